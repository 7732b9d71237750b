"""The whole network learned towards the float one, on variations of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.batches import Call
from ptq.refinement.blocks import kept_if_better, squared_error
from ptq.refinement.learning import Example, Recipe, fresh, learn, shuffled, watched
from ptq.refinement.varying import can_be_varied, patched, varied
from ptq.refinement.walking import LayerRefiner


@dataclass(frozen=True, kw_only=True)
class NetworkRecipe(Recipe):
    blocks: float  # share of all blocks' outputs in the loss: the answers alone, a few numbers, are learned by heart
    vary_each: int  # one in so many steps is on variations, the others on samples as they are


RECIPES = {
    "fast": NetworkRecipe(steps=320, weights=0.03, scales=0.006, biases=0.006, blocks=3.0, vary_each=2),
    "best": NetworkRecipe(steps=1800, weights=0.012, scales=0.001, biases=0.001, blocks=1.0, vary_each=1),
}
_WORK = 2**41  # multiplications that ``fast`` may learn with
_PASSES = 4  # of a step: the float network forwards, the quantized one forwards and backwards, which counts twice
_LEAST_STEPS = 100  # fewer change little
_JUDGES = 16  # of as many samples as a step has; half of them are variations that are not learned from
_CLOSE = 0.01  # of the answers' variance: an error below it is left as it is


def recipe_for(effort: str, multiplications: int) -> NetworkRecipe | None:
    """How to learn a network of so many multiplications a sample.

    ``best`` has its own way; all others take that of ``fast``: fewer steps, or none, if the network is large.
    What a step costs is counted, not timed, so that the result is the same on every machine.
    """
    if effort == "best":
        return RECIPES["best"]
    recipe = RECIPES["fast"]
    affordable = _WORK // max(1, _PASSES * recipe.samples * multiplications)
    return replace(recipe, steps=min(recipe.steps, affordable)) if affordable >= _LEAST_STEPS else None


def refine_network(
    refiner: LayerRefiner, given: Sequence[Call], names: Sequence[str], blocks: Sequence[str], recipe: NetworkRecipe
) -> bool:
    """Learn these layers together, their weights on their grids; whether that was tried.

    It needs samples that can be varied, one tensor for an answer, and something to learn. The outputs of the blocks
    are wanted to be those of the float network, too. What was learned stays only if the answers, to samples and to
    other variations, are closer to the float network's.
    """
    reference, quantized = refiner.networks.both
    if not all(map(can_be_varied, given)) or not isinstance(given[0].first(1).run(reference), Tensor):
        return False
    parts = [part for call in given for part in replace(call, labels=None).split(recipe.samples)]
    seen = examples_of(reference, parts, _JUDGES, refiner.seed + 1, vary_each=2)
    judges = [(call, found[""]) for call, found in seen]
    variance = sum(float((answer - answer.mean(0)).square().sum()) for _, answer in judges)
    before = squared_error(quantized, judges)
    if before < _CLOSE * variance:
        return False
    shares = {"": 1.0, **{block: recipe.blocks / len(blocks) for block in blocks}}
    with kept_if_better(quantized, partial(squared_error, quantized, judges), before):
        examples = examples_of(reference, parts, recipe.steps, refiner.seed, shares, vary_each=recipe.vary_each)
        layers = {name: layer for name, layer in channels.layers_of(quantized) if name in names}
        bits = {name: refiner.bits[name].weights for name in names}
        learn(quantized, layers, examples, recipe, bits=bits, shares=shares)
    return True


def examples_of(
    reference: nn.Module,
    parts: Sequence[Call],
    count: int,
    seed: int,
    modules: Iterable[str] = ("",),
    *,
    vary_each: int = 1,
) -> Iterator[Example]:
    """So many parts, one in ``vary_each`` of them a variation, with what these modules of the float network return."""
    generator = torch.Generator().manual_seed(seed)
    for number, example in enumerate(shuffled(parts, count, generator)):
        if number % vary_each == 0:
            other = parts[int(torch.randint(len(parts), (), generator=generator))]
            example = patched(varied(example, other, generator), other, generator)
        with torch.no_grad(), watched(reference, modules) as outputs:
            fresh(example).run(reference)
        yield example, dict(outputs)
