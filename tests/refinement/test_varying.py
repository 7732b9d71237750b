"""Variations of samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ptq.batches import Call
from ptq.refinement.varying import can_be_varied, patched, varied, varied_samples


def call(*tensors: Tensor, **named: Tensor) -> Call:
    return Call(tensors, named, None)


def test_variations_lie_between_two_samples() -> None:
    x = torch.arange(400.0).view(400, 1)
    values = torch.cat([found.args[0] for found in varied_samples([call(part) for part in x.split(160)], 3, seed=0)])
    assert len(values) == 1200 and float(values.min()) >= 0 and float(values.max()) <= 399
    assert 0.4 < float((values == values.round()).float().mean()) < 0.6  # half of the samples come as they are
    # More than half of each is the sample in its place.
    mostly = values.view(3, 400, 1) - x / 2
    assert float(mostly.min()) >= 0 and float((mostly - 399 / 2).max()) <= 0


def test_they_depend_on_no_size_of_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    images, more = torch.randn(40, 3, 8, 8, generator=generator), torch.randn(40, 5, generator=generator)
    one, many = (
        varied_samples([call(a, scale=b) for a, b in zip(images.split(size), more.split(size), strict=True)], 2, seed=3)
        for size in (40, 7)
    )
    for read in (lambda found: found.args[0], lambda found: found.kwargs["scale"]):
        assert torch.equal(*(torch.cat([read(found) for found in side]) for side in (one, many)))
    other = varied_samples([call(images, scale=more)], 2, seed=4)
    assert not torch.equal(one[0].args[0], other[0].args[0])


def test_images_are_shifted_and_mirrored() -> None:
    column = torch.arange(16.0).expand(64, 1, 8, 16)  # each pixel tells its column
    same = call(column, torch.arange(64.0))
    moved, others = varied(same, same.first(1), torch.Generator().manual_seed(0)).args  # nothing fits to be mixed with
    assert moved.shape == column.shape and others.shape == (64,)
    mixed = others != torch.arange(64.0)
    alone = moved[~mixed]
    steps = alone[:, 0, 0, 1:] - alone[:, 0, 0, :-1]
    assert 0.25 < float((steps.mean(1) < 0).float().mean()) < 0.75  # half of them
    middle = {float(image[0, 0, 8]) for image in alone}
    assert middle <= {5.0, 6.0, 7.0, 8.0, 9.0, 10.0} and len(middle) > 3  # two to each side, and mirrored


def test_half_of_the_images_get_a_rectangle_of_another() -> None:
    zeros, labels = torch.zeros(400, 2, 12, 16), torch.arange(400.0)
    ours, theirs = call(zeros, labels), call(torch.arange(1.0, 401).view(400, 1, 1, 1).expand_as(zeros), labels)
    images, same = patched(ours, theirs, torch.Generator().manual_seed(0)).args
    assert torch.equal(same, labels)  # only images have rectangles
    inside = images[:, 0] > 0
    assert torch.equal(images[:, 1] > 0, inside)
    sizes = inside.flatten(1).sum(1)
    assert 0.4 < float((sizes > 0).float().mean()) < 0.6
    assert float(sizes.max()) <= 0.5 * 12 * 16 * 1.1 and float(sizes.max()) > 0.4 * 12 * 16
    height, width = inside.any(2).sum(1), inside.any(1).sum(1)
    assert torch.equal(height * width, sizes)  # nothing but a rectangle
    from_one = [image[image > 0].unique().numel() for image in images]
    assert max(from_one) == 1
    assert inside.any(0).all()  # anywhere
    assert patched(ours, theirs.first(7), torch.Generator().manual_seed(0)) is ours


def test_images_of_several_sizes_are_not_mixed_with_each_other() -> None:
    small, large = torch.zeros(8, 1, 8, 8), torch.ones(8, 1, 12, 12)
    found = varied_samples([call(small), call(large)], 1, seed=0)
    assert torch.equal(found[0].args[0], small) and torch.equal(found[1].args[0], large)


def test_tokens_can_not_be_varied() -> None:
    assert can_be_varied(call(torch.zeros(4, 3), scale=torch.ones(4)))
    assert not can_be_varied(call(torch.zeros(4, 3, dtype=torch.int64)))
    assert not can_be_varied(call(torch.zeros(4, 3), table=torch.zeros(7, 3)))
    assert not can_be_varied(call(torch.zeros(4, 3), mask=torch.full((4, 3), -torch.inf)))  # 0 · ∞ is no number
