"""A network cut into stages: by the names of modules, or so that the stages take equally long.

torch.fx records the calls of the network's own modules; a stage is the part of that record between two cuts, with
the same modules under the same names, so that the stages' state dicts together are the network's.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from ptq.errors import InputError
from ptq.hooks import evaluating

_REPEATS = 5  # of which the fastest counts


@dataclass(frozen=True)
class Cut:
    """A place between two calls: ``name`` is the module that begins the next stage."""

    name: str
    place: int  # in the record of calls


class _Tracer(fx.Tracer):
    """Also takes the modules of these names as one call."""

    def __init__(self, called_as_one: Collection[str]) -> None:
        super().__init__()
        self._called_as_one = called_as_one

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._called_as_one or super().is_leaf_module(m, module_qualified_name)


def traced(model: nn.Module) -> fx.Graph:
    """The record of the model's calls."""
    try:
        graph: fx.Graph = _Tracer(getattr(model, "called_as_one", ())).trace(model)
    except Exception as error:  # whatever a forward method does with the stand-ins it is given
        reason = str(error).splitlines()[0][:200]
        raise InputError(
            f"{type(model).__name__} can't be cut into stages, torch.fx can't follow it ({reason}):"
            " write its forward without choices that depend on values"
        ) from error
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise InputError(f"{type(model).__name__} takes several inputs: only networks of one input can be cut")
    return graph


def cuts_by_name(model: nn.Module, names: Sequence[str]) -> list[Cut]:
    """Each stage but the first begins with the module of that name."""
    graph = traced(model)
    cuts = []
    for name in names:
        place = next((place for place, node in enumerate(graph.nodes) if name in _modules_of(node)), None)
        if place is None:
            known = [child for child, _ in model.named_modules() if child][:8]
            raise InputError(f"split at {name!r}: no module of that name runs: the names begin {', '.join(known)} …")
        cuts.append(Cut(name, _start_of(list(graph.nodes), place)))
    if any(first.place >= second.place for first, second in pairwise(cuts)):
        raise InputError(f"split at {', '.join(names)}: name the modules in the order in which they run")
    if not cuts or not any(node.op == "call_module" for node in list(graph.nodes)[: cuts[0].place]):
        raise InputError(f"split at {', '.join(names) or 'nothing'}: the first stage would be empty")
    return cuts


def balanced_cuts(model: nn.Module, stages: int, example: Tensor) -> list[Cut]:
    """Cuts between modules, where one tensor crosses, for which the slowest stage is as fast as can be."""
    if stages < 2:
        raise InputError(f"{stages} stages: give at least 2")
    graph = traced(model)
    nodes = list(graph.nodes)
    seconds = _forward_seconds(model, graph, example)
    before = [sum(seconds[:place]) for place in range(len(nodes) + 1)]
    crossing = _crossing(nodes)
    if not example.is_floating_point():  # integers, as the ids of tokens, cross beside what is made of them
        crossing = [[node for node in values if node.op != "placeholder"] for values in crossing]
    starts = [(node, _start_of(nodes, place)) for place, node in enumerate(nodes) if node.op == "call_module"]
    names = {
        start: str(node.target)
        for node, start in starts
        if len(crossing[start]) == 1 and crossing[start][0].op != "placeholder"
    }
    allowed = list(names)
    if len(allowed) < stages - 1:
        raise InputError(f"{type(model).__name__} has {len(allowed)} places to cut it at: give fewer than {stages}")
    # best[place]: the least time of the slowest of some stages that end there, and their cuts
    best: dict[int, tuple[float, list[int]]] = {place: (before[place], [place]) for place in allowed}
    for _ in range(stages - 2):
        best = {
            end: min(
                (max(slowest, before[end] - before[start]), [*cuts, end])
                for start, (slowest, cuts) in best.items()
                if start < end
            )
            for end in allowed
            if any(start < end for start in best)
        }
    _, places = min((max(slowest, before[-1] - before[end]), cuts) for end, (slowest, cuts) in best.items())
    return [Cut(names[place], place) for place in places]


def modules_before(model: nn.Module, cut: Cut) -> list[str]:
    """The modules whose results cross a cut."""
    crossing = _crossing(list(traced(model).nodes))[cut.place]
    return [str(node.target) for node in crossing if node.op == "call_module"]


def stage_modules(model: nn.Module, cuts: Sequence[Cut]) -> list[fx.GraphModule]:
    """The stages, which share the model's own modules; each takes and returns the tensors that cross its borders."""
    nodes = list(traced(model).nodes)
    crossing = _crossing(nodes)
    borders = [0, *(cut.place for cut in cuts), len(nodes)]
    stages = []
    for start, stop in pairwise(borders):
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in crossing[start] if start else []:
            copies[node] = graph.placeholder(node.name)
        received = set(copies.values())
        for node in nodes[start:stop]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_module" and getattr(model.get_submodule(str(node.target)), "inplace", False):
                _spare_received(graph, copies[node], received)
        if stop < len(nodes):
            leaving = tuple(copies[node] for node in crossing[stop])
            graph.output(leaving[0] if len(leaving) == 1 else leaving)
        graph.lint()
        stages.append(fx.GraphModule(model, graph))
    return stages


def _spare_received(graph: fx.Graph, node: fx.Node, received: set[fx.Node]) -> None:
    """What was received is a leaf of autograd, which can't be overwritten: an in-place module gets a copy."""
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument in received:
            with graph.inserting_before(node):
                node.replace_input_with(argument, graph.call_method("clone", (argument,)))


def boundary_tensors(stages: Sequence[nn.Module], example: Tensor) -> list[tuple[Tensor, ...]]:
    """Stand-ins for what crosses each border, the outer ones included, for an input of this shape.

    Found in eval mode, so that no statistics and no random numbers are used up.
    """
    with torch.no_grad(), evaluating(*stages):
        borders: list[tuple[Any, ...]] = [(example,)]
        for stage in stages:
            output = stage(*borders[-1])
            borders.append(output if isinstance(output, tuple) else (output,))
    for place, border in enumerate(borders[1:-1], start=1):
        if not all(isinstance(value, Tensor) for value in border):
            raise InputError(f"border {place}: something else than a tensor crosses it: split at another module")
    return [
        tuple(
            torch.zeros(value.shape, dtype=value.dtype).requires_grad_(place > 0 and value.is_floating_point())
            for value in border
        )
        for place, border in enumerate(borders)
    ]


def _modules_of(node: fx.Node) -> set[str]:
    """The modules that a call is part of."""
    stack = node.meta.get("nn_module_stack") or {}
    names = {entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()} | set(stack)
    return names | ({str(node.target)} if node.op == "call_module" else set())


def _crossing(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """For each place, the values made before it that are used from there on."""
    order = {node: place for place, node in enumerate(nodes)}
    last_use = {node: max((order[user] for user in node.users), default=-1) for node in nodes}
    return [[node for node in nodes[:place] if last_use[node] >= place] for place in range(len(nodes) + 1)]


def _start_of(nodes: Sequence[fx.Node], place: int) -> int:
    """Where a stage begins that begins with this node: before what is made of the inputs alone, and just for it.

    The mask of a layer is such a value: made on the far side of a cut, it need not cross.
    """
    of_inputs: set[fx.Node] = set()
    for node in nodes[:place]:
        calls_no_module = node.op in ("call_function", "call_method") and bool(node.all_input_nodes)
        if node.op == "placeholder" or (calls_no_module and of_inputs.issuperset(node.all_input_nodes)):
            of_inputs.add(node)
    order = {node: number for number, node in enumerate(nodes)}
    while (
        (before := nodes[place - 1]).op != "placeholder"
        and before in of_inputs
        and all(order[user] >= place for user in before.users)
    ):
        place -= 1
    return place


def _forward_seconds(model: nn.Module, graph: fx.Graph, example: Tensor) -> list[float]:
    class Timed(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            started = time.perf_counter()
            result = super().run_node(n)
            seconds[n.name] = min(seconds.get(n.name, float("inf")), time.perf_counter() - started)
            return result

    seconds: dict[str, float] = {}
    module = fx.GraphModule(model, graph)
    with torch.no_grad(), evaluating(module):
        for _ in range(_REPEATS):
            Timed(module).run(example)
    return [seconds[node.name] for node in module.graph.nodes]
