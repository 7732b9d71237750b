"""The whole network learned towards the float one, on variations of the samples.

What the float network answers to the samples it was trained on says little about others: it is sure of them. Of
mixtures of two it is not, and there is no end of them; images are shifted and mirrored, too. No variation has to make
sense: the float network's answer to it is what is to be learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptq import channels
from ptq.batches import Call
from ptq.refinement.blocks import kept_if_better, squared_error
from ptq.refinement.learning import Recipe, fresh, learn, shuffled
from ptq.refinement.walking import LayerRefiner

RECIPE = Recipe(steps=1600, weights=0.004, scales=0.00025, biases=0.00025)
_JUDGES = 16  # variations of so many samples as a step has, which are not learned from
_CLOSE = 0.01  # of the answers' variance: an error below it is left as it is
_SHIFT = 1 / 8  # of an image's height and width, at most


def refine_network(refiner: LayerRefiner, given: Sequence[Call], names: Sequence[str]) -> bool:
    """Learn these layers together, their weights on their grids; whether that was tried.

    It needs samples that can be mixed, which token numbers can't, one tensor for an answer, and something to learn.
    What was learned stays only if it is closer to the float network on other variations.
    """
    reference, quantized = refiner.networks.both
    if not all(map(_can_be_mixed, given)) or not isinstance(given[0].first(1).run(reference), Tensor):
        return False
    parts = [part for call in given for part in replace(call, labels=None).split(RECIPE.samples)]
    judges = list(variations(reference, parts, _JUDGES, refiner.seed + 1))
    variance = sum(float((answer - answer.mean(0)).square().sum()) for _, answer in judges)
    if squared_error(quantized, judges) < _CLOSE * variance:
        return False
    with kept_if_better(quantized, partial(squared_error, quantized, judges)):
        examples = variations(reference, parts, RECIPE.steps, refiner.seed)
        layers = {name: layer for name, layer in channels.layers_of(quantized) if name in names}
        learn(quantized, layers, examples, RECIPE, bits={name: refiner.bits[name].weights for name in names})
    return True


def variations(reference: nn.Module, parts: Sequence[Call], count: int, seed: int) -> Iterator[tuple[Call, Tensor]]:
    """So many parts, varied, with what the float network answers."""
    generator = torch.Generator().manual_seed(seed)
    for part in shuffled(parts, count, generator):
        moved = _moved(part, generator)
        other = parts[int(torch.randint(len(parts), (), generator=generator))]
        fits = [value.shape for value in _tensors(other)] == [value.shape for value in _tensors(part)]
        varied = _mixed(moved, _moved(other, generator) if fits else moved, generator)
        yield varied, _answer(reference, varied)


@torch.no_grad()
def _answer(reference: nn.Module, call: Call) -> Tensor:
    answer: Tensor = fresh(call).run(reference)
    return answer


def _tensors(call: Call) -> list[Tensor]:
    return [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]


def _can_be_mixed(call: Call) -> bool:
    return all(value.is_floating_point() and value.dim() and len(value) == call.samples for value in _tensors(call))


def _moved(call: Call, generator: torch.Generator) -> Call:
    """Images shifted, each by itself, and half of them mirrored; whatever else there is stays."""
    mirrored = torch.rand(call.samples, generator=generator) < 0.5
    places = torch.rand(call.samples, 2, generator=generator)

    def move(value: Tensor) -> Tensor:
        if value.dim() != 4:
            return value
        height, width = value.shape[2:]
        down, right = int(height * _SHIFT), int(width * _SHIFT)
        wide = F.pad(value, (right, right, down, down), mode="reflect")
        starts = (places * torch.tensor([2 * down + 1, 2 * right + 1])).int().tolist()
        cut = [image[:, y : y + height, x : x + width] for image, (y, x) in zip(wide, starts, strict=True)]
        found = torch.stack(cut)
        return torch.where(mirrored.to(value.device)[:, None, None, None], found.flip(3), found)

    return call.mapped(move)


def _mixed(call: Call, other: Call, generator: torch.Generator) -> Call:
    """Half of the samples as they are; of the others more than a half, and the rest of a sample of another call."""
    order = torch.randperm(call.samples, generator=generator)
    share = torch.rand(call.samples, generator=generator)
    share = torch.where(share < 0.5, 1.0, share)
    others = iter(_tensors(other))

    def mix(value: Tensor) -> Tensor:
        part = share.to(value).view(-1, *(1 for _ in value.shape[1:]))
        return part * value + (1 - part) * next(others)[order.to(value.device)]

    return call.mapped(mix)
