"""Reads documents with a model: pages in, Markdown with boxes and figures out."""
