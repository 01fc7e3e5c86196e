"""Routing over real vLLM workers: Saccade's gateway beside SMG."""
