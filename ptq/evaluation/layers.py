"""How far each layer's output is from the float network's, streamed: sums only, whatever the amount of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ptq import channels, distributed
from ptq.attention import splitting_attention
from ptq.batches import Batches, Call, calls
from ptq.batchnorm import FoldedBatchNorm
from ptq.errors import MismatchError
from ptq.hooks import attached, evaluating
from ptq.smoothing.modules import folding_of

_HELD_BYTES = 64 * 2**20  # float outputs that wait for their quantized counterparts


@dataclass(frozen=True)
class Distance:
    """Distances between outputs y and ŷ."""

    l1: float  # Σ|y-ŷ| / Σ|y|
    sqnr: float  # 10 log10(Σy² / Σ(y-ŷ)²), in dB
    cosine: float  # Σyŷ / √(Σy² Σŷ²)
    max: float  # max|y-ŷ|

    def to_json(self) -> dict[str, float | None]:
        return {key: value if math.isfinite(value) else None for key, value in asdict(self).items()}


@dataclass(frozen=True)
class LayerError:
    """The error a layer makes by itself (float inputs) and the one the whole quantized network has there."""

    isolated: Distance
    accumulated: Distance | None


@dataclass
class DistanceSums:
    """What the distances of any number of outputs y and ŷ are made of."""

    difference: float = 0.0  # Σ|y-ŷ|
    absolute: float = 0.0  # Σ|y|
    squared_difference: float = 0.0
    squared: float = 0.0
    squared_found: float = 0.0
    product: float = 0.0
    largest: float = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        expected, found = expected.detach().flatten().float(), found.detach().flatten().float()
        difference = found - expected
        self.difference += float(difference.abs().sum())
        self.absolute += float(expected.abs().sum())
        self.squared_difference += float(difference @ difference)
        self.squared += float(expected @ expected)
        self.squared_found += float(found @ found)
        self.product += float(expected @ found)
        self.largest = max(self.largest, float(difference.abs().max()) if len(difference) else 0.0)

    def merge(self, other: DistanceSums) -> None:
        largest = max(self.largest, other.largest)
        for sum_of in fields(self):
            setattr(self, sum_of.name, getattr(self, sum_of.name) + getattr(other, sum_of.name))
        self.largest = largest

    def distance(self) -> Distance:
        norms = math.sqrt(self.squared * self.squared_found)
        return Distance(
            l1=_ratio(self.difference, self.absolute),
            sqnr=10 * math.log10(self.squared / self.squared_difference)
            if self.squared and self.squared_difference
            else (math.inf if not self.squared_difference else -math.inf),
            cosine=min(1.0, self.product / norms) if norms else 1.0,  # float32 sums may overshoot by 1e-7
            max=self.largest,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


@dataclass
class _Sums:
    """Of one layer."""

    isolated: DistanceSums = field(default_factory=DistanceSums)
    accumulated: DistanceSums = field(default_factory=DistanceSums)
    ran: bool = False

    def merge(self, other: _Sums) -> None:
        self.isolated.merge(other.isolated)
        self.accumulated.merge(other.accumulated)
        self.ran |= other.ran


@dataclass
class _Comparison:
    """One layer, and what waits to be compared."""

    layer: channels.Layer
    sums: _Sums  # of the batch that runs
    alone: list[Tensor] = field(default_factory=list)  # its output on float inputs
    expected: list[Tensor] = field(default_factory=list)  # the float network's outputs, oldest first
    input_factor: Tensor | None = None  # what smoothing divided its input by, somewhere else
    output_factor: Tensor | None = None

    def undo_folding(self, *, behind_batchnorm: bool) -> None:
        notes = folding_of(self.layer)
        if notes is not None:
            self.input_factor = notes.input
            self.output_factor = notes.output if notes.behind_batchnorm == behind_batchnorm else None

    def run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The layer's output on what the float network's layer reads."""
        if self.input_factor is not None:
            x = args[0] if args else kwargs["input"]
            scaled = x / channels.over_inputs(self.input_factor, channels.channel_axis(self.layer), x)
            args, kwargs = ((scaled, *args[1:]), kwargs) if args else (args, {**kwargs, "input": scaled})
        output: Tensor = self.layer(*args, **kwargs)
        return self.in_original_scale(output)

    def in_original_scale(self, output: Tensor) -> Tensor:
        if self.output_factor is None:
            return output
        return output * channels.over_inputs(self.output_factor, channels.channel_axis(self.layer), output)


def layer_errors(
    model: nn.Module, quantized: nn.Module, batches: Batches, *, max_batches: int = 8, accumulated: bool = True
) -> dict[str, LayerError]:
    """Compare a quantized network with the float one it was made from, layer by layer.

    A layer that took over a BatchNorm is compared behind that BatchNorm, one whose channels were scaled by smoothing
    in the channels' original scale. ``accumulated=False`` leaves out the run of the whole quantized network.
    """
    comparisons = {name: _Comparison(layer, _Sums()) for name, layer in channels.layers_of(quantized)}
    # Where the float network has what a quantized layer returns: at the layer, or behind its folded BatchNorm.
    places = {name: name for name in comparisons} | {
        module.into: name for name, module in quantized.named_modules() if isinstance(module, FoldedBatchNorm)
    }
    for name, comparison in comparisons.items():
        comparison.undo_folding(behind_batchnorm=places[name] != name)
    by_batch: dict[int, dict[str, _Sums]] = {}
    with torch.inference_mode(), evaluating(model, quantized), splitting_attention(model):
        for number, call in enumerate(calls(batches, model, max_batches)):
            if not distributed.is_mine(number):
                continue
            by_batch[number] = {name: _Sums() for name in comparisons}
            for name, comparison in comparisons.items():
                comparison.sums = by_batch[number][name]
            for part in _parts(call, model, places):
                with attached(_float_hooks(model, comparisons, places, hold=accumulated)):
                    part.run(model)
                if accumulated:
                    with attached(_quantized_hooks(comparisons)):
                        part.run(quantized)
    totals = {name: _Sums() for name in comparisons}
    for found in distributed.merged(by_batch).values():  # in the order of the batches, whoever ran them
        for name, total in totals.items():
            total.merge(found[name])
    return {
        name: LayerError(total.isolated.distance(), total.accumulated.distance() if accumulated else None)
        for name, total in totals.items()
        if total.ran
    }


def _float_hooks(
    model: nn.Module, comparisons: dict[str, _Comparison], places: dict[str, str], *, hold: bool
) -> Iterator[Any]:
    def run_alone(comparison: _Comparison) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            comparison.alone.append(comparison.run_alone(args, kwargs))

        return hook

    def compare(comparison: _Comparison) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            comparison.sums.isolated.add(output, comparison.alone.pop(0))
            comparison.sums.ran = True
            if hold:
                comparison.expected.append(output.clone())  # an in-place activation is about to overwrite it

        return hook

    modules = dict(model.named_modules())
    for name, comparison in comparisons.items():
        if name not in modules or places[name] not in modules:
            raise MismatchError(f"{name}: the float model has no such layer: compare with the model it was made from")
        yield modules[name].register_forward_hook(run_alone(comparison), with_kwargs=True)
        yield modules[places[name]].register_forward_hook(compare(comparison))


def _quantized_hooks(comparisons: dict[str, _Comparison]) -> Iterator[Any]:
    def compare(comparison: _Comparison) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, output: Tensor) -> None:
            comparison.sums.accumulated.add(comparison.expected.pop(0), comparison.in_original_scale(output))

        return hook

    for comparison in comparisons.values():
        yield comparison.layer.register_forward_hook(compare(comparison))


def _parts(call: Call, model: nn.Module, places: dict[str, str]) -> Iterator[Call]:
    """Cut a batch so that the outputs held for one part stay within the memory that is allowed."""
    one_sample = 0

    def measure(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal one_sample
        one_sample += output.numel() * output.element_size()

    modules = dict(model.named_modules())
    with attached(modules[place].register_forward_hook(measure) for place in places.values() if place in modules):
        call.first(1).run(model)
    yield from call.split(max(1, _HELD_BYTES // max(1, one_sample)))
