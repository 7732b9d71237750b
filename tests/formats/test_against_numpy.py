"""Each format against the definition, written once more in plain numpy, and against values worked out elsewhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ptq.errors import InputError
from ptq.formats import format

Floats = npt.NDArray[np.float32]
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, count: int, kind: str = "normal") -> Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return {"normal": x, "relu": x.relu(), "tied": (2 * x).round(), "shifted": x + 3}[kind]


kinds = st.sampled_from(["normal", "relu", "tied", "shifted"])


def affine(x: Floats, bits: int) -> Floats:
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / (2**bits - 1) or 1.0
    first = -(2 ** (bits - 1))
    zero_point = np.clip(np.rint(first - low / scale), first, -first - 1)
    q = np.clip(np.rint(x / np.float32(scale)) + zero_point, first, -first - 1)
    return ((q - zero_point) * np.float32(scale)).astype(np.float32)


def symmetric(x: Floats, bits: int) -> Floats:
    top = 2 ** (bits - 1) - 1
    scale = np.float32(float(np.abs(x).max()) / top or 1.0)
    return (np.clip(np.rint(x / scale), -top, top) * scale).astype(np.float32)


def multistep(x: Floats, bits: int, parts: int) -> tuple[Floats, int]:
    restored = np.empty_like(x)
    for piece in np.array_split(np.argsort(x, kind="stable"), parts):
        if len(piece):
            low = x[piece].min()
            step = np.float32((float(x[piece].max()) - float(low)) / (2**bits - 1))
            code = np.clip(np.rint((x[piece] - low) / step), 0, 2**bits - 1) if step > 0 else np.zeros(len(piece))
            restored[piece] = low + code.astype(np.float32) * step
    return restored, 8 * parts + int(np.ceil(len(x) * (bits + int(np.ceil(np.log2(parts)))) / 8))


@settings(max_examples=40, deadline=None)
@given(seeds, kinds, st.integers(2, 16), st.integers(1, 200))
def test_affine(seed: int, kind: str, bits: int, count: int) -> None:
    x = draw(seed, count, kind)
    np.testing.assert_array_equal(format(f"affine:bits={bits}").fake(x).numpy(), affine(x.numpy(), bits))
    np.testing.assert_array_equal(format(f"affine:bits={bits},symmetric").fake(x).numpy(), symmetric(x.numpy(), bits))
    rows = x[: count // 5 * 5].reshape(5, -1)
    if rows.numel():
        by_row = format(f"affine:bits={bits},axis=0").fake(rows).numpy()
        np.testing.assert_array_equal(by_row, np.stack([affine(row, bits) for row in rows.numpy()]))
        by_column = format(f"affine:bits={bits},symmetric,axis=1").fake(rows.t().reshape(-1, 5)).numpy()
        np.testing.assert_array_equal(by_column, np.stack([symmetric(row, bits) for row in rows.numpy()]).T)
        pairs = [affine(rows.numpy()[start : start + 2].ravel(), bits) for start in (0, 2, 4)]
        grouped = format(f"affine:bits={bits},axis=0,group=2").fake(rows).numpy()
        np.testing.assert_array_equal(grouped.ravel(), np.concatenate(pairs))
    runs = [affine(x.numpy()[start : start + 7], bits) for start in range(0, count, 7)]
    np.testing.assert_array_equal(format(f"affine:bits={bits},group=7").fake(x).numpy(), np.concatenate(runs))


@settings(max_examples=40, deadline=None)
@given(seeds, kinds, st.integers(2, 12))
def test_affine_errors_are_bounded(seed: int, kind: str, bits: int) -> None:
    """Half a step, and half more at the ends for the rounded zero-point; a whole one where rounding is stochastic."""
    x = draw(seed, 100, kind)
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = (high - low) / (2**bits - 1)
    slack = 1e-5 * max(high, -low)
    assert (format(f"affine:bits={bits}").fake(x) - x).abs().max() <= step + slack
    inside = (x > low + step) & (x < high - step)
    assert ((format(f"affine:bits={bits}").fake(x) - x).abs()[inside] <= step / 2 + slack).all()
    assert (format(f"affine:bits={bits},full").fake(x) - x).abs().max() <= max(high, -low) / (2**bits - 2) + slack
    assert (format(f"affine:bits={bits},power_of_two").fake(x) - x).abs().max() <= 2 * step + slack
    wider = (high - low) / (2**bits - 2)
    assert (format(f"affine:bits={bits},stochastic").fake(x) - x).abs().max() <= wider + slack


def test_power_of_two_scales() -> None:
    x = draw(0, 50)
    for text in ("affine:bits=5,power_of_two", "affine:bits=5,power_of_two,symmetric"):
        scale = format(text).encode(x).payload[:4].clone().view(torch.float32)
        mantissa, _ = torch.frexp(scale)
        assert float(mantissa) == 0.5
    exact = torch.tensor([-1.0, 0.25, 0.875])  # a step of 1/8 already: it stays
    assert torch.equal(format("affine:bits=4,power_of_two,full").fake(exact), exact)


def test_the_known_codes_stand_in_the_bytes() -> None:
    """The example whose codes and scale are known: q = [-8, -1, 2, 3, 7], scale .05, zero-point 2."""
    packed = format("affine:bits=4").encode(torch.tensor([-0.5, -0.13, 0.0, 0.07, 0.25]))
    assert packed.nbytes == 4 + 4 + 3
    assert abs(float(packed.payload[:4].clone().view(torch.float32)) - 0.05) < 1e-8
    assert int(packed.payload[4:8].clone().view(torch.int32)) == 2
    low, high = packed.payload[8:10] & 15, packed.payload[8:10] >> 4
    codes = [*low.tolist(), *high.tolist(), int(packed.payload[10])]
    assert [code - 8 for code in codes] == [-8, -1, 2, 3, 7]


@settings(max_examples=40, deadline=None)
@given(seeds, kinds, st.integers(1, 8), st.integers(1, 16), st.integers(1, 200))
def test_multistep(seed: int, kind: str, bits: int, parts: int, count: int) -> None:
    x = draw(seed, count, kind)
    form = format(f"multistep:parts={parts},bits={bits}")
    restored, size = multistep(x.numpy(), bits, parts)
    np.testing.assert_array_equal(form.fake(x).numpy(), restored)
    assert form.encode(x).nbytes == size


@pytest.mark.parametrize("kind", ["normal", "relu", "tied"])
@pytest.mark.parametrize("parts", [2, 5, 16])
def test_multistep_without_a_sort_is_multistep(kind: str, parts: int) -> None:
    x = draw(1, 200_003, kind)
    restored, _ = multistep(x.numpy(), 4, parts)
    np.testing.assert_array_equal(format(f"multistep:parts={parts},bits=4").fake(x).numpy(), restored)


@settings(max_examples=40, deadline=None)
@given(seeds, kinds, st.integers(1, 300), st.floats(0.001, 1.0))
def test_topk(seed: int, kind: str, count: int, ratio: float) -> None:
    x = draw(seed, count, kind)
    kept = max(1, int(ratio * count))
    places = np.argsort(-np.abs(x.numpy()), kind="stable")[:kept]
    expected = np.zeros(count, dtype=np.float32)
    expected[places] = x.numpy()[places]
    form = format(f"topk:ratio={ratio!r}")
    np.testing.assert_array_equal(form.fake(x).numpy(), expected)
    index_bytes = 0 if kept == count else min(4 * kept, -(-count // 8))
    assert form.encode(x).nbytes == 4 * kept + index_bytes
    several = format(f"topk:ratio={ratio!r}+multistep:parts=4,bits=3").encode(x)
    assert several.nbytes == 8 * 4 + -(-kept * 5 // 8) + index_bytes
    values, _ = multistep(x.numpy()[np.sort(places)], 3, 4)
    np.testing.assert_array_equal(several.decode().numpy()[np.sort(places)], values)


def test_topk_passes_gradients_where_it_keeps_also_at_zeros() -> None:
    x = torch.tensor([0.0, 3.0, 0.0, -2.0, 0.0, 0.0], requires_grad=True)
    form = format("topk:ratio=0.7")  # four of six: the two values and the first two zeros
    form.fake(x).backward(torch.arange(1.0, 7.0))
    assert x.grad is not None and x.grad.tolist() == [1, 2, 3, 4, 0, 0]


def test_topk_and_multistep_send_back_the_same_positions() -> None:
    x = draw(2, 50).requires_grad_()
    format("topk:ratio=0.2+multistep:parts=2,bits=2").fake(x).backward(torch.ones(50))
    kept = torch.zeros(50)
    kept[x.detach().abs().topk(10).indices] = 1
    assert x.grad is not None and torch.equal(x.grad, kept)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.25, 0.1, 1.5]))
def test_truncation(seed: int, step: float) -> None:
    x = draw(seed, 100)
    multiples = x.numpy() / np.float32(step)
    trunc, floor = (format(f"truncate:step={step},mode={mode}").fake(x).numpy() for mode in ("trunc", "floor"))
    np.testing.assert_array_equal(trunc, np.trunc(multiples) * np.float32(step))
    np.testing.assert_array_equal(floor, np.floor(multiples) * np.float32(step))
    assert (np.abs(trunc) <= np.abs(x.numpy()) + 1e-6).all()


def test_floor_is_biased_by_half_a_step_and_trunc_is_not() -> None:
    x = draw(0, 100_000)
    assert abs(float((format("truncate:step=0.1,floor").fake(x) - x).mean()) + 0.05) < 1e-3
    assert abs(float((format("truncate:step=0.1").fake(x) - x).mean())) < 1e-3


def test_truncation_says_when_bits_don_t_reach() -> None:
    x = torch.tensor([-3.0, 5.0])
    with pytest.raises(InputError, match=r"needs multiples from -30 to 50, 6 bits hold -32 to 31"):
        format("truncate:step=0.1,bits=6").encode(x)
    assert format("truncate:step=0.1,bits=6,saturate").fake(x).tolist() == pytest.approx([-3.0, 3.1])
    assert format("truncate:step=1,bits=4").fake(torch.tensor([-8.9, 7.9])).tolist() == [-8, 7]
    with pytest.raises(InputError, match="saturate"):
        format("truncate:step=1,bits=4,floor").encode(torch.tensor([-8.1]))


def test_downsample_is_pooling_and_upsampling() -> None:
    x = draw(0, 2 * 3 * 8 * 6).reshape(2, 3, 8, 6)
    pooled = functional.avg_pool2d(x, 2)
    for mode in ("nearest", "bilinear"):
        expected = functional.interpolate(pooled, scale_factor=2, mode=mode)
        torch.testing.assert_close(format(f"downsample:mode={mode}").fake(x), expected)
    assert format("downsample+affine:bits=8").nbytes_for(x.shape) == 8 + 2 * 3 * 4 * 3
    ragged = functional.avg_pool2d(x[..., :5], 2, ceil_mode=True, count_include_pad=False)
    expected = functional.interpolate(ragged, scale_factor=2, mode="nearest")[..., :5]
    torch.testing.assert_close(format("downsample").fake(x[..., :5]), expected)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 2, 9), (1, 1, 5, 4)])
def test_downsampling_goes_backward_by_its_transpose(mode: str, shape: tuple[int, ...]) -> None:
    form = format(f"downsample:factor=2,mode={mode}")
    count = torch.Size(shape).numel()
    columns = [form.fake(unit.reshape(shape)).flatten() for unit in torch.eye(count, dtype=torch.float64)]
    matrix = torch.stack(columns, dim=1)  # the linear map itself
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    form.fake(x).backward(gradient)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.flatten(), matrix.T @ gradient.flatten())


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 100), st.integers(1, 40), st.sampled_from(["l2", "linf"]))
def test_nearest_levels(seed: int, count: int, bucket: int, norm: str) -> None:
    x = draw(seed, count)
    levels = np.array([-1, -0.3, 0.1, 0.4, 1], dtype=np.float32)
    form = format(f"levels:bits=3,nearest,bucket={bucket},norm={norm},levels=-1/-0.3/0.1/0.4/1")
    restored = form.fake(x).numpy()
    for start in range(0, count, bucket):
        values = x.numpy()[start : start + bucket].astype(np.float64)
        size = np.linalg.norm(values) if norm == "l2" else np.abs(values).max()
        distance = np.abs(values[:, None] / size - levels)
        got = np.abs(values / size - restored[start : start + bucket] / size)
        np.testing.assert_allclose(got, distance.min(1), atol=1e-5)
    assert form.encode(x).nbytes == 4 * -(-count // min(bucket, count)) + -(-count * 3 // 8)


def test_gradients_at_three_bits_in_buckets_take_the_bytes_they_should() -> None:
    """549,322 gradients, buckets of 8,192: 68 norms of 4 bytes and three bits each, 206,268 bytes."""
    assert format("qsgdinf:bits=3,bucket=8192").nbytes_for((549_322,)) == 206_268


def test_a_pipeline_boundary_takes_the_bytes_it_should() -> None:
    """Four micro-batches of [8, 32, 32, 32], both ways, at 8 bits: 2,097,216 bytes instead of 8,388,608."""
    assert 8 * format("affine:bits=8").nbytes_for((8, 32, 32, 32)) == 2_097_216


def test_several_steps_lose_to_one_at_equal_bits_on_a_normal_distribution() -> None:
    """Never sold as a lower squared error: with b + ⌈log2 P⌉ bits in all, one uniform grid is better on average."""
    x = draw(0, 100_000)

    def squared(text: str) -> float:
        return float((format(text).fake(x) - x).square().mean())

    assert (
        squared("multistep:parts=1,bits=8") < squared("multistep:parts=4,bits=6") < squared("multistep:parts=16,bits=4")
    )
