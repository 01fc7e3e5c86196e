"""The wire format of the OpenAI API: bodies to values, values to bodies."""
