"""Run by an environment that has xgrammar: which of several answers each structural tag allows.

Reads {"special": texts of special tokens, the last one ending an answer; "cases": [[tag, answers], ...]} from the
standard input, and writes a list of lists of true and false. The vocabulary is the bytes and these tokens.
"""

import json
import sys

import xgrammar


def token_ids(text: str, special: list[str]) -> list[int]:
    """The ids of *text*: a special token's text is that token."""
    ids, position = [], 0
    while position < len(text):
        found = next((token for token in special if text.startswith(token, position)), None)
        ids += list(text[position].encode()) if found is None else [256 + special.index(found)]
        position += 1 if found is None else len(found)
    return ids


def main() -> None:
    given = json.load(sys.stdin)
    special = given["special"]
    vocabulary = [*(bytes([byte]) for byte in range(256)), *(token.encode() for token in special)]
    end = len(vocabulary) - 1
    described = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(described)
    allowed = []
    for tag, answers in given["cases"]:
        compiled = compiler.compile_structural_tag(tag)
        matchers = [xgrammar.GrammarMatcher(compiled) for _ in answers]
        allowed.append(
            [
                all(matcher.accept_token(token_id) for token_id in [*token_ids(answer, special), end])
                for matcher, answer in zip(matchers, answers, strict=True)
            ]
        )
    json.dump(allowed, sys.stdout)


if __name__ == "__main__":
    main()
