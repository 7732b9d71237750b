"""Codes of 1 to 16 bits in ⌈n·b/8⌉ bytes, and back.

The layout is planar, so that every step is one operation on long contiguous runs. Codes are taken in blocks of 131,072;
with ``g = 8 / gcd(b, 8)`` codes to ``w = b·g/8`` bytes, a block of m codes is cut into g planes of ``m // g`` codes,
and gives w planes of bytes: the codes number i of all planes, put one after another from the lowest bit up, fill the
bytes number i of all byte planes. The last ``m mod g`` codes of the last block follow as one such group, of which only
the bytes that hold bits are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ptq.formats.tensors import BLOCK

MAX_BITS = 16


def packed_length(count: int, bits: int) -> int:
    """``⌈count · bits / 8⌉``."""
    return (count * bits + 7) // 8


def code_dtype(bits: int) -> torch.dtype:
    """What codes of so many bits are kept in while they are not packed."""
    return torch.uint8 if bits <= 8 else torch.int32


def pack(codes: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Codes ``[n]`` from 0 to ``2^bits - 1``, uint8 or int32, as bytes, into ``out`` if given.

    >>> pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2)
    tensor([57], dtype=torch.uint8)
    """
    group = 8 // math.gcd(bits, 8)
    length = packed_length(len(codes), bits)
    payload = torch.empty(length, dtype=torch.uint8, device=codes.device) if out is None else out
    whole = len(codes) // group * group
    for start, end, blocks in _runs(whole, codes.device):
        run = payload[start * bits // 8 : end * bits // 8]
        _pack_group(codes[start:end].view(blocks, group, -1), bits, run.view(blocks, bits * group // 8, -1))
    if whole < len(codes):
        last = torch.zeros(1, group, 1, dtype=codes.dtype, device=codes.device)
        last[0, : len(codes) - whole, 0] = codes[whole:]
        packed = torch.empty(1, bits * group // 8, 1, dtype=torch.uint8, device=codes.device)
        _pack_group(last, bits, packed)
        payload[whole * bits // 8 :] = packed.view(-1)[: length - whole * bits // 8]
    return payload


def unpack(payload: Tensor, count: int, bits: int) -> Tensor:
    """The codes ``[count]`` that ``pack`` packed."""
    group = 8 // math.gcd(bits, 8)
    codes = torch.empty(count, dtype=code_dtype(bits), device=payload.device)
    whole = count // group * group
    for start, end, blocks in _runs(whole, payload.device):
        run = payload[start * bits // 8 : end * bits // 8]
        _unpack_group(run.view(blocks, bits * group // 8, -1), bits, codes[start:end].view(blocks, group, -1))
    if whole < count:
        last = torch.zeros(1, bits * group // 8, 1, dtype=torch.uint8, device=payload.device)
        rest = payload[whole * bits // 8 :]
        last[0, : len(rest), 0] = rest
        unpacked = torch.empty(1, group, 1, dtype=codes.dtype, device=payload.device)
        _unpack_group(last, bits, unpacked)
        codes[whole:] = unpacked.view(-1)[: count - whole]
    return codes


def _runs(whole: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """From where to where the next run of codes goes, and how many blocks it has.

    On a CPU one block at a time, which stays in its cache; elsewhere all full blocks at once, and then the last.
    """
    full = whole // BLOCK
    if device.type == "cpu":
        yield from ((number * BLOCK, (number + 1) * BLOCK, 1) for number in range(full))
    elif full:
        yield 0, full * BLOCK, full
    if whole > full * BLOCK:
        yield full * BLOCK, whole, 1


def _pack_group(codes: Tensor, bits: int, out: Tensor) -> None:
    """Planes of codes ``[blocks, g, m]`` into planes of bytes ``[blocks, w, m]``."""
    for index, plane in enumerate(codes.unbind(1)):
        bit = index * bits
        for byte in range(bit // 8, (bit + bits - 1) // 8 + 1):
            shift = bit - 8 * byte  # where the code's lowest bit falls, counted from this byte's
            if shift > 0:
                # One pass does both: the bits don't overlap, and a byte drops what goes beyond it.
                low = plane if plane.dtype == torch.uint8 else (plane & 255).to(torch.uint8)
                out[:, byte].add_(low, alpha=1 << shift)
            elif plane.dtype != torch.uint8:
                out[:, byte].copy_((plane >> -shift) & 255)
            elif shift < 0:
                torch.bitwise_right_shift(plane, -shift, out=out[:, byte])
            else:
                out[:, byte].copy_(plane)


def _unpack_group(planes: Tensor, bits: int, out: Tensor) -> None:
    """Planes of bytes ``[blocks, w, m]`` into planes of codes ``[blocks, g, m]``."""
    mask = 2**bits - 1
    if out.dtype != torch.uint8:
        planes = planes.to(out.dtype)
    for index, code in enumerate(out.unbind(1)):
        bit = index * bits
        first, last = bit // 8, (bit + bits - 1) // 8
        if bit > 8 * first:
            torch.bitwise_right_shift(planes[:, first], bit - 8 * first, out=code)
        else:
            code.copy_(planes[:, first])
        for byte in range(first + 1, last + 1):
            code.add_(planes[:, byte], alpha=1 << (8 * byte - bit))
        if (bit + bits) % 8 or bits > 8:
            code.bitwise_and_(mask)
