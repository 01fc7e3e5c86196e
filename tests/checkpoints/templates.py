"""Chat templates: written here, rendering the bytes that the releases' own render for text, images and reasoning."""

_QWEN_IMAGES = """{%- set count = namespace(images=0) -%}
{%- macro show(content, rank) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{%- set count.images = count.images + 1 -%}
{%- if add_vision_id -%}{{ 'Picture ' ~ count.images ~ ': ' }}{%- endif -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""

QWEN2 = (
    _QWEN_IMAGES
    + """{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}{{ show(message['content']) }}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
)
"""Qwen2-VL and Qwen2.5-VL: who writes no system turn gets one."""

QWEN3 = (
    _QWEN_IMAGES
    + """{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}{{ show(messages[0].content) + '\\n\\n' }}{%- endif -%}
{{ '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' }}{{ tool | tojson }}{%- endfor -%}
{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n' }}
{{- '</tool_call><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and (tools or not loop.first) -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' }}{{ show(message.content) }}{{ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}{{ show(message['content']) }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
)
"""Tools in a system turn, calls as JSON, results in turns of the user; system turns after the first are left out."""

QWEN3_5 = (
    _QWEN_IMAGES
    + """{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if last.query < 0 -%}{{ raise_exception('No question of a user was found.') }}{%- endif -%}
{%- if tools -%}
{{ '<|im_start|>system\\n# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}
{{ '\\n</tools>\\n\\nA call looks like this:\\n\\n<tool_call>\\n<function=name>\\n<parameter=name>\\nvalue\\n' }}
{{- '</parameter>\\n</function>\\n</tool_call>' }}
{%- if messages[0].role == 'system' -%}{{ '\\n\\n' + show(messages[0].content) | trim }}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- set content = show(message.content) | trim -%}
{%- if message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if message.reasoning_content is string -%}
{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.query -%}{{ '<think>\\n' + reasoning | trim + '\\n</think>\\n\\n' }}{%- endif -%}
{{ content }}
{%- for call in message.tool_calls or [] -%}
{{ ('\\n\\n' if content else '') if loop.first else '\\n' }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items -%}
{{ '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- elif tools and message.role == 'system' and loop.first -%}
{%- elif message.role == 'system' and not loop.first -%}
{{ raise_exception('The system turn must be the first.') }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- else -%}{{ '<think>\\n' }}{%- endif -%}
{%- endif -%}
"""
)
"""Qwen3.5 trims what is said, and keeps reasoning only after the last question."""

KIMI_K25 = """{%- set last = namespace(answer=-1) -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' and not message.get('tool_calls') -%}
{%- set last.answer = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{ '<|im_system|>tool_declare<|im_middle|>' }}
{{- tools_ts_str if tools_ts_str else tools | tojson(separators=(',', ':')) }}{{ '<|im_end|>' }}
{%- endif -%}
{%- for message in messages -%}
{{ {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(message['role'], '<|im_system|>') }}
{{- (message.get('name') or message['role']) + '<|im_middle|>' }}
{%- if message['role'] == 'assistant' -%}
{%- set reasoning = message.get('reasoning_content') or '' if loop.index0 > last.answer else '' -%}
{{ '<think>' + reasoning + '</think>' }}
{%- endif -%}
{%- if message['role'] == 'tool' -%}{{ '## Return of ' + message['tool_call_id'] + '\\n' }}{%- endif -%}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{%- for part in message['content'] or [] -%}
{%- if part['type'] in ('video', 'video_url') -%}{{ '<|kimi_k25_video_placeholder|>' }}
{%- elif part['type'] in ('image', 'image_url') -%}
{{ '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n' }}
{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- if message.get('tool_calls') -%}
{{ '<|tool_calls_section_begin|>' }}
{%- for call in message['tool_calls'] -%}
{%- set arguments = call['function']['arguments'] -%}
{{ '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
{{- arguments if arguments is string else arguments | tojson }}{{ '<|tool_call_end|>' }}
{%- endfor -%}
{{ '<|tool_calls_section_end|>' }}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_assistant|>assistant<|im_middle|><think>' }}
{%- if thinking is defined and thinking is false -%}{{ '</think>' }}{%- endif -%}
{%- endif -%}
"""

LLAVA = """{%- for message in messages -%}
{%- if message['role'] != 'system' -%}{{ message['role'] | upper + ': ' }}{%- endif -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{ part['text'] + ' ' }}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""
"""LLaVA-1.5: images first; content must be a list of parts."""

LLAVA_NEXT = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{ '<<SYS>>\\n' + message['content'][0]['text'] + '\\n<</SYS>>\\n\\n' }}
{%- elif message['role'] == 'user' -%}
{{ '[INST] ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{ part['text'] }}{%- endfor -%}
{{ ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}
{{ ' ' + message['content'][0]['text'] + '</s> ' }}
{%- endif -%}
{%- endfor -%}
"""
"""LLaVA-NeXT over Mistral: images first, lists of parts, and nothing to prompt an answer with."""

SMOLVLM = (
    "<|im_start|>{% for message in messages %}"
    "{{ message['role'] | capitalize }}{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<image>' if part['type'] == 'image' else '' }}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM: lists of parts, images where they stand, and no space before an image that comes first."""

PHI3_V = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Phi-3-vision: content is one string; images are numbered tags in it."""

PADDLEOCR_VL = """{{- cls_token if cls_token is defined else '<|begin_of_sentence|>' -}}
{%- for message in messages -%}
{%- set texts = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | list -%}
{%- if message['role'] == 'user' -%}
{{ 'User: ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}
{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}
{%- endfor -%}
{{ texts | join('') + '\\n' }}
{%- elif message['role'] == 'assistant' -%}
{{ 'Assistant:\\n' + texts | join('') + (eos_token if eos_token is defined else '</s>') }}
{%- elif message['role'] == 'system' -%}
{%- for text in texts -%}{{ text + '\\n' }}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:\\n' }}{%- endif -%}
"""
"""PaddleOCR-VL 1.5 and 1.6: images first, and lists of parts; other roles are left out."""

GLM_V = """[gMASK]<sop>
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content or [] -%}{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro lines(content) -%}
{%- if content is string -%}{{ '\\n' + content }}
{%- else -%}{%- for part in content -%}
{%- if part['type'] == 'video' -%}{{ '\\n<|begin_of_video|><|video|><|end_of_video|>' }}
{%- elif part['type'] == 'image' -%}{{ '\\n<|begin_of_image|><|image|><|end_of_image|>' }}
{%- elif part['type'] == 'text' -%}{{ '\\n' + part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{ '<|system|>\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n' }}
{%- for tool in tools -%}{{ tool | tojson(ensure_ascii=False) + '\\n' }}{%- endfor -%}
{{ '</tools>\\n\\nFor each function call, output the function name and arguments within XML tags:\\n' }}
{{- '<tool_call>{function-name}\\n<arg_key>{arg-key}</arg_key>\\n<arg_value>{arg-value}</arg_value>\\n...\\n</tool_call>' }}
{%- endif -%}
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '<|user|>' + lines(message.content) }}
{%- if enable_thinking is defined and not enable_thinking and not show(message.content).endswith('/nothink') -%}
{{ '/nothink' }}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set content = show(message.content) -%}
{%- set reasoning = '' -%}
{%- if message.reasoning_content is string -%}
{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{ '<|assistant|>\\n<think>' + (reasoning | trim if loop.index0 > last.query else '') + '</think>' }}
{%- if content | trim -%}{{ '\\n' + content | trim }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for name, value in call.function.arguments | items -%}
{{ '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}{{ '</arg_value>\\n' }}
{%- endfor -%}
{{ '</tool_call>' }}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|observation|>' }}{%- endif -%}
{{ '\\n<tool_response>' + lines(message.content) + '\\n</tool_response>' }}
{%- elif message.role == 'system' -%}
{{ '<|system|>\\n' + show(message.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- endif -%}
"""
"""GLM-4.5V and 4.6V: parts on lines of their own, reasoning after the last question, calls as pairs of tags."""

INTERNVL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ {'image': '<IMG_CONTEXT>\\n', 'video': '<video>\\n'}[part['type']] if part['type'] != 'text' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""InternVL3.5 of the -HF repositories: images and videos where they stand, each with a line break."""

GEMMA4 = """{%- macro kind(value) -%}
{%- if value is string -%}{{ '<|"|>' + value | upper + '<|"|>' }}
{%- else -%}{{ '[' }}{%- for one in value -%}{{ kind(one) }}{{ ',' if not loop.last }}{%- endfor -%}{{ ']' }}{%- endif -%}
{%- endmacro -%}
{%- macro write(value, quotes=true) -%}
{%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}
{{ '{' }}{%- for key, one in value | dictsort -%}
{{ ('<|"|>' + key + '<|"|>' if quotes else key) + ':' }}{{ write(one, quotes) }}{{ ',' if not loop.last }}
{%- endfor -%}{{ '}' }}
{%- elif value is iterable -%}
{{ '[' }}{%- for one in value -%}{{ write(one, quotes) }}{{ ',' if not loop.last }}{%- endfor -%}{{ ']' }}
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro names(listed) -%}
{{ '[' }}{%- for one in listed -%}{{ '<|"|>' + one + '<|"|>' }}{{ ',' if not loop.last }}{%- endfor -%}{{ ']' }}
{%- endmacro -%}
{%- macro properties(declared, of_object=false) -%}
{%- set seen = namespace(any=false) -%}
{%- for key, value in declared | dictsort
    if not of_object or key not in ['description', 'type', 'properties', 'required', 'nullable'] -%}
{%- set comma = namespace(text='') -%}
{{ ',' if seen.any }}{%- set seen.any = true -%}{{ key + ':{' }}
{%- if value['description'] -%}{{ 'description:<|"|>' + value['description'] + '<|"|>' }}{%- set comma.text = ',' -%}{%- endif -%}
{%- if value['type'] and 'string' in value['type'] -%}
{%- if value['enum'] -%}{{ comma.text + 'enum:' }}{{ write(value['enum']) }}{%- set comma.text = ',' -%}{%- endif -%}
{%- elif value['type'] and 'array' in value['type'] and value['items'] is mapping and value['items'] -%}
{{ comma.text + 'items:{' }}{%- set comma.text = ',' -%}
{%- for name, item in value['items'] | dictsort if item is not none -%}
{{ ',' if not loop.first }}{{ name + ':' }}
{%- if name == 'properties' -%}{{ '{' }}{{ properties(item) }}{{ '}' }}
{%- elif name == 'required' -%}{{ names(item) }}
{%- elif name == 'type' -%}{{ kind(item) }}
{%- else -%}{{ write(item) }}{%- endif -%}
{%- endfor -%}{{ '}' }}
{%- endif -%}
{%- if value['nullable'] -%}{{ comma.text + 'nullable:true' }}{%- set comma.text = ',' -%}{%- endif -%}
{%- if value['type'] and 'object' in value['type'] -%}
{{ comma.text + 'properties:{' }}{%- set comma.text = ',' -%}
{%- if value['properties'] is mapping -%}{{ properties(value['properties']) }}
{%- else -%}{{ properties(value, true) }}{%- endif -%}{{ '}' }}
{%- if value['required'] -%}{{ ',required:' }}{{ names(value['required']) }}{%- endif -%}
{%- endif -%}
{{ comma.text + 'type:' }}{{ kind(value['type']) if value['type'] else '' }}{{ '}' }}
{%- endfor -%}
{%- endmacro -%}
{%- macro declare(function) -%}
{{ '<|tool>declaration:' + function['name'] + '{description:<|"|>' }}{{ function['description'] }}{{ '<|"|>' }}
{%- set schema = function['parameters'] -%}
{%- if schema -%}
{%- set comma = namespace(text='') -%}{{ ',parameters:{' }}
{%- if schema['properties'] -%}
{{ 'properties:{' }}{{ properties(schema['properties']) }}{{ '}' }}{%- set comma.text = ',' -%}
{%- endif -%}
{%- if schema['required'] -%}{{ comma.text + 'required:' }}{{ names(schema['required']) }}{%- set comma.text = ',' -%}{%- endif -%}
{%- if schema['type'] -%}{{ comma.text + 'type:' }}{{ kind(schema['type']) }}{%- endif -%}{{ '}' }}
{%- endif -%}
{{ '}<tool|>' }}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
{%- set kept = namespace(text='') -%}
{%- for part in text.split('<channel|>') -%}{%- set kept.text = kept.text + part.split('<|channel>')[0] -%}{%- endfor -%}
{{ kept.text | trim }}
{%- endmacro -%}
{%- macro show(content, is_model) -%}
{%- if content is string -%}{{ without_thoughts(content) if is_model else content | trim }}
{%- else -%}{%- for part in content -%}
{%- if part['type'] == 'image' -%}{{ '<|image|>' }}
{%- elif part['type'] == 'video' -%}{{ '<|video|>' }}
{%- elif part['type'] == 'text' -%}{{ without_thoughts(part['text']) if is_model else part['text'] | trim }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro answer(name, content) -%}
{{ '<|tool_response>response:' + name + '{value:' }}
{%- if content is string -%}{{ write(content) }}
{%- else -%}
{{ '<|"|>' }}{%- for part in content if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}{{ '<|"|>' }}
{%- endif -%}
{{ '}<tool_response|>' }}
{%- if content is not string -%}
{%- for part in content if part['type'] == 'image' -%}{{ '<|image|>' }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- set has_system = messages[0]['role'] == 'system' -%}
{%- if enable_thinking or tools or has_system -%}
{{ '<|turn>system\\n' }}{{ '<|think|>\\n' if enable_thinking }}
{%- if has_system and messages[0]['content'] is string -%}{{ messages[0]['content'] | trim }}
{%- elif has_system -%}{%- for part in messages[0]['content'] -%}{{ part['text'] | trim + ' ' }}{%- endfor -%}{%- endif -%}
{%- for tool in tools or [] -%}{{ declare(tool['function']) }}{%- endfor -%}
{{ '<turn|>\\n' }}
{%- endif -%}
{%- set rest = messages[1:] if has_system else messages -%}
{%- set last = namespace(question=-1, role='', is_open=false) -%}
{%- for message in rest -%}{%- if message['role'] == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in rest -%}
{%- if message['role'] != 'tool' -%}
{%- set is_model = message['role'] == 'assistant' -%}
{%- set place = loop.index0 -%}
{%- if not (is_model and last.role == 'assistant') -%}{{ '<|turn>' + ('model' if is_model else message['role']) + '\\n' }}{%- endif -%}
{%- set last.role = message['role'] -%}
{%- set calls = message['tool_calls'] or [] -%}
{%- if message['reasoning_content'] and place > last.question and calls -%}
{{ '<|channel>thought\\n' + message['reasoning_content'] + '\\n<channel|>' }}
{%- endif -%}
{%- for call in calls -%}
{{ '<|tool_call>call:' + call['function']['name'] }}{{ write(call['function']['arguments'], false) }}{{ '<tool_call|>' }}
{%- endfor -%}
{%- set results = namespace(any=false, stopped=not calls) -%}
{%- for result in rest[place + 1:] -%}
{%- if result['role'] != 'tool' -%}{%- set results.stopped = true -%}{%- endif -%}
{%- if not results.stopped -%}
{%- set results.any = true -%}
{%- for call in calls if call['id'] == result['tool_call_id'] -%}{{ answer(call['function']['name'], result['content']) }}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- set said = show(message['content'], is_model) -%}
{{ said }}
{%- set last.is_open = calls and true -%}
{%- if calls and not results.any -%}{{ '<|tool_response>' }}
{%- elif not results.any or said -%}{{ '<turn|>\\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not last.is_open -%}
{{ '<|turn>model\\n' }}{{ '<|channel>thought\\n<channel|>' if not enable_thinking }}
{%- endif -%}
"""
"""Gemma 4: calls and their results in the model's turn, strings between quotes that are tokens, keys in order."""

MISTRAL3 = """{%- macro text(content) -%}{{ content if content is string else content[0]['text'] }}{%- endmacro -%}
{{ bos_token }}
{%- if messages[0]['role'] != 'system' -%}
{{ '[SYSTEM_PROMPT]You are a helpful assistant. Today is ' + strftime_now('%Y-%m-%d') + '.[/SYSTEM_PROMPT]' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ '[INST]' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}
{%- elif part['type'] in ['image', 'image_url'] -%}{{ '[IMG]' }}
{%- else -%}{{ raise_exception('A part is a text or an image.') }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '[/INST]' }}
{%- elif message['role'] == 'system' -%}{{ '[SYSTEM_PROMPT]' + text(message['content']) + '[/SYSTEM_PROMPT]' }}
{%- elif message['role'] == 'assistant' -%}{{ text(message['content']) + eos_token }}
{%- else -%}{{ raise_exception('The role ' + message['role'] + ' is unknown.') }}{%- endif -%}
{%- endfor -%}
"""
"""Mistral Small 3.1: a system turn with the date by default, the first text of a turn alone, and no tools."""

GEMMA3 = """{{ bos_token }}
{%- set first = namespace(text='', turns=messages) -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set told = messages[0]['content'] -%}
{%- set first.text = (told if told is string else told[0]['text']) + '\\n\\n' -%}
{%- set first.turns = messages[1:] -%}
{%- endif -%}
{%- for turn in first.turns -%}
{%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Turns of user and assistant must alternate.') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\\n' + (first.text if loop.first else '') }}
{%- if turn['content'] is string -%}{{ turn['content'] | trim }}
{%- elif turn['content'] is iterable -%}
{%- for part in turn['content'] -%}
{%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}
{%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
{%- endfor -%}
{%- else -%}{{ raise_exception('A turn is a text or a list.') }}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
"""Gemma 3: the system turn stands in the first turn, of which it writes the first text alone; turns must alternate."""

LLAMA_TEXT = """{{ bos_token }}{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""
"""Llama 3: content is a text."""

MISTRAL_TEXT = """{{ bos_token }}{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else -%}{{ ' ' + message['content'] + eos_token }}{%- endif -%}
{%- endfor -%}
"""
"""Mistral 7B: content is a text."""

QWEN_TEXT = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""
"""Qwen3: content is a text, and reasoning can be turned off."""
