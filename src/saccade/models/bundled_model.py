"""The model that ships with Saccade: its name, page form and digest, and a note on what it can do."""

from saccade.models.family import PageForm

BUNDLED_NAME = "saccade-reader"
"""The model's name in the API."""

BUNDLED_PAGE_FORM = PageForm("What does it say?", longest_side=256)
"""It was trained to read images of 256 x 128 pixels, with this question."""

BUNDLED_WEIGHTS = bytes.fromhex("4da803aed5aedd98a6cfd9619486041ff17cefdc895f536baba47191d0ed6196")
"""The digest of its weights, by which an engine knows them under any name (engine/executor/fingerprint.py)."""

ABILITIES = "The bundled model only reads 1 to 4 capitals and digits, and names six shapes and eight colours."
WAY_ON = "`saccade serve MODEL` serves a model for other questions."
