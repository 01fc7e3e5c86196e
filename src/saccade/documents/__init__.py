"""Reads documents by a model: pages in, Markdown with boxes and figures out."""
