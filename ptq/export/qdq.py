"""QDQ: onnxruntime's quantization tools write the file, with scales that are given to them; and reading it again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.export.graph import FloatGraph, LayerNode
from ptq.export.placement import ACTIVATIONS, JOIN, KEEP_RANGE, REMOVABLE, SHARE_GRID, Grid, Plan

_OUTPUT_SUFFIX = "_QuantizeLinear_Input"  # onnxruntime's name for a graph output before its quantizer


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How integers are stored, which decides the kernels a CPU has for them."""

    name: str
    unsigned: bool  # activations as uint8 rather than int8: the same grid, codes moved by 128
    reduced: bool = False  # weights on 7 bits, so that two products fit into 16


U8S8 = Variant(name="u8s8", unsigned=True)
S8S8 = Variant(name="s8s8", unsigned=False)
U8S7 = Variant(name="u8s8-reduced", unsigned=True, reduced=True)
VARIANTS = {variant.name: variant for variant in (U8S8, S8S8, U8S7)}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a runtime asks of a QDQ graph beyond the numbers."""

    symmetric: bool = False  # int8 activations with zero-point 0
    float_weights: bool = False  # weights in float with a QuantizeLinear of their own
    float_biases: bool = False
    own_pairs: bool = False  # a QuantizeLinear for each reader of a tensor
    float_outputs: bool = False  # layers write float; the readers quantize


def write(
    graph: FloatGraph,
    layers: tuple[LayerNode, ...],
    weight_scales: Mapping[str, Tensor],
    plan: Plan,
    grids: Mapping[str, Grid],
    variant: Variant,
    rules: Rules,
) -> Any:
    """The graph with QuantizeLinear and DequantizeLinear nodes, as an ``onnx.ModelProto``.

    ``weight_scales`` are ``[O]`` for each layer, ``grids`` hold every tensor that the plan touches.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantType
    from onnxruntime.quantization.calibrate import TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    kind, offset = (QuantType.QUInt8, 128) if variant.unsigned else (QuantType.QInt8, 0)
    code = np.uint8 if variant.unsigned else np.int8
    overrides: dict[str, list[dict[str, Any]]] = {
        name: [
            {
                "quant_type": kind,
                "scale": np.array(grid.scale, np.float32),
                "zero_point": np.array(grid.zero_point + offset, code),
            }
        ]
        for name, grid in grids.items()
    }
    for layer in layers:
        scales = weight_scales[layer.layer].numpy()
        overrides[layer.weight] = [
            {"axis": layer.axis, "quant_type": QuantType.QInt8, "scale": scale, "zero_point": np.array(0, np.int8)}
            for scale in scales
        ]
    ranges = {
        name: TensorData(lowest=np.float32(grid.low), highest=np.float32(grid.high)) for name, grid in grids.items()
    }
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    with _quiet():
        quantizer = QDQQuantizer(
            onnx.shape_inference.infer_shapes(proto),
            per_channel=True,
            reduce_range=False,
            weight_qType=QuantType.QInt8,
            activation_qType=kind,
            tensors_range=TensorsData(CalibrationMethod.MinMax, ranges),
            nodes_to_quantize=list(plan.nodes),
            nodes_to_exclude=[],
            op_types_to_quantize=sorted({"Conv", "ConvTranspose", "Gemm", "MatMul"} | _FOLLOWERS),
            extra_options={
                "TensorQuantOverrides": overrides,
                "ActivationSymmetric": rules.symmetric,
                "WeightSymmetric": True,
                "AddQDQPairToWeight": rules.float_weights,
                "QuantizeBias": not rules.float_biases,
                "DedicatedQDQPair": rules.own_pairs,
                "QDQKeepRemovableActivations": not _saturation_suffices(graph, plan, grids),
                "OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]
                + (["Conv", "ConvTranspose", "Add"] if rules.float_outputs else []),
            },
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
        written = quantizer.model.model
    written.producer_name, written.producer_version = "ptq", ""
    return written


_FOLLOWERS = JOIN | ACTIVATIONS | KEEP_RANGE | SHARE_GRID


def _saturation_suffices(graph: FloatGraph, plan: Plan, grids: Mapping[str, Grid]) -> bool:
    """Whether the grid behind each ReLU and Clip ends where these do, so that they can be left to saturation."""
    import onnx

    constants = {tensor.name: tensor for tensor in graph.proto.graph.initializer}

    def bound(node: Any, index: int, default: float) -> float:
        if len(node.input) <= index or not node.input[index]:
            return default
        tensor = constants.get(node.input[index])
        return float(onnx.numpy_helper.to_array(tensor)) if tensor is not None else float("nan")

    for node in graph.proto.graph.node:
        if node.op_type not in REMOVABLE or node.name not in plan.nodes:
            continue
        grid = grids[node.output[0]]
        low = 0.0 if node.op_type == "Relu" else bound(node, 1, -np.inf)
        high = np.inf if node.op_type == "Relu" else bound(node, 2, np.inf)
        # The ends of a grid are multiples of a rounded scale: a step of float32 beyond the bound is none.
        if not (grid.low >= low - 1e-6 * abs(low) and grid.high <= high + 1e-6 * abs(high)):
            return False
    return True


def read(proto: Any) -> tuple[dict[str, Grid], dict[str, Tensor]]:
    """The grids of a QDQ file's activations, and its weights and biases as floats: both by their ONNX names."""
    import onnx

    constants = {tensor.name: tensor for tensor in proto.graph.initializer}

    def values(name: str) -> np.ndarray[Any, Any]:
        return np.asarray(onnx.numpy_helper.to_array(constants[name]))

    def zero_points(node: Any) -> np.ndarray[Any, Any]:
        return values(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1, np.int8)

    grids: dict[str, Grid] = {}
    parameters: dict[str, Tensor] = {}
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants:
            zero_point = zero_points(node)
            offset = 128 if zero_point.dtype == np.uint8 else 0
            tensor = node.input[0].removesuffix(_OUTPUT_SUFFIX)
            grids[tensor] = Grid(float(values(node.input[1])), int(zero_point) - offset)
        elif node.op_type == "QuantizeLinear":  # a weight in float with a quantizer of its own
            weight, scale = _by_channel(node, values(node.input[0]), values(node.input[1]))
            codes = np.clip(np.rint(weight / scale), -128, 127).astype(np.float32)
            parameters[node.input[0]] = torch.from_numpy(codes * scale)
        elif node.op_type == "DequantizeLinear" and node.input[0] in constants:
            codes, scale = _by_channel(node, values(node.input[0]).astype(np.float32), values(node.input[1]))
            name = node.input[0].removesuffix("_quantized")
            parameters[name] = torch.from_numpy(np.asarray(codes * scale, np.float32))
    return grids, parameters


def _by_channel(node: Any, array: Any, scale: Any) -> tuple[Any, Any]:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    return array, scale.reshape([-1 if index == axis else 1 for index in range(array.ndim)]) if scale.ndim else scale


@contextmanager
def _quiet() -> Iterator[None]:
    """onnxruntime's tools log, on the root logger, what is our own business; and raise what the user can't read."""
    logging.disable(logging.WARNING)
    try:
        yield
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"onnxruntime's quantizer refuses this graph: {error}: exclude the layers it names") from error
    finally:
        logging.disable(logging.NOTSET)
