"""OpenAI's Responses, translated to and from chats, and the stored conversations."""
