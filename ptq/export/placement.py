"""Where quantizers stand in a network that runs in integers, and the simulation that has them in the same places.

In the laboratory a quantizer stands before each layer. A runtime needs more: whatever an integer kernel reads or
writes is quantized (what is added, concatenated and pooled), and a tensor has one grid for all its readers. The
simulation is built from the finished file: a fake quantizer for each of its QuantizeLinear nodes, its weights and
its biases.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from tqdm import tqdm

from ptq.batches import Batches, calls
from ptq.errors import ActivationError, InputError
from ptq.export.graph import FloatGraph, LayerNode
from ptq.formats import affine
from ptq.observers import Histogram
from ptq.quantization.modules import FakeQuantize
from ptq.ranges import HISTOGRAM_RANGES

BITS = 8
FIRST, LAST = affine.code_range(BITS)
# The output has the grid of the input, and the same extremes.
KEEP_RANGE = frozenset({"Flatten", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
# The output has the grid of the input, but may use only a part of it.
SHARE_GRID = frozenset({"AveragePool", "Pad", "Resize", "Slice", "Split"})
# Monotone, with a bound of its own for each channel: rounding before and after on one grid is rounding once.
BOUNDS = frozenset({"Max", "Min"})
JOIN = frozenset({"Add", "Concat", "Mul"})
REMOVABLE = frozenset({"Clip", "Relu"})  # the runtime lets saturation do their work
ACTIVATIONS = REMOVABLE | {"GlobalAveragePool", "LeakyRelu", "Sigmoid"}
INTEGER_OUTPUT = frozenset({"Conv", "ConvTranspose"})  # products of matrices may leave in float at no cost


@dataclass(frozen=True)
class Grid:
    """The 256 values ``(code - zero_point) · scale``, codes from -128 to 127."""

    scale: float
    zero_point: int = 0

    @property
    def low(self) -> float:
        return (FIRST - self.zero_point) * self.scale

    @property
    def high(self) -> float:
        return (LAST - self.zero_point) * self.scale

    @classmethod
    def over(cls, low: float, high: float, *, symmetric: bool = False) -> Grid:
        """The grid for a range, as ptq's own quantizers choose it."""
        quantizer = FakeQuantize(BITS, symmetric=symmetric)
        quantizer.set_range(low, high)
        return cls.of(quantizer)

    @classmethod
    def of(cls, quantizer: FakeQuantize) -> Grid:
        return cls(float(quantizer.scale), int(quantizer.zero_point))

    def symmetric(self) -> Grid:
        """The grid with zero-point 0 over the same range."""
        return self if self.zero_point == 0 else Grid.over(self.low, self.high, symmetric=True)

    def quantizer(self) -> FakeQuantize:
        quantizer = FakeQuantize(BITS)
        quantizer.scale.fill_(self.scale)
        quantizer.zero_point.fill_(self.zero_point)
        return quantizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which nodes run in integers, and the grids of the tensors between them."""

    nodes: tuple[str, ...]
    grids: dict[str, Grid]  # tensors that layers read, and what shares a grid with them
    unknown: tuple[str, ...]  # tensors that need a grid and have none yet
    tied: dict[str, str]  # tensors that take the grid of an unknown one
    notes: tuple[str, ...]


def plan(graph: FloatGraph, layers: Iterable[LayerNode], grids: Mapping[str, Grid]) -> Plan:
    """Decide what runs in integers; ``layers`` are to be quantized, ``grids`` are those of their layers' inputs."""
    by_node = {layer.node: layer for layer in layers}
    demanded, notes = _demands(by_node.values(), grids)
    initializers = {tensor.name for tensor in graph.proto.graph.initializer}
    integer, included = set(demanded), {}
    bounds: dict[str, str] = {}  # what is bounded → what comes out
    for node in graph.proto.graph.node:
        if node.name in by_node:
            included[node.name] = node
            integer |= set(node.output) if node.op_type in INTEGER_OUTPUT else set()
        elif _eligible(node, integer, initializers, graph):
            included[node.name] = node
            integer |= set(node.output)
        elif _is_bound(node, integer, initializers, graph):
            bounds[node.input[0]] = node.output[0]
            integer |= set(node.output)
    known = dict(demanded)
    for node in reversed(graph.proto.graph.node):
        if node.input and bounds.get(node.input[0]) in node.output and node.output[0] in known:
            known.setdefault(node.input[0], known[node.output[0]])
        elif node.name in included and node.op_type in KEEP_RANGE | SHARE_GRID and not _settle(node, known):
            del included[node.name]
    unknown = _touched(included.values(), by_node, initializers) - set(known)
    tied = {source: bounded for source, bounded in bounds.items() if {source, bounded} <= unknown}
    return Plan(nodes=tuple(included), grids=known, unknown=tuple(sorted(unknown - set(tied))), tied=tied, notes=notes)


def _demands(layers: Iterable[LayerNode], grids: Mapping[str, Grid]) -> tuple[dict[str, Grid], tuple[str, ...]]:
    """The grid of each tensor that layers read: the widest, should they differ."""
    demanded: dict[str, Grid] = {}
    notes = []
    for layer in layers:
        grid, other = grids[layer.layer], demanded.get(layer.input)
        if other is not None and other != grid:
            notes.append(f"{layer.layer}: shares its input with a layer whose range differs; both get the wider one")
            low, high = min(grid.low, other.low), max(grid.high, other.high)
            grid = Grid.over(low, high, symmetric=grid.zero_point == other.zero_point == 0)
        demanded[layer.input] = grid
    return demanded, tuple(notes)


def _eligible(node: Any, integer: set[str], initializers: set[str], graph: FloatGraph) -> bool:
    """Whether everything the node reads is there in integers, and the torch graph knows what it computes."""
    if node.op_type in JOIN:
        read = list(node.input)
    elif node.op_type in KEEP_RANGE | SHARE_GRID | ACTIVATIONS:
        read = [node.input[0]]
    else:
        return False
    if node.op_type == "Pad" and len(node.input) > 2 and node.input[2]:
        return False  # pads with a value of its own, which the grid may not hold
    known = all(name in graph.torch_names for name in (*read, *node.output))
    return known and all(name in integer and name not in initializers for name in read)


def _is_bound(node: Any, integer: set[str], initializers: set[str], graph: FloatGraph) -> bool:
    """Whether the node, which runs in float, only bounds a tensor that is there in integers by constants."""
    known = all(name in graph.torch_names for name in (node.input[0], *node.output)) if node.input else False
    constant = len(node.input) == 2 and node.input[1] in initializers
    return node.op_type in BOUNDS and known and constant and node.input[0] in integer


def _settle(node: Any, known: dict[str, Grid]) -> bool:
    """Let a node whose output has its input's grid agree with what is demanded of the output; False if it can't."""
    demanded = {known[name] for name in node.output if name in known}
    source = node.input[0]
    if not demanded:
        return True
    if len(demanded) > 1 or (source in known and known[source] not in demanded):
        return False
    if source not in known:
        if node.op_type not in KEEP_RANGE:
            return False
        known[source] = next(iter(demanded))
    return True


def _touched(nodes: Iterable[Any], layers: Mapping[str, LayerNode], initializers: set[str]) -> set[str]:
    """The tensors that get a quantizer of their own."""
    touched: set[str] = set()
    shared: set[str] = set()
    for node in nodes:
        if node.name in layers:
            touched |= {node.input[0], *(node.output if node.op_type in INTEGER_OUTPUT else ())}
        elif node.op_type in KEEP_RANGE | SHARE_GRID:
            touched.add(node.input[0])
            shared |= set(node.output)
        else:
            touched |= {name for name in (*node.input, *node.output) if name and name not in initializers}
    return touched - shared


# Ranges of the tensors between the layers ---------------------------------------------------------------------------


class RangeObserver(nn.Module):
    """Lets a tensor pass and remembers its range, and its histogram if the observer needs one."""

    def __init__(self, name: str, observer: str) -> None:
        super().__init__()
        self.name, self.observer = name, observer
        self.low = self.high = 0.0  # zero is always inside
        self.seen = False
        self.histogram = Histogram() if observer in HISTOGRAM_RANGES else None

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            low, high = (float(bound) for bound in torch.aminmax(x))
            if not (abs(low) < float("inf") and abs(high) < float("inf")):  # false for NaN too
                raise ActivationError(f"{self.name}: not finite: check the data and the weights of the layers before")
            self.low, self.high, self.seen = min(self.low, low), max(self.high, high), True
            if self.histogram is not None:
                self.histogram.collect(x, low, high)
        return x

    def grid(self, *, symmetric: bool) -> Grid:
        if not self.seen:
            raise InputError(f"{self.name}: the calibration lacks this tensor: give batches that reach it")
        low, high = self.low, self.high
        if self.histogram is not None:
            low, high = HISTOGRAM_RANGES[self.observer](self.histogram, low, high, BITS)
        return Grid.over(low, high, symmetric=symmetric)


def calibrate_tensors(
    graph: FloatGraph,
    tensors: Iterable[str],
    batches: Batches,
    *,
    observer: str,
    symmetric: bool,
    max_batches: int,
    progress: bool = False,
) -> dict[str, Grid]:
    """The grids of these tensors, from the ranges they take over the batches."""
    observers = {name: RangeObserver(name, observer) for name in tensors}
    if not observers:
        return {}
    watched = with_modules(graph, observers)
    total = min(max_batches, len(batches)) if isinstance(batches, Sized) else None
    with torch.inference_mode():
        seen = calls(batches, watched, max_batches)
        for call in tqdm(seen, "ranges", total, unit="batch", disable=not progress, leave=False):
            call.run(watched)
    return {name: watcher.grid(symmetric=symmetric) for name, watcher in observers.items()}


def with_modules(graph: FloatGraph, modules: Mapping[str, nn.Module]) -> fx.GraphModule:
    """A copy of the torch graph in which these ONNX tensors go through these modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's copy of its own trees
        program = copy.deepcopy(graph.program)
    nodes = {node.name: node for node in program.graph.nodes}
    for index, (tensor, module) in enumerate(modules.items()):
        node = nodes[graph.torch_names[tensor]]
        name = f"_quantizer_{index}"
        program.add_submodule(name, module)
        with program.graph.inserting_after(node):
            passed = program.graph.call_module(name, (node,))
        node.replace_all_uses_with(passed, delete_user_cb=_other_than(passed))
    program.recompile()
    return program


def _other_than(kept: fx.Node) -> Callable[[fx.Node], bool]:
    return lambda user: user is not kept


# The simulation -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def simulation(graph: FloatGraph, grids: Mapping[str, Grid], parameters: Mapping[str, Tensor]) -> nn.Module:
    """The torch graph with a fake quantizer for each grid, and with the weights and biases of the file.

    ``grids`` and ``parameters`` are what the file holds, by ONNX name: see ``ptq.export.qdq.read``.
    """
    program = with_modules(graph, {name: grid.quantizer() for name, grid in grids.items()})
    for layer in graph.layers:
        module = program.get_submodule(layer.layer)
        for attribute, name in (("weight", layer.weight), ("bias", layer.bias)):
            if name is not None and name in parameters:
                stored = parameters[name]
                parameter = getattr(module, attribute)
                turned = layer.operator in ("Gemm", "MatMul") and attribute == "weight" and layer.axis == 1
                parameter.copy_(stored.T if turned else stored)
    return program
