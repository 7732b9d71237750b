"""The whole network learned towards the float one, on variations of the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.batches import Call
from ptq.refinement.blocks import kept_if_better, squared_error
from ptq.refinement.learning import Recipe, fresh, learn, shuffled
from ptq.refinement.varying import can_be_varied, varied
from ptq.refinement.walking import LayerRefiner

RECIPE = Recipe(steps=1600, weights=0.004, scales=0.00025, biases=0.00025)
_JUDGES = 16  # variations of so many samples as a step has, which are not learned from
_CLOSE = 0.01  # of the answers' variance: an error below it is left as it is


def refine_network(refiner: LayerRefiner, given: Sequence[Call], names: Sequence[str]) -> bool:
    """Learn these layers together, their weights on their grids; whether that was tried.

    It needs samples that can be varied, one tensor for an answer, and something to learn.
    What was learned stays only if it is closer to the float network on other variations.
    """
    reference, quantized = refiner.networks.both
    if not all(map(can_be_varied, given)) or not isinstance(given[0].first(1).run(reference), Tensor):
        return False
    parts = [part for call in given for part in replace(call, labels=None).split(RECIPE.samples)]
    judges = list(examples_of(reference, parts, _JUDGES, refiner.seed + 1))
    variance = sum(float((answer - answer.mean(0)).square().sum()) for _, answer in judges)
    if squared_error(quantized, judges) < _CLOSE * variance:
        return False
    with kept_if_better(quantized, partial(squared_error, quantized, judges)):
        examples = examples_of(reference, parts, RECIPE.steps, refiner.seed)
        layers = {name: layer for name, layer in channels.layers_of(quantized) if name in names}
        learn(quantized, layers, examples, RECIPE, bits={name: refiner.bits[name].weights for name in names})
    return True


def examples_of(reference: nn.Module, parts: Sequence[Call], count: int, seed: int) -> Iterator[tuple[Call, Tensor]]:
    """So many parts, varied, with what the float network answers."""
    generator = torch.Generator().manual_seed(seed)
    for part in shuffled(parts, count, generator):
        other = parts[int(torch.randint(len(parts), (), generator=generator))]
        example = varied(part, other, generator)
        yield example, _answer(reference, example)


@torch.no_grad()
def _answer(reference: nn.Module, call: Call) -> Tensor:
    answer: Tensor = fresh(call).run(reference)
    return answer
