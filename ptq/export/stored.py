"""Weights that are stored in few bits: multiplied in float where the activations are, or packed two to a byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.export.graph import LayerNode
from ptq.quantization import Bits

PACKED_BITS = 4
PACKED_OPSET = 21  # the first whose DequantizeLinear takes int4
_BLOCK = 32  # elements that share a scale in MatMulNBits; ours share one over the whole row
_MICROSOFT = "com.microsoft"


def write(
    proto: Any,
    layers: Iterable[LayerNode],
    bits: Mapping[str, Bits],
    scales: Mapping[str, Tensor],
    zero_points: Mapping[str, Tensor],
    *,
    pack: bool,
) -> Any:
    """The graph with these layers' weights in integers; with ``pack``, those of up to four bits two to a byte.

    A weight in float becomes ``DequantizeLinear(codes)``, and if it is packed and belongs to a Linear, the product
    becomes a MatMulNBits. A weight that QDQ made int8 becomes int4.

    Codes in int8 are those less the layer's ``zero_points`` [O]; in int4 they don't fit, and the zero-points stand
    beside them.
    """
    import onnx

    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    opset = next(entry.version for entry in changed.opset_import if entry.domain in ("", "ai.onnx"))
    constants = {tensor.name: tensor for tensor in changed.graph.initializer}
    for layer in layers:
        packed = pack and (bits[layer.layer].weights or 0) <= PACKED_BITS
        in_float = layer.weight in constants and any(layer.weight in node.input for node in changed.graph.node)
        as_matrix = packed and in_float and layer.operator in ("Gemm", "MatMul")
        if packed and not as_matrix and opset < PACKED_OPSET:
            raise InputError(
                f"{layer.layer}: int4 weights need opset {PACKED_OPSET}, this is {opset}: give --opset {PACKED_OPSET}"
            )
        scale = scales[layer.layer].numpy()
        zero_point = zero_points.get(layer.layer, torch.zeros(len(scale))).numpy().astype(np.int8)
        if as_matrix:
            _multiply_packed(changed, layer, constants, scale, zero_point)
        elif in_float:
            _dequantize(changed, layer, constants, scale, zero_point if packed else None)
        elif packed:
            _repack(changed, layer, zero_point)
    return changed


def _codes(layer: LayerNode, constants: Mapping[str, Any], scale: Any) -> Any:
    """Those less the zero-points: what the scale makes weights of."""
    import onnx

    weight = np.asarray(onnx.numpy_helper.to_array(constants[layer.weight]))
    return np.rint(weight / _over_outputs(scale, weight, layer)).astype(np.int8)


def _over_outputs(values: Any, weight: Any, layer: LayerNode) -> Any:
    return values.reshape([-1 if index == layer.axis else 1 for index in range(weight.ndim)])


def _dequantize(
    proto: Any, layer: LayerNode, constants: Mapping[str, Any], scale: Any, zero_point_of_packed: Any | None
) -> None:
    import onnx

    name = f"{layer.weight}_quantized"
    if any(tensor.name == name for tensor in proto.graph.initializer):
        return  # a layer that is called twice
    codes = _codes(layer, constants, scale)
    tensors = [onnx.numpy_helper.from_array(scale, f"{layer.weight}_scale")]
    if zero_point_of_packed is None:
        tensors = [onnx.numpy_helper.from_array(codes, name), *tensors]
    else:
        moved = codes + _over_outputs(zero_point_of_packed, codes, layer)
        tensors = [_int4(name, moved), *tensors, _int4(f"{layer.weight}_zero_point", zero_point_of_packed)]
    _replace_initializer(proto, layer.weight, tensors)
    node = onnx.helper.make_node(
        "DequantizeLinear",
        [tensor.name for tensor in tensors],
        [layer.weight],
        f"{layer.weight}_DequantizeLinear",
        axis=layer.axis,
    )
    proto.graph.node.insert(0, node)


def _repack(proto: Any, layer: LayerNode, zero_point: Any) -> None:
    import onnx

    for tensor in list(proto.graph.initializer):
        if tensor.name in (f"{layer.weight}_quantized", f"{layer.weight}_zero_point") and tensor.data_type == 3:  # int8
            codes = np.asarray(onnx.numpy_helper.to_array(tensor))  # or zero-points, all 0 in int8
            moved = codes + (zero_point if codes.ndim == 1 else _over_outputs(zero_point, codes, layer))
            _replace_initializer(proto, tensor.name, [_int4(tensor.name, moved)])


def _multiply_packed(proto: Any, layer: LayerNode, constants: Mapping[str, Any], scale: Any, zero_point: Any) -> None:
    """``Gemm(x, W, b)`` or ``MatMul(x, W)`` as MatMulNBits: rows of W in blocks, codes and zero-points moved by 8."""
    import onnx

    codes = _codes(layer, constants, scale)
    rows = codes if layer.axis == 0 else codes.T  # [O, C]
    outputs, inputs = rows.shape
    blocks = -(-inputs // _BLOCK)
    padded = np.pad(rows, ((0, 0), (0, blocks * _BLOCK - inputs)))
    moved = (zero_point + 8).astype(np.uint8)[:, None]  # [O, 1]
    content = _nibbles((padded + moved).astype(np.uint8)).reshape(outputs, blocks, _BLOCK // 2)
    parts = {"packed": content, "block_scales": np.repeat(scale.astype(np.float32)[:, None], blocks, 1)}
    if zero_point.any():  # each row in whole bytes
        parts["block_zero_points"] = _nibbles(np.repeat(moved, blocks + blocks % 2, 1)).reshape(outputs, -1)
    names = [f"{layer.weight}_{part}" for part in parts]
    if not any(tensor.name == names[0] for tensor in proto.graph.initializer):
        arrays = zip(parts.values(), names, strict=True)
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for array, name in arrays)
    index, node = next((place, n) for place, n in enumerate(proto.graph.node) if n.name == layer.node)
    product = f"{layer.output}_product" if layer.bias else layer.output
    replacement = [
        onnx.helper.make_node(
            "MatMulNBits",
            [node.input[0], *names],
            [product],
            node.name,
            domain=_MICROSOFT,
            K=inputs,
            N=outputs,
            bits=PACKED_BITS,
            block_size=_BLOCK,
        )
    ]
    if layer.bias:
        replacement.append(onnx.helper.make_node("Add", [product, layer.bias], [layer.output], f"{node.name}_bias"))
    del proto.graph.node[index]
    for offset, new in enumerate(replacement):
        proto.graph.node.insert(index + offset, new)
    if not any(layer.weight in other.input for other in proto.graph.node):
        _replace_initializer(proto, layer.weight, [])
    if not any(entry.domain == _MICROSOFT for entry in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid(_MICROSOFT, 1))


def _int4(name: str, codes: Any) -> Any:
    import onnx

    return onnx.helper.make_tensor(name, onnx.TensorProto.INT4, codes.shape, _nibbles(codes).tobytes(), raw=True)


def _nibbles(codes: Any) -> Any:
    """Two codes a byte, the first in the lower half."""
    flat = codes.reshape(-1).astype(np.uint8) & 0xF
    flat = np.pad(flat, (0, len(flat) % 2))
    return flat[0::2] | flat[1::2] << 4


def _replace_initializer(proto: Any, name: str, tensors: list[Any]) -> None:
    kept = [tensor for tensor in proto.graph.initializer if tensor.name != name]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend([*kept, *tensors])
