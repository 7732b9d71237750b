"""Both networks side by side, the float one and the quantized one, stopped where a layer or a block gets its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ptq import channels, distributed
from ptq.batches import Call
from ptq.calibration import Calibration
from ptq.hooks import attached
from ptq.quantization import Bits
from ptq.quantization.modules import ATTRIBUTE, DiffusedQuantize, FakeQuantize
from ptq.refinement.layer import refine_layer
from ptq.refinement.lockstep import Walker, side_by_side, stop_here
from ptq.refinement.rows import sampled_rows, weight_matrix
from ptq.refinement.steps import LAYER_STEPS

_ROW_VALUES = 2**24  # numbers in the rows of one layer, unless the least number of rows needs more
_LEAST_ROWS = 2**14


@dataclass(frozen=True)
class Networks:
    """The float network with BatchNorm folded, and the quantized one: the same modules by name."""

    reference: nn.Module
    quantized: nn.Module

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.reference, self.quantized

    def modules(self, name: str) -> tuple[nn.Module, nn.Module]:
        return self.reference.get_submodule(name), self.quantized.get_submodule(name)

    @contextmanager
    def stopping_at(self, layers: Sequence[str], blocks: Sequence[str] = ()) -> Iterator[None]:
        """Inside, walkers stop where these modules are called, with the call that they get.

        A layer's input is scaled by smoothing there, but not yet quantized.
        """

        def stops() -> Iterator[RemovableHandle]:
            for name in layers:
                reference, quantized = self.modules(name)
                for module in (reference, getattr(quantized, ATTRIBUTE, quantized)):
                    yield module.register_forward_pre_hook(partial(_stop, name), with_kwargs=True)
            for name in blocks:
                for module in self.modules(name):
                    yield module.register_forward_pre_hook(partial(_stop, name), with_kwargs=True)

        with attached(stops()):
            yield


def _stop(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stop_here(name, Call(args, kwargs, None))


@dataclass(frozen=True)
class Way:
    """One batch and how to run it through both networks, or the same block of them."""

    first: int  # the index of its first sample in the stream
    samples: int
    valid: Tensor | None  # which tokens are no padding, [N, T]
    through_reference: Callable[[], object]
    through_quantized: Callable[[], object]


@dataclass(frozen=True)
class Arrival:
    """A batch in front of a module: how it is called in each network."""

    way: Way
    reference: Call
    quantized: Call


def ways_through(networks: Networks, given: Sequence[Call]) -> list[Way]:
    ways, first = [], 0
    for call in given:
        runs = [partial(call.run, network) for network in networks.both]
        ways.append(Way(first, call.samples, valid_tokens(call), *runs))
        first += call.samples
    return ways


def valid_tokens(call: Call) -> Tensor | None:
    """Which tokens of a text are no padding, [N, T]."""
    mask = call.kwargs.get("attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def walk(ways: Sequence[Way], places: Sequence[str]) -> Iterator[tuple[str, list[Arrival]]]:
    """Each of the places, in the order of execution, with the batches that arrive there in both networks.

    A place is met once: should some batches come there later than others, they pass. Processes that share the work
    meet each place together, each with the batches that it was given.
    """
    walkers = [
        (Walker[Call](way.through_reference, places), Walker[Call](way.through_quantized, places)) for way in ways
    ]
    met: set[str] = set()
    for place, _ in side_by_side([walker for pair in walkers for walker in pair], places):
        arrived = [
            Arrival(way, reference.seen, quantized.seen)
            for way, (reference, quantized) in zip(ways, walkers, strict=True)
            if reference.place == place and quantized.place == place and reference.seen and quantized.seen
        ]
        if place not in met and any(distributed.exchanged(bool(arrived))):
            met.add(place)
            yield place, arrived


@dataclass(frozen=True)
class LayerRefiner:
    """Refines layers of the quantized network in the order of execution."""

    networks: Networks
    bits: dict[str, Bits]
    calibration: Calibration | None  # None keeps the ranges of the inputs as they are
    rows: int  # of a layer, at most
    seed: int
    steps: frozenset[str] = LAYER_STEPS  # that are taken with each layer

    def refine(self, ways: Sequence[Way], names: Sequence[str]) -> None:
        """Refine these layers, all of which these ways lead through."""
        with self.networks.stopping_at(names):
            for name, arrived in walk(ways, names):
                self.refine_layer(name, arrived)

    def refine_layer(self, name: str, arrived: Sequence[Arrival]) -> None:
        """Refine a layer on the rows of these batches, and of those that arrived in other processes."""
        float_layer, layer = self.networks.modules(name)
        assert isinstance(layer, channels.LAYER_TYPES) and isinstance(float_layer, channels.LAYER_TYPES)
        samples = sum(distributed.exchanged(sum(arrival.way.samples for arrival in arrived)))
        wanted = weight_matrix(float_layer.weight, float_layer)  # [g, o, n]
        groups, _, width = wanted.shape
        per_sample = -(-min(self.rows, max(_LEAST_ROWS, _ROW_VALUES // (groups * width))) // samples)

        quantizer = getattr(layer, ATTRIBUTE, None)
        assert quantizer is None or isinstance(quantizer, FakeQuantize)
        whole = isinstance(quantizer, DiffusedQuantize)  # looks at whole images, and has its range

        def rows_of(call: Call, way: Way, quantizer: FakeQuantize | None = None) -> Tensor:
            x: Tensor = call.args[0] if call.args else call.kwargs["input"]
            x = x if quantizer is None else quantizer(x)
            return sampled_rows(x, layer, per_sample, first=way.first, seed=self.seed, valid=way.valid)

        found = distributed.merged(
            {
                arrival.way.first: (
                    rows_of(arrival.quantized, arrival.way, quantizer if whole else None),
                    rows_of(arrival.reference, arrival.way) @ wanted.mT,
                )
                for arrival in arrived
            }
        )
        rows, outputs = (torch.cat(parts, 1) for parts in zip(*found.values(), strict=True))
        del found  # as large as both together
        refine_layer(
            layer,
            float_layer,
            self.bits[name].weights,
            None if whole else quantizer,
            extent=self.extent(name),
            rows=rows,
            outputs=outputs,
            steps=self.steps,
        )

    def extent(self, name: str) -> tuple[float, float] | None:
        """The range of a layer's input that the calibration saw."""
        if self.calibration is None:
            return None
        statistics = self.calibration.layers[name]
        return min(0.0, float(statistics.minimum.min())), max(0.0, float(statistics.maximum.max()))
