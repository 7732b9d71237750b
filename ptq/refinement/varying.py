"""Variations of samples: shifted, mirrored, mixed and patched, without end.

What the float network answers to the samples it was trained on says little about others: it is sure of them. Of
mixtures of two it is not. No variation has to make sense: the float network's answer to it is what is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from ptq.batches import Call

_SHIFT = 1 / 8  # of an image's height and width, at most


def can_be_varied(call: Call) -> bool:
    """Token numbers can't, nor masks of infinities, nor what isn't one entry for each sample."""
    return all(
        value.is_floating_point() and value.dim() and len(value) == call.samples and bool(value.isfinite().all())
        for value in _tensors(call)
    )


def varied(call: Call, other: Call, generator: torch.Generator) -> Call:
    """The samples of a call shifted, mirrored, and half of them mixed with those of another, if these fit."""
    moved = _moved(replace(call, labels=None), generator)
    return _mixed(moved, _moved(other, generator) if _fit(call, other) else moved, generator)


def patched(call: Call, other: Call, generator: torch.Generator) -> Call:
    """Half of the images with a rectangle, of up to half their size, of another call's, if these fit."""
    if not _fit(call, other):
        return call
    order = torch.randperm(call.samples, generator=generator)
    side = (torch.rand(call.samples, generator=generator) / 2).sqrt()
    side[torch.rand(call.samples, generator=generator) < 0.5] = 0
    places = torch.rand(2, call.samples, generator=generator)
    others = iter(_tensors(other))

    def inside(size: int, place: Tensor) -> Tensor:
        """Which of so many rows or columns are in the rectangle, for each sample."""
        length = (side * size).round()
        start = (place * (size - length + 1)).floor()
        at = torch.arange(size)
        return (at >= start[:, None]) & (at < (start + length)[:, None])

    def patch(value: Tensor) -> Tensor:
        theirs = next(others)
        if value.dim() != 4:
            return value
        rows, columns = inside(value.shape[2], places[0]), inside(value.shape[3], places[1])
        mask = rows[:, None, :, None] & columns[:, None, None, :]
        return torch.where(mask.to(value.device), theirs[order.to(value.device)], value)

    return call.mapped(patch)


def varied_samples(given: Sequence[Call], copies: int, seed: int) -> list[Call]:
    """So many variations of each sample, in calls as large as these; they depend on no batch's size."""
    generator = torch.Generator().manual_seed(seed)
    batches = [list(call.split(1)) for call in given]
    samples = list(chain.from_iterable(batches))
    found = []
    for _ in range(copies):
        others = iter(torch.randperm(len(samples), generator=generator).tolist())
        for batch in batches:
            found.append(_joined([varied(sample, samples[next(others)], generator) for sample in batch]))
    return found


def _joined(calls: Sequence[Call]) -> Call:
    """Calls whose tensors all have one entry for each sample, as one."""
    columns = zip(*map(_tensors, calls), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return calls[0].mapped(lambda _: next(joined))


def _fit(call: Call, other: Call) -> bool:
    return [value.shape for value in _tensors(call)] == [value.shape for value in _tensors(other)]


def _tensors(call: Call) -> list[Tensor]:
    return [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]


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
