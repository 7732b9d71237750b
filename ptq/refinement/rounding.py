"""Weights to a grid so that a layer's output stays: least squares, then rounding that lets the rest make good.

Everything is batched over g groups, and a group's weight is ``[o, n]``: n products add up to one output. With X the
rows ``[R, n]`` that the weight meets and ``H = XᵀX + λI``, the error of w in place of the target t is
``(w - t) H (w - t)ᵀ``, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 128  # columns whose effect on later ones is gathered into one matrix product


@dataclass(frozen=True)
class Grid:
    """Whole multiples of a scale from a first to a last code, row by row: [g, o] each, or codes for all rows alike."""

    scale: Tensor
    first: Tensor | int
    last: Tensor | int

    def nearest(self, x: Tensor) -> Tensor:
        """Each value of a column [g, o], or of all columns [g, o, n], rounded by itself."""
        grid = self if x.dim() == 2 else self.mapped(lambda part: part[:, :, None])
        return (x / grid.scale).round_().clamp_(grid.first, grid.last).mul_(grid.scale)  # type: ignore[arg-type]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Grid:
        """The same of what is different from row to row."""
        return Grid(*(change(part) if isinstance(part, Tensor) else part for part in vars(self).values()))


def damped(gram: Tensor, ratio: float) -> Tensor:
    """``H = G + λI`` with λ = ratio · mean(diag G), one λ for each group: [g, n, n]."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1)
    ridge = ratio * torch.where(mean > 0, mean, torch.ones_like(mean))
    return gram + torch.diag_embed(ridge[:, None].expand_as(diagonal))


def ridge_solution(hessian: Tensor, gram: Tensor, cross: Tensor, weight: Tensor) -> Tensor:
    """``argmin_V ||XVᵀ - Y||² + λ||V - W||²``, that is ``W + ((XᵀX + λI)⁻¹ (XᵀY - XᵀX·Wᵀ))ᵀ``.

    ``gram`` is XᵀX [g, n, n], ``hessian`` the same with λI, ``cross`` is XᵀY [g, n, o] and ``weight`` W [g, o, n].
    """
    residual = cross - gram @ weight.mT
    factor = torch.linalg.cholesky(hessian)
    return weight + torch.cholesky_solve(residual, factor).mT


def output_error(weight: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """``(w - t) H (w - t)ᵀ`` of each row: [g, o]."""
    difference = weight - target
    return ((difference @ hessian) * difference).sum(2)


def compensated(target: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Round column after column; each one's error is made good, as far as it can be, by the columns still to come.

    This is GPTQ: with ``H⁻¹ = UᵀU``, U upper triangular, rounding column i adds ``e = (q_i - w_i) / U_ii`` times
    ``U_ij`` to every column j > i. Columns go by decreasing ``H_ii``. Returns values on the grid.
    """
    order = hessian.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)  # [g, n]
    sorted_hessian = hessian.gather(1, order[:, :, None].expand_as(hessian))
    sorted_hessian = sorted_hessian.gather(2, order[:, None].expand_as(hessian))
    upper = _inverse_factor(sorted_hessian)
    columns = order[:, None].expand_as(target)
    weight = target.gather(2, columns)
    rounded = torch.empty_like(weight)
    for start in range(0, weight.shape[2], _BLOCK):
        block = weight[:, :, start : start + _BLOCK].clone()
        errors = torch.empty_like(block)
        size = block.shape[2]
        inner = upper[:, start : start + size, start : start + size]
        for i in range(size):
            column = block[:, :, i]
            value = grid.nearest(column)
            error = (value - column) / inner[:, i, i, None]
            rounded[:, :, start + i] = value
            errors[:, :, i] = error
            if i + 1 < size:
                block[:, :, i + 1 :].baddbmm_(error[:, :, None], inner[:, i, None, i + 1 :])
        weight[:, :, start + size :].baddbmm_(errors, upper[:, start : start + size, start + size :])
    return torch.empty_like(rounded).scatter_(2, columns, rounded)


def descended(rounded: Tensor, target: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """One sweep of coordinate descent: each column moves to the grid value of the least error given all others.

    The error of no row rises. The best value of column j is ``w_j - ((w - t) H)_j / H_jj``, rounded.
    """
    weight = rounded.clone()
    slope = (weight - target) @ hessian  # [g, o, n]
    for start in range(0, weight.shape[2], _BLOCK):
        stop = min(start + _BLOCK, weight.shape[2])
        block, before = weight[:, :, start:stop], weight[:, :, start:stop].clone()
        inner, slopes = hessian[:, start:stop, start:stop], slope[:, :, start:stop].clone()
        for i in range(stop - start):
            column = block[:, :, i]
            value = grid.nearest(column - slopes[:, :, i] / inner[:, i, i, None])
            slopes.baddbmm_((value - column)[:, :, None], inner[:, i, None])
            block[:, :, i] = value
        slope.baddbmm_(block - before, hessian[:, start:stop])
    return weight


def refitted_scale(rounded: Tensor, target: Tensor, hessian: Tensor, scale: Tensor, taps: int = 1) -> Tensor:
    """The scale of the least error for the codes as they are: ``s · (q H tᵀ) / (q H qᵀ)``, with q on the grid of s.

    ``taps`` consecutive rows share one scale. Where that isn't a positive number the scale stays.
    """
    pulled = rounded @ hessian
    numerator, denominator = (shared_sum((pulled * other).sum(2), taps) for other in (target, rounded))
    factor = numerator / denominator
    return torch.where((factor > 0) & factor.isfinite(), scale * factor, scale)


def shared_sum(of_rows: Tensor, taps: int) -> Tensor:
    """The sum over each ``taps`` consecutive rows, in the place of each of them: [g, o]."""
    return of_rows.reshape(len(of_rows), -1, taps).sum(2).repeat_interleave(taps, 1)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with ``H⁻¹ = UᵀU``.

    ``H = RRᵀ`` with R upper triangular is the Cholesky decomposition read from the other corner; then U = R⁻¹.
    """
    factor = torch.linalg.cholesky(hessian.flip(1, 2)).flip(1, 2)
    identity = torch.eye(hessian.shape[1], dtype=hessian.dtype, device=hessian.device).expand_as(hessian)
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=True)
    return inverse
