"""Mixed precision: each layer's weights get as many bits as they need, within a budget of bits on average.

How much a layer suffers at a width is measured without labels: what the network's output loses when this layer's
weights alone are rounded to it. The losses of layers are taken to add up, so the choice is a knapsack problem, which
is solved exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from ptq import channels, distributed
from ptq.attention import split_attention
from ptq.batches import Batch, Batches, Call, as_call, calls, limited
from ptq.batchnorm import fold_batchnorms
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.hooks import evaluating
from ptq.quantization import Bits, Scheme
from ptq.quantization.apply import quantize_by
from ptq.refinement import rounded_weights

SCHEMA = 1
WIDTHS = (2, 3, 4, 5, 6, 8)
SAMPLES = 128  # to measure a layer at one width
SAMPLES_TO_COMPARE = 2048  # two networks' answers
_ALIKE = 0.1  # bits on average: budgets closer than that aren't told apart


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The bits of one layer's weights, and what each width would have cost."""

    bits: int
    elements: int  # of the weight
    errors: dict[int, float]  # width → relative squared error of the network's output


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Bits for each layer that has a choice; those fixed by the scheme count in the average."""

    budget: float  # bits on average
    average: float  # of what was chosen
    predicted: float  # the sum of the layers' errors
    layers: dict[str, Choice]
    changed: float | None = None  # per cent of answers that differ from the float network's, where that was measured

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "mixed precision",
            "schema": SCHEMA,
            "budget": self.budget,
            "average": self.average,
            "predicted": self.predicted,
            "changed": self.changed,
            "layers": {
                name: {
                    "bits": choice.bits,
                    "elements": choice.elements,
                    "errors": {str(width): error for width, error in choice.errors.items()},
                }
                for name, choice in self.layers.items()
            },
        }


@dataclass(frozen=True)
class Sensitivities:
    """What the network's output loses at each width of each layer's weight, all others in float."""

    errors: dict[str, dict[int, float]]  # layer → width → relative squared error of the output
    elements: dict[str, int]  # of each weight that is quantized, those without a choice included
    fixed: dict[str, int]  # layer → bits that the scheme insists on

    def allocate(self, budget: float) -> Allocation:
        """The bits of the least predicted error with ``Σ elements · bits ≤ budget · Σ elements``."""
        total = sum(self.elements.values())
        spent = sum(self.elements[name] * bits for name, bits in self.fixed.items())
        names = list(self.errors)
        least = spent + sum(self.elements[name] * min(self.errors[name]) for name in names)
        if least > budget * total * (1 + 1e-12):
            raise InputError(f"--budget {budget:g}: the layers take {least / total:.3g} bits on average at least")
        chosen = cheapest(
            [self.errors[name] for name in names],
            [self.elements[name] for name in names],
            budget * total * (1 + 1e-12) - spent,
        )
        layers = {
            name: Choice(bits=bits, elements=self.elements[name], errors=self.errors[name])
            for name, bits in zip(names, chosen, strict=True)
        }
        used = spent + sum(choice.elements * choice.bits for choice in layers.values())
        return Allocation(
            budget=budget,
            average=used / total,
            predicted=sum(choice.errors[choice.bits] for choice in layers.values()),
            layers=layers,
        )


def cheapest(errors: Sequence[Mapping[int, float]], elements: Sequence[int], most: float) -> list[int]:
    """One width for each layer such that ``Σ elements · width ≤ most`` and ``Σ error`` is least: an exact search.

    As an integer programme: ``x[layer, width] ∈ {0, 1}``, one of them 1 in each layer; ``most`` holds to the solver's
    tolerance, a millionth.
    """
    options = [(layer, width) for layer, of_layer in enumerate(errors) for width in of_layer]
    if not options:
        return []
    cost = np.array([errors[layer][width] for layer, width in options])
    weight = np.array([float(elements[layer] * width) for layer, width in options])
    one_each = np.array([[float(layer == row) for layer, _ in options] for row in range(len(errors))])
    size = max(float(cost.max()), 1e-300)
    found = milp(
        cost / size,
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(weight / max(most, 1.0), -np.inf, 1.0)],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise InputError(f"no choice of widths fits into {most:g} bits")
    return [options[index][1] for index in np.flatnonzero(found.x > 0.5)]


def sensitivities(
    model: nn.Module,
    calibration: Calibration,
    scheme: Scheme,
    batches: Batches,
    *,
    compensated: bool = False,
    widths: Sequence[int] = WIDTHS,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Sensitivities:
    """Measure ``Σ |f_q(x) - f(x)|² / Σ |f(x)|²`` of the outputs, with one layer's weight rounded in f_q.

    Of the layers to which the scheme gives its own bits, not those of the outer layers or of an override.
    ``compensated`` rounds as ``refine`` does, otherwise weights go to the nearest value.
    """
    assigned = scheme.assign(list(calibration.layers))
    kept = {name: bits for name, bits in assigned.items() if bits.weights is not None and not bits.weight_format}
    free = replace(scheme, first_last=None, overrides=())
    named = _named(scheme, list(calibration.layers))
    choices = [name for name in kept if name not in named]
    if not choices:
        raise InputError("mixed precision: the scheme leaves no layer whose bits could be chosen")
    network = copy.deepcopy(model)
    split_attention(network)
    if scheme.fold_batchnorm:
        fold_batchnorms(network, dict(calibration.batchnorms))
    layers = dict(channels.layers_of(network))
    rounded = {width: quantize_by(replace(free, bits=Bits(width, None)), model, calibration) for width in widths}
    plain = {width: dict(channels.layers_of(found.model)) for width, found in rounded.items()}
    weights: dict[str, dict[int, Tensor]] = {
        name: {width: plain[width][name].weight for width in widths} for name in choices
    }
    if compensated:
        weights |= rounded_weights(network, choices, widths, batches, scheme, seed=seed)
    with evaluating(network), torch.no_grad():
        given = list(calls(limited(batches, samples), network))
        error = _error_against(network, given)
        of_layers = distributed.shared_out(
            choices, lambda name: {width: error(layers[name], weights[name][width]) for width in widths}
        )
    return Sensitivities(
        dict(zip(choices, of_layers, strict=True)),
        elements={name: layers[name].weight.numel() for name in kept},
        fixed={name: bits.weights for name, bits in kept.items() if name in named and bits.weights is not None},
    )


def with_bits(scheme: Scheme, allocation: Allocation) -> Scheme:
    """The scheme with these bits for the weights of these layers, and its own for everything else."""
    chosen = tuple((name, replace(scheme.bits, weights=choice.bits)) for name, choice in allocation.layers.items())
    return replace(scheme, overrides=(*chosen, *scheme.overrides))


def choose_bits(
    model: nn.Module,
    calibration: Calibration,
    scheme: Scheme,
    batches: Batches,
    quantize: Callable[[Scheme], nn.Module],
    *,
    budget: float | None = None,
    max_drop: float | None = None,
    compensated: bool = False,
    refined_on: int = 0,
    seed: int = 0,
) -> Allocation:
    """Bits for the weights of each layer: ``budget`` of them on average, or the fewest that lose at most ``max_drop``.

    ``quantize`` makes the network of a scheme; with ``max_drop`` per cent its answers are compared with the float
    network's, on samples after the first ``refined_on`` where there are some.
    """
    check_wish(budget, max_drop)
    found = sensitivities(model, calibration, scheme, batches, compensated=compensated, seed=seed)
    if budget is not None:
        return found.allocate(budget)
    assert max_drop is not None
    others = _After(batches, refined_on)
    if not any(True for _ in others):
        others = _After(batches, 0)

    def changed(allocation: Allocation) -> float:
        return answers_changed(model, quantize(with_bits(scheme, allocation)), others, SAMPLES_TO_COMPARE)

    return fewest_bits(found, changed, max_drop)


def check_wish(budget: float | None, max_drop: float | None) -> None:
    if (budget is None) == (max_drop is None):
        raise InputError("mixed precision: give either --budget, in bits, or --max-drop, in per cent")
    if budget is not None and not budget >= min(WIDTHS):
        raise InputError(f"--budget {budget:g}: give the bits of a weight on average, {min(WIDTHS)} or more")
    if max_drop is not None and not max_drop >= 0:
        raise InputError(f"--max-drop {max_drop:g}: give per cent, 0 or more")


def fewest_bits(
    found: Sensitivities, changed: Callable[[Allocation], float], most: float, widths: Sequence[int] = WIDTHS
) -> Allocation:
    """The allocation of the fewest bits on average for which at most ``most`` per cent of the answers change.

    ``changed`` quantizes with an allocation and counts. As the share of right answers can't fall by more than the
    share of those that change, accuracy falls by at most so many points on these samples. Bisection over budgets.
    """
    highest = found.allocate(float(max(*widths, *found.fixed.values())))
    share = changed(highest)
    if share > most:
        raise InputError(
            f"--max-drop {most:g}: {share:.2f} % of the answers change already at {highest.average:.3g} bits:"
            " allow more, or give the activations more bits"
        )
    best = replace(highest, changed=share)
    low, high = float(min(widths)), highest.average
    while high - low > _ALIKE:
        try:
            tried = found.allocate((low + high) / 2)
        except InputError:  # what the scheme fixes takes more
            low = (low + high) / 2
            continue
        share = changed(tried)
        if share <= most:
            best, high = replace(tried, changed=share), tried.average
        else:
            low = (low + high) / 2
    return best


@torch.no_grad()
def answers_changed(reference: nn.Module, quantized: nn.Module, batches: Batches, samples: int) -> float:
    """Per cent of the samples to which the two networks give another answer."""
    different = total = 0
    with evaluating(reference, quantized):
        for call in calls(limited(batches, samples), reference):
            one, other = (call.logits(network).argmax(-1) for network in (reference, quantized))
            different, total = different + int((one != other).sum()), total + one.numel()
    if not total:
        raise InputError("--max-drop: the data has no sample to compare answers on")
    return 100 * different / total


@dataclass(frozen=True)
class _After:
    """The batches behind those that hold the first samples."""

    batches: Batches
    samples: int

    def __iter__(self) -> Iterator[Batch]:
        passed = 0
        for batch in self.batches:
            if passed >= self.samples:
                yield batch
            passed += as_call(batch).samples


def _named(scheme: Scheme, layers: Sequence[str]) -> set[str]:
    """Layers whose bits the user chose: the outer ones where those have bits of their own, and overrides."""
    outer = {layers[0], layers[-1]} if scheme.first_last is not None else set()
    return outer | {name for name in layers if any(fnmatchcase(name, pattern) for pattern, _ in scheme.overrides)}


def _error_against(network: nn.Module, given: Sequence[Call]) -> Callable[[channels.Layer, Tensor], float]:
    expected = [call.logits(network) for call in given]
    energy = sum(float(output.square().sum()) for output in expected) or 1.0

    def error(layer: channels.Layer, weight: Tensor) -> float:
        own = layer.weight.clone()
        layer.weight.copy_(weight)
        differences = (call.logits(network) - output for call, output in zip(given, expected, strict=True))
        found = sum(float(difference.square().sum()) for difference in differences) / energy
        layer.weight.copy_(own)
        return found

    return error
