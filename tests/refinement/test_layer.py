"""Ranges of inputs, moments of rows, and the scales that are tried."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptq.quantization import FakeQuantize
from ptq.refinement import layer
from ptq.refinement.layer import Moments, choose_range
from ptq.refinement.rounding import damped, output_error


def squared_error_of_best_fit(quantizer: FakeQuantize, rows: torch.Tensor, outputs: torch.Tensor) -> float:
    """Of numpy's least squares with an intercept, on the quantized rows."""
    x, y = quantizer(rows)[0].double().numpy(), outputs[0].double().numpy()
    x, y = x - x.mean(0), y - y.mean(0)
    return float(((x @ np.linalg.lstsq(x, y, rcond=None)[0] - y) ** 2).sum())


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_chosen_range_is_no_worse_than_any_on_a_grid(bits: int, symmetric: bool) -> None:
    """One value in a thousand is far out: the range is clipped, the more so the fewer the bits."""
    torch.manual_seed(0)
    rows, weight = torch.randn(1, 4000, 8).exp() - 1, torch.randn(1, 5, 8)
    outputs, extent = rows @ weight.mT, (float(rows.min()), float(rows.max()))
    quantizer = FakeQuantize(bits, symmetric=symmetric)
    choose_range(quantizer, extent, rows, outputs, weight, centered=True)
    error, scale = squared_error_of_best_fit(quantizer, rows, outputs), float(quantizer.scale)
    quantizer.set_range(*extent)
    assert error < squared_error_of_best_fit(quantizer, rows, outputs)
    assert scale < float(quantizer.scale)
    for step in (-1, 1):  # the neighbours of the chosen range
        quantizer.scale.fill_(scale + step * 0.1 * extent[1] / (2**bits - 1))
        if float(quantizer.scale) > 0:
            assert error < 1.02 * squared_error_of_best_fit(quantizer, rows, outputs)


def test_centered_moments_are_a_covariance() -> None:
    torch.manual_seed(0)
    rows, outputs = torch.randn(2, 50, 4) + 3, torch.randn(2, 50, 3) - 1
    found = Moments.of(rows, outputs, centered=True)
    for g in range(2):
        both = np.cov(torch.cat([rows[g], outputs[g]], 1).double().numpy(), rowvar=False, bias=True)
        np.testing.assert_allclose(found.gram[g].numpy(), both[:4, :4], atol=1e-5)
        np.testing.assert_allclose(found.cross[g].numpy(), both[:4, 4:], atol=1e-5)
    plain = Moments.of(rows, outputs, centered=False)
    np.testing.assert_allclose(plain.gram[0].numpy(), (rows[0].T @ rows[0]).numpy() / 50, rtol=1e-5)


def test_a_range_is_not_chosen_on_one_border_alone() -> None:
    """Rows come image by image, position by position. Every 16th of 64 positions of a map 8 wide is in its first
    column, and a third of what that column reads is padding: ranges that were chosen on every 16th row were too narrow.
    """
    torch.manual_seed(0)
    rows, weight = torch.randn(1, 1024, 64, 8).relu(), torch.randn(1, 5, 8)
    rows[:, :, ::16] *= 0.1
    rows = rows.reshape(1, -1, 8)
    outputs, extent = rows @ weight.mT, (0.0, float(rows.max()))
    quantizer, fair = FakeQuantize(4), FakeQuantize(4)
    choose_range(quantizer, extent, rows, outputs, weight, centered=True)
    mixed = torch.randperm(rows.shape[1])
    choose_range(fair, extent, rows[:, mixed], outputs[:, mixed], weight, centered=True)
    assert float(quantizer.scale) == pytest.approx(float(fair.scale), rel=0.1)


@pytest.mark.parametrize(
    ("groups", "outputs", "inputs", "bits", "count"),
    [(1, 64, 576, 4, 160), (960, 1, 9, 4, 160), (1, 1280, 320, 4, 20), (1, 512, 4608, 4, 6), (1, 64, 576, 8, 1)],
)
def test_wide_layers_try_fewer_scales(groups: int, outputs: int, inputs: int, bits: int, count: int) -> None:
    """The largest layer of ResNet-20 and a depthwise one, MobileNetV2's last, ResNet-18's last; none at 8 bits."""
    ratios = layer._clip_ratios(torch.empty(groups, outputs, inputs, device="meta"), bits)
    assert len(ratios) == count and ratios[0] == 1 and min(ratios) >= 0.4


def test_more_scales_round_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inputs are correlated, as those of layers are, so that weights make up for each other's rounding."""
    torch.manual_seed(0)
    target, rows = torch.randn(1, 128, 48), torch.randn(1, 200, 48) @ torch.randn(48, 48)
    hessian = damped(rows.mT @ rows / 200, 0.03)
    errors = []
    for most in (10, 160):
        monkeypatch.setattr(layer, "_SCALES", most)
        errors.append(float(output_error(layer.round_weight(target, hessian, 4)[0], target, hessian).sum()))
    assert errors[1] < 0.97 * errors[0]
