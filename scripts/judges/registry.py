"""All judges, in the order in which they run."""

from judges.judge import Judge
from judges.suites import (
    json_schema,
    llama_answers,
    llama_server,
    openai_python,
    openapi,
    pillow_images,
    templates,
    vllm_events,
    vllm_readers,
    vllm_servers,
)

JUDGES: tuple[Judge, ...] = (
    openai_python.JUDGE,
    openapi.JUDGE,
    json_schema.JUDGE,
    llama_answers.JUDGE,
    llama_server.JUDGE,
    vllm_readers.JUDGE,
    vllm_servers.CHATS_JUDGE,
    vllm_servers.APIS_JUDGE,
    vllm_servers.REASONING_JUDGE,
    vllm_events.JUDGE,
    templates.JUDGE,
    pillow_images.JUDGE,
)
