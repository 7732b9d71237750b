"""What is here to work with: versions, threads, instruction sets, allocator, extras."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ptq.export.cpu import cpu_model, has_dot_products, instruction_sets, u8s8_saturates

EXTRAS = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "text": ("transformers",),
    "nvidia": ("nvidia-modelopt",),
    "slurm": ("submitit",),
    "dev": ("openvino",),
}


def doctor() -> dict[str, Any]:
    """Facts about this machine and this installation, ready for JSON.

    ``cpu.u8s8_saturates`` is tried out with onnxruntime, not read off a list; None where that isn't installed.
    """
    import torch

    sets = instruction_sets()
    tested = all(find_spec(package) for package in ("onnx", "onnxruntime"))
    saturates = u8s8_saturates() if tested else None
    return {
        "kind": "doctor",
        "schema": 1,
        "ptq": _version("ptq"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": {
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "instruction_sets": list(sets),
            "dot_products": has_dot_products(sets),
            "u8s8_saturates": saturates,
        },
        "allocator_tunable": _allocator_tunable(),
        "extras": {extra: {package: _version(package) for package in packages} for extra, packages in EXTRAS.items()},
        "advice": list(_advice(sets, saturates)),
    }


def _advice(sets: tuple[str, ...], saturates: bool | None) -> list[str]:
    advice = []
    if saturates is None:
        advice.append("ptq export needs onnx and onnxruntime: pip install 'ptq[onnx]'")
    elif saturates:
        advice.append(
            "products of uint8 and int8 saturate in 16 bits on this CPU: ptq export measures int8 activations and "
            "7-bit weights too, and takes what is right and fast"
        )
    if sets and not has_dot_products(sets):
        advice.append("no VNNI: int8 gains less over float here than on newer CPUs")
    return advice


def _allocator_tunable() -> bool:
    """Whether ``ptq.allocator.tune_allocator`` has something to tune: glibc's malloc."""
    return sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
