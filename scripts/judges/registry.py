"""All judges, in the order in which they run."""

from judges.judge import Judge
from judges.suites import json_schema, openai_python, openapi

JUDGES: tuple[Judge, ...] = (
    openai_python.JUDGE,
    openapi.JUDGE,
    json_schema.JUDGE,
)
