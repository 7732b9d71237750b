"""The network as an ONNX graph in float, and the torch graph it was made from, tensor by tensor.

torch.onnx names an ONNX tensor after the node of the torch graph that computes it. So one table of names says where
a quantizer stands in both, and the file and its simulation can't differ in that.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from ptq import channels
from ptq.batches import Call
from ptq.errors import InputError
from ptq.export.packages import required
from ptq.hooks import evaluating
from ptq.quantization.modules import ATTRIBUTE as QUANTIZER
from ptq.smoothing.modules import ATTRIBUTE as SMOOTHING
from ptq.smoothing.modules import ChannelClamp, InputScaling

OPSETS = range(18, 24)
DEFAULT_OPSET = 20
LAYER_OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True, kw_only=True)
class LayerNode:
    """One call of a layer: the ONNX node and the names of what it reads."""

    layer: str
    node: str
    operator: str
    input: str
    output: str
    weight: str  # an initializer
    axis: int  # of the weight's output channels
    bias: str | None


@dataclass(frozen=True, kw_only=True)
class FloatGraph:
    """A network without quantizers, as ONNX and as the torch graph that ONNX was made from."""

    proto: Any  # onnx.ModelProto
    program: fx.GraphModule  # the same inputs and outputs as the model
    layers: tuple[LayerNode, ...]
    torch_names: dict[str, str]  # ONNX tensor → node of the torch graph
    inputs: tuple[str, ...]  # in the order of the call's positional, then keyword arguments
    output: int  # which of the outputs holds the logits


class InputMultiplying(nn.Module):
    """What is left of a smoothing that didn't fold: one multiplication by ``1 / factor``, per channel."""

    inverse: Tensor

    def __init__(self, scaling: InputScaling) -> None:
        super().__init__()
        inverse = scaling.factor.double().reciprocal().float()
        self.register_buffer("inverse", inverse.reshape(-1, *(1 for _ in range(-1 - scaling.axis))))  # [C, 1…]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inverse


class ReluAndMinimum(nn.Module):
    """A ReLU6 whose upper bound differs by channel, as a ReLU, which runtimes fuse, and a minimum."""

    high: Tensor

    def __init__(self, clamp: ChannelClamp) -> None:
        super().__init__()
        self.register_buffer("high", clamp.high.reshape(-1, *(1 for _ in range(-1 - clamp.axis))))  # [C, 1…]

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x.relu(), self.high)


def without_quantizers(model: nn.Module) -> nn.Module:
    """A copy on the CPU in which no input is rounded; weights stay as they are, on their grid."""
    plain = copy.deepcopy(model).cpu().eval()
    for _, layer in channels.layers_of(plain):
        if hasattr(layer, QUANTIZER):
            setattr(layer, QUANTIZER, nn.Identity())
        if isinstance(scaling := getattr(layer, SMOOTHING, None), InputScaling):
            setattr(layer, SMOOTHING, InputMultiplying(scaling))
    for name, module in list(plain.named_modules()):
        if isinstance(module, ChannelClamp) and not module.low.any():
            parent, _, attribute = name.rpartition(".")
            setattr(plain.get_submodule(parent), attribute, ReluAndMinimum(module))
    return plain


def to_onnx(model: nn.Module, example: Call, *, opset: int = DEFAULT_OPSET) -> FloatGraph:
    """Export a float model with a dynamic batch size; ``example`` is one call of it."""
    required("onnx", "onnxscript")
    if opset not in OPSETS:
        raise InputError(f"opset {opset}: choose one from {OPSETS[0]} to {OPSETS[-1]}")
    example = _two_samples(example)
    with evaluating(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations are nothing the user could act on
        outputs, logits = tree_leaves(example.run(model)), example.logits(model)
        names = {"output_names": ["logits"]} if len(outputs) == 1 else {}
        try:
            exported = torch.onnx.export(
                model,
                example.args,
                None,
                kwargs=example.kwargs or None,
                dynamic_shapes=_dynamic_batch(model, example),
                dynamo=True,
                opset_version=opset,
                verbose=False,
                external_data=False,
                **names,  # type: ignore[arg-type]
            )
        except Exception as error:  # whatever a tracer stumbles over in a user's model
            raise InputError(f"the model can't be exported to ONNX: {_reason(error)}") from error
        assert exported is not None and exported.exported_program is not None
        program = exported.exported_program.module()
        assert isinstance(program, fx.GraphModule)
    _drop_guards(program)
    proto = exported.model_proto
    _name_nodes(proto)
    _pool_by_name(proto)
    layers = _find_layers(proto, model)
    _forget_origin(proto)
    return FloatGraph(
        proto=proto,
        program=program,
        layers=layers,
        torch_names=_torch_names(proto, program),
        inputs=tuple(value.name for value in proto.graph.input),
        output=next((index for index, value in enumerate(outputs) if _same(value, logits)), 0),
    )


def _two_samples(example: Call) -> Call:
    """The example with at least two samples: a batch of one would be traced as a constant."""
    return example if example.samples != 1 else example.mapped(lambda value: torch.cat([value, value]))


def _dynamic_batch(model: nn.Module, example: Call) -> dict[str, Any]:
    batch = torch.export.Dim("batch")
    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    return {
        name: tuple({0: batch} if isinstance(item, Tensor) else None for item in value)
        if isinstance(value, tuple)
        else ({0: batch} if isinstance(value, Tensor) and value.dim() else None)
        for name, value in bound.arguments.items()
    }


def _same(value: Any, logits: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == logits.shape and bool(torch.equal(value, logits))


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: what torch says around it is about its own retries."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def _drop_guards(program: fx.GraphModule) -> None:
    """Take out the checks of the input's shape: they repeat what the exporter saw."""
    for node in list(program.graph.nodes):
        if node.op == "call_module" and "guards" in str(node.target):
            program.graph.erase_node(node)
    program.recompile()


def _name_nodes(proto: Any) -> None:
    """Every node gets a name of its own, since quantizers are assigned by it."""
    taken: set[str] = set()
    for index, node in enumerate(proto.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{index}"
        taken.add(node.name)


def _pool_by_name(proto: Any) -> None:
    """Say GlobalAveragePool where the exporter writes a mean over rows and columns: runtimes have it in integers."""
    import onnx

    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in proto.graph.value_info}
    for node in proto.graph.node:
        if node.op_type != "ReduceMean" or len(node.input) != 2 or node.input[1] not in constants:
            continue
        attributes = {entry.name: entry.i for entry in node.attribute}
        axes = {int(axis) % 4 for axis in onnx.numpy_helper.to_array(constants[node.input[1]]).reshape(-1)}
        if ranks.get(node.input[0]) == 4 and axes == {2, 3} and attributes.get("keepdims", 1):
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]
    read = {name for node in proto.graph.node for name in node.input}
    for tensor in [tensor for tensor in proto.graph.initializer if tensor.name not in read]:
        proto.graph.initializer.remove(tensor)


def _find_layers(proto: Any, model: nn.Module) -> tuple[LayerNode, ...]:
    import onnx

    layers = dict(channels.layers_of(model))
    initializers = {tensor.name for tensor in proto.graph.initializer}
    found = []
    for node in proto.graph.node:
        if node.op_type not in LAYER_OPERATORS or len(node.input) < 2 or node.input[1] not in initializers:
            continue
        scopes = {entry.key: entry.value for entry in node.metadata_props}.get(_SCOPES, "[]")
        owner = node.input[1].removesuffix(".weight")
        if owner not in layers:  # the transposed weight of a Linear has a name of the exporter's own
            owner = next((name for name in reversed(_texts(scopes)) if name in layers), "")
        if owner not in layers:
            continue
        attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        by_rows = node.op_type == "Conv" or (node.op_type == "Gemm" and attributes.get("transB", 0))
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
        found.append(
            LayerNode(
                layer=owner,
                node=node.name,
                operator=node.op_type,
                input=node.input[0],
                output=node.output[0],
                weight=node.input[1],
                axis=0 if by_rows else 1,
                bias=bias,
            )
        )
    return tuple(found)


def _forget_origin(proto: Any) -> None:
    """Take out where in whose source code each node came from: it is half of a small file, and nobody's business."""
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.initializer, *proto.graph.value_info):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for value in (*proto.graph.input, *proto.graph.output):
        value.ClearField("metadata_props")
        value.ClearField("doc_string")


def _texts(written: str) -> list[str]:
    return [part.strip().strip("'\"") for part in written.strip("[]").split(",")]


def _torch_names(proto: Any, program: fx.GraphModule) -> dict[str, str]:
    nodes = {node.name: node for node in program.graph.nodes}
    names = {name: name for name in nodes}
    for node in nodes.values():
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            names[f"{node.args[0].name}_split_{node.args[1]}"] = node.name  # how the exporter calls parts of a split
    placeholders = [node for node in nodes.values() if node.op == "placeholder"]
    names |= {value.name: node.name for value, node in zip(proto.graph.input, placeholders, strict=False)}
    returned = [node for node in tree_leaves(program.graph.output_node().args) if isinstance(node, fx.Node)]
    names |= {value.name: node.name for value, node in zip(proto.graph.output, returned, strict=False)}
    written = {name for node in proto.graph.node for name in node.output} | {v.name for v in proto.graph.input}
    return {name: torch_name for name, torch_name in names.items() if name in written}
