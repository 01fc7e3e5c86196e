"""Anthropic's Messages API, translated to and from chats."""
