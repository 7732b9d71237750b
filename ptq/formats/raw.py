"""The values as they are: what a selecting format keeps when nothing else is said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ptq.formats.base import Format
from ptq.formats.tensors import as_bytes, bounds


@dataclass(frozen=True, kw_only=True)
class Raw(Format):
    """Float values, bit for bit."""

    name: ClassVar[str] = "raw"

    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        return math.prod(shape) * dtype.itemsize

    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        bounds(x)
        return as_bytes(x)[0].clone()

    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return payload.clone().view(dtype).reshape(shape)
