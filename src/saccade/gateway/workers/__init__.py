"""The workers, and which of them serves a request."""
