"""The names of a checkpoint's small files, and how large they may be."""

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
PROCESSOR_CONFIG = "processor_config.json"
VIDEO_PREPROCESSOR_CONFIG = "video_preprocessor_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TIKTOKEN = "tiktoken.model"
CHAT_TEMPLATE_JINJA = "chat_template.jinja"
CHAT_TEMPLATE_JSON = "chat_template.json"
GATEWAY_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    VIDEO_PREPROCESSOR_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TIKTOKEN,
    CHAT_TEMPLATE_JINJA,
    CHAT_TEMPLATE_JSON,
)
"""The files of a checkpoint that a gateway may need; only config.json is required."""

MAX_FILES_BYTES = 128 << 20
"""Of all together: three times the largest tokenizer of a release."""
