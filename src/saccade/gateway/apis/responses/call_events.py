"""The events of calls in Responses: an item that begins, the pieces of its text, and the whole item."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from saccade.gateway.apis.responses.tools import CallItem, CustomInput, DeclaredTools
from saccade.gateway.apis.responses.wire import CustomToolCallItem, FunctionCallItem
from saccade.gateway.output.call_reader import GeneratedCall


class CallEvents:
    """Writes calls of *tools*, one after another; *event* makes an event."""

    def __init__(self, tools: DeclaredTools, event: Callable[..., bytes]) -> None:
        self._tools = tools
        self._event = event
        self._texts: list[str] = []
        self._input = CustomInput()
        self._num_sent = 0

    def take(self, call: GeneratedCall, suffix: str, index: int) -> tuple[bytes, CallItem | None]:
        """Return the events of *call* or of a piece of it, and the item number *index* once it is whole.

        The item's id ends in *suffix*.
        """
        item = self._tools.call_item(call, suffix)
        events = self._begin(item, index) if call.begins else b""
        self._texts.append(call.arguments)
        if call.ends:
            item = self._tools.call_item(replace(call, arguments="".join(self._texts)), suffix)
            return events + self._end(item, index), item
        match item:
            case FunctionCallItem(id=item_id):
                events += self._delta("function_call_arguments", item_id, index, call.arguments)
            case CustomToolCallItem(id=item_id):
                events += self._delta("custom_tool_call_input", item_id, index, self._input.push(call.arguments))
        return events, None

    def _begin(self, item: CallItem, index: int) -> bytes:
        self._texts, self._input, self._num_sent = [], CustomInput(), 0
        started: dict[str, Any] = {"status": "in_progress"}
        if isinstance(item, FunctionCallItem):
            started["arguments"] = ""
        elif isinstance(item, CustomToolCallItem):
            started["input"] = ""
        added = msgspec.structs.replace(item, **started)
        return self._event("response.output_item.added", output_index=index, item=added)

    def _delta(self, kind: str, item_id: str, index: int, text: str) -> bytes:
        self._num_sent += len(text)
        return self._event(f"response.{kind}.delta", item_id=item_id, output_index=index, delta=text) if text else b""

    def _end(self, item: CallItem, index: int) -> bytes:
        place = {"item_id": item.id, "output_index": index}
        events = b""
        match item:
            case FunctionCallItem(name=name, arguments=text):
                events = self._delta("function_call_arguments", item.id, index, text[self._num_sent :])
                events += self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
            case CustomToolCallItem(input=text):
                events = self._delta("custom_tool_call_input", item.id, index, text[self._num_sent :])
                events += self._event("response.custom_tool_call_input.done", **place, input=text)
        return events + self._event("response.output_item.done", output_index=index, item=item)
