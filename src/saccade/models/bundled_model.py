"""What the model that ships with Saccade can do: said wherever it answers."""

BUNDLED_NAME = "saccade-reader"
"""The model's name in the API."""

ABILITIES = f"{BUNDLED_NAME} only reads 1 to 4 capitals and digits, and names six shapes and eight colours."
WAY_ON = "`saccade serve MODEL` serves a model for other questions."
