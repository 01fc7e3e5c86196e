"""From a chat to the token ids of its prompt.

Other packages use `PromptDrafter` and the `Draft` that it returns, and `chat_prompt` for workers that take chats only.
"""
