"""Several steps and minima per tensor ("multiple quantization"): the sorted values are cut into parts of equal size,
and each part has a uniform grid of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.formats import bits as packing
from ptq.formats.base import Format
from ptq.formats.ranking import MAX_PARTS, even_borders, split_by_rank
from ptq.formats.tensors import as_bytes, block_of, bounds, fit_dtype, in_blocks, take_bytes


@dataclass(frozen=True, kw_only=True)
class MultiStep(Format):
    """P parts of the stably sorted values, each with its minimum and its step ``(max - min) / (2^b - 1)``.

    ``code = clamp(rint((x - min) / step))``, 0 where the step is 0; the code word is ``(part << b) | code``, and
    ``8P + ⌈n (b + ⌈log2 P⌉) / 8⌉`` bytes hold them all. After ``topk:ratio=…+`` it codes the kept values alone.

    At equal bits, ``b + ⌈log2 P⌉``, one uniform grid has the smaller squared error; several sets pay for the typical
    value, where the many near zero matter more than the few far out.
    """

    name: ClassVar[str] = "multistep"
    parts: int = 4
    bits: int = 6

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MAX_PARTS:
            raise InputError(f"parts = {self.parts}: choose from 1 to {MAX_PARTS}")
        if not (self.bits >= 1 and self.word_bits <= packing.MAX_BITS):
            raise InputError(
                f"bits = {self.bits} with {self.parts} parts make words of {self.word_bits} bits: "
                f"choose at least 1 bit, and words of at most {packing.MAX_BITS}"
            )

    @property
    def word_bits(self) -> int:
        """``b + ⌈log2 P⌉``."""
        return self.bits + (self.parts - 1).bit_length()

    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        count = math.prod(shape)
        return 8 * self.parts + packing.packed_length(count, self.word_bits) if count else 0

    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        payload = torch.empty(self.nbytes_for(x.shape), dtype=torch.uint8, device=x.device)
        if not x.numel():
            return payload
        ends = bounds(x)
        flat = x.reshape(-1)
        parts = split_by_rank(flat, even_borders(len(flat), self.parts), ends)
        low = parts.low.float() + 0.0
        step = (parts.high.double() - parts.low.double()) / (2**self.bits - 1)
        step = step.clamp(max=torch.finfo(torch.float32).max).float()
        torch.cat(as_bytes(low, step), out=payload[: 8 * self.parts])
        packing.pack(self._words(flat, parts.part, low, step), self.word_bits, out=payload[8 * self.parts :])
        return payload

    def _words(self, flat: Tensor, part: Tensor, low: Tensor, step: Tensor) -> Tensor:
        words = torch.empty(len(flat), dtype=packing.code_dtype(self.word_bits), device=flat.device)
        divisor = torch.where(step > 0, step, torch.inf)
        block = -(-block_of(flat.device, len(flat)) // 2)  # half a block: four buffers have to stay in the cache
        values = torch.empty(min(block, len(flat)), device=flat.device)
        steps, indices = torch.empty_like(values), torch.empty_like(values, dtype=torch.int32)
        codes = torch.empty_like(indices)
        for x, number, out in in_blocks(block, flat, part, words):
            value, scale, index, code = (buffer[: len(x)] for buffer in (values, steps, indices, codes))
            index.copy_(number)
            torch.index_select(low, 0, index, out=value)
            torch.index_select(divisor, 0, index, out=scale)
            torch.sub(x, value, out=value)
            code.copy_(value.div_(scale).round_().clamp_(0, 2**self.bits - 1))
            out.copy_(code.add_(index, alpha=2**self.bits))
        return words

    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device=payload.device)
        low = take_bytes(payload, 0, self.parts, torch.float32)
        step = take_bytes(payload, 4 * self.parts, self.parts, torch.float32)
        # min + code · step, for every word there is
        table = low[:, None] + torch.arange(2**self.bits, device=payload.device) * step[:, None]  # [parts, codes]
        table = fit_dtype(table.clamp(max=torch.finfo(torch.float32).max).flatten(), dtype)
        words = packing.unpack(payload[8 * self.parts :], count, self.word_bits)
        return look_up(table, words).reshape(shape)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """``table[codes]``, block by block."""
    result = torch.empty(len(codes), dtype=table.dtype, device=codes.device)
    block = block_of(codes.device, len(codes))
    for index, out in in_blocks(block, codes, result):
        torch.index_select(table, 0, index.to(torch.int32), out=out)
    return result
