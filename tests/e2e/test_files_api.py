"""Files with the openai SDK, against `saccade serve`: the answer is that of the image in the request itself."""

import io
from typing import Any

from chats import openai_messages, random_image
from server import Server

IMAGE = random_image(96, 64, 7)


def test_an_uploaded_image_is_answered_as_one_in_the_request(tiny_server: Server) -> None:
    buffer = io.BytesIO()
    IMAGE.save(buffer, "PNG")
    fields: Any = {"model": tiny_server.name, "max_tokens": 12, "temperature": 0}
    with tiny_server.client() as client:
        inline = client.chat.completions.create(messages=openai_messages(IMAGE, "What is it?"), **fields)
        file = client.files.create(file=("a.png", buffer.getvalue()), purpose="vision")
        parts: Any = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": "What is it?"}]
        named = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **fields)
        client.files.delete(file.id)
    assert named.choices[0].message.content == inline.choices[0].message.content
    assert named.usage is not None
    assert inline.usage is not None
    assert named.usage.prompt_tokens == inline.usage.prompt_tokens
    assert named.usage.prompt_tokens_details is not None
    assert named.usage.prompt_tokens_details.cached_tokens
