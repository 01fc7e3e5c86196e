"""Tool calls in answers: found by their tags' token ids, read by the format that the model's family declares."""
