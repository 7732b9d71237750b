"""Affine integers against numpy, and the properties that any quantizer has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptq.errors import InputError
from ptq.formats import affine

ranges = st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32)).map(sorted)
all_bits = st.integers(2, 16)


def reference(x: np.ndarray, scale: float, zero_point: float, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in numpy; np.rint rounds half to even."""
    codes = np.clip(np.rint(x.astype(np.float32) / np.float32(scale)) + zero_point, first, last)
    return codes, ((codes - zero_point) * np.float32(scale)).astype(np.float32)


@given(ranges, all_bits, st.integers(0, 2**32 - 1))
def test_codes_and_values_follow_the_definition(bounds: list[float], bits: int, seed: int) -> None:
    low, high = bounds
    x = torch.rand(64, generator=torch.Generator().manual_seed(seed)) * (high - low) * 1.5 + low
    scale, zero_point = affine.affine_parameters(torch.tensor(low), torch.tensor(high), bits)
    first, last = affine.code_range(bits)
    codes, values = reference(x.numpy(), float(scale), float(zero_point), first, last)
    q = affine.codes(x, scale, zero_point, first, last)
    np.testing.assert_array_equal(q.numpy(), codes)
    np.testing.assert_array_equal(affine.fake(x, scale, zero_point, first, last).numpy(), values)
    np.testing.assert_array_equal(affine.values(q, scale, zero_point).numpy(), values)


@given(ranges, all_bits)
def test_zero_is_exact_and_the_range_is_covered(bounds: list[float], bits: int) -> None:
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    scale, zero_point = affine.affine_parameters(torch.tensor(low), torch.tensor(high), bits)
    first, last = affine.code_range(bits)
    assert float(affine.fake(torch.zeros(1), scale, zero_point, first, last)) == 0.0
    ends = torch.tensor([low, high])
    # Half a step for the value, half for the zero-point, and what float32 itself can't hold.
    tolerance = float(scale) * (1 + 1e-3) + 1e-6 * max(abs(low), abs(high))
    assert (affine.fake(ends, scale, zero_point, first, last) - ends).abs().max() <= tolerance


@given(st.floats(0, 1e6, width=32), all_bits)
def test_the_symmetric_range_is_restricted_and_its_ends_exact(absmax: float, bits: int) -> None:
    scale = affine.symmetric_scale(torch.tensor(absmax), bits)
    first, last = affine.code_range(bits, symmetric=True)
    assert first == -last
    ends = torch.tensor([-absmax, absmax])
    restored = affine.fake(ends, scale, torch.tensor(0.0), first, last)
    # A scale below the smallest normal float32 counts as none.
    assert torch.allclose(restored, ends, rtol=1e-6, atol=last * torch.finfo(torch.float32).tiny)


@given(ranges, all_bits, st.integers(0, 2**32 - 1))
def test_fake_is_monotone_and_idempotent(bounds: list[float], bits: int, seed: int) -> None:
    low, high = bounds
    scale, zero_point = affine.affine_parameters(torch.tensor(low), torch.tensor(high), bits)
    x = (torch.rand(64, generator=torch.Generator().manual_seed(seed)) * (high - low) + low).sort().values
    once = affine.fake(x, scale, zero_point, *affine.code_range(bits))
    assert (once.diff() >= 0).all()
    assert torch.equal(affine.fake(once, scale, zero_point, *affine.code_range(bits)), once)


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])
    assert affine.fake(x, torch.tensor(1.0), torch.tensor(0.0), -8, 7).tolist() == [0, 2, 2, 0, -2]


def test_agrees_with_torchs_own_quantizer() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    scale, zero_point = affine.affine_parameters(x.min(), x.max(), 8)
    expected = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), -128, 127)
    assert (affine.fake(x, scale, zero_point, -128, 127) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-42])
@pytest.mark.parametrize("bits", [2, 8, 16])
def test_constant_tensors_have_no_nan(value: float, bits: int) -> None:
    x = torch.full((4,), value)
    scale, zero_point = affine.affine_parameters(x.min(), x.max(), bits)
    restored = affine.fake(x, scale, zero_point, *affine.code_range(bits))
    assert torch.allclose(restored, x, rtol=1e-4, atol=1e-37)


def test_the_callers_tensor_is_not_written() -> None:
    x = torch.randn(10)
    kept = x.clone()
    affine.fake(x, torch.tensor(0.1), torch.tensor(0.0), -8, 7)
    affine.codes(x, torch.tensor(0.1), torch.tensor(0.0), -8, 7)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("bits", [1, 17, 0, -3, True, 4.0])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(InputError, match="from 2 to 16"):
        affine.checked_bits(bits)
