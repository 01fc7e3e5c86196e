"""OpenAI's chats."""
