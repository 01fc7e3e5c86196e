"""Names a conversation by its beginning, which every one of its turns repeats."""

from collections.abc import Iterator, Sequence

from blake3 import blake3

from saccade.gateway.chat import Chat
from saccade.tokenization.messages import Message

CONVERSATION_BYTES = 16


def conversation_of(chat: Chat, images: Sequence[bytes]) -> bytes:
    """Return a hash of 16 bytes of *chat* up to the end of the first user's turn, b"" for a plain prompt.

    *images* are the content hashes of the chat's images; the first one counts if it is in that part.
    """
    if chat.plain is not None:
        return b""
    hasher, has_image = blake3(), False
    for message in _beginning(chat.client_messages):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            text = part.get("text", "").encode(errors="surrogatepass")
            has_image |= part["type"] != "text"
            hasher.update(f"{message['role']} {part['type']} {len(text)} ".encode() + text)
    if has_image and images:
        hasher.update(images[0])
    return hasher.digest(CONVERSATION_BYTES)


def _beginning(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield *messages* up to the first user's."""
    for message in messages:
        yield message
        if message["role"] == "user":
            return
