"""Shipping it: an int8 ONNX file, run and measured, and the quantizers of other runtimes.

The room has the name of what it does, since ``ptq.export.nvidia`` and ``ptq.export(quantized, path, example)`` are
both asked for. So the module itself can be called, and which of the two is imported first makes no difference.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ptq.export import nvidia
from ptq.export.deployment import TARGETS, deployed
from ptq.export.doctor import doctor
from ptq.export.folder import export_task, summary
from ptq.export.graph import DEFAULT_OPSET, to_onnx
from ptq.export.onnx import Exported, export
from ptq.export.qdq import VARIANTS
from ptq.export.runtime import Agreement, OnnxModule, agreement, latencies

__all__ = [
    "DEFAULT_OPSET",
    "TARGETS",
    "VARIANTS",
    "Agreement",
    "Exported",
    "OnnxModule",
    "agreement",
    "deployed",
    "doctor",
    "export",
    "export_task",
    "latencies",
    "nvidia",
    "summary",
    "to_onnx",
]


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Exported:
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
