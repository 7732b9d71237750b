"""Sampled rows: which samples are kept, against brute force; what a row holds, against unfolding by hand."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptq import channels
from ptq.sampling import BLOCK, BLOCKS, CAPACITY, RowSample, SampleReservoir, priority

ALL_OUTPUTS = 10**9  # a budget that gives every layer of this file 16 rows a sample


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def keep(layer: channels.Layer, x: Tensor, **options: int) -> Tensor:
    """The rows of every sample of one batch."""
    sample = RowSample(layer, **options)
    picks = [(place, place) for place in range(len(x))]
    sample.store(x, picks, channels.channel_axis(layer))
    return sample.rows(range(len(x))).float()


# Which samples


def stream(reservoir: SampleReservoir, cuts: list[tuple[int, int]]) -> list[int | None]:
    """What lies at each place in the end, when (first index, size) batches of a stream 0, 1, 2 … are stored."""
    places: list[int | None] = [None] * CAPACITY
    for first, size in cuts:
        for place, index in reservoir.pick(first, size):
            assert 0 <= index < size
            places[place] = first + index
    return places


def in_batches(total: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(size, total - first)) for first in range(0, total, size)]


def lowest_priorities(total: int, seed: int) -> list[int]:
    blocks = sorted(range(-(-total // BLOCK)), key=lambda block: priority(seed, block))[:BLOCKS]
    return [index for index in range(total) if index // BLOCK in blocks]


@pytest.mark.parametrize("size", [1, 3, 16, 50, 1003])
@pytest.mark.parametrize("total", [5, 128, 1003])
def test_the_blocks_of_the_lowest_priorities_are_kept_whatever_the_batches(total: int, size: int) -> None:
    for seed in range(5):
        reservoir = SampleReservoir(seed)
        places = stream(reservoir, in_batches(total, size))
        assert [places[place] for place in reservoir.held().values()] == lowest_priorities(total, seed)


def test_the_order_of_the_batches_does_not_matter() -> None:
    cuts = in_batches(1003, 12)
    for seed in range(5):
        random.Random(seed).shuffle(cuts)
        reservoir = SampleReservoir(7)
        places = stream(reservoir, cuts)
        assert [places[place] for place in reservoir.held().values()] == lowest_priorities(1003, 7)


def test_a_batch_never_fills_a_place_twice() -> None:
    """A block may be driven out by another one of the same batch: only one of them may be stored."""
    for seed in range(20):
        places = [place for place, _ in SampleReservoir(seed).pick(0, 2000)]
        assert len(set(places)) == len(places) == CAPACITY


def test_every_block_is_kept_equally_often() -> None:
    blocks, seeds = 64, 2000
    kept = Counter(
        index // BLOCK for seed in range(seeds) for index in set(lowest_places(SampleReservoir(seed), blocks * BLOCK))
    )
    expected = seeds * BLOCKS / blocks * BLOCK
    # Each count is binomial with p = 1/4; five standard deviations of it, in samples.
    deviation = 5 * (seeds * 0.25 * 0.75) ** 0.5 * BLOCK
    assert len(kept) == blocks and all(abs(count - expected) < deviation for count in kept.values())


def lowest_places(reservoir: SampleReservoir, total: int) -> list[int]:
    return [index for _, index in reservoir.pick(0, total)]


def test_the_hash_is_splitmix64() -> None:
    """The generator's published first output from state 0 is 0xE220A8397B1DCDAF."""
    assert priority(0, 0) == splitmix64(0xE220A8397B1DCDAF)


def splitmix64(state: int) -> int:
    z = np.uint64(state)
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int(z ^ (z >> np.uint64(31)))


# Which rows

CONVOLUTIONS_2D = {
    "1x1": nn.Conv2d(6, 4, 1),
    "padded": nn.Conv2d(6, 4, 3, padding=1),
    "strided": nn.Conv2d(6, 4, 3, stride=2, padding=1),
    "dilated": nn.Conv2d(6, 4, 3, dilation=2, padding=2),
    "uneven": nn.Conv2d(6, 4, (3, 2), stride=(1, 3), dilation=(2, 1), padding=(0, 1)),
    "stem": nn.Conv2d(6, 4, 7, stride=2, padding=3),
    "depthwise": nn.Conv2d(6, 12, 3, padding=1, groups=6),
    "grouped": nn.Conv2d(6, 4, 3, groups=2),
}


def unfolded(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """``F.unfold`` as ``[positions, C, k]``, sample by sample."""
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # [N, C·k, positions]
    return patches.transpose(1, 2).reshape(len(x), -1, layer.in_channels, patches.shape[1] // layer.in_channels)


def places_of(rows: Tensor, patches: Tensor) -> list[int]:
    """The position of every row among the patches, which are all different."""
    found = []
    for row in rows:
        equal = (patches == row).flatten(1).all(1).nonzero().flatten()
        assert len(equal) == 1
        found.append(int(equal))
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("name", CONVOLUTIONS_2D)
def test_rows_are_patches_at_random_positions(name: str, layout: torch.memory_format) -> None:
    layer = CONVOLUTIONS_2D[name]
    x = torch.randn(5, 6, 11, 9, generator=torch.Generator().manual_seed(0)).half().float()
    patches = unfolded(layer, x)
    rows = keep(layer, x.to(memory_format=layout), budget=ALL_OUTPUTS)
    per_sample = min(16, patches.shape[1])
    assert rows.shape == (5 * per_sample, *patches.shape[2:])
    for sample, group in zip(patches, rows.split(per_sample), strict=True):
        assert len(set(places_of(group, sample))) == per_sample


@pytest.mark.parametrize("name", CONVOLUTIONS_2D)
def test_rows_times_weight_are_the_outputs_of_the_layer(name: str) -> None:
    layer = CONVOLUTIONS_2D[name]
    x = torch.randn(3, 6, 11, 9, generator=torch.Generator().manual_seed(0)).half().float()
    rows = keep(layer, x, budget=ALL_OUTPUTS)
    per_sample = len(rows) // len(x)
    outputs = layer(x).detach().flatten(2).transpose(1, 2)  # [N, positions, O]
    grouped = rows.reshape(len(rows), layer.groups, -1)  # [R, g, C/g·k]
    weight = layer.weight.detach().reshape(layer.groups, layer.out_channels // layer.groups, -1)
    assert layer.bias is not None
    products = torch.einsum("rgn,gon->rgo", grouped, weight).flatten(1) + layer.bias.detach()
    patches = unfolded(layer, x)
    for sample in range(len(x)):
        here = slice(sample * per_sample, (sample + 1) * per_sample)
        torch.testing.assert_close(
            products[here], outputs[sample, places_of(rows[here], patches[sample])], atol=1e-5, rtol=1e-5
        )


def patches_by_hand(x: np.ndarray, layer: channels.Layer) -> np.ndarray:
    """Every patch of one sample ``[C, *map]``, one element at a time: ``[positions, C, k]``."""
    assert not isinstance(layer, nn.Linear)
    taps, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    padding = [int(size) for size in layer.padding]
    outputs = [
        (size + 2 * pad - step * (tap - 1) - 1) // move + 1
        for size, pad, step, tap, move in zip(x.shape[1:], padding, dilation, taps, stride, strict=True)
    ]
    result = np.zeros((*outputs, len(x), *taps), dtype=np.float32)
    for position in itertools.product(*map(range, outputs)):
        for tap in itertools.product(*map(range, taps)):
            source = [
                o * move - pad + t * step
                for o, move, pad, t, step in zip(position, stride, padding, tap, dilation, strict=True)
            ]
            if all(0 <= s < size for s, size in zip(source, x.shape[1:], strict=True)):
                for channel in range(len(x)):
                    result[(*position, channel, *tap)] = x[(channel, *source)]
    return result.reshape(int(np.prod(outputs)), len(x), -1)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 4, 5, stride=2, padding=2, groups=2), (2, 4, 40)),
        (nn.Conv1d(4, 8, 3, dilation=3), (2, 4, 21)),
        (nn.Conv3d(2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(1, 1, 0), dilation=(1, 2, 1)), (2, 2, 4, 7, 3)),
    ],
    ids=["1d strided", "1d dilated", "3d"],
)
def test_one_and_three_axes(layer: nn.Conv1d | nn.Conv3d, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half().float()
    rows = keep(layer, x, budget=ALL_OUTPUTS)
    per_sample = len(rows) // len(x)
    for sample, group in zip(x, rows.split(per_sample), strict=True):
        patches = torch.from_numpy(patches_by_hand(sample.numpy(), layer))
        assert per_sample == min(16, len(patches))
        assert len(set(places_of(group, patches))) == per_sample


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(("taps", "dilation"), [(2, 1), (2, 2), (3, 1), (4, 1)], ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_padding_same_in_every_mode(mode: str, taps: int, dilation: int) -> None:
    """With an even kernel the end is padded more than the beginning."""
    layer = nn.Conv2d(3, 5, taps, padding="same", padding_mode=mode, dilation=dilation)
    x = torch.randn(1, 3, 4, 4).half().float()
    rows = keep(layer, x, budget=ALL_OUTPUTS)  # 16 rows: every position, in order
    outputs = layer(x).detach()[0].flatten(1).T
    assert layer.bias is not None
    products = rows.flatten(1) @ layer.weight.detach().flatten(1).T + layer.bias.detach()
    torch.testing.assert_close(products, outputs, atol=1e-5, rtol=1e-5)


def test_rows_of_a_transposed_convolution_are_pixels() -> None:
    layer, x = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1), torch.randn(2, 4, 3, 5).half().float()
    rows = keep(layer, x, budget=ALL_OUTPUTS)
    assert rows.shape == (2 * 15, 4, 1)
    torch.testing.assert_close(rows[..., 0], x.flatten(2).transpose(1, 2).flatten(0, 1), atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(3, 8), (3, 5, 8), (3, 2, 4, 8), (8,)], ids=str)
def test_rows_of_a_linear_are_tokens(shape: tuple[int, ...]) -> None:
    layer, x = nn.Linear(8, 2), torch.randn(shape).half().float()
    sample = RowSample(layer, ALL_OUTPUTS)
    sample.store(x, [(place, place) for place in range(3 if len(shape) > 1 else 1)], -1)
    torch.testing.assert_close(sample.rows(range(3))[..., 0].float(), x.reshape(-1, 8), atol=0, rtol=0)


def test_a_long_sequence_is_sampled_without_replacement() -> None:
    x = torch.arange(2 * 100.0).reshape(2, 100, 1).expand(2, 100, 8)
    rows = keep(nn.Linear(8, 2), x, budget=ALL_OUTPUTS)[:, 0, 0]
    first, second = rows.split(16)
    assert len(first.unique()) == 16 and first.max() < 100
    torch.testing.assert_close(second, first + 100, atol=0, rtol=0)


def test_padding_tokens_are_not_taken() -> None:
    lengths = [100, 7, 0, 20]
    mask = torch.tensor([[t < length for t in range(100)] for length in lengths])
    x = torch.arange(100.0).reshape(1, 100, 1).expand(4, 100, 8).masked_fill(~mask[..., None], -1)
    sample = RowSample(nn.Linear(8, 2), ALL_OUTPUTS)
    sample.store(x, [(place, place) for place in range(4)], -1, mask=mask)
    for place, length in enumerate(lengths):
        tokens = sample.rows([place])[:, 0, 0]
        assert len(tokens.unique()) == len(tokens) == min(16, length)
        assert bool((tokens >= 0).all())


def test_a_mask_of_other_tokens_is_none_of_its_business() -> None:
    x = torch.randn(2, 8)  # pooled over tokens
    sample = RowSample(nn.Linear(8, 2), ALL_OUTPUTS)
    sample.store(x, [(0, 0), (1, 1)], -1, mask=torch.zeros(2, 5, dtype=torch.bool))
    assert len(sample.rows([0, 1])) == 2


def test_maps_of_several_shapes_in_one_stream() -> None:
    layer = nn.Conv2d(3, 5, 3, padding=1)
    sizes = [4, 6, 1, 4]  # the third has fewer positions than rows are asked for
    maps = [torch.randn(1, 3, size, size) for size in sizes]
    sample = RowSample(layer, ALL_OUTPUTS)
    for place, x in enumerate(maps):
        sample.store(x, [(place, 0)], -3)
    expected = torch.cat([keep(layer, x, budget=ALL_OUTPUTS) for x in maps])
    torch.testing.assert_close(sample.rows(range(len(maps))).float(), expected, atol=0, rtol=0)


def test_unbatched_maps_are_one_sample() -> None:
    layer, x = nn.Conv2d(3, 5, 3, padding=1), torch.randn(3, 4, 4)
    sample = RowSample(layer, ALL_OUTPUTS)
    sample.store(x, [(8, 0), (9, 1)], -3)
    torch.testing.assert_close(sample.rows([8, 9]).float(), keep(layer, x[None], budget=ALL_OUTPUTS))


def test_windows_and_frames_belong_to_the_samples_they_were_cut_from() -> None:
    windows = torch.arange(2 * 4 * 3.0).reshape(8, 3, 1).expand(8, 3, 8)  # 2 samples of 4 windows of 3 tokens
    sample = RowSample(nn.Linear(8, 2), ALL_OUTPUTS)
    sample.store(windows, [(5, 1)], -1, samples=2)
    assert sample.rows([5])[:, 0, 0].tolist() == list(range(12, 24))
    frames = torch.arange(6.0).reshape(6, 1, 1, 1)  # 2 samples of 3 frames
    sample = RowSample(nn.Conv2d(1, 1, 1), ALL_OUTPUTS)
    sample.store(frames, [(0, 0), (1, 1)], -3, samples=2)
    assert sample.rows([0, 1]).flatten().tolist() == [0, 3]


def test_sizes_may_change_from_batch_to_batch() -> None:
    layer, sample = nn.Conv2d(2, 3, 3, padding=1), RowSample(nn.Conv2d(2, 3, 3, padding=1), ALL_OUTPUTS)
    for place, size in enumerate([8, 5, 3, 8, 1]):
        x = torch.randn(1, 2, size, size).half().float()
        sample.store(x, [(place, 0)], -3)
        assert len(sample.rows([place])) == min(16, size * size)
        places_of(sample.rows([place]), unfolded(layer, x)[0])


# Both together


@pytest.mark.parametrize("size", [1, 3, 16, 50])
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3, padding=1), nn.Linear(4, 2)], ids=["Conv2d", "Linear"])
def test_the_rows_do_not_depend_on_the_batches(layer: channels.Layer, size: int) -> None:
    data = torch.randn(400, 2, 4, 4, generator=torch.Generator().manual_seed(0)).half().float()

    def rows(size: int) -> Tensor:
        reservoir, sample = SampleReservoir(3), RowSample(layer, 10_000, 3)
        for first in range(0, len(data), size):
            batch = data[first : first + size]
            sample.store(batch, reservoir.pick(first, len(batch)), channels.channel_axis(layer))
        return sample.rows(list(reservoir.held().values()))

    found = rows(size)
    assert torch.equal(found, rows(400))
    expected = data[lowest_priorities(400, 3)]
    assert torch.equal(found, keep(layer, expected, budget=10_000, seed=3))


def test_memory_is_bounded_by_the_budget_or_one_row_of_each_sample() -> None:
    budget = 2**18
    for layer in (nn.Conv2d(3, 8, 1), nn.Conv2d(64, 8, 3), nn.Conv2d(512, 8, 3), nn.Linear(3000, 8)):
        sample = RowSample(layer, budget)
        row = layer.weight[0].numel()
        assert sample.rows_per_sample == min(16, max(1, budget // (128 * row)))
        assert sample.nbytes == 2 * 128 * row * sample.rows_per_sample <= 2 * max(budget, 128 * row)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_any_float_is_kept_within_half_precision(dtype: torch.dtype) -> None:
    largest = 1e6 if dtype != torch.float16 else 65504.0
    x = torch.tensor([[largest, -largest, 0.5, 0.0]], dtype=dtype)
    assert keep(nn.Linear(4, 1), x).flatten().tolist() == [65504, -65504, 0.5, 0]


def test_what_a_layer_did_not_see_has_no_rows() -> None:
    sample = RowSample(nn.Linear(4, 2))
    sample.store(torch.empty(0, 4), [(0, 0)], -1)
    sample.store(torch.ones(2, 4), [(0, 0), (1, 1), (2, 2)], -1)  # fewer samples than the batch
    assert sample.rows([0, 1, 2, 3]).shape == (2 * 1, 4, 1)
    assert sample.rows([3]).shape == (0, 4, 1)
    sample.store(torch.ones(1, 4), [(0, 0), (1, 1)], -1)  # place 1 has been given to a sample that isn't there
    assert sample.rows([1]).shape == (0, 4, 1)


def test_inputs_are_left_alone_and_gradients_do_not_matter() -> None:
    x = torch.full((2, 3, 4, 4), 1e6, requires_grad=True)
    sample = RowSample(nn.Conv2d(3, 2, 3, padding=1))
    with torch.inference_mode():
        sample.store(x, [(0, 0)], -3)
    sample.store(x, [(1, 1)], -3)
    assert bool((x == 1e6).all()) and not sample.rows([0, 1]).requires_grad


@pytest.mark.parametrize("samples", [40, 128, 500])
def test_what_is_expected_changes_how_much_is_stored_and_not_what_is_kept(samples: int) -> None:
    surprised, prepared = SampleReservoir(3), SampleReservoir(3)
    prepared.expect(samples - samples % 16)
    stored = [0, 0]
    for start in range(0, samples, 16):
        size = min(16, samples - start)
        for index, reservoir in enumerate((surprised, prepared)):
            stored[index] += len(reservoir.pick(start, size))
    kept = [sorted(i for i in reservoir._indices if i is not None) for reservoir in (surprised, prepared)]
    assert kept[0] == kept[1]
    assert stored[1] <= stored[0] and (samples <= 128 or stored[1] < stored[0])
