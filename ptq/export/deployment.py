"""A quantized network made ready for a runtime: what goes into the file, and the simulation of exactly that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptq import channels
from ptq.batches import Batch, Batches, Call, as_call
from ptq.errors import InputError
from ptq.export import qdq, stored
from ptq.export.graph import DEFAULT_OPSET, FloatGraph, LayerNode, to_onnx, without_quantizers
from ptq.export.packages import required
from ptq.export.placement import BITS, Grid, Plan, calibrate_tensors, plan, simulation
from ptq.export.qdq import U8S8, Rules, Variant
from ptq.formats import affine
from ptq.quantization import Bits, FakeQuantize, Quantized
from ptq.quantization.modules import ATTRIBUTE as QUANTIZER
from ptq.quantization.modules import ZERO_POINT

TARGETS: Mapping[str, Rules] = {
    "onnxruntime": Rules(),
    "openvino": Rules(),
    # TensorRT takes int8 with zero-point 0 only, weights and biases in float, and quantizes what layers read.
    "tensorrt": Rules(symmetric=True, float_weights=True, float_biases=True, own_pairs=True, float_outputs=True),
}
DEFAULT_TARGET = "onnxruntime"


@dataclass(frozen=True, kw_only=True)
class Built:
    """One file, not yet written, and its simulation."""

    variant: Variant
    content: bytes
    simulation: nn.Module
    grids: dict[str, Grid]  # by ONNX tensor: where QuantizeLinear nodes stand


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything that is decided about the file, but for how integers are stored."""

    model: nn.Module  # in float, its weights on their grids
    example: Call
    graph: FloatGraph
    integer_layers: tuple[LayerNode, ...]  # weights and activations in integers
    stored_layers: tuple[LayerNode, ...]  # weights alone in integers
    float_layers: tuple[str, ...]
    bits: dict[str, Bits]
    weight_scales: dict[str, Tensor]  # [O] of each layer
    weight_zero_points: dict[str, Tensor]  # [O] of the layers that have any
    plan: Plan
    grids: dict[str, Grid]
    rules: Rules
    pack_weights: bool
    notes: tuple[str, ...]

    def build(self, variant: Variant = U8S8) -> Built:
        """The file for a way to store integers."""
        proto = self.graph.proto
        if self.integer_layers:
            scales = self._reduced_scales() if variant.reduced else self.weight_scales
            proto = qdq.write(self.graph, self.integer_layers, scales, self.plan, self.grids, variant, self.rules)
        grids, parameters = qdq.read(proto)
        layers = self.stored_layers + (self.integer_layers if self.pack_weights else ())
        proto = stored.write(
            proto, layers, self.bits, self.weight_scales, self.weight_zero_points, pack=self.pack_weights
        )
        return Built(
            variant=variant,
            content=proto.SerializeToString(),
            simulation=simulation(self.graph, grids, parameters),
            grids=grids,
        )

    def _reduced_scales(self) -> dict[str, Tensor]:
        """Scales that put 8-bit weights on 7 bits; fewer bits are fewer already."""
        factor = _largest(BITS) / _largest(BITS - 1)
        return {
            name: scale * factor if self.bits[name].weights == BITS else scale
            for name, scale in self.weight_scales.items()
        }


def _largest(bits: int) -> int:
    return affine.code_range(bits, symmetric=True)[1]


def prepare(
    quantized: Quantized,
    example: Batch,
    batches: Batches | None = None,
    *,
    target: str = DEFAULT_TARGET,
    opset: int = DEFAULT_OPSET,
    pack_weights: bool = False,
    max_batches: int = 200,
    progress: bool = False,
) -> Deployment:
    """Place quantizers where the target needs them; ``batches`` give the ranges of tensors that no layer reads."""
    required("onnx", "onnxscript", "onnxruntime")
    if target not in TARGETS:
        raise InputError(f"target {target!r} is unknown: choose one of {', '.join(TARGETS)}")
    rules = TARGETS[target]
    notes = []
    _check_bits(quantized)
    call = as_call(example, torch.device("cpu"))
    model = without_quantizers(quantized.model)
    graph = to_onnx(model, call, opset=opset)
    by_layer = _found(quantized, graph, model)
    layers = dict(channels.layers_of(quantized.model))
    grids = {name: _grid_of(layers[name]) for name, bits in quantized.bits.items() if bits.activations is not None}
    if rules.symmetric and any(grid.zero_point for grid in grids.values()):
        grids = {name: grid.symmetric() for name, grid in grids.items()}
        notes.append(f"{target} takes zero-point 0 only: quantize with symmetric activations to choose ranges for that")
    integer_layers = tuple(layer for name in grids for layer in by_layer[name])
    planned = plan(graph, integer_layers, grids)
    if rules.float_outputs:
        planned = _inputs_alone(planned, graph, integer_layers)
    if rules.float_outputs:
        notes.append(f"made for {target}: the times are those of onnxruntime on this CPU, which has no kernels for it")
    if batches is None and planned.unknown:
        notes.append(f"the ranges of {len(planned.unknown)} tensors come from the example alone: give batches")
    others = calibrate_tensors(
        graph,
        planned.unknown,
        [example] if batches is None else batches,
        observer=quantized.observer,
        symmetric=rules.symmetric or quantized.scheme.symmetric_activations,
        max_batches=max_batches,
        progress=progress,
    )
    others |= {name: others[like] for name, like in planned.tied.items()}
    return Deployment(
        model=model,
        example=call,
        graph=graph,
        integer_layers=integer_layers,
        stored_layers=tuple(layer for name in quantized.bits if name not in grids for layer in by_layer[name]),
        float_layers=tuple(name for name in layers if name not in quantized.bits),
        bits=quantized.bits,
        weight_scales={name: layers[name].weight_scale.detach().cpu() for name in quantized.bits},  # type: ignore[operator]
        weight_zero_points={
            name: layers[name].get_buffer(ZERO_POINT).detach().cpu()
            for name in quantized.bits
            if hasattr(layers[name], ZERO_POINT)
        },
        plan=planned,
        grids=planned.grids | others,
        rules=rules,
        pack_weights=pack_weights,
        notes=(*notes, *planned.notes),
    )


def deployed(
    quantized: Quantized, example: Batch, batches: Batches | None = None, *, target: str = DEFAULT_TARGET
) -> nn.Module:
    """The simulation with ``placement="deploy"``: the same inputs and outputs, quantizers where the file has them."""
    variant = qdq.S8S8 if TARGETS.get(target, Rules()).symmetric else U8S8
    return prepare(quantized, example, batches, target=target).build(variant).simulation


def _check_bits(quantized: Quantized) -> None:
    """Refuse, by name, what ONNX has no integers for."""
    for name, bits in quantized.bits.items():
        reason = None
        if bits.weight_format or bits.activation_format:
            reason = f"{bits.weight_format or bits.activation_format} is no format of ONNX: quantize it with bits"
        elif bits.activations not in (None, BITS):
            reason = f"activations of {bits.activations} bits: ONNX runtimes have {BITS}, quantize with that"
        elif bits.weights is None:
            reason = "integer activations need integer weights: give it bits for both"
        elif bits.weights > BITS:
            reason = f"weights of {bits.weights} bits: ONNX kernels take {BITS} at most, quantize with fewer"
        if reason:
            raise InputError(f"{name}: can't be exported, {reason}, or exclude it")
        layer = quantized.model.get_submodule(name)
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if isinstance(layer, transposed) and layer.groups > 1:
            raise InputError(
                f"{name}: can't be exported, a transposed convolution in groups has more scales than ONNX gives it: "
                "exclude it"
            )


def _found(quantized: Quantized, graph: FloatGraph, model: nn.Module) -> dict[str, list[LayerNode]]:
    """The ONNX nodes of each quantized layer, whose weights must have come through the export as they were."""
    import onnx

    constants = {tensor.name: tensor for tensor in graph.proto.graph.initializer}
    by_layer: dict[str, list[LayerNode]] = {name: [] for name in quantized.bits}
    for node in graph.layers:
        if node.layer not in by_layer:
            continue
        weight = np.asarray(onnx.numpy_helper.to_array(constants[node.weight]))
        expected = model.get_submodule(node.layer).weight.detach().numpy()  # type: ignore[operator]
        turned = node.operator in ("Gemm", "MatMul") and node.axis == 1
        if not np.array_equal(weight.T if turned else weight, expected):
            raise InputError(
                f"{node.layer}: the exporter merged a BatchNorm into its rounded weight: quantize with BatchNorm folded"
            )
        if node.input not in graph.torch_names:
            raise InputError(f"{node.layer}: reads {node.input}, which the exporter made up: exclude the layer")
        by_layer[node.layer].append(node)
    for name, nodes in by_layer.items():
        if not nodes:
            raise InputError(f"{name}: isn't in the exported graph, the example doesn't reach it: exclude it")
    return by_layer


def _grid_of(layer: nn.Module) -> Grid:
    quantizer = layer.get_submodule(QUANTIZER)
    assert isinstance(quantizer, FakeQuantize)
    return Grid.of(quantizer)


def _inputs_alone(planned: Plan, graph: FloatGraph, layers: tuple[LayerNode, ...]) -> Plan:
    """Quantize what layers and additions read, and nothing else."""
    operators = {node.name: node.op_type for node in graph.proto.graph.node}
    own = {layer.node for layer in layers}
    added = [name for name in planned.nodes if operators[name] == "Add" and name not in own]
    read = {name for node in graph.proto.graph.node if node.name in added for name in node.input}
    inputs = {layer.input for layer in layers}
    grids = {name: grid for name, grid in planned.grids.items() if name in inputs}
    return replace(
        planned,
        nodes=tuple(name for name in planned.nodes if name in own or name in added),
        grids=grids,
        unknown=tuple(sorted(read - set(grids))),
        tied={},
    )


def facts(deployment: Deployment) -> dict[str, Any]:
    """What became of the layers."""
    return {
        "integer": sorted({layer.layer for layer in deployment.integer_layers}),
        "weights_only": sorted({layer.layer for layer in deployment.stored_layers}),
        "float": list(deployment.float_layers),
    }
