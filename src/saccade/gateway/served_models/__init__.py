"""Builds the models that a gateway serves from the files that their workers send.

Other packages mainly use `ModelRegistry`, `ServedModel`, and `ModelProbe`, which tries a model's files.
"""
