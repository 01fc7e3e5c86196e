"""The release of vLLM whose tests judge."""

from judges.archives import Archive

ARCHIVE = Archive("vllm", "vllm-0.33.0.tar.gz", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112")
