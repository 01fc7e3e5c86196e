"""Turns a worker's deltas into an answer's text, reasoning and calls.

Other packages use the `Answer`, the `AnswerChunk` and `GeneratedChoice` that APIs write, and `sampling_params`.
"""
