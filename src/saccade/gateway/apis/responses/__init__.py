"""OpenAI's Responses, translated to and from chats, and the conversations that are kept."""
