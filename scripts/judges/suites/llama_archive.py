"""The release of llama.cpp whose tests judge, in the source archive of its binding for Python."""

from judges.archives import Archive

ARCHIVE = Archive(
    "llama-cpp-python",
    "llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
)
ROOT = "vendor/llama.cpp"
TEMPLATES = f"{ROOT}/models/templates"
