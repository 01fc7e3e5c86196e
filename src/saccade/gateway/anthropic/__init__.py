"""Anthropic's wire format, translated to and from chats."""
