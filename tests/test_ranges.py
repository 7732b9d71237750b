"""How observers choose a range: against brute force on the data itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.observers import Histogram
from ptq.ranges import HISTOGRAM_RANGES, checked_observer, entropy_range, mse_range, percentile_range


def collected(x: Tensor) -> tuple[Histogram, float, float]:
    histogram = Histogram()
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    histogram.collect(x, low, high)
    return histogram, low, high


def laplace(n: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).laplace(size=n)).float()


@pytest.mark.parametrize("one_sided", [False, True], ids=["signed", "after relu"])
def test_percentile_is_numpys_to_a_bin(one_sided: bool) -> None:
    x = laplace(400_000).relu() if one_sided else laplace(400_000)
    histogram, low, high = collected(x)
    found = percentile_range(histogram, low, high, 8)
    expected = np.percentile(x.numpy(), [0.01, 99.99])
    assert found[1] == pytest.approx(expected[1], abs=histogram.width)
    assert found[0] == pytest.approx(0.0 if one_sided else expected[0], abs=histogram.width)


def quantization_error(x: np.ndarray, low: float, high: float, bits: int) -> float:
    scale = (high - low) / (2**bits - 1)
    zero = np.clip(np.rint(-low / scale), 0, 2**bits - 1)
    restored = (np.clip(np.rint(x / scale) + zero, 0, 2**bits - 1) - zero) * scale
    return float(np.mean((restored - x) ** 2))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_mse_finds_the_clip_of_a_brute_force_search_on_the_data(bits: int) -> None:
    x = laplace(50_000)
    low, high = mse_range(*collected(x), bits)
    found = quantization_error(x.double().numpy(), low, high, bits)
    ratios = np.arange(1, 101) / 100
    best = min(quantization_error(x.double().numpy(), r * float(x.min()), r * float(x.max()), bits) for r in ratios)
    assert found <= best * 1.02
    if bits <= 4:
        assert found < 0.9 * quantization_error(x.double().numpy(), float(x.min()), float(x.max()), bits)


def test_entropy_clips_a_lone_outlier_and_keeps_a_uniform_range() -> None:
    body = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    assert entropy_range(*collected(body), 8)[1] > 0.95 * float(body.max())
    with_outlier = torch.cat([body, torch.tensor([30.0])])
    assert entropy_range(*collected(with_outlier), 8)[1] < 6


@pytest.mark.parametrize("name", HISTOGRAM_RANGES)
@pytest.mark.parametrize(
    "x",
    [torch.zeros(10), torch.ones(10), -torch.ones(10), torch.tensor([1e-30])],
    ids=["zeros", "ones", "minus", "tiny"],
)
def test_degenerate_data_gives_a_range_inside_its_own(name: str, x: Tensor) -> None:
    histogram, low, high = collected(x)
    found_low, found_high = HISTOGRAM_RANGES[name](histogram, low, high, 8)
    assert low <= found_low <= 0 <= found_high <= high


def test_an_unknown_observer_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="max, percentile, entropy, mse"):
        checked_observer("minmax")
