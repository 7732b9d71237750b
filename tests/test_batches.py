"""Batches joined into larger ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ptq.batches import Batch, regrouped


def sizes(batches: list[Batch], size: int) -> list[int]:
    return [len(batch["x"] if isinstance(batch, dict) else batch[0]) for batch in regrouped(batches, size)]


def test_neighbours_are_joined_in_their_order() -> None:
    images, labels = torch.randn(100, 3, 4, 4), torch.arange(100)
    parts = list(zip(images.split(16), labels.split(16), strict=True))
    found = list(regrouped(parts, 50))
    assert [len(batch[0]) for batch in found] == [48, 48, 4]
    assert torch.equal(torch.cat([batch[0] for batch in found]), images)
    assert torch.equal(torch.cat([batch[1] for batch in found]), labels)


def test_a_batch_that_is_larger_stays_as_it_is() -> None:
    assert sizes([(torch.zeros(70, 2), None), (torch.zeros(20, 2), None), (torch.zeros(30, 2), None)], 50) == [70, 50]


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(8, 5)},  # another number of tokens
        {"mask": torch.zeros(1, 4)},  # one for all samples
        {"mode": "b"},
        {"temperature": torch.tensor(2.0)},
        {"more": torch.zeros(8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_batches_that_differ_are_not_joined(change: dict[str, Any]) -> None:
    batch = {"x": torch.zeros(8, 4), "mask": torch.zeros(8, 4), "mode": "a", "temperature": torch.tensor(1.0)}
    assert sizes([batch, batch, batch | change], 100) == [16, 8]
    shared = batch | {"mask": torch.zeros(1, 4)}
    assert sizes([shared, shared], 100) == [8, 8]
