"""OpenAI's Responses: the wire format, its translation to chats, and the conversations that are kept."""
