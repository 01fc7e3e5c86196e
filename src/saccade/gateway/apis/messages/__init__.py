"""Anthropic's Messages, translated to and from chats."""
