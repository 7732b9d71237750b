"""The whole network learned towards the float one, on variations of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.batches import Call
from ptq.refinement.blocks import kept_if_better, squared_error
from ptq.refinement.learning import Example, Recipe, fresh, learn, shuffled, watched
from ptq.refinement.varying import can_be_varied, patched, varied
from ptq.refinement.walking import LayerRefiner

RECIPE = Recipe(steps=2400, weights=0.012, scales=0.001, biases=0.001)
_BLOCKS = 1.0  # share of all blocks' outputs in the loss: a few numbers, the answers alone, are soon learned by heart
_JUDGES = 16  # variations of so many samples as a step has, which are not learned from
_CLOSE = 0.01  # of the answers' variance: an error below it is left as it is


def refine_network(refiner: LayerRefiner, given: Sequence[Call], names: Sequence[str], blocks: Sequence[str]) -> bool:
    """Learn these layers together, their weights on their grids; whether that was tried.

    It needs samples that can be varied, one tensor for an answer, and something to learn. The outputs of the blocks
    are wanted to be those of the float network, too. What was learned stays only if the answers to other variations
    are closer to the float network's.
    """
    reference, quantized = refiner.networks.both
    if not all(map(can_be_varied, given)) or not isinstance(given[0].first(1).run(reference), Tensor):
        return False
    parts = [part for call in given for part in replace(call, labels=None).split(RECIPE.samples)]
    judges = [(call, found[""]) for call, found in examples_of(reference, parts, _JUDGES, refiner.seed + 1)]
    variance = sum(float((answer - answer.mean(0)).square().sum()) for _, answer in judges)
    if squared_error(quantized, judges) < _CLOSE * variance:
        return False
    shares = {"": 1.0, **{block: _BLOCKS / len(blocks) for block in blocks}}
    with kept_if_better(quantized, partial(squared_error, quantized, judges)):
        examples = examples_of(reference, parts, RECIPE.steps, refiner.seed, shares)
        layers = {name: layer for name, layer in channels.layers_of(quantized) if name in names}
        bits = {name: refiner.bits[name].weights for name in names}
        learn(quantized, layers, examples, RECIPE, bits=bits, shares=shares)
    return True


def examples_of(
    reference: nn.Module, parts: Sequence[Call], count: int, seed: int, modules: Iterable[str] = ("",)
) -> Iterator[Example]:
    """So many parts, varied, with what these modules of the float network return."""
    generator = torch.Generator().manual_seed(seed)
    for part in shuffled(parts, count, generator):
        other = parts[int(torch.randint(len(parts), (), generator=generator))]
        example = patched(varied(part, other, generator), other, generator)
        with torch.no_grad(), watched(reference, modules) as outputs:
            fresh(example).run(reference)
        yield example, dict(outputs)
