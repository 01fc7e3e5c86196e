"""Turns a worker's deltas into an answer's text, reasoning and calls.

Other packages mainly use `Answer`, the `AnswerChunk` and `GeneratedChoice` that APIs write, `Delivery`, and
`sampling_params`.
"""
