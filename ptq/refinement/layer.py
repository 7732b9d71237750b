"""One layer refined: from the rows it meets in the quantized network towards what the float layer gives."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.formats import affine
from ptq.quantization.modules import FakeQuantize
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
            given = None if "ranges" in steps else layer.weight_scale.view(len(weight), -1)  # type: ignore[operator]
            weight, scale = round_weight(
                weight, hessian.to(wanted), bits, several, given, compensate="rounding" in steps
            )
            layer.weight_scale.copy_(scale.flatten())  # type: ignore[operator]
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
    given: Tensor | None = None,
    *,
    compensate: bool = True,
) -> tuple[Tensor, Tensor]:
    """The weight on a grid near the target [g, o, n], by ``(w - t) H (w - t)ᵀ``, and the scales [g, o / several].

    For each output channel: compensated rounding with the scales of many clipping ratios, the best of which goes
    through rounds of coordinate descent and of fitting the scale to the codes. ``several`` consecutive rows share
    one scale. Scales that are ``given`` stay; without ``compensate`` each weight goes to the nearest code.
    """
    first, last = affine.code_range(bits, symmetric=True)
    absmax = target.abs().reshape(len(target), -1, several * target.shape[2]).amax(2)  # [g, O]
    scales = [affine.symmetric_scale(absmax * ratio, bits).to(target) for ratio in _clip_ratios(target, bits)]
    if given is not None:
        scales = [given.to(target)]
    tried = torch.cat(scales, 1).repeat_interleave(several, 1)  # [g, ratios · o]: all at once, one below the other
    targets = target.repeat(1, len(scales), 1)
    found = rounding.nearest(targets, tried, first, last)
    if compensate:
        found = rounding.compensated(targets, hessian, tried, first, last)
    errors = rounding.shared_sum(rounding.output_error(found, targets, hessian), several)
    apart = (len(target), len(scales), -1)
    chosen = errors.view(apart).argmin(1, keepdim=True)  # [g, 1, o]
    spread = tried.view(apart).gather(1, chosen)[:, 0]
    best = found.view(*apart[:2], *target.shape[1:]).take_along_dim(chosen[:, :, :, None], 1)[:, 0]
    for _ in range(_ROUNDS if compensate else 0):
        best = rounding.descended(best, target, hessian, spread, first, last)
        if given is None:
            codes = (best / spread[:, :, None]).round_()
            spread = rounding.refitted_scale(best, target, hessian, spread, several)
            best = codes * spread[:, :, None]
    return best, spread[:, ::several]


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
