"""Saccade from Python: LLM and AsyncLLM answer chats without a server; serve() runs a server for a `with` block."""
