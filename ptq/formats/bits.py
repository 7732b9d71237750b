"""Codes of 1 to 16 bits in ⌈n·b/8⌉ bytes, and back.

The layout is planar, so that every step is one operation on long contiguous runs. Codes are taken in blocks of 131,072;
with ``g = 8 / gcd(b, 8)`` codes to ``w = b·g/8`` bytes, a block of m codes is cut into g planes of ``m // g`` codes,
and gives w planes of bytes: the codes number i of all planes, put one after another from the lowest bit up, fill the
bytes number i of all byte planes. The last ``m mod g`` codes of the last block follow as one such group, of which only
the bytes that hold bits are kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ptq.formats.base import BLOCK

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
    place = 0
    for start in range(0, whole, BLOCK):
        block = codes[start : min(start + BLOCK, whole)]
        size = len(block) * bits // 8
        _pack_group(block.view(group, -1), bits, payload[place : place + size].view(-1, len(block) // group))
        place += size
    if whole < len(codes):
        last = torch.zeros(group, 1, dtype=codes.dtype, device=codes.device)
        last[: len(codes) - whole, 0] = codes[whole:]
        packed = torch.empty(bits * group // 8, 1, dtype=torch.uint8, device=codes.device)
        _pack_group(last, bits, packed)
        payload[place:] = packed[: len(payload) - place, 0]
    return payload


def unpack(payload: Tensor, count: int, bits: int) -> Tensor:
    """The codes ``[count]`` that ``pack`` packed."""
    group = 8 // math.gcd(bits, 8)
    codes = torch.empty(count, dtype=code_dtype(bits), device=payload.device)
    whole = count // group * group
    place = 0
    for start in range(0, whole, BLOCK):
        block = codes[start : min(start + BLOCK, whole)]
        size = len(block) * bits // 8
        _unpack_group(payload[place : place + size].view(-1, len(block) // group), bits, block.view(group, -1))
        place += size
    if whole < count:
        last = torch.zeros(bits * group // 8, 1, dtype=torch.uint8, device=payload.device)
        last[: len(payload) - place, 0] = payload[place:]
        unpacked = torch.empty(group, 1, dtype=codes.dtype, device=payload.device)
        _unpack_group(last, bits, unpacked)
        codes[whole:] = unpacked[: count - whole, 0]
    return codes


def _pack_group(codes: Tensor, bits: int, out: Tensor) -> None:
    """Planes of codes ``[g, m]`` into planes of bytes ``[w, m]``."""
    filled = [False] * len(out)
    for index, plane in enumerate(codes):
        bit = index * bits
        for byte in range(bit // 8, (bit + bits - 1) // 8 + 1):
            shift = bit - 8 * byte  # where the code's lowest bit falls, counted from this byte's
            moved = plane << shift if shift > 0 else plane >> -shift if shift else plane
            if moved.dtype != torch.uint8:
                moved = (moved & 255).to(torch.uint8)
            if filled[byte]:
                out[byte].bitwise_or_(moved)
            else:
                out[byte].copy_(moved)
                filled[byte] = True


def _unpack_group(planes: Tensor, bits: int, out: Tensor) -> None:
    """Planes of bytes ``[w, m]`` into planes of codes ``[g, m]``."""
    mask = 2**bits - 1
    if out.dtype != torch.uint8:
        planes = planes.to(out.dtype)
    for index, code in enumerate(out):
        bit = index * bits
        first, last = bit // 8, (bit + bits - 1) // 8
        shift = bit - 8 * first
        if shift:
            torch.bitwise_right_shift(planes[first], shift, out=code)
        else:
            code.copy_(planes[first])
        for byte in range(first + 1, last + 1):
            code.bitwise_or_(planes[byte] << (8 * byte - bit))
        if (bit + bits) % 8 or last > first and bits % 8:
            code.bitwise_and_(mask)
