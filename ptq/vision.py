"""The one door to torchvision.

torchvision's published wheel expects a CUDA torch: beside a CPU-only torch its import fails with
"operator torchvision::nms does not exist", because it registers fake kernels for two operators whose
schemas only its compiled library declares. Declaring the schemas makes models, transforms and datasets
work; the operators themselves (used by detectors' post-processing) stay unavailable.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

_declared: list[Any] = []  # keeps the library alive: torch drops the schemas together with it


def torchvision(submodule: str = "") -> ModuleType:
    """Import torchvision, or one of its submodules: ``torchvision("models")``."""
    try:
        package = importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_operators()
        package = importlib.import_module("torchvision")
    return importlib.import_module(f"torchvision.{submodule}") if submodule else package


def _declare_operators() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # what the failed import left behind
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)
