"""α for each group of layers: the one whose quantized layers come closest to the float ones, on sampled rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.errors import InputError
from ptq.formats import affine
from ptq.smoothing.factors import checked_alpha, smoothing_factor

GRID = tuple(round(0.05 * i, 2) for i in range(21))  # 0 … 1
_COARSE_CLIPS = tuple(round(1 - 0.1 * i, 1) for i in range(9))  # 1.0 … 0.2
_FINER_STEPS = (0.05, 0.025)
_STARTS = (None, 0.5)  # where a search with clips starts, too: the best α may be another one then
_NEAR = 0.15  # how far α may move at a time, once it has been found without clips


@dataclass(frozen=True)
class Member:
    """One layer of a group whose factors are chosen together."""

    name: str
    layer: channels.Layer
    weight: Tensor  # as it will be quantized, with BatchNorm folded in; shaped as layer.weight
    rows: Tensor  # [R, C, k]; k = 1 for Linear and transposed convolutions
    minimum: Tensor  # [C]
    maximum: Tensor  # [C]
    activation_absmax: Tensor  # [C]
    classes: Tensor  # [C], int64: channels with the same number, in whichever member, share one factor


@dataclass(frozen=True)
class Choice:
    """What was found for a group; ``alpha`` is None where no smoothing is as good as any."""

    alpha: float | None
    activation_clips: dict[str, float]  # by member; 1 is the whole range
    weight_clips: dict[str, float]
    error: float  # mean over the members
    curve: dict[float | None, dict[str, float]]  # every α, and None for no smoothing → member → error without clips


def shared_factors(members: Sequence[Member], alpha: float) -> list[Tensor]:
    """The factors ``[C]`` of each member: ``smoothing_factor(a, w, α)`` for each class.

    a and w are the largest activation and the largest weight of the class, over all members and channels.
    """
    return _Classes(members).factors(checked_alpha(alpha))


def output_error(
    member: Member,
    factor: Tensor,
    bits_weights: int | None,
    bits_activations: int | None,
    activation_clip: float = 1.0,
    weight_clip: float = 1.0,
) -> float:
    """``Σ(y - ŷ)² / Σy²`` over the member's rows, with y = X·W and ŷ = Q(X / s) · Q(W · s); None bits are float.

    Q rounds X to affine codes over ``[min(0, min_c minimum / s), max(0, max_c maximum / s)]`` times its clip, per
    tensor, and W to symmetric ones over the absmax times its clip, per output channel.
    """
    trial = _Trial(member, bits_weights, bits_activations)
    return trial.error(trial.scaled(factor), _Clips(activation_clip, weight_clip))


def output_l1(
    member: Member,
    factor: Tensor,
    bits_weights: int | None,
    bits_activations: int | None,
    activation_clip: float = 1.0,
    weight_clip: float = 1.0,
) -> float:
    """``Σ|y - ŷ| / Σ|y|`` of the same y and ŷ as in ``output_error``."""
    trial = _Trial(member, bits_weights, bits_activations)
    return trial.l1(trial.scaled(factor), _Clips(activation_clip, weight_clip))


def search_group(
    members: Sequence[Member],
    weights: int | None,
    activations: int | None,
    *,
    alphas: Sequence[float] = GRID,
    clip: bool = False,
) -> Choice:
    """The α with the least mean error over the members; none if that is as good.

    With ``clip`` also a ratio for the activations' range and one for the weights' of each member, by coordinate
    descent from the best α without clips, from no smoothing and from 0.5: no step is taken that raises the error.
    """
    if not members:
        raise InputError("a group without layers: there is nothing to search")
    candidates = [None, *(checked_alpha(alpha) for alpha in alphas)]
    group = _Group(members, weights, activations)
    clips = [_Clips() for _ in members]
    errors = group.errors(candidates, clips)
    curve = {alpha: {member.name: e for member, e in zip(members, errors[alpha], strict=True)} for alpha in candidates}
    alpha = _least(errors)
    if clip:
        starts = dict.fromkeys([alpha, *(start for start in _STARTS if start in candidates)])
        clipped = {start: group.best_clips(start, clips, _COARSE_CLIPS) for start in starts}
        alpha = _least({start: group.errors([start], clipped[start])[start] for start in starts})
        clips = clipped[alpha]
        for _ in range(2):
            errors = group.errors(_near(alpha, candidates), clips)
            alpha = _least(errors)
            clips = group.best_clips(alpha, clips, ())
        errors = group.errors([alpha], clips)
    return Choice(
        alpha=alpha,
        activation_clips={member.name: ratio.activations for member, ratio in zip(members, clips, strict=True)},
        weight_clips={member.name: ratio.weights for member, ratio in zip(members, clips, strict=True)},
        error=sum(errors[alpha]) / len(members),
        curve=curve,
    )


@dataclass(frozen=True)
class _Clips:
    activations: float = 1.0
    weights: float = 1.0


@dataclass(frozen=True)
class _Scaled:
    """A member's rows divided and its weight multiplied by a factor, with their ranges."""

    rows: Tensor  # [g, R, n]
    low: float
    high: float
    weight: Tensor  # [g, O/g, m, n]
    absmax: Tensor  # [g, O/g, 1, 1]


class _Trial:
    """A member laid out for matrix products, and what its float layer gives.

    In each of g groups n products add up to one output: n = C/g · k, and m = 1. An input of a transposed convolution
    gives k contributions to each output channel instead: n = C/g, and m = k.
    """

    def __init__(self, member: Member, bits_weights: int | None, bits_activations: int | None) -> None:
        self._member, self._bits_weights, self._bits_activations = member, bits_weights, bits_activations
        weight = channels.grouped_view(member.weight.detach().float(), member.layer)
        groups, outputs, inputs, *_ = weight.shape
        weight = weight.reshape(groups, outputs, inputs, -1)  # [g, O/g, C/g, k]
        if not isinstance(member.layer, nn.Linear) and member.layer.transposed:
            weight = weight.transpose(2, 3).contiguous()  # [g, O/g, m, n]
        else:
            weight = weight.reshape(groups, outputs, 1, -1)  # [g, O/g, 1, n]
        self._weight = weight
        self._taps = member.rows.shape[2]
        rows = member.rows.to(weight.device, torch.float32).reshape(len(member.rows), groups, inputs * self._taps)
        self._rows = rows.transpose(0, 1).contiguous()  # [g, R, n]
        self._output = torch.bmm(self._rows, _as_matrix(weight))  # [g, R, O/g · m]
        self._energy = float(self._output.square().sum())

    def scaled(self, factor: Tensor) -> _Scaled:
        """``X / s`` and ``W · s``, and the ranges that a calibration of the smoothed layer would have."""
        low = float((self._member.minimum / factor.to(self._member.minimum)).min())
        high = float((self._member.maximum / factor.to(self._member.maximum)).max())
        groups = len(self._weight)
        spread = factor.to(self._weight).reshape(groups, -1).repeat_interleave(self._taps, 1)  # [g, n]
        weight = self._weight * spread[:, None, None]
        absmax = torch.maximum(weight.amax((2, 3), keepdim=True), -weight.amin((2, 3), keepdim=True))
        return _Scaled(self._rows / spread[:, None], min(0.0, low), max(0.0, high), weight, absmax)

    def quantized_rows(self, scaled: _Scaled, clip: float) -> Tensor:
        bits = self._bits_activations
        if bits is None:
            return scaled.rows
        ends = torch.tensor([scaled.low * clip, scaled.high * clip])
        scale, zero_point = affine.affine_parameters(ends[0], ends[1], bits)
        first, last = affine.code_range(bits)
        return _on_grid(scaled.rows, scale, first - float(zero_point), last - float(zero_point))

    def quantized_weight(self, scaled: _Scaled, clip: float) -> Tensor:
        bits = self._bits_weights
        if bits is None:
            return scaled.weight
        first, last = affine.code_range(bits, symmetric=True)
        return _on_grid(scaled.weight, affine.symmetric_scale(scaled.absmax * clip, bits), first, last)

    def error(self, scaled: _Scaled, clips: _Clips) -> float:
        rows = self.quantized_rows(scaled, clips.activations)
        return self._distance(rows, self.quantized_weight(scaled, clips.weights))

    def l1(self, scaled: _Scaled, clips: _Clips) -> float:
        rows, weight = self.quantized_rows(scaled, clips.activations), self.quantized_weight(scaled, clips.weights)
        found = torch.bmm(rows, _as_matrix(weight))
        return float((found - self._output).abs().sum()) / max(float(self._output.abs().sum()), sys.float_info.min)

    def best_clips(self, scaled: _Scaled, clips: _Clips, coarse: Sequence[float]) -> _Clips:
        """First the activations' ratio with the weights' as it is, then the other way round."""
        if self._bits_activations is not None:
            weight = self.quantized_weight(scaled, clips.weights)
            ratio = _best_ratio(
                lambda clip: self._distance(self.quantized_rows(scaled, clip), weight), clips.activations, coarse
            )
            clips = replace(clips, activations=ratio)
        if self._bits_weights is not None:
            rows = self.quantized_rows(scaled, clips.activations)
            ratio = _best_ratio(
                lambda clip: self._distance(rows, self.quantized_weight(scaled, clip)), clips.weights, coarse
            )
            clips = replace(clips, weights=ratio)
        return clips

    def _distance(self, rows: Tensor, weight: Tensor) -> float:
        difference = torch.baddbmm(self._output, rows, _as_matrix(weight), alpha=-1)
        return float(difference.square_().sum()) / max(self._energy, sys.float_info.min)


class _Group:
    """The members and the factors they share; one member at a time is laid out for its products."""

    def __init__(self, members: Sequence[Member], weights: int | None, activations: int | None) -> None:
        self._members, self._weights, self._activations = members, weights, activations
        self._classes = _Classes(members)

    def errors(self, alphas: Sequence[float | None], clips: Sequence[_Clips]) -> dict[float | None, list[float]]:
        """For each α the error of each member."""
        found: dict[float | None, list[float]] = {alpha: [] for alpha in alphas}
        factors = {alpha: self._classes.factors(alpha) for alpha in alphas}
        for index, (member, ratios) in enumerate(zip(self._members, clips, strict=True)):
            trial = _Trial(member, self._weights, self._activations)
            for alpha in alphas:
                found[alpha].append(trial.error(trial.scaled(factors[alpha][index]), ratios))
        return found

    def best_clips(self, alpha: float | None, clips: Sequence[_Clips], coarse: Sequence[float]) -> list[_Clips]:
        found = []
        for member, factor, ratios in zip(self._members, self._classes.factors(alpha), clips, strict=True):
            trial = _Trial(member, self._weights, self._activations)
            found.append(trial.best_clips(trial.scaled(factor), ratios, coarse))
        return found


class _Classes:
    """The largest activation and the largest weight of each class of channels."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._classes = [member.classes.cpu() for member in members]
        count = 1 + max(int(classes.max()) for classes in self._classes)
        self._activation, self._weight = torch.zeros(count), torch.zeros(count)
        for member, classes in zip(members, self._classes, strict=True):
            weight = channels.weight_absmax(member.weight, member.layer)
            for largest, values in ((self._activation, member.activation_absmax), (self._weight, weight)):
                largest.scatter_reduce_(0, classes, values.float().cpu(), "amax")

    def factors(self, alpha: float | None) -> list[Tensor]:
        """``[C]`` for each member; None is no smoothing, and ones."""
        if alpha is None:
            return [torch.ones(len(classes)) for classes in self._classes]
        factor = smoothing_factor(self._activation, self._weight, alpha)
        return [factor[classes] for classes in self._classes]


def _as_matrix(weight: Tensor) -> Tensor:
    return weight.flatten(1, 2).transpose(1, 2)  # [g, O/g, m, n] → [g, n, O/g · m]


def _on_grid(x: Tensor, scale: Tensor, lowest: float, highest: float) -> Tensor:
    """``affine.fake`` with the zero-point taken off the bounds already."""
    return (x / scale).round_().clamp_(lowest, highest).mul_(scale)


def _least(errors: dict[float | None, list[float]]) -> float | None:
    """The α with the least total error, the first of equals."""
    return min(errors, key=lambda alpha: sum(errors[alpha]))


def _near(alpha: float | None, candidates: Sequence[float | None]) -> list[float | None]:
    """The candidates to try around an α, itself among them; there is nothing near to no smoothing but all of them."""
    if alpha is None:
        return list(candidates)
    return [other for other in candidates if other is None or abs(other - alpha) < _NEAR + 1e-9]


def _best_ratio(error: Callable[[float], float], start: float, coarse: Sequence[float]) -> float:
    """The clip ratio of the least error: over a coarse grid, then in ever smaller steps around the best so far."""
    found = {ratio: error(ratio) for ratio in dict.fromkeys((start, *coarse))}
    for step in _FINER_STEPS:
        best = min(found, key=lambda ratio: found[ratio])
        for ratio in (round(best - step, 3), round(best + step, 3)):
            if 0 < ratio <= 1 and ratio not in found:
                found[ratio] = error(ratio)
    return min(found, key=lambda ratio: found[ratio])
