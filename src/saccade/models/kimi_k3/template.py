"""Kimi-K3's chat template; the releases ship a program instead.

Source of the form: the releases' encoding_k3.py. Tool results are written in the order of their calls.
"""

from typing import Final

TEMPLATE: Final = """\
{%- macro value_of(text) -%}{{ text | string | replace('&', '&amp;') | replace('"', '&quot;') }}{%- endmacro -%}
{%- macro write(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content or [] -%}
{%- if part['type'] in ('image', 'image_url') -%}{{ '<|media_pad|>' }}{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro system(type, text) -%}
{{ '<|open|>message role="system" type="' + type + '"<|sep|>' + text + '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endmacro -%}
{%- macro write_call(call, index) -%}
{{ '<|open|>call tool="' + value_of(call['function']['name']) + '" index="' + index | string + '"<|sep|>' }}
{%- for key, value in (call['function']['arguments'] or {}).items() -%}
{%- set type = 'boolean' if value is boolean else 'null' if value is none else 'number' if value is number
    else 'string' if value is string else 'object' if value is mapping else 'array' -%}
{{ '<|open|>argument key="' + value_of(key) + '" type="' + type + '"<|sep|>' }}
{{- value if value is string else value | tojson }}{{ '<|close|>argument<|sep|>' }}
{%- endfor -%}
{{ '<|close|>call<|sep|>' }}
{%- endmacro -%}
{%- macro write_result(message, name, index) -%}
{{ '<|open|>message role="tool" tool="' + value_of(name) + '" index="' + index | string + '"<|sep|>' }}
{{- write(message['content']) }}{{ '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endmacro -%}
{%- set thinks = thinking is not defined or thinking is none or thinking -%}
{%- set effort = thinking_effort | default('max', true) -%}
{%- if thinks and effort not in ('low', 'high', 'max') -%}
{{ raise_exception('`thinking_effort` must be low, high or max.') }}
{%- endif -%}
{%- if tools -%}
{{ system('tool-declare', '# Tools\\nHere are the available tools, described in JSONSchema.\\n\\n```json\\n' +
    tools | tojson(separators=(',', ':')) + '\\n```') }}
{%- endif -%}
{%- if thinks -%}
{{ system('thinking-effort', '`thinking_effort` guides on how much to think in your thinking channel (not including ' +
    'the response channel), supported values include `low`, `medium`, `high`, and `max`.\\n' +
    'Now the system is invoked with `thinking_effort=' + effort + '`.') }}
{%- endif -%}
{%- set asked = namespace(calls=[], results=[], index=0) -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- set asked.results = asked.results + [message] -%}
{%- if loop.last or loop.nextitem['role'] != 'tool' -%}
{%- set found = namespace(ids=[], pairs=[]) -%}
{%- for call in asked.calls if call['id'] not in found.ids -%}
{%- set found.ids = found.ids + [call['id']] -%}
{%- for result in asked.results if result['tool_call_id'] == call['id'] -%}
{%- set found.pairs = found.pairs + [(result, call['function']['name'])] -%}
{%- endfor -%}
{%- endfor -%}
{%- if found.pairs | length == asked.results | length -%}
{%- for result, name in found.pairs -%}
{%- set asked.index = asked.index + 1 -%}{{ write_result(result, name, asked.index) }}
{%- endfor -%}
{%- else -%}
{%- for result in asked.results -%}
{%- set asked.index = asked.index + 1 -%}
{%- set name = result.get('name') or
    (asked.calls[asked.index - 1]['function']['name'] if asked.index <= asked.calls | length else '') -%}
{%- if not name -%}{{ raise_exception('A message of the role tool answers no call.') }}{%- endif -%}
{{ write_result(result, name, asked.index) }}
{%- endfor -%}
{%- endif -%}
{%- set asked.results = [] -%}
{%- endif -%}
{%- else -%}
{{ '<|open|>message role="' + message['role'] + '"' }}
{%- if message.get('name') -%}{{ ' name="' + value_of(message['name']) + '"' }}{%- endif -%}
{{ '<|sep|>' }}
{%- if message['role'] == 'assistant' -%}
{%- set asked.calls = message.get('tool_calls') or [] -%}
{%- set asked.index = 0 -%}
{%- if thinks -%}
{%- set reasoning = message.get('reasoning_content') or '' -%}
{{ '<|open|>think<|sep|>' + (reasoning if reasoning.strip() else '') + '<|close|>think<|sep|>' }}
{%- endif -%}
{{ '<|open|>response<|sep|>' }}{{ write(message['content']) }}{{ '<|close|>response<|sep|>' }}
{%- if asked.calls -%}
{{ '<|open|>tools<|sep|>' }}
{%- for call in asked.calls -%}{{ write_call(call, loop.index) }}{%- endfor -%}
{{ '<|close|>tools<|sep|>' }}
{%- endif -%}
{%- else -%}
{{ write(message['content']) }}
{%- endif -%}
{{ '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endif -%}
{%- endfor -%}
{%- if tool_choice == 'required' -%}
{{ system('tool-choice', 'The system is invoked with `tool_choice=required`.\\nYou MUST call tools in the next ' +
    'message.') }}
{%- endif -%}
{%- if add_generation_prompt -%}
{{ '<|open|>message role="assistant"<|sep|><|open|>' + ('think' if thinks else 'response') + '<|sep|>' }}
{%- endif -%}
"""
"""Jinja, as for chat_template.jinja."""
