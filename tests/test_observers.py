"""Streaming statistics against numpy over all data at once, and their exactness under any order and split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ptq.observers import BINS, ChannelRange, Histogram


def histogram_of(*parts: Tensor) -> Histogram:
    histogram = Histogram()
    for part in parts:
        histogram.collect(part, float(part.min()), float(part.max()))
    return histogram


DATA = {
    "normal": lambda g: torch.randn(200_000, generator=g),
    "after relu": lambda g: torch.randn(200_000, generator=g).relu(),
    "after relu6": lambda g: (torch.randn(70_001, generator=g) * 4).clamp(0, 6),
    "negative": lambda g: -torch.rand(1000, generator=g) - 3,
    "pixels on bin edges": lambda g: torch.randint(0, 256, (5000,), generator=g) / 255,
    "whole numbers": lambda g: torch.randint(-64, 65, (5000,), generator=g).float(),
    "tiny": lambda g: torch.randn(1000, generator=g) * 1e-38,
    "huge": lambda g: torch.randn(1000, generator=g) * 1e37,
    "one": lambda g: torch.tensor([1.0]),
    "zeros": lambda g: torch.zeros(100),
}


@pytest.mark.parametrize("name", DATA)
def test_counts_equal_numpys(name: str) -> None:
    x = DATA[name](torch.Generator().manual_seed(0))
    histogram = histogram_of(x)
    expected, _ = np.histogram(x.double().numpy(), bins=histogram.edges.numpy())
    np.testing.assert_array_equal(histogram.counts.numpy(), expected)
    assert int(histogram.counts.sum()) == x.numel()


@pytest.mark.parametrize("name", ["normal", "after relu6", "whole numbers", "pixels on bin edges"])
def test_the_width_is_the_smallest_power_of_two_that_holds_the_data(name: str) -> None:
    x = DATA[name](torch.Generator().manual_seed(0))
    histogram, absmax = histogram_of(x), float(x.abs().max())
    assert absmax < BINS / 2 * histogram.width
    assert absmax >= BINS / 4 * histogram.width


def test_batches_in_any_order_give_the_same_histogram_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    # Ranges that grow and shrink from batch to batch, so that the bins widen at different moments.
    parts = [torch.randn(3000, generator=generator) * size for size in (1e-3, 50.0, 0.0, 7.0, -1.0)]
    whole = histogram_of(torch.cat(parts))
    for order in itertools.permutations(parts):
        streamed = histogram_of(*order)
        assert streamed.exponent == whole.exponent
        assert torch.equal(streamed.counts, whole.counts)


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=5), st.integers(0, 2**31), st.data())
def test_merging_equals_collecting_everything(sizes: list[float], seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(50, generator=generator) * size for size in sizes]
    split = data.draw(st.integers(1, len(parts) - 1))
    left, right = histogram_of(*parts[:split]), histogram_of(*parts[split:])
    left.merge(right)
    whole = histogram_of(*parts)
    assert (left.exponent, left.counts.tolist()) == (whole.exponent, whole.counts.tolist())


def test_half_precision_and_strided_inputs_are_counted_as_their_float_values() -> None:
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(histogram_of(x.t()).counts, histogram_of(x).counts)
    half = x.half()
    assert torch.equal(histogram_of(half).counts, histogram_of(half.float()).counts)


def test_channel_ranges_merge_like_one_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(n, 4, 3, 3, generator=generator) for n in (1, 5, 2)]
    streamed, first, rest = (ChannelRange(4) for _ in range(3))
    for batch in batches:
        streamed.collect(batch, 1)
    first.collect(batches[0], 1)
    for batch in batches[1:]:
        rest.collect(batch, 1)
    first.merge(rest)
    everything = torch.cat(batches).numpy()
    for collector in (streamed, first):
        np.testing.assert_array_equal(collector.minimum.numpy(), everything.min((0, 2, 3)))
        np.testing.assert_array_equal(collector.maximum.numpy(), everything.max((0, 2, 3)))
