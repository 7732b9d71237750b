"""The rows that a layer multiplies its weight with, at random positions that differ from sample to sample.

A row is laid out as in ``ptq.sampling``: the patch of one output position, one token, or one input pixel of a
transposed convolution.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptq import channels
from ptq.sampling import priority, windows_of


def sampled_rows(
    x: Tensor, layer: channels.Layer, per_sample: int, *, first: int = 0, seed: int = 0, valid: Tensor | None = None
) -> Tensor:
    """Up to ``per_sample`` rows of each sample of an input, grouped for matrix products: ``[g, R, n]``.

    Which positions are taken depends on the seed, the sample's index in the stream, which starts at ``first`` here,
    and the shape of its map alone. ``valid`` [N, T] says which tokens of a Linear's input [N, T, C] are no padding;
    an input of another shape has nothing to do with it.
    """
    if isinstance(layer, nn.Linear):
        return _token_rows(x, per_sample, first, seed, valid).unsqueeze(0)
    if x.dim() == len(layer.kernel_size) + 1:  # unbatched: one sample
        x = x.unsqueeze(0)
    patches = _patches(x, layer, per_sample, first, seed)  # [N, C, J, k]
    samples, _, rows, taps = patches.shape
    grouped = patches.reshape(samples, layer.groups, -1, rows, taps).permute(1, 0, 3, 2, 4)  # [g, N, J, C/g, k]
    return grouped.reshape(layer.groups, samples * rows, -1)


def weight_matrix(weight: Tensor, layer: channels.Layer) -> Tensor:
    """The weight that a row meets: ``[g, O/g · m, n]``, with m contributions to each output channel.

    m is 1, and for a transposed convolution the number of its taps: an input pixel gives that many to each channel.
    """
    view = channels.grouped_view(weight, layer)
    groups, outputs, inputs, *_ = view.shape
    view = view.reshape(groups, outputs, inputs, -1)  # [g, O/g, C/g, k]
    if contributions(layer) > 1:
        return view.transpose(2, 3).reshape(groups, -1, inputs)
    return view.reshape(groups, outputs, -1)


def write_weight(layer: channels.Layer, matrix: Tensor) -> None:
    """The inverse of ``weight_matrix``, into the layer."""
    view = channels.grouped_view(layer.weight, layer)
    groups, outputs, inputs, *positions = view.shape
    if contributions(layer) > 1:
        matrix = matrix.reshape(groups, outputs, -1, inputs).transpose(2, 3)
    view.copy_(matrix.reshape(groups, outputs, inputs, *positions))


def contributions(layer: channels.Layer) -> int:
    """How many numbers a row gives to each output channel: m of ``weight_matrix``."""
    return math.prod(layer.kernel_size) if not isinstance(layer, nn.Linear) and layer.transposed else 1


def _token_rows(x: Tensor, per_sample: int, first: int, seed: int, valid: Tensor | None) -> Tensor:
    if valid is not None and x.dim() == 3 and valid.shape == x.shape[:2]:
        parts = enumerate(tokens[mask][None] for tokens, mask in zip(x, valid, strict=True))  # [1, T', C] each
        return torch.cat([_token_rows(tokens, per_sample, first + i, seed, None) for i, tokens in parts])
    x = x.reshape(len(x), -1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, 1, -1)  # [N, T, C]
    index = _positions(len(x), x.shape[1], per_sample, first, seed).to(x.device)  # [N, J]
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2])).flatten(0, 1)


def _patches(x: Tensor, layer: channels.Layer, per_sample: int, first: int, seed: int) -> Tensor:
    """What random output positions of each sample read: ``[N, C, J, k]``."""
    assert not isinstance(layer, nn.Linear)
    windows = windows_of(layer)
    if layer.padding_mode != "zeros":
        x = F.pad(x, [end for window in reversed(windows) for end in window.padding], layer.padding_mode)
        windows = [window.without_padding() for window in windows]
    sizes = x.shape[2:]
    outputs = [window.outputs(size) for window, size in zip(windows, sizes, strict=True)]
    chosen = _positions(len(x), math.prod(outputs), per_sample, first, seed)  # [N, J]
    flat = chosen.flatten()
    index, inside = torch.zeros(len(flat), 1, dtype=torch.int64), torch.ones(len(flat), 1, dtype=torch.bool)
    for window, size, output in zip(windows, sizes, torch.unravel_index(flat, outputs), strict=True):
        reads = window.reads(output)[:, None]  # [N · J, 1, taps]
        inside = (inside[:, :, None] & (reads >= 0) & (reads < size)).flatten(1)
        index = (index[:, :, None] * size + reads.clamp(0, size - 1)).flatten(1)
    where = index.reshape(len(x), 1, -1).to(x.device).expand(-1, x.shape[1], -1)  # [N, C, J · k]
    found = x.flatten(2).gather(2, where)
    if not bool(inside.all()):
        found.mul_(inside.reshape(len(x), 1, -1).to(found))
    return found.reshape(*found.shape[:2], chosen.shape[1], -1)


@lru_cache(maxsize=256)  # the same for both networks and all layers with maps of one size
def _positions(samples: int, positions: int, per_sample: int, first: int, seed: int) -> Tensor:
    """``[N, J]``, ascending: those positions of each sample whose hash of (seed, sample, position) is least."""
    if per_sample >= positions:
        return torch.arange(positions).expand(samples, -1)
    start = priority(seed, positions) - 2**63
    counter = torch.arange(first * positions, (first + samples) * positions).view(samples, positions)
    return _hashed(counter + start).topk(per_sample, dim=1, largest=False).indices.sort(1).values


def _hashed(x: Tensor) -> Tensor:
    """One step of splitmix64, on int64 that wraps around; the shifts drag the sign along, which does no harm here."""
    x = x * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
