"""The messages and tools that chat templates take."""

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
"""{"role": str, "content": str | list of {"type": "text", "text": str} and {"type": "image"}}; optionally, "name",
"reasoning_content" and "tool_call_id", strings, and "tool_calls": a list of {"id": str, "type": "function", "function":
{"name": str, "arguments": JSON object}}."""

Tool = Mapping[str, Any]
"""A function's declaration as JSON values: {"type": "function", "function": {"name": str, ...}}."""
