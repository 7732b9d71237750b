"""The factor, against the closed form worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ptq.errors import InputError
from ptq.smoothing import ALPHAS, checked_alpha, smoothing_factor


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.5, [math.sqrt(16 / 4), math.sqrt(1 / 0.25)]),
        (1.0, [16, 1]),
        (0.0, [1 / 4, 1 / 0.25]),
        (0.25, [2 / 4**0.75, 0.25**-0.75]),
    ],
    ids=str,
)
def test_formula(alpha: float, expected: list[float]) -> None:
    factor = smoothing_factor(torch.tensor([16.0, 1.0]), torch.tensor([4.0, 0.25]), alpha)
    assert factor.tolist() == pytest.approx(expected, rel=1e-6)


def test_at_one_half_activations_and_weights_become_equally_large() -> None:
    a, w = torch.rand(20) + 0.1, torch.rand(20) + 0.1
    factor = smoothing_factor(a, w, 0.5)
    torch.testing.assert_close(a / factor, w * factor)


@pytest.mark.parametrize(
    ("a", "w"),
    [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (math.inf, 1.0), (1.0, math.nan), (1e-38, 1e38)],
    ids=str,
)
def test_a_channel_that_cannot_be_smoothed_is_left_alone(a: float, w: float) -> None:
    assert smoothing_factor(torch.tensor([a, 4.0]), torch.tensor([w, 1.0]), 0.5).tolist() == [1.0, 2.0]


def test_the_default_grid() -> None:
    assert len(ALPHAS) == 19 and ALPHAS[0] == 0.05 and ALPHAS[-1] == 0.95


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, math.inf, "0.5"])
def test_alpha_out_of_range(alpha: float) -> None:
    with pytest.raises(InputError, match=r"alpha = .*from 0 .* to 1"):
        checked_alpha(alpha)
