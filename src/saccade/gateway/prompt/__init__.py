"""Turns a chat into the token ids of its prompt.

Other packages mainly use `PromptBuilder` and the `PromptTokens` that it returns, and `chat_prompt` for workers that
take only chats.
"""
