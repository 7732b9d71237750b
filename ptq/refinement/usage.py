"""How a network uses its modules in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ptq import channels
from ptq.batches import Call
from ptq.hooks import attached

MOST_LAYERS = 16  # of a block


@dataclass(frozen=True)
class Usage:
    """What the forward pass of one sample showed."""

    layers: dict[str, int]  # Conv and Linear → how often it ran, in the order of execution
    once: frozenset[str]  # modules that ran once and returned a tensor
    largest_map: int  # bytes that a layer read or returned
    multiplications: int  # of weights, in all layers

    def blocks(self, layers: Sequence[str]) -> dict[str, list[str]]:
        """Modules to learn as a whole → the layers in them, from among these.

        The smallest that hold two layers or more and run once, other than the whole network; where one holds
        another, the larger, as long as it has at most 16 layers.
        """
        found: dict[str, list[str]] = {}
        for layer in layers:
            around = [parent for parent in _parents(layer) if parent in self.once]
            block = next((parent for parent in around if len(layers_in(parent, layers)) > 1), None)
            if block is not None and len(layers_in(block, layers)) <= MOST_LAYERS:
                found[block] = layers_in(block, layers)
        return {
            block: inside
            for block, inside in found.items()
            if not any(block != other and block.startswith(f"{other}.") for other in found)
        }


def look_at_usage(model: nn.Module, call: Call) -> Usage:
    """Run the first sample of the call and look."""
    counts: dict[str, int] = {}
    layers: dict[str, int] = {}
    others: set[str] = set()  # return something that isn't a tensor
    largest = multiplications = 0

    def look(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal largest, multiplications
        counts[name] = counts.get(name, 0) + 1
        if not isinstance(output, Tensor):
            others.add(name)
        if isinstance(module, channels.LAYER_TYPES):
            layers[name] = counts[name]
            tensors = [x for x in (*args, *kwargs.values(), output) if isinstance(x, Tensor)]
            largest = max(largest, *(x.nbytes for x in tensors))
            multiplications += _multiplications(module, tensors[0], output)

    with attached(
        module.register_forward_hook(partial(look, name), with_kwargs=True) for name, module in model.named_modules()
    ):
        call.first(1).run(model)
    once = frozenset(name for name, count in counts.items() if count == 1 and name not in others)
    return Usage(layers, once, largest, multiplications)


def _multiplications(layer: channels.Layer, x: Tensor, output: Tensor) -> int:
    """Each weight meets every output position, or every input position if the layer scatters its products."""
    if not isinstance(layer, nn.Linear) and layer.transposed:
        return layer.weight.numel() * x.numel() // channels.input_channels(layer)
    return layer.weight.numel() * output.numel() // channels.output_channels(layer)


def _parents(name: str) -> list[str]:
    """The modules around a module, the nearest first, without the whole network."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]


def layers_in(block: str, layers: Sequence[str]) -> list[str]:
    """Those of the layers that are inside the block."""
    return [layer for layer in layers if layer.startswith(f"{block}.")]
