"""vLLM, Saccade and transformers' generate, in turn in one run, on one model folder with one client."""
