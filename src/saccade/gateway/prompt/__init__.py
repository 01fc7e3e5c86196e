"""Turns a chat into the token ids of its prompt.

Other packages use `PromptBuilder` and the `PromptTokens` that it returns, and `chat_prompt` for workers that take chats
only.
"""
