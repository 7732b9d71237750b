"""What a CPU has for 8-bit integers, read from the system and tried out."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from ptq.export.packages import required

_CPUINFO = Path("/proc/cpuinfo")
# What matters to integer kernels, from the widest down.
_INTERESTING = (
    "amx_int8",
    "avx512_vnni",
    "avx_vnni",
    "avx_vnni_int8",
    "avx512bw",
    "avx512f",
    "avx2",
    "sse4_1",
    "i8mm",
    "asimddp",
    "asimd",
)
_DOT_PRODUCTS = {"amx_int8", "avx512_vnni", "avx_vnni", "avx_vnni_int8", "i8mm", "asimddp"}


def cpu_model(cpuinfo: str | None = None) -> str:
    for line in (_read() if cpuinfo is None else cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def instruction_sets(cpuinfo: str | None = None) -> tuple[str, ...]:
    """Those of the first core in ``/proc/cpuinfo`` that integer kernels care about; empty where there is no such file.

    >>> instruction_sets("flags : fpu avx2 avx512_vnni")
    ('avx512_vnni', 'avx2')
    """
    for line in (_read() if cpuinfo is None else cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # as x86 and ARM call them
            present = set(value.split())
            return tuple(name for name in _INTERESTING if name in present)
    return ()


def has_dot_products(sets: Collection[str]) -> bool:
    """Whether sums of four 8-bit products are made in 32 bits (VNNI, AMX, ARM's dot products)."""
    return bool(_DOT_PRODUCTS & set(sets))


def _read() -> str:
    try:
        return _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def u8s8_saturates() -> bool:
    """Whether onnxruntime's product of uint8 and int8 is wrong here, found by multiplying the largest numbers.

    Without VNNI, x86 adds two products in 16 bits: ``2 · 255 · 127`` doesn't fit into 32,767 and is cut off there.
    """
    required("onnx", "onnxruntime")
    depth, width = 64, 32
    activations = np.full((8, depth), 255, np.uint8)
    weights = np.full((depth, width), 127, np.int8)
    product = _multiply(activations, weights)
    return not np.array_equal(product, activations.astype(np.int32) @ weights.astype(np.int32))


def _multiply(activations: Any, weights: Any) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    from ptq.export.runtime import OnnxModule

    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["activations", "weights"], ["product"])],
        "probe",
        [helper.make_tensor_value_info("activations", TensorProto.UINT8, list(activations.shape))],
        [helper.make_tensor_value_info("product", TensorProto.INT32, [len(activations), weights.shape[1]])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return OnnxModule(model.SerializeToString()).session.run(None, {"activations": activations})[0]
