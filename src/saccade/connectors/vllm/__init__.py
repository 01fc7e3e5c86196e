"""The client for vLLM servers."""
