"""Least squares and compensated rounding, against numpy and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ptq.formats import affine
from ptq.refinement import rounding
from ptq.refinement.layer import round_weight
from ptq.refinement.rounding import Grid


def correlated_rows(seed: int, groups: int, rows: int, inputs: int) -> Tensor:
    """Rows whose columns have much in common and are of very different size, as in a network."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(groups, inputs, inputs, generator=generator, dtype=torch.float64)
    size = torch.logspace(-1, 1, inputs, dtype=torch.float64)
    noise = torch.randn(groups, rows, inputs, generator=generator, dtype=torch.float64)
    return (noise @ mixing / inputs**0.5 + noise.mean(2, keepdim=True)) * size


def problem(seed: int, groups: int = 1, outputs: int = 6, inputs: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """A target weight [g, o, n], a Hessian [g, n, n] and scales [g, o] for three bits."""
    rows = correlated_rows(seed, groups, 64, inputs)
    hessian = rounding.damped(rows.mT @ rows, 0.01)
    generator = torch.Generator().manual_seed(seed + 1000)
    target = torch.randn(groups, outputs, inputs, generator=generator, dtype=torch.float64)
    return target, hessian, target.abs().amax(2) / 3


def nearest(target: Tensor, scale: Tensor, last: int = 3) -> Tensor:
    return (target / scale[:, :, None]).round().clamp(-last, last) * scale[:, :, None]


def gptq_by_the_book(weight: np.ndarray, hessian: np.ndarray, scale: np.ndarray, last: int) -> np.ndarray:
    """One column after the other, and the inverse of what is left of the Hessian computed anew each time.

    No Cholesky decomposition: after rounding column i by e, the optimal change of the columns F still free is
    ``e / [H_F⁻¹]_ii · [H_F⁻¹]_iF`` (optimal brain surgeon).
    """
    weight, result = weight.copy(), np.zeros_like(weight)
    free = sorted(range(len(hessian)), key=lambda i: -hessian[i, i])
    while free:
        inverse = np.linalg.inv(hessian[np.ix_(free, free)])
        i = free[0]
        result[:, i] = np.clip(np.rint(weight[:, i] / scale), -last, last) * scale
        error = (weight[:, i] - result[:, i]) / inverse[0, 0]
        weight[:, free] -= error[:, None] * inverse[0][None]
        free = free[1:]
    return result


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.3])
def test_the_ridge_solution_is_that_of_lstsq(ridge: float) -> None:
    """Ridge towards W is ordinary least squares with √λ·I as more rows, which aim at √λ·W."""
    rows = correlated_rows(0, 1, 40, 7)
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(1, 40, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(1, 3, 7, generator=generator, dtype=torch.float64)
    gram = rows.mT @ rows
    found = rounding.ridge_solution(rounding.damped(gram, ridge), gram, rows.mT @ outputs, weight)
    strength = np.sqrt(ridge * float(gram[0].diagonal().mean()))
    more_rows = np.concatenate([rows[0].numpy(), strength * np.eye(7)])
    more_outputs = np.concatenate([outputs[0].numpy(), strength * weight[0].numpy().T])
    expected = np.linalg.lstsq(more_rows, more_outputs, rcond=None)[0].T
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-8, atol=1e-10)


def test_rows_of_zeros_leave_the_weight_as_it_is() -> None:
    weight, gram = torch.randn(1, 3, 7), torch.zeros(1, 7, 7)
    hessian = rounding.damped(gram, 0.01)
    assert torch.equal(rounding.ridge_solution(hessian, gram, torch.zeros(1, 7, 3), weight), weight)


@pytest.mark.parametrize("seed", range(5))
def test_compensated_rounding_is_gptq(seed: int) -> None:
    target, hessian, scale = problem(seed)
    found = rounding.compensated(target, hessian, Grid(scale, -3, 3))
    expected = gptq_by_the_book(target[0].numpy(), hessian[0].numpy(), scale[0].numpy(), 3)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-9)


def test_blocks_of_columns_change_nothing() -> None:
    """More columns than one block has: what earlier blocks leave behind arrives in the later ones."""
    target, hessian, scale = problem(3, outputs=2, inputs=150)
    found = rounding.compensated(target, hessian, Grid(scale, -3, 3))
    expected = gptq_by_the_book(target[0].numpy(), hessian[0].numpy(), scale[0].numpy(), 3)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-9)


def test_compensation_beats_rounding_to_nearest() -> None:
    """Not each row of each problem, but nearly all, and the sum of every problem."""
    rows_better = []
    for seed in range(40):
        target, hessian, scale = problem(seed)
        found = rounding.compensated(target, hessian, Grid(scale, -3, 3))
        error = rounding.output_error(found, target, hessian)
        plain = rounding.output_error(nearest(target, scale), target, hessian)
        assert float(error.sum()) <= float(plain.sum())
        rows_better += (error <= plain + 1e-12).flatten().tolist()
    assert np.mean(rows_better) > 0.9


def test_a_diagonal_hessian_leaves_nothing_to_compensate() -> None:
    target, _, scale = problem(0)
    hessian = torch.diag(torch.rand(12, dtype=torch.float64) + 0.1)[None]
    torch.testing.assert_close(rounding.compensated(target, hessian, Grid(scale, -3, 3)), nearest(target, scale))


@pytest.mark.parametrize("start", ["nearest", "compensated"])
def test_descent_raises_no_error_and_ends_where_no_single_step_helps(start: str) -> None:
    for seed in range(5):
        target, hessian, scale = problem(seed, inputs=8)
        weight = rounding.compensated(target, hessian, Grid(scale, -3, 3))
        if start == "nearest":
            weight = nearest(target, scale)
        error = rounding.output_error(weight, target, hessian)
        for _ in range(20):
            weight = rounding.descended(weight, target, hessian, Grid(scale, -3, 3))
            after = rounding.output_error(weight, target, hessian)
            assert bool((after <= error + 1e-9).all())
            error = after
        codes = (weight / scale[:, :, None]).round()
        for column in range(8):  # brute force over every value of every single weight
            for code in range(-3, 4):
                other = codes.clone()
                other[:, :, column] = code
                trial = rounding.output_error(other * scale[:, :, None], target, hessian)
                assert bool((trial >= error - 1e-9).all())


def test_descent_over_blocks_equals_a_plain_loop() -> None:
    target, hessian, scale = problem(1, outputs=2, inputs=150)
    weight = nearest(target, scale)[0].numpy().copy()
    found = rounding.descended(nearest(target, scale), target, hessian, Grid(scale, -3, 3))
    t, h, s = target[0].numpy(), hessian[0].numpy(), scale[0].numpy()
    for j in range(150):
        best = weight[:, j] - ((weight - t) @ h)[:, j] / h[j, j]
        weight[:, j] = np.clip(np.rint(best / s), -3, 3) * s
    np.testing.assert_allclose(found[0].numpy(), weight, atol=1e-9)


def test_the_refitted_scale_is_the_minimum_of_a_parabola() -> None:
    target, hessian, scale = problem(2)
    rounded = nearest(target, scale * 0.8)
    found = rounding.refitted_scale(rounded, target, hessian, scale * 0.8)
    codes = rounded / (scale * 0.8)[:, :, None]
    least = rounding.output_error(codes * found[:, :, None], target, hessian)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert bool((rounding.output_error(codes * found[:, :, None] * factor, target, hessian) > least).all())


def test_rows_that_share_a_scale_are_fitted_together() -> None:
    target, hessian, scale = problem(2, outputs=6)
    shared = scale.unflatten(1, (2, 3)).amax(2).repeat_interleave(3, 1)
    rounded = nearest(target, shared)
    found = rounding.refitted_scale(rounded, target, hessian, shared, 3)
    assert torch.equal(found[:, 0], found[:, 2]) and torch.equal(found[:, 3], found[:, 5])
    codes, t, h = (rounded / shared[:, :, None])[0, :3].numpy(), target[0, :3].numpy(), hessian[0].numpy()
    root = np.linalg.cholesky(h).T
    expected = np.linalg.lstsq((codes @ root.T).reshape(-1, 1), (t @ root.T).reshape(-1), rcond=None)[0][0]
    assert float(found[0, 0]) == pytest.approx(expected)


def test_codes_of_zero_keep_their_scale() -> None:
    target, hessian, scale = problem(0)
    assert torch.equal(rounding.refitted_scale(torch.zeros_like(target), target, hessian, scale), scale)


def test_groups_are_rounded_each_by_itself() -> None:
    target, hessian, scale = problem(4, groups=5, outputs=3, inputs=9)
    together = rounding.compensated(target, hessian, Grid(scale, -3, 3))
    descended = rounding.descended(together, target, hessian, Grid(scale, -3, 3))
    weight, grid = round_weight(target.float(), hessian.float(), 3)
    for g in range(5):
        one = slice(g, g + 1)
        alone = rounding.compensated(target[one], hessian[one], Grid(scale[one], -3, 3))
        torch.testing.assert_close(together[one], alone)
        torch.testing.assert_close(
            descended[one], rounding.descended(alone, target[one], hessian[one], Grid(scale[one], -3, 3))
        )
        weight_alone, grid_alone = round_weight(target[one].float(), hessian[one].float(), 3)
        torch.testing.assert_close(weight[one], weight_alone)
        for part in ("scale", "first", "last"):
            torch.testing.assert_close(getattr(grid, part)[one], getattr(grid_alone, part))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zero-points"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_rounded_weight_is_on_its_grid_and_better_than_gptq_alone(bits: int, symmetric: bool) -> None:
    last = 2 ** (bits - 1) - 1
    for seed in range(5):
        target, hessian, scale = problem(seed)
        found, grid = round_weight(target, hessian, bits, symmetric=symmetric)
        codes = found / grid.scale[:, :, None]
        torch.testing.assert_close(codes, codes.round(), atol=1e-6, rtol=0)
        lowest, highest = codes.amin(2).round(), codes.amax(2).round()
        assert bool((lowest >= grid.first).all()) and bool((highest <= grid.last).all())
        count = torch.as_tensor(grid.last - grid.first) + 1
        assert bool((count == 2**bits - symmetric).all())
        assert bool((torch.as_tensor(grid.first) <= 0).all()) and bool((torch.as_tensor(grid.last) >= 0).all())
        whole = Grid(scale * 3 / last, -last, last)
        if not symmetric:
            spread, zero_point = affine.affine_parameters(target.amin(2), target.amax(2), bits)
            whole = Grid(spread, -last - 1 - zero_point, last - zero_point)
        alone = rounding.compensated(target, hessian, whole)
        assert bool(
            (
                rounding.output_error(found, target, hessian) <= rounding.output_error(alone, target, hessian) + 1e-9
            ).all()
        )


def test_weights_of_one_sign_use_all_codes_of_a_shifted_grid() -> None:
    """The steps are half as wide: less than a third of the error of a grid with as many codes below zero."""
    hessian = torch.eye(40, dtype=torch.float64)[None]
    target = torch.rand(1, 300, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = [
        rounding.output_error(round_weight(target, hessian, 4, symmetric=symmetric)[0], target, hessian).mean()
        for symmetric in (False, True)
    ]
    assert 0.15 < float(errors[0] / errors[1]) < 0.35  # (7 / 15)² = 0.22
