"""Saccade from Python: LLM and AsyncLLM answer chats without a server, serve() runs one for a block."""
