"""Mistakes that people make, each told and kept from coming back."""

from __future__ import annotations

import torch
from torch import nn

import ptq
from ptq.formats import affine


def test_channels_of_an_image_are_not_its_last_axis() -> None:
    """Collecting activation ranges with ``x.view(-1, C).abs().amax(0)`` works for Linear and was copied to Conv2d.

    On an N,C,H,W tensor it mixes positions and channels: for ``x[0,0] = 1..4, x[0,1] = 10..40`` it says [30, 40].
    The scales made of it are worse than no smoothing at all.
    """
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]).reshape(1, 2, 2, 2)
    assert x.view(-1, 2).abs().amax(0).tolist() == [30, 40]
    calibration = ptq.calibrate(nn.Conv2d(2, 1, 1), [x])
    assert calibration.layers[""].activation_absmax.tolist() == [4, 40]


def test_codes_are_rounded_and_brought_back() -> None:
    """Scaling weights to ``[-2^(b-1), 2^(b-1) - 1]`` and running on the codes, neither rounded nor dequantized.

    Zero then maps to another number, a constant tensor becomes NaN, and 4 bits are an affine copy of 8, so that
    every number of bits seems to cost the same accuracy.
    """
    x = torch.tensor([-0.5, -0.13, 0.0, 0.07, 0.25])

    def mistaken(values: torch.Tensor, bits: int) -> torch.Tensor:
        low, high = values.min(), values.max()
        return (values - low) / (high - low) * (2**bits - 1) - 2 ** (bits - 1)

    assert mistaken(x, 8)[2] != 0
    assert torch.allclose(mistaken(x, 4), (mistaken(x, 8) + 128) / 255 * 15 - 8, atol=1e-5)
    assert mistaken(torch.ones(3), 8).isnan().all()

    for bits, expected, step, zero in ((8, [-128, -2, 42, 66, 127], 0.00294118, 42), (4, [-8, -1, 2, 3, 7], 0.05, 2)):
        scale, zero_point = affine.affine_parameters(x.min(), x.max(), bits)
        q = affine.codes(x, scale, zero_point, *affine.code_range(bits))
        assert q.tolist() == expected
        assert abs(float(scale) - step) < 1e-8 and int(zero_point) == zero
        restored = affine.fake(x, scale, zero_point, *affine.code_range(bits))
        assert restored[2] == 0
        assert (restored - x).abs().max() <= scale / 2 + 1e-7

    constant = torch.full((3,), 0.7)
    scale, zero_point = affine.affine_parameters(constant.min(), constant.max(), 4)
    assert torch.allclose(affine.fake(constant, scale, zero_point, -8, 7), constant)
