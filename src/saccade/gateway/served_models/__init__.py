"""The models that a gateway serves, built from the files that their workers send."""
