"""Parts by brackets and by radix selection against a stable sort, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ptq.formats import ranking
from ptq.formats.tensors import bounds

COUNT = ranking._SORT_BELOW + 1001


def cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(COUNT, generator=generator)
    spread = normal * 10.0 ** torch.randint(-30, 30, (COUNT,), generator=generator)
    zeros = torch.zeros(COUNT)
    zeros[::3] = -0.0
    few = torch.randint(-2, 3, (COUNT,), generator=generator).float()
    return {
        "normal": normal,
        "relu": normal.relu(),
        "few values": few,
        "both zeros": zeros,
        "both zeros and more": torch.where(normal > 1, normal, zeros),
        "wide": spread,
        "tiny": normal * 1e-44,
        "one outlier": torch.cat([normal * 1e-6, torch.tensor([1e30])]),
        "ties in the last bits": (normal * 8).round() / 8 + torch.where(normal > 0, 2**-22, 0.0),
        "bfloat16": normal.bfloat16(),
        "ascending": normal.sort().values,
    }


@pytest.fixture(params=["brackets", "radix"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way of selecting: by brackets where they serve, or by radix always."""
    if request.param == "radix":
        monkeypatch.setattr(ranking, "_MOST_BRACKETS", 0)
    return str(request.param)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("parts", [1, 2, 4, 16])
def test_selection_is_the_stable_sort(name: str, parts: int, way: str) -> None:
    x = cases()[name]
    order = np.argsort(x.float().numpy(), kind="stable")
    expected = np.empty(len(x), dtype=np.uint8)
    pieces = np.array_split(order, parts)  # numpy's and torch's split agree: the first parts are the longer ones
    for number, piece in enumerate(pieces):
        expected[piece] = number
    found = ranking.split_by_rank(x, ranking.even_borders(len(x), parts), bounds(x))
    np.testing.assert_array_equal(found.part.numpy(), expected)
    ordered = x.float().numpy()[order]
    ends = np.cumsum([len(piece) for piece in pieces])
    np.testing.assert_array_equal(found.low.float().numpy(), ordered[ends - [len(piece) for piece in pieces]])
    np.testing.assert_array_equal(found.high.float().numpy(), ordered[ends - 1])


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("kept", [1, 700, COUNT // 2, COUNT - 1])
def test_largest_first_with_ties_to_the_lowest_index(name: str, kept: int, way: str) -> None:
    x = cases()[name]
    order = np.argsort(-np.abs(x.float().numpy()), kind="stable")
    np.testing.assert_array_equal(np.flatnonzero(ranking.largest(x, kept) == 0), np.sort(order[:kept]))


@pytest.mark.parametrize("count", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16])
def test_borders_are_those_of_tensor_split(count: int, parts: int) -> None:
    starts = np.cumsum([0] + [len(piece) for piece in torch.arange(count).tensor_split(parts)])[1:-1]
    assert ranking.even_borders(count, parts) == starts.tolist()


def test_an_order_that_fools_the_sample_is_noticed() -> None:
    """Every third element is tiny and the sample takes every third: its brackets miss, and the radix steps in."""
    x = torch.randn(3 * ranking._SAMPLE, generator=torch.Generator().manual_seed(0))
    x[::3] *= 1e-3
    assert len(x) // ranking._SAMPLE == 3
    assert ranking._by_brackets(x, np.array([len(x) // 4]), by_size=False) is None
    order = np.argsort(x.numpy(), kind="stable")
    part = ranking.split_by_rank(x, [len(x) // 4], bounds(x)).part.numpy()
    np.testing.assert_array_equal(np.flatnonzero(part == 0), np.sort(order[: len(x) // 4]))
