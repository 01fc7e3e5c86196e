"""From the deltas of a worker to the text, reasoning and calls of an answer.

Other packages use the `Answer`, the `AnswerChunk` and `GeneratedChoice` that APIs write, and `sampling_params`.
"""
