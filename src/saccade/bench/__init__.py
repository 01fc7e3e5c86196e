"""Measure a server of the OpenAI API: `settings`, `chats` to send, `load`, `figures`, `report` and `page`."""
