"""The events for tool calls in Responses: the start of an item, the pieces of its text, and the whole item."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from saccade.gateway.apis.responses.tools import CallItem, CustomInput, DeclaredTools
from saccade.gateway.apis.responses.wire import CustomToolCallItem, FunctionCallItem
from saccade.gateway.output.call_reader import GeneratedCall

Event = tuple[str, dict[str, Any]]
"""The type of an event, and its fields."""


class CallEvents:
    """Makes the events for calls to *tools*, one call after another."""

    def __init__(self, tools: DeclaredTools) -> None:
        self._tools = tools
        self._texts: list[str] = []
        self._input = CustomInput()
        self._num_sent = 0

    def take_call(
        self, call: GeneratedCall, suffix: str, index: int
    ) -> tuple[list[Event], tuple[CallItem, GeneratedCall] | None]:
        """Return the events for *call* or a piece of it.

        Once the call is complete, also return its item and the whole call. *index* is the item's position in the
        output, and the item's id ends in *suffix*.
        """
        item = self._tools.call_item(call, suffix)
        events = [self._begin(item, index)] if call.begins else []
        self._texts.append(call.arguments)
        if call.ends:
            whole = replace(call, arguments="".join(self._texts))
            item = self._tools.call_item(whole, suffix)
            return [*events, *self._end(item, index)], (item, whole)
        match item:
            case FunctionCallItem(id=item_id):
                events += self._delta("function_call_arguments", item_id, index, call.arguments)
            case CustomToolCallItem(id=item_id):
                events += self._delta(
                    "custom_tool_call_input", item_id, index, self._input.push_arguments(call.arguments)
                )
        return events, None

    def _begin(self, item: CallItem, index: int) -> Event:
        self._texts, self._input, self._num_sent = [], CustomInput(), 0
        started: dict[str, Any] = {"status": "in_progress"}
        if isinstance(item, FunctionCallItem):
            started["arguments"] = ""
        elif isinstance(item, CustomToolCallItem):
            started["input"] = ""
        added = msgspec.structs.replace(item, **started)
        return "response.output_item.added", {"output_index": index, "item": added}

    def _delta(self, kind: str, item_id: str, index: int, text: str) -> list[Event]:
        self._num_sent += len(text)
        fields = {"item_id": item_id, "output_index": index, "delta": text}
        return [(f"response.{kind}.delta", fields)] if text else []

    def _end(self, item: CallItem, index: int) -> Iterator[Event]:
        place = {"item_id": item.id, "output_index": index}
        match item:
            case FunctionCallItem(name=name, arguments=text):
                yield from self._delta("function_call_arguments", item.id, index, text[self._num_sent :])
                yield "response.function_call_arguments.done", {**place, "name": name, "arguments": text}
            case CustomToolCallItem(input=text):
                yield from self._delta("custom_tool_call_input", item.id, index, text[self._num_sent :])
                yield "response.custom_tool_call_input.done", {**place, "input": text}
        yield "response.output_item.done", {"output_index": index, "item": item}
