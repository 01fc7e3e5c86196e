"""Parameters that no field reads: those refused, those without effect, and advice about other servers' parameters."""

from typing import Final

from saccade.gateway.field_schemas import IMAGE_PART

LATER: Final[dict[str, tuple[object, ...]]] = {
    "add_special_tokens": (False,),
    "attachments": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "documents": ([],),
    "echo": (False,),
    "files": ([],),
    "format": ("",),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": ("",),
    "image": (),
    "image_data": ([],),
    "image_url": (),
    "images": ([],),
    "input": ("", []),
    "instructions": ("",),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media": ([],),
    "modalities": ([], ["text"]),
    "options": ({},),
    "prompt": ("", []),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], ""),
    "stream_reasoning": (True,),
    "structural_tag": ("",),
    "system": ("", []),
    "thinking": (),
    "thinking_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "video": (),
    "videos": ([],),
    "web_search_options": (),
}
"""Unsupported parameters that would change the answer, with the values, besides null, that change nothing.

Texts that other APIs take at the top level are among them: they would be left out of the prompt.
"""

SPELLINGS: Final = {
    "format": 'OpenAI\'s spelling is `response_format`, as in {"type": "json_object"}',
    "function_call": "OpenAI's newer form is `tool_choice`",
    "functions": "OpenAI's newer form is `tools`",
    "guided_json_object": 'OpenAI\'s spelling is `response_format`, as in {"type": "json_object"}',
    "structural_tag": "constrain the answer by `response_format`, and calls by `tools` whose functions are `strict`",
    "thinking_budget": "vLLM's spelling is `thinking_token_budget`",
    "options": "send `temperature`, `top_p`, `seed`, `stop` and `max_tokens` at the top level, as OpenAI spells them",
    **dict.fromkeys(("instructions", "system"), "in a chat it is a message of the role system"),
    **dict.fromkeys(("input", "prompt"), "in a chat it is a message of the role user"),
    **dict.fromkeys(
        ("image", "image_data", "image_url", "images", "media"),
        f"send images as parts of a message's `content`: {IMAGE_PART}",
    ),
}
"""Advice about parameters of other servers."""

CONSTRAINTS: Final = (
    "format",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "ebnf",
    "json_schema",
    "regex",
    "response_format",
    "structural_tag",
    "structured_outputs",
)
"""What constrains an answer's form in chats of any server; an API with another spelling refuses them by name."""

NO_CONSTRAINT: Final[tuple[object, ...]] = ("", [], {}, False, {"type": "text"})

WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options.include_obfuscation",
        "user",
    }
)
"""Parameters of OpenAI's API that change no answer; they are accepted without a warning."""
