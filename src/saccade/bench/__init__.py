"""Measure a server of the OpenAI API: `settings`, `chats` to send, `load`, `figures` of the records, and `page`."""
