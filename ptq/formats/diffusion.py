"""Error diffusion: images on few levels, what one pixel is off made up for by those that are rounded after it.

Floyd and Steinberg (1976) spread the error of a pixel so that the eye doesn't see it. Here it is spread so that a
network doesn't: with weights that follow from how its answers react, colours included. Pixels (y, x) are rounded in
waves, by ascending ``2y + x``: all of a wave at once, and their channels one after the other.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

REACH = 3  # rows and columns that an error is spread over, each way
_SLOPE = 2  # of the waves: 1 has fewer of them and less to choose from, 3 hardly does better
DAMPING = 0.01  # as a share of the mean of the correlation at no shift
_PILED = 1.0  # steps that an error has at most: beyond the ends of the grid they would pile up


def correlation_of(gradients: Tensor, lags: int = 2 * REACH) -> Tensor:
    """``K[a, b, d] = Σ_p g_a(p) g_b(p + d)`` of gradients [N, C, H, W], summed over images: ``[C, C, L, L]``.

    For shifts d of up to so many rows and columns, that of none in the middle. A small change e of an image changes
    what the gradients are of by ``Σ g e``, and K says what the square of that is on average, wherever e is.
    """
    height, width = (lags + max(size, lags + 1) for size in gradients.shape[2:])  # so that no shift wraps around
    spectrum = torch.fft.rfft2(gradients.double(), s=(height, width))  # [N, C, f, f]
    cross = torch.einsum("nayx,nbyx->abyx", spectrum.conj(), spectrum)
    found: Tensor = torch.fft.irfft2(cross, s=(height, width))
    return found.roll((lags, lags), (2, 3))[:, :, : 2 * lags + 1, : 2 * lags + 1]


def spread_of(correlation: Tensor, damping: float = DAMPING) -> Tensor:
    """How much of a rounding error goes where: ``[C, C, 2R + 1, 2R + 1]``, to and from which channel, R + dy, R + dx.

    Of all ways to spread the error n of one value over what is rounded later, the one for which
    ``Σ e_a(p) K[a, b, q - p] e_b(q)``, e being n and what was spread, is least: normal equations, as those of linear
    prediction. Rounding errors of different values have nothing to do with each other, so it is the least for the
    whole image, too.
    """
    channels, lags = len(correlation), correlation.shape[-1] // 2
    reach = lags // 2
    shifts = torch.cartesian_prod(torch.arange(-reach, reach + 1), torch.arange(-reach, reach + 1))
    places = torch.cat(
        [torch.zeros(1, 2, dtype=torch.int64), shifts[shifts @ torch.tensor([_SLOPE, 1]) > 0]]
    )  # the pixel, then later ones
    channel = torch.arange(channels).repeat(len(places))
    down, right = places.repeat_interleave(channels, dim=0).T  # in the order of rounding
    matrix = correlation.double().cpu()[
        channel[:, None], channel, lags + down - down[:, None], lags + right - right[:, None]
    ]
    mean = matrix.diagonal()[:channels].mean()
    damped = matrix + damping * mean * torch.eye(len(matrix))
    spread = torch.zeros(channels, channels, 2 * reach + 1, 2 * reach + 1, dtype=torch.float64)
    for source in range(channels):
        later = slice(source + 1, None)
        weights = torch.linalg.solve(damped[later, later], -matrix[later, source])
        spread[channel[later], source, reach + down[later], reach + right[later]] = weights
    return spread


@torch.no_grad()
def diffused(x: Tensor, scale: float, zero_point: float, first: int, last: int, spread: Tensor) -> Tensor:
    """Images [N, C, H, W] on the grid ``(q - zero_point) · scale``, their rounding errors spread.

    In float64, so that sums in another order round to the same codes.
    """
    samples, channels, height, width = x.shape
    reach = spread.shape[2] // 2
    low, high = first - zero_point, last - zero_point
    spread = spread.to(device=x.device, dtype=torch.float64)
    within = spread[:, :, reach, reach].tolist()
    around = spread.abs().amax((0, 1))  # [2R + 1, 2R + 1]
    around[reach, reach] = 0
    down, right = around.nonzero().T - reach
    weights = spread[:, :, reach + down, reach + right].transpose(1, 2).flatten(1)  # [C, taps · C]
    steps = F.pad(x.double() / scale, (reach,) * 4).permute(2, 3, 1, 0).flatten(0, 1).contiguous()  # [P, C, N]
    errors = torch.zeros_like(steps)
    wide = width + 2 * reach
    sources = -(down * wide + right)
    for own in _waves(height, width, reach, x.device):
        near = errors.index_select(0, (own[:, None] + sources).flatten()).view(len(own), -1, samples)
        values = torch.baddbmm(steps.index_select(0, own), weights.expand(len(own), -1, -1), near)  # [rows, C, N]
        codes = torch.empty_like(values)
        left = values.unbind(1)
        for channel, (value, code) in enumerate(zip(left, codes.unbind(1), strict=True)):
            for error, share in zip(left[:channel], within[channel], strict=False):
                value.add_(error, alpha=share)
            torch.round(value, out=code).clamp_(low, high)
            torch.sub(code, value, out=value).clamp_(-_PILED, _PILED)  # now what is left
        errors.index_copy_(0, own, values)
        steps.index_copy_(0, own, codes)
    found = steps.view(-1, wide, channels, samples)[reach : reach + height, reach : reach + width]
    return found.permute(3, 2, 0, 1).to(x, memory_format=torch.contiguous_format).mul_(scale)


@lru_cache(maxsize=8)
def _waves(height: int, width: int, margin: int, device: torch.device) -> list[Tensor]:
    """The pixels of each wave, by their index in a map with such a margin around."""
    waves = []
    for wave in range(_SLOPE * (height - 1) + width):
        rows = torch.arange(max(0, -((width - 1 - wave) // _SLOPE)), min(height, wave // _SLOPE + 1), device=device)
        waves.append((rows + margin) * (width + 2 * margin) + wave - _SLOPE * rows + margin)
    return [wave for wave in waves if len(wave)]
