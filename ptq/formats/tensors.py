"""What all formats do with tensors: refuse what isn't finite, go block by block, read and write bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ptq.errors import InputError

BLOCK = 131_072  # elements per step on a CPU: the work buffers of a block stay in a core's second-level cache
ROUNDINGS = ("nearest", "stochastic")


def checked_choice(value: str, choices: Sequence[str], what: str) -> None:
    if value not in choices:
        raise InputError(f"{what} = {value!r}: choose one of {', '.join(choices)}")


def require_finite(low: Tensor, high: Tensor, x: Tensor) -> None:
    """Refuse NaN, Inf and what float32, in which scales are kept, can't hold; given extremes of ``x`` find them."""
    largest = torch.finfo(torch.float32).max
    if low.numel() and not bool(((low >= -largest) & (high <= largest)).all()):
        bad = ~torch.isfinite(x)
        what = "NaN or Inf"
        if not bool(bad.any()):
            bad, what = x.abs() > largest, "beyond float32's range"
        first = tuple(bad.nonzero()[0].tolist())
        raise InputError(f"{int(bad.sum())} of {x.numel()} values are {what}, the first at index {first}")


def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element, known to be finite; zeros for an empty tensor."""
    if not x.numel():
        return x.new_zeros(()), x.new_zeros(())
    low, high = torch.aminmax(x)
    require_finite(low, high, x)
    return low, high


def block_of(device: torch.device, elements: int) -> int:
    """How many elements to work on at once: on a CPU what fits its cache, elsewhere everything."""
    return BLOCK if device.type == "cpu" else max(1, elements)


def in_blocks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of tensors of the same length, side by side; views."""
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_bytes(*parts: Tensor) -> list[Tensor]:
    return [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]


def take_bytes(payload: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` numbers that stand in the payload from byte ``start`` on, wherever that is aligned."""
    size = torch.empty((), dtype=dtype).element_size()
    return payload[start : start + count * size].clone().view(dtype)


def fit_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, with what would overflow brought to the dtype's largest value."""
    largest = torch.finfo(dtype).max
    return (values.clamp(-largest, largest) if largest < torch.finfo(values.dtype).max else values).to(dtype)
