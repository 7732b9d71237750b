"""One layer refined: from the rows it meets in the quantized network towards what the float layer gives."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.formats import affine
from ptq.quantization.modules import ZERO_POINT, FakeQuantize, weight_codes
from ptq.refinement import rounding
from ptq.refinement.rows import contributions, weight_matrix, write_weight
from ptq.refinement.steps import LAYER_STEPS

DAMPING = 0.03  # λ of the least squares and of the rounding, as a share of the mean diagonal: rows are only a sample
_ROUNDS = 3  # of coordinate descent and scales fitted again
_COARSE = tuple(round(1 - 0.05 * i, 2) for i in range(17))  # shares of an activation's range: 1.0 … 0.2
_FINE = 0.05  # steps around the best of them
_ROWS_FOR_RANGES = 4096
_FEW_SCALES, _SCALES = 10, 160  # tried for each channel: each rounds another way, so the best of more is closer
_VALUES = 2**23  # rounded weights that more than a few scales of one layer may make
_WORK = 2**36  # multiplications that looking for the scales of one layer may cost


@dataclass(frozen=True)
class Moments:
    """What least squares needs of rows X [R, n] and outputs Y [R, o], group by group."""

    gram: Tensor  # [g, n, n], XᵀX / R
    cross: Tensor  # [g, n, o], XᵀY / R
    row_mean: Tensor  # [g, 1, n]; zero where X and Y were not centered
    output_mean: Tensor  # [g, 1, o]

    @classmethod
    def of(cls, rows: Tensor, outputs: Tensor, *, centered: bool) -> Moments:
        """Centered where the layer has a bias, which takes care of the means."""
        row_mean, output_mean = rows.mean(1, keepdim=True), outputs.mean(1, keepdim=True)
        if centered:
            rows, outputs = rows - row_mean, outputs - output_mean
        count = rows.shape[1]
        return cls((rows.mT @ rows).double() / count, (rows.mT @ outputs).double() / count, row_mean, output_mean)

    def solve(self, weight: Tensor, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
        """The ridge solution near ``weight``, and the Hessian of the error around it."""
        hessian = rounding.damped(self.gram, damping)
        return rounding.ridge_solution(hessian, self.gram, self.cross, weight.double()), hessian


@torch.no_grad()
def refine_layer(
    layer: channels.Layer,
    float_layer: channels.Layer,
    bits: int | None,
    quantizer: FakeQuantize | None,
    extent: tuple[float, float] | None,
    rows: Tensor,
    outputs: Tensor,
    steps: Collection[str] = LAYER_STEPS,
) -> None:
    """Choose the range of the input, then the weight and its scales, then the bias; or what of that the steps say.

    ``rows`` [g, R, n] are what arrives in the quantized network, before the input's quantizer, ``outputs`` [g, R, o]
    what the float layer makes, without its bias, of what arrives in the float one; ``extent`` is the range of the input
    that the calibration saw, None to keep the one that the quantizer has. ``bits`` None leaves the weight off any grid.
    """
    wanted = weight_matrix(float_layer.weight, float_layer)  # [g, o, n]
    several = contributions(layer)
    centered = layer.bias is not None and several == 1 and "bias" in steps
    if quantizer is not None:
        if extent is not None and "ranges" in steps:
            choose_range(quantizer, extent, rows, outputs, wanted, centered=centered)
        rows = quantizer(rows)
    moments = Moments.of(rows, outputs, centered=centered)
    solution, hessian = moments.solve(wanted)
    weight = weight_matrix(layer.weight, layer)
    if set(steps) - {"bias"}:
        weight = solution.to(wanted) if "weights" in steps else wanted
        if bits is not None:
            zero_point, first, last = weight_codes(layer, bits)
            held = rounding.Grid(layer.get_buffer("weight_scale"), first - zero_point, last - zero_point)
            given = None if "ranges" in steps else held.mapped(lambda part: part.view(len(weight), -1))
            symmetric = not hasattr(layer, ZERO_POINT)
            weight, grid = round_weight(
                weight, hessian.to(wanted), bits, several, given, symmetric=symmetric, compensate="rounding" in steps
            )
            layer.get_buffer("weight_scale").copy_(grid.scale.flatten())
            if not symmetric:
                zero_point.copy_(first - torch.as_tensor(grid.first).flatten())
        write_weight(layer, weight)
    if layer.bias is not None and "bias" in steps:
        assert float_layer.bias is not None
        residual = moments.output_mean - moments.row_mean @ weight.mT  # [g, 1, o]
        layer.bias.copy_(float_layer.bias + output_shift(residual, layer))


def output_shift(residual: Tensor, layer: channels.Layer) -> Tensor:
    """What a mean residual of the rows' products [g, 1, O/g · m] is in the output: ``[O]``.

    Where an input pixel gives m products to each channel, they fall on ``Π stride`` output positions (borders aside).
    """
    if isinstance(layer, nn.Linear) or contributions(layer) == 1:
        return residual.flatten()
    return residual.reshape(-1, contributions(layer)).sum(1) / math.prod(layer.stride)


def round_weight(
    target: Tensor,
    hessian: Tensor,
    bits: int,
    several: int = 1,
    given: rounding.Grid | None = None,
    *,
    symmetric: bool = False,
    compensate: bool = True,
) -> tuple[Tensor, rounding.Grid]:
    """The weight on a grid near the target [g, o, n], by ``(w - t) H (w - t)ᵀ``, and that grid, [g, o / several].

    For each output channel: compensated rounding on the grids of many clipping ratios, the best of which goes through
    rounds of coordinate descent and of fitting the scale to the codes. ``several`` consecutive rows share one grid.
    One that is ``given`` stays; without ``compensate`` each weight goes to the nearest code.
    """
    tried = _grids(target, bits, several, symmetric=symmetric) if given is None else given
    tried = tried.mapped(lambda part: part.repeat_interleave(several, 1))  # [g, tries · o], one below the other
    apart = (len(target), -1, target.shape[1])
    tries = tried.scale.view(apart).shape[1]
    targets = target.repeat(1, tries, 1)
    found = rounding.compensated(targets, hessian, tried) if compensate else tried.nearest(targets)
    errors = rounding.shared_sum(rounding.output_error(found, targets, hessian), several)
    chosen = errors.view(apart).argmin(1, keepdim=True)  # [g, 1, o]
    grid = tried.mapped(lambda part: part.view(apart).gather(1, chosen)[:, 0])
    best = found.view(len(target), tries, *target.shape[1:]).take_along_dim(chosen[:, :, :, None], 1)[:, 0]
    for _ in range(_ROUNDS if compensate else 0):
        best = rounding.descended(best, target, hessian, grid)
        if given is None:
            codes = (best / grid.scale[:, :, None]).round_()
            grid = replace(grid, scale=rounding.refitted_scale(best, target, hessian, grid.scale, several))
            best = codes * grid.scale[:, :, None]
    return best, grid.mapped(lambda part: part[:, ::several])


def _grids(target: Tensor, bits: int, several: int, *, symmetric: bool) -> rounding.Grid:
    """Of many shares of each output channel's range: [g, tries · o / several]."""
    ratios = target.new_tensor(_clip_ratios(target, bits))[:, None]
    weights = target.reshape(len(target), 1, -1, several * target.shape[2])  # [g, 1, O, …]
    low, high = weights.amin(3) * ratios, weights.amax(3) * ratios  # [g, tries, O]
    if symmetric:
        scale = affine.symmetric_scale(torch.maximum(-low, high), bits)
        return rounding.Grid(scale.to(target).flatten(1), *affine.code_range(bits, symmetric=True))
    scale, zero_point = affine.affine_parameters(low, high, bits)
    ends = ((end - zero_point).to(target).flatten(1) for end in affine.code_range(bits))
    return rounding.Grid(scale.to(target).flatten(1), *ends)


def choose_range(
    quantizer: FakeQuantize,
    extent: tuple[float, float],
    rows: Tensor,
    outputs: Tensor,
    weight: Tensor,
    *,
    centered: bool,
) -> None:
    """Set the range, as shares of both ends of the extent, whose quantized rows give the least squared error.

    First one share for both ends, with the weight as it is. Then, where the rows are enough to tell, around it, and
    each end by itself, with the weight that least squares would find.
    """
    # At random: rows come in the order of positions, so that every so-manieth could be all of one border.
    some = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))[:_ROWS_FOR_RANGES].to(rows.device)
    rows, outputs = rows[:, some], outputs[:, some]

    def quantized(shares: tuple[float, float]) -> Tensor:
        quantizer.set_range(extent[0] * shares[0], extent[1] * shares[1])
        found: Tensor = quantizer(rows)
        return found

    def error(shares: tuple[float, float]) -> float:
        return float((quantized(shares) @ weight.mT - outputs).square().sum())

    def error_after_solving(shares: tuple[float, float]) -> float:
        found = quantized(shares)
        solution = Moments.of(found, outputs, centered=centered).solve(weight)[0].to(weight)
        left = found @ solution.mT - outputs
        return float((left - left.mean(1, keepdim=True) if centered else left).square().sum())

    best = min(((share, share) for share in _COARSE), key=error)
    if rows.shape[1] >= 4 * rows.shape[2]:
        together = quantizer.symmetric or not extent[0] < 0 < extent[1]
        for moves_low, moves_high in [(True, True), *([] if together else [(False, True), (True, False)])]:
            steps = [_FINE * i for i in range(-3, 4)]
            near = [(best[0] + moves_low * step, best[1] + moves_high * step) for step in steps]
            best = min((shares for shares in near if min(shares) > 0.01), key=error_after_solving)
    quantized(best)


def _clip_ratios(target: Tensor, bits: int) -> list[float]:
    """1, and smaller ones in even steps: many for a small layer, and never more than the work allows."""
    values, inputs = target.numel(), target.shape[2]
    wanted = max(_FEW_SCALES, min(_SCALES, _VALUES // values))
    count = max(1, min(wanted, _WORK // (values * inputs)))
    return [1 - 0.6 * i / count for i in range(count)] if bits < 8 else [1.0]
