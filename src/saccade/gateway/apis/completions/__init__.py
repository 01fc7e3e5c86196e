"""OpenAI's Completions API, which continues plain prompts."""
