"""Weights rounded with compensation one layer at a time, each in the float network: what a width costs a layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ptq import channels
from ptq.batches import Batches, calls, limited
from ptq.hooks import attached, evaluating
from ptq.quantization import Scheme
from ptq.refinement import rounding
from ptq.refinement.layer import DAMPING, round_weight
from ptq.refinement.rows import contributions, sampled_rows, weight_matrix, write_weight
from ptq.refinement.usage import look_at_usage
from ptq.refinement.walking import valid_tokens

SAMPLES = 256
ROWS = 8192


class _Gram:
    """``XᵀX / R`` of the rows X that a layer meets, as a running sum."""

    def __init__(self, layer: channels.Layer) -> None:
        groups, _, inputs = weight_matrix(layer.weight, layer).shape
        self._products, self._rows = layer.weight.new_zeros(groups, inputs, inputs), 0

    def add(self, rows: Tensor) -> None:
        self._products.baddbmm_(rows.mT, rows)
        self._rows += rows.shape[1]

    def hessian(self) -> Tensor:
        """[g, n, n]"""
        return rounding.damped(self._products / max(1, self._rows), DAMPING)


@torch.no_grad()
def rounded_weights(
    network: nn.Module,
    names: Sequence[str],
    widths: Sequence[int],
    batches: Batches,
    scheme: Scheme,
    *,
    samples: int = SAMPLES,
    rows: int = ROWS,
    seed: int = 0,
) -> dict[str, dict[int, Tensor]]:
    """Layer → width → its weight on a grid of so many bits, rounded for the rows that it meets in this network.

    The scheme says which widths have zero-points. Layers that don't run exactly once are left out, as ``refine``
    leaves them. One pass over the first samples.
    """
    layers = dict(channels.layers_of(network))
    with evaluating(network):
        given = list(calls(limited(batches, samples), network))
        once = [name for name, times in look_at_usage(network, given[0]).layers.items() if times == 1]
        grams = {name: _Gram(layers[name]) for name in names if name in once}
        per_sample = -(-rows // sum(call.samples for call in given))
        first = 0
        for call in given:
            look = partial(_look, per_sample=per_sample, first=first, seed=seed, valid=valid_tokens(call))
            with attached(_hooks(layers, grams, look)):
                call.run(network)
            first += call.samples
    return {name: _rounded(layers[name], gram.hessian(), widths, scheme) for name, gram in grams.items()}


def _hooks(layers: dict[str, channels.Layer], grams: dict[str, _Gram], look: Any) -> Iterator[RemovableHandle]:
    for name, gram in grams.items():
        yield layers[name].register_forward_pre_hook(partial(look, gram), with_kwargs=True)


def _look(gram: _Gram, layer: channels.Layer, args: Any, kwargs: Any, **sampling: Any) -> None:
    x: Tensor = args[0] if args else kwargs["input"]
    gram.add(sampled_rows(x, layer, **sampling))


def _rounded(layer: channels.Layer, hessian: Tensor, widths: Sequence[int], scheme: Scheme) -> dict[int, Tensor]:
    target, found = weight_matrix(layer.weight, layer), {}
    for width in widths:
        written = copy.deepcopy(layer)
        symmetric = not scheme.shifts_weights(width)
        write_weight(written, round_weight(target, hessian, width, contributions(layer), symmetric=symmetric)[0])
        found[width] = written.weight.detach()
    return found
