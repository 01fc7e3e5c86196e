"""Answers of Kimi-K3 as text, in its tags."""

OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
END = f"{CLOSE}message{SEP}"
NOTHING = f"{CLOSE}response{SEP}"
"""A response without text, if the prompt has opened it."""

THOUGHT = f"Hm <b>.{CLOSE}think{SEP}{OPEN}response{SEP}"


def argument(key: str, kind: str, value: str) -> str:
    return f'{OPEN}argument key="{key}" type="{kind}"{SEP}{value}{CLOSE}argument{SEP}'


def call(name: str, *arguments: str, number: int = 1) -> str:
    return f'{OPEN}call tool="{name}" index="{number}"{SEP}{"".join(arguments)}{CLOSE}call{SEP}'


def section(*calls: str) -> str:
    return f"{OPEN}tools{SEP}{''.join(calls)}{CLOSE}tools{SEP}"
