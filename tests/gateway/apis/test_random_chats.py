"""Every text of a random conversation is in its prompt once, in each API, with files, documents and late turns. # F13"""

import base64
import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripted
from images import encode, random_image

PNG = base64.b64encode(encode(random_image(64, 64))).decode()
URL = f"data:image/png;base64,{PNG}"
WORD = re.compile(r"w_\d+_w")
ODD = ("", " ", "\n", ' "x" \\', "é")
"""Ends of texts, some of which JSON escapes."""

Fields = dict[str, Any]


class Writer:
    """Writes conversations of words that stand nowhere else."""

    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed)
        self._num_words = 0

    def word(self) -> str:
        self._num_words += 1
        return f"w_{self._num_words}_w"

    def file(self) -> str:
        return base64.b64encode(self.word().encode()).decode()

    def several(self, *parts: Callable[[], Fields]) -> list[Fields]:
        return [self.draw.choice(parts)() for _ in range(self.draw.randrange(1, 4))]

    def content(self, *parts: Callable[[], Fields]) -> str | list[Fields]:
        return self.word() if self.draw.random() < 0.3 else self.several(*parts)

    def late(self, turn: Callable[[], Fields]) -> list[Fields]:
        return [turn() for _ in range(self.draw.randrange(2))]


class Chats(Writer):
    """Writes chats."""

    def text(self) -> Fields:
        return {"type": "text", "text": self.word() + self.draw.choice(ODD)}

    def text_file(self) -> Fields:
        return {"type": "file", "file": {"file_data": f"data:text/plain;base64,{self.file()}", "filename": self.word()}}

    def image(self) -> Fields:
        return {"type": "image_url", "image_url": {"url": URL}}

    def told(self) -> Fields:
        role = self.draw.choice(("system", "developer"))
        return {"role": role, "content": self.content(self.text, self.text_file)}

    def asked(self) -> Fields:
        return {"role": "user", "content": self.content(self.text, self.text_file, self.image)}

    def called(self) -> list[Fields]:
        arguments = self.draw.choice(('{"a": "%s"}', '{"a": "%s', "%s")) % self.word()
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        answer = {"role": "assistant", "content": self.content(self.text, self.text_file), "tool_calls": calls}
        return [answer, {"role": "tool", "tool_call_id": "c", "content": self.asked()["content"]}]

    def request(self) -> tuple[str, Fields]:
        turns = [self.told() for _ in range(self.draw.randrange(3))]
        for _ in range(self.draw.randrange(1, 4)):
            turns += [self.asked(), *self.late(self.told), *self.called()]
        return self.draw.choice(("/v1/chat/completions", "/invocations/")), {"messages": [*turns, self.asked()]}


class Messages(Writer):
    """Writes requests in Anthropic's form."""

    def text(self) -> Fields:
        return {"type": "text", "text": self.word() + self.draw.choice(ODD)}

    def document(self) -> Fields:
        plain, encoded = {"type": "text", "data": self.word()}, {"type": "base64", "media_type": "text/plain"}
        blocks = {"type": "content", "content": self.draw.choice((self.word(), [self.text(), self.text()]))}
        source = self.draw.choice((plain, {**encoded, "data": self.file()}, blocks))
        return {"type": "document", "title": self.word(), "context": self.word(), "source": source}

    def found(self) -> Fields:
        texts = [self.text(), self.text()]
        return {"type": "search_result", "title": self.word(), "source": self.word(), "content": texts}

    def image(self) -> Fields:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}

    def blocks(self) -> str | list[Fields]:
        return self.content(self.text, self.document, self.found, self.image)

    def request(self) -> tuple[str, Fields]:
        turns: list[Fields] = []
        for _ in range(self.draw.randrange(1, 4)):
            turns += [{"role": "user", "content": self.blocks()}]
            turns += self.late(lambda: {"role": "system", "content": self.several(self.text)})
            call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": self.word()}}
            result = {"type": "tool_result", "tool_use_id": "c", "content": self.blocks()}
            turns += [{"role": "assistant", "content": [self.text(), call]}, {"role": "user", "content": [result]}]
        return "/v1/messages", {"max_tokens": 9, "system": self.several(self.text), "messages": turns}


class Responses(Writer):
    """Writes requests of responses."""

    def text(self) -> Fields:
        return {"type": "input_text", "text": self.word() + self.draw.choice(ODD)}

    def text_file(self) -> Fields:
        url = f"data:text/plain;base64,{self.file()}"
        return {"type": "input_file", "file_data": url, "filename": self.word()}

    def image(self) -> Fields:
        return {"type": "input_image", "image_url": URL}

    def said(self) -> str | list[Fields]:
        return self.content(self.text, self.text_file, self.image)

    def called(self) -> list[Fields]:
        action = {"type": "exec", "command": [self.word()], "env": {self.word(): self.word()}, "user": self.word()}
        fields: dict[str, Fields] = {
            "function_call": {"name": "f", "arguments": f'{{"a": "{self.word()}"}}'},
            "custom_tool_call": {"name": "p", "input": self.word()},
            "local_shell_call": {"action": action},
        }
        kind = self.draw.choice([*fields])
        call = {"type": kind, "call_id": "c", **fields[kind]}
        return [call, {"type": f"{kind}_output", "call_id": "c", "output": self.said()}]

    def request(self) -> tuple[str, Fields]:
        items: list[Fields] = []
        for _ in range(self.draw.randrange(1, 4)):
            items += [{"role": "user", "content": self.said()}]
            items += self.late(lambda: {"role": "developer", "content": self.several(self.text)})
            items += self.called()
        return "/v1/responses", {
            "instructions": self.word(),
            "input": [*items, {"role": "user", "content": self.said()}],
        }


def words_in(body: str) -> set[str]:
    files = re.findall(r'(?:text/plain;base64,|"text/plain", "data": ")([\w+/=]+)"', body)
    return {*WORD.findall(body), *(base64.b64decode(file).decode() for file in files)}


def check(gateway: scripted.Gateway, writers: list[Any], num_rounds: int) -> None:
    for writer in writers * num_rounds:
        path, fields = writer.request()
        body = json.dumps({"model": "tiny", **fields})
        gateway.answer_two_tokens()
        answer = gateway.ask("POST", path, gzip.compress(body.encode()), Content_Encoding="gzip")
        assert answer.status == 200, (answer.body, body)
        request = gateway.worker.requests[-1]
        words = words_in(body)
        prompt = gateway.tokenizer.decode(request.token_ids)
        assert {word: prompt.count(word) for word in words} == dict.fromkeys(words, 1), (prompt, body)
        assert len(request.media) == body.count(PNG), body


def test_every_text_is_in_the_prompt_once(gateway: scripted.Gateway) -> None:
    check(gateway, [writer("random chats") for writer in (Chats, Messages, Responses)], 10)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "gemma4"])
def test_whatever_the_template_writes(name: str, network_folder: Callable[[str], Path]) -> None:
    with scripted.running(network_folder(name)) as gateway:
        check(gateway, [writer(f"random chats for {name}") for writer in (Chats, Messages, Responses)], 60)
