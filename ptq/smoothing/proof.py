"""The proof that a rewritten network computes what the original does, layer by layer and at the output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.attention import split_attention
from ptq.batches import Batches, Call, calls
from ptq.errors import EquivalenceError
from ptq.hooks import attached, evaluating

TOLERANCE = 1e-5  # of the largest value of the compared tensor; rounding the new weights to float32 costs about 1e-7
_SAMPLES_PER_BATCH = 8  # all outputs of the compared samples are held at once


@dataclass(frozen=True)
class Proof:
    """The largest relative differences that were seen, and over how many samples."""

    samples: int
    output: float
    worst_layer: str
    worst_layer_difference: float


def prove_equivalence(
    original: nn.Module,
    rewritten: nn.Module,
    batches: Batches,
    *,
    limit: int = 2,
    output_factors: Mapping[str, Tensor] | None = None,
) -> Proof:
    """Compare two networks on a few batches; raises with the first layer that differs.

    The measure is ``max|y - y'| / max|y|`` for each layer's output, in float64 arithmetic, which keeps the
    accumulation of rounding errors out of the verdict. ``output_factors`` are what the rewriting divided the output
    channels of layers by.
    """
    original, rewritten = copy.deepcopy(original).double(), copy.deepcopy(rewritten).double()
    split_attention(original)
    axes = {name: channels.channel_axis(layer) for name, layer in channels.layers_of(original)}
    samples, output, worst = 0, 0.0, ("", 0.0)
    with torch.inference_mode(), evaluating(original, rewritten):
        for call in calls(batches, original, limit):
            call = call.first(_SAMPLES_PER_BATCH).double()
            expected, found = _outputs(original, call), _outputs(rewritten, call)
            for (name, y), (_, rewritten_y) in zip(expected, found, strict=True):
                if output_factors and name in output_factors:
                    factor = output_factors[name].to(rewritten_y)
                    rewritten_y = rewritten_y * channels.over_inputs(factor, axes[name], rewritten_y)
                difference = _difference(y, rewritten_y)
                if not difference <= TOLERANCE:  # true for NaN too
                    where = f"{name}: first layer that differs" if name else "the output differs"
                    raise EquivalenceError(
                        f"{where}, by {difference:.2e} of its largest value (allowed {TOLERANCE:.0e}): the rewritten "
                        "network isn't equivalent and is refused"
                    )
                if not name:
                    output = max(output, difference)
                elif difference >= worst[1]:
                    worst = (name, difference)
            samples += call.samples
    return Proof(samples, output, *worst)


def _outputs(model: nn.Module, call: Call) -> list[tuple[str, Tensor]]:
    """What every layer returned, in the order of execution, and at the end, without a name, what the model did."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda layer, args, output: outputs.append((name, output.clone()))

    with attached(layer.register_forward_hook(keep(name)) for name, layer in channels.layers_of(model)):
        result = call.logits(model)
    return [*outputs, ("", result)]


def _difference(expected: Tensor, found: Tensor) -> float:
    if not expected.numel():
        return 0.0
    difference, largest = float((expected - found).abs().max()), float(expected.abs().max())
    return difference / largest if largest > 0 else difference
