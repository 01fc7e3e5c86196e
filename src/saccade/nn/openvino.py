"""OpenVINO, which reports to nobody: import it from here.

While it is imported, it would report that to its makers' analytics. None makes Python say that the module which does so
is missing, and OpenVINO goes on without it.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
import openvino  # noqa: E402
from openvino import opset13  # noqa: E402

__all__ = ["openvino", "opset13"]
