"""From a chat to the token ids of its prompt."""
