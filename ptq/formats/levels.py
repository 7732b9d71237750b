"""Non-uniform levels on [-1, 1] times a norm per bucket: QSGD, QSGDinf, NUQSGD, TernGrad, ALQ, ALQG, AMQ.

Each bucket of d values is divided by its norm, and each value goes to one of the two levels beside it: up with the
probability ``(v-ℓ_j)/(ℓ_{j+1}-ℓ_j)``, so that the mean is the value itself, or to the nearest, for inference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ptq.errors import InputError
from ptq.formats import bits as packing
from ptq.formats import learning
from ptq.formats.base import Format
from ptq.formats.distributions import Array, Distribution, Empirical, Mixture, TruncatedNormal, sampled
from ptq.formats.learning import Multiplier, alq, alqg, amq, exponential, uniform, variance
from ptq.formats.tensors import ROUNDINGS, as_bytes, block_of, bounds, checked_choice, fit_dtype, in_blocks, take_bytes

__all__ = [
    "Distribution",
    "Empirical",
    "Levels",
    "Mixture",
    "Multiplier",
    "TruncatedNormal",
    "alq",
    "alqg",
    "amq",
    "exponential",
    "uniform",
    "variance",
]

METHODS = ("uniform", "exponential", "ternary", "alq", "alqg", "amq", "fixed")
LEARNED = ("alq", "alqg", "amq")
NORMS = ("l2", "linf")
MODELS = ("data", "mixture", "normal")
_COMPARE_UP_TO = 32  # levels; comparing with each beats a binary search that isn't vectorised


@dataclass(frozen=True, kw_only=True)
class Levels(Format):
    """Codes of ``bits`` bits for levels on [-1, 1], and a float32 norm for each bucket of ``bucket`` values.

    ``method`` says where the levels come from. Learned ones (alq, alqg, amq) are fitted to each tensor on encoding
    and travel with it, 4 bytes a level; ``Levels.fit`` learns them once, after which they are part of the format.
    ``zero`` asks for a level at zero, which takes the place of one other. ``clip`` cuts values at so many standard
    deviations of their bucket first (TernGrad: 2.5).

    Random numbers are drawn in the order of the elements: on a CPU, a tensor that is cut at a border of buckets gives
    the same bytes as the whole, from one generator, unless levels are learned on the way.
    """

    name: ClassVar[str] = "levels"
    bits: int = 3
    method: str = field(default="uniform", metadata={"choices": METHODS})
    bucket: int = 8192
    norm: str = field(default="l2", metadata={"choices": NORMS})
    rounding: str = field(default="stochastic", metadata={"choices": ROUNDINGS})
    zero: bool = False
    p: float | None = None
    clip: float | None = None
    levels: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        checked_choice(self.norm, NORMS, "norm")
        checked_choice(self.rounding, ROUNDINGS, "rounding")
        if self.levels is not None and self.method != "fixed":
            object.__setattr__(self, "method", "fixed")
        checked_choice(self.method, METHODS, "method")
        if self.bucket < 1:
            raise InputError(f"bucket = {self.bucket}: a bucket has at least one value")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip = {self.clip}: give a number of standard deviations above 0")
        if self.method == "ternary" and self.bits != 2:
            raise InputError(f"bits = {self.bits}: three levels take 2")
        if self.zero and self.method == "amq":
            raise InputError("amq has the levels ±p^j and none at zero")
        if self.method == "fixed":
            self._check_levels()
        learning._count(self.bits, zero=self._has_zero)
        if self.method == "exponential":
            exponential(self.bits, self.p or 0.5, zero=self.zero)

    def _check_levels(self) -> None:
        levels = self.levels or ()
        rising = all(low < high for low, high in itertools.pairwise(levels))
        if len(levels) < 2 or len(levels) > 2**self.bits or not rising or levels[0] != -1 or levels[-1] != 1:
            raise InputError(
                f"levels {'/'.join(f'{level:g}' for level in levels) or 'missing'}: give 2 to {2**self.bits} rising "
                f"numbers from -1 to 1 for {self.bits} bits, separated by /"
            )

    @property
    def _has_zero(self) -> bool:
        return self.zero or self.method == "ternary"

    @property
    def _travelling(self) -> int:
        """How many levels go with each tensor."""
        return 2**self.bits - self._has_zero if self.method in LEARNED else 0

    @classmethod
    def fit(
        cls,
        tensor: Tensor,
        bits: int = 3,
        method: str = "alq",
        *,
        model: str = "data",
        previous: Levels | None = None,
        bucket: int = 8192,
        norm: str = "l2",
        rounding: str = "stochastic",
        zero: bool = False,
    ) -> Levels:
        """A format whose levels are learned from this tensor, each bucket weighted by its squared norm.

        ``model`` is what the learning sees: a sample of the data itself, a ``mixture`` of truncated normals, one for
        each of some buckets, or one truncated ``normal``. ``previous`` joins the starts.
        """
        checked_choice(method, LEARNED, "method")
        checked_choice(model, MODELS, "model")
        form = cls(bits=bits, method=method, bucket=bucket, norm=norm, rounding=rounding, zero=zero)
        bounds(tensor.detach())
        if not tensor.numel():
            raise InputError("levels can't be learned from an empty tensor")
        buckets, norms = form._normalised(tensor.detach().reshape(-1).float())
        before = None if previous is None or previous.levels is None else np.array(previous.levels)
        learned = form._learn(_distribution(buckets, norms, model), before)
        return replace(form, method="fixed", levels=tuple(learned.tolist()))

    def _learn(self, distribution: Distribution, previous: Array | None = None) -> Array:
        if self.method == "amq":
            p = None if previous is None or len(previous) < 4 else float(previous[-2])
            return amq(distribution, self.bits, previous=p).levels
        learn = alq if self.method == "alq" else alqg
        return learn(distribution, self.bits, symmetry="zero" if self.zero else "free", previous=previous)

    def _levels_for(self, buckets: Tensor, norms: Tensor) -> Array:
        if self.method == "fixed":
            return np.array(self.levels)
        if self.method in ("uniform", "ternary"):
            return uniform(self.bits, zero=self._has_zero)
        if self.method == "exponential":
            return exponential(self.bits, self.p or 0.5, zero=self.zero)
        if not bool((norms > 0).any()):
            return uniform(self.bits, zero=self._has_zero)  # zeros alone teach nothing
        return self._learn(_distribution(buckets, norms, "data"))

    def _size(self, count: int) -> int:
        return max(1, min(self.bucket, count))

    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        count = math.prod(shape)
        if not count:
            return 0
        buckets = -(-count // self._size(count))
        return 4 * (self._travelling + buckets) + packing.packed_length(count, self.bits)

    def _normalised(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Buckets ``[n, d]`` of ``v = x / norm``, the last filled with zeros, and the norms ``[n]``."""
        size = self._size(len(flat))
        buckets = functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
        if self.clip is not None:
            members = torch.full((len(buckets), 1), size, device=flat.device)
            members[-1] -= buckets.numel() - len(flat)  # the zeros that fill the last bucket are no values of it
            wide = buckets.double()
            mean, square = wide.sum(1, keepdim=True) / members, wide.square().sum(1, keepdim=True) / members
            reach = (self.clip * (square - mean.square()).clamp(min=0).sqrt()).float()
            # Values that are all the same have no deviation to be cut at.
            buckets = torch.where(reach > 0, buckets.clamp(-reach, reach), buckets)
        largest = torch.maximum(-buckets.amin(1), buckets.amax(1))
        norms = largest
        if self.norm == "l2":
            # Of values divided by the largest, whose squares neither overflow nor vanish.
            scaled = buckets / torch.where(largest > 0, largest, 1.0)[:, None]
            norms = torch.linalg.vector_norm(scaled, dim=1).clamp(min=1) * largest
            norms = norms.clamp(max=torch.finfo(torch.float32).max)
        return (buckets / torch.where(norms > 0, norms, 1.0)[:, None]).clamp_(-1, 1), norms

    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        bounds(x)
        buckets, norms = self._normalised(x.reshape(-1).float())
        levels = torch.from_numpy(self._levels_for(buckets, norms)).float().to(x.device)
        flat = buckets.view(-1)[: x.numel()]
        codes = torch.empty(len(flat), dtype=torch.uint8, device=x.device)
        block = block_of(x.device, len(flat))
        choose = _nearest if self.rounding == "nearest" else _stochastic
        for part, out in in_blocks(block, flat, codes):
            out.copy_(choose(part, levels, generator))
        travelling = as_bytes(levels) if self._travelling else []
        return torch.cat([*travelling, *as_bytes(norms), packing.pack(codes, self.bits)])

    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device=payload.device)
        size = self._size(count)
        buckets, travelling = -(-count // size), self._travelling
        if travelling:
            levels = take_bytes(payload, 0, travelling, torch.float32)
        else:
            nothing = torch.zeros(0, 1)
            levels = torch.from_numpy(self._levels_for(nothing, nothing)).float().to(payload.device)
        norms = take_bytes(payload, 4 * travelling, buckets, torch.float32)
        codes = packing.unpack(payload[4 * (travelling + buckets) :], count, self.bits)
        result = torch.empty(buckets * size, dtype=torch.float32, device=payload.device)
        block = block_of(payload.device, count)
        for index, out in in_blocks(block, codes, result[:count]):
            torch.index_select(levels, 0, index.to(torch.int32), out=out)
        result.view(buckets, size).mul_(norms[:, None])
        return fit_dtype(result[:count], dtype).reshape(shape)


def _nearest(values: Tensor, levels: Tensor, generator: torch.Generator | None) -> Tensor:
    """The nearest level; halfway between two, the lower."""
    return _passed(values, (levels[1:] + levels[:-1]) / 2, right=False)


def _stochastic(values: Tensor, levels: Tensor, generator: torch.Generator | None) -> Tensor:
    """The level above with probability ``(v-ℓ_j)/(ℓ_{j+1}-ℓ_j)``, else the one below."""
    below = _passed(values, levels[1:-1], right=True)
    index = below.to(torch.int32)
    low, gap = levels.index_select(0, index), levels.diff().index_select(0, index)
    draws = torch.rand(values.shape, generator=generator, device=values.device)
    return below.add_(draws.mul_(gap) < values - low)


def _passed(values: Tensor, edges: Tensor, *, right: bool) -> Tensor:
    """How many of the ascending edges each value is above, or with ``right`` at or above; uint8."""
    if len(edges) >= _COMPARE_UP_TO:
        return torch.bucketize(values, edges, out_int32=True, right=right).to(torch.uint8)
    if values.device.type != "cpu":
        return (values[:, None] >= edges if right else values[:, None] > edges).sum(1, dtype=torch.uint8)
    # numpy compares floats several times faster than torch does on a CPU.
    compare = np.greater_equal if right else np.greater
    count, above = np.zeros(len(values), dtype=np.uint8), np.empty(len(values), dtype=np.bool_)
    for edge in edges.numpy():
        np.add(count, compare(values.numpy(), edge, out=above).view(np.uint8), out=count)
    return torch.from_numpy(count)


def _distribution(buckets: Tensor, norms: Tensor, model: str) -> Distribution:
    if not bool((norms > 0).any()):
        raise InputError("levels can't be learned from zeros alone")
    if model == "mixture":
        return Mixture.fit(buckets.double().cpu().numpy(), norms.double().cpu().numpy())
    values, weights = sampled(buckets, norms)
    return TruncatedNormal.fit(values, weights) if model == "normal" else Empirical(values, weights)
