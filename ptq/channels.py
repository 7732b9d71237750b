"""The one answer to "which channel is that", for activations and weights of every kind of layer.

With g groups a convolution's weight is ``[O, C/g, *k]``, a transposed one's ``[C, O/g, *k]``; a Linear is a
convolution without positions. Everything here goes through one view, ``[g, O/g, C/g, k…]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

Layer: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Linear
)
LAYER_TYPES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
_CACHED = 2**19  # elements that stay in a core's cache between two looks
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def layers_of(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Every Conv and Linear with its name, in the order the model registered them."""
    for name, module in model.named_modules():
        if isinstance(module, LAYER_TYPES):
            yield name, module


def weight_owners(model: nn.Module) -> dict[int, list[str]]:
    """Which modules hold each parameter, by its id: a tied weight has several."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    return owners


def why_fixed(name: str, layer: Layer, owners: dict[int, list[str]]) -> str | None:
    """Why this layer's weight can't be rewritten by itself, or None if it can."""
    if "weight" not in layer._parameters:
        return "its weight is computed by a parametrization: remove that first"
    others = [owner for owner in owners[id(layer.weight)] if owner != name]
    return f"its weight is shared with {others[0]}" if others else None


def input_channels(layer: Layer) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def output_channels(layer: Layer) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def channel_axis(layer: Layer) -> int:
    """Where an input has its channels, counted from the end, so that unbatched inputs fit too."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)


def kind_of(layer: Layer) -> str:
    """``Conv2d``, ``Conv2d depthwise``, ``Conv2d groups=4``, ``Linear`` …"""
    name = next(kind.__name__ for kind in LAYER_TYPES if isinstance(layer, kind))
    if isinstance(layer, nn.Linear) or layer.groups == 1:
        return name
    return f"{name} depthwise" if layer.groups == layer.in_channels else f"{name} groups={layer.groups}"


def grouped_view(weight: Tensor, layer: Layer) -> Tensor:
    """The weight as ``[g, O/g, C/g, k…]``: a view, so writing into it writes the weight."""
    if isinstance(layer, nn.Linear):
        return weight.unsqueeze(0)
    first, *rest = weight.shape
    view = weight.view(layer.groups, first // layer.groups, *rest)
    return view.transpose(1, 2) if isinstance(layer, _TRANSPOSED) else view


def activation_range(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each channel over every other axis: two tensors ``[C]``.

    NaN goes through both, so one look at the results finds it.
    """
    minimum, maximum = _over_others(x, axis, torch.amin, torch.amax)
    return minimum, maximum


def activation_maximum(x: Tensor, axis: int) -> Tensor:
    """The maximum alone, in half the time."""
    (maximum,) = _over_others(x, axis, torch.amax)
    return maximum


def _over_others(x: Tensor, axis: int, *reductions: Callable[..., Tensor]) -> Iterable[Tensor]:
    """What each reduction makes of every channel, ``[C]``."""
    axis %= x.dim()
    if axis == 1 and x.dim() > 2 and len(x) > 1:
        positions = math.prod(x.shape[2:])
        if positions < 1024:
            # Small maps leave a reduction over positions nothing to vectorise: over samples first is up to 4 times
            # faster.
            return [reduce(reduce(x, 0).flatten(1), 1) for reduce in reductions]
        if x.is_contiguous() and x.numel() > 2 * _CACHED:
            # Part by part, so that the second look at a part finds it in the cache.
            parts = torch.split(x.view(-1, positions), max(1, _CACHED // positions))
            found = [[reduce(part, 1) for reduce in reductions] for part in parts]
            by_sample = (torch.cat(ends).view(x.shape[:2]) for ends in zip(*found, strict=True))  # [N, C]
            return [reduce(ends, 0) for reduce, ends in zip(reductions, by_sample, strict=True)]
    others = tuple(i for i in range(x.dim()) if i != axis)
    return [reduce(x, others) if others else x for reduce in reductions]


def weight_absmax(weight: Tensor, layer: Layer) -> Tensor:
    """``|W|.reshape(g, O/g, C/g, -1).amax((1, 3)).reshape(C)``: the largest weight each input channel meets."""
    view = grouped_view(weight.detach(), layer)
    return view.abs().amax((1, *range(3, view.dim()))).flatten()


def scale_inputs(weight: Tensor, layer: Layer, factor: Tensor) -> None:
    """Multiply, in place, every weight element by the factor ``[C]`` of the input channel it belongs to."""
    view = grouped_view(weight, layer)  # [g, O/g, C/g, k…]
    groups, _, channels, *positions = view.shape
    view.mul_(factor.reshape(groups, 1, channels, *(1 for _ in positions)))


def scale_outputs(weight: Tensor, layer: Layer, factor: Tensor) -> None:
    """Multiply, in place, every weight element by the factor ``[O]`` of the output channel it belongs to."""
    view = grouped_view(weight, layer)
    groups, channels, _, *positions = view.shape
    view.mul_(factor.reshape(groups, channels, 1, *(1 for _ in positions)))


def output_absmax(weight: Tensor, layer: Layer) -> Tensor:
    """The largest ``|w|`` of each output channel, ``[O]``."""
    return grouped_view(weight.detach(), layer).abs().flatten(2).amax(2).flatten()


def over_outputs(values: Tensor, weight: Tensor, layer: Layer) -> Tensor:
    """Values ``[O]`` shaped so that they broadcast against the weight by output channel."""
    if isinstance(layer, _TRANSPOSED):
        groups, per_group = layer.groups, weight.shape[1]
        spread = values.reshape(groups, 1, per_group).expand(groups, weight.shape[0] // groups, per_group)
        return spread.reshape(weight.shape[0], per_group, *(1 for _ in weight.shape[2:]))
    return values.reshape(-1, *(1 for _ in weight.shape[1:]))


def over_inputs(values: Tensor, axis: int, x: Tensor) -> Tensor:
    """Values ``[C]`` shaped so that they broadcast against an input by channel."""
    return values.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])


def absmax_of(minimum: Tensor, maximum: Tensor) -> Tensor:
    return torch.maximum(minimum.abs(), maximum.abs())
