"""ptq: post-training quantization and calibration for PyTorch.

The names below are imported when they are first used, so that ``ptq --help`` need not wait for torch. Rooms are
named by nouns (``ptq.calibration``) and what they do by verbs (``ptq.calibrate``): the two never collide.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptq import export
    from ptq.allocator import tune_allocator
    from ptq.analysis import Analysis, analyze
    from ptq.batchnorm import fold_batchnorms
    from ptq.calibration import Calibration, LayerStatistics, calibrate
    from ptq.errors import PtqError
    from ptq.evaluation import Evaluation, LayerError, evaluate, layer_errors
    from ptq.formats import Format, Packed, format
    from ptq.packing import PackedCheckpoint, pack
    from ptq.quantization import Bits, Quantized, Scheme
    from ptq.refinement import quantize
    from ptq.smoothing import ALPHAS, Smoothed, smooth
    from ptq.sweeping import Sweep, sweep
    from ptq.tasks import Task

__all__ = [
    "ALPHAS",
    "Analysis",
    "Bits",
    "Calibration",
    "Evaluation",
    "Format",
    "LayerError",
    "LayerStatistics",
    "Packed",
    "PackedCheckpoint",
    "PtqError",
    "Quantized",
    "Scheme",
    "Smoothed",
    "Sweep",
    "Task",
    "__version__",
    "analyze",
    "calibrate",
    "evaluate",
    "export",
    "fold_batchnorms",
    "format",
    "layer_errors",
    "pack",
    "quantize",
    "smooth",
    "sweep",
    "tune_allocator",
]

_HOMES = {
    "ALPHAS": "ptq.smoothing",
    "Analysis": "ptq.analysis",
    "Bits": "ptq.quantization",
    "Calibration": "ptq.calibration",
    "Evaluation": "ptq.evaluation",
    "Format": "ptq.formats",
    "LayerError": "ptq.evaluation",
    "LayerStatistics": "ptq.calibration",
    "Packed": "ptq.formats",
    "PackedCheckpoint": "ptq.packing",
    "PtqError": "ptq.errors",
    "Quantized": "ptq.quantization",
    "Scheme": "ptq.quantization",
    "Smoothed": "ptq.smoothing",
    "Sweep": "ptq.sweeping",
    "Task": "ptq.tasks",
    "analyze": "ptq.analysis",
    "calibrate": "ptq.calibration",
    "evaluate": "ptq.evaluation",
    "fold_batchnorms": "ptq.batchnorm",
    "format": "ptq.formats",
    "layer_errors": "ptq.evaluation",
    "pack": "ptq.packing",
    "quantize": "ptq.refinement",
    "smooth": "ptq.smoothing",
    "sweep": "ptq.sweeping",
    "tune_allocator": "ptq.allocator",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ptq")
    if name == "export":  # a room that can be called: ptq.export(…), and ptq.export.nvidia
        return importlib.import_module("ptq.export")
    if name not in _HOMES:
        raise AttributeError(f"module 'ptq' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # found once, found for good
    return value


def __dir__() -> list[str]:
    return __all__
