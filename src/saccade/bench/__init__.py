"""Measures a server that has the OpenAI API.

`chats` makes the conversations, `load` sends them, `figures` computes the results, and `report` and `page` show them.
"""
