"""Distributions on [-1, 1] with closed-form partial moments, for learning levels.

Nothing here is integrated numerically: at small deviations a quadrature misses the spike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri
from torch import Tensor

from ptq.errors import InputError

Array = npt.NDArray[np.float64]
_TOLERANCE = 1e-13  # of a level, where it is solved for
_MAX_VALUES = 65_536  # a sample of this size moves Ψ by less than a thousandth
_MAX_COMPONENTS = 64


class Distribution(ABC):
    """What the learning of levels asks: moments of an interval, the density, and quantiles."""

    @abstractmethod
    def moments(self, low: Array, high: Array) -> tuple[Array, Array, Array]:
        """``∫ f``, ``∫ x f`` and ``∫ x² f`` from ``low`` to ``high``, elementwise."""

    @abstractmethod
    def density(self, x: Array) -> Array: ...

    def mass(self, low: Array, high: Array) -> Array:
        return self.moments(low, high)[0]

    def quantile(self, share: Array) -> Array:
        """Where the mass from -1 on is this share of all."""
        return self._where_mass(np.full_like(share, -1.0), np.full_like(share, 1.0), share)

    def between(self, low: Array, high: Array) -> Array:
        """The level e with ``∫_c^e (x-c) f = ∫_e^d (d-x) f`` between its neighbours c and d.

        Both sides are linear in the mass from c to e, so that this mass is known at once:
        ``∫_c^e f = ∫_c^d (d-x) f / (d-c)``, and e is where it is reached.
        """
        everything, first, _ = self.moments(low, high)
        gap = high - low
        with np.errstate(invalid="ignore", divide="ignore"):
            share = (high * everything - first) / gap
        level = self._where_mass(low, high, np.clip(share, 0.0, everything))
        # An interval without mass has no opinion.
        level = np.where((everything > 0) & np.isfinite(level), level, (low + high) / 2)
        return np.clip(level, low, high)

    def _where_mass(self, low: Array, high: Array, share: Array) -> Array:
        """Solve ``∫_low^e f = share`` for e: Newton steps inside a shrinking bracket."""
        left, right, level = low.copy(), high.copy(), (low + high) / 2
        for _ in range(100):
            excess = self.mass(low, level) - share
            left, right = np.where(excess <= 0, level, left), np.where(excess >= 0, level, right)
            with np.errstate(invalid="ignore", divide="ignore"):
                following = level - excess / self.density(level)
            inside = (following > left) & (following < right)
            following = np.where(inside, following, (left + right) / 2)
            if np.abs(following - level).max(initial=0.0) < _TOLERANCE:
                return following
            level = following
        return level


class TruncatedNormal(Distribution):
    """The normal distribution restricted to [-1, 1].

    >>> float(TruncatedNormal(mean=0.0, std=0.1).mass(np.array(-1.0), np.array(0.0)))
    0.5
    """

    def __init__(self, mean: float = 0.0, std: float = 0.1) -> None:
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise InputError(f"TruncatedNormal(mean={mean}, std={std}): the deviation has to be above 0")
        self.mean, self.std = float(mean), float(std)
        self._total = float(self._normal_mass(np.array(-1.0), np.array(1.0)))
        if self._total <= 0:
            raise InputError(f"TruncatedNormal(mean={mean}, std={std}): nothing of it lies between -1 and 1")

    def __repr__(self) -> str:
        return f"TruncatedNormal(mean={self.mean:g}, std={self.std:g})"

    @classmethod
    def fit(cls, values: Array, weights: Array | None = None) -> TruncatedNormal:
        """The sample's own mean and deviation."""
        mean = float(np.average(values, weights=weights)) if len(values) else 0.0
        variance = float(np.average((values - mean) ** 2, weights=weights)) if len(values) else 0.0
        return cls(mean=mean, std=max(math.sqrt(variance), 1e-6))

    def _normal_mass(self, low: Array, high: Array) -> Array:
        a, b = (low - self.mean) / self.std, (high - self.mean) / self.std
        # Above the mean by the upper tails: differences of numbers near 1 would lose the digits.
        above = a > 0
        result: Array = ndtr(np.where(above, -a, b)) - ndtr(np.where(above, -b, a))
        return result

    def density(self, x: Array) -> Array:
        z = (x - self.mean) / self.std
        result: Array = np.exp(-0.5 * z * z) / (math.sqrt(2 * math.pi) * self.std * self._total)
        return result

    def mass(self, low: Array, high: Array) -> Array:
        return self._normal_mass(low, high) / self._total

    def moments(self, low: Array, high: Array) -> tuple[Array, Array, Array]:
        """With ``φ`` the density: ``∫xf = μM - σ²[φ]``, ``∫x²f = (μ²+σ²)M - σ²[(x+μ)φ]``."""
        mass, variance = self.mass(low, high), self.std**2
        at_low, at_high = self.density(low), self.density(high)
        first = self.mean * mass - variance * (at_high - at_low)
        second = (self.mean**2 + variance) * mass
        second = second - variance * ((high + self.mean) * at_high - (low + self.mean) * at_low)
        return mass, first, second

    def _where_mass(self, low: Array, high: Array, share: Array) -> Array:
        a, b = (low - self.mean) / self.std, (high - self.mean) / self.std
        rest = np.maximum(self._normal_mass(low, high) - share * self._total, 0.0)
        upper = a + b > 0  # solve from the side whose tail is the smaller
        tail = np.where(upper, ndtr(-b) + rest, ndtr(a) + share * self._total)
        z = ndtri(np.clip(tail, 0.0, 1.0))
        level: Array = np.clip(self.mean + self.std * np.where(upper, -z, z), low, high)
        return level


class Mixture(Distribution):
    """``Σ γ_i TN(μ_i, σ_i)``; the weights are normalised."""

    def __init__(self, components: Sequence[TruncatedNormal], weights: Sequence[float] | Array) -> None:
        gamma = np.asarray(weights, dtype=np.float64)
        if not components or gamma.shape != (len(components),) or not (gamma >= 0).all() or not gamma.sum() > 0:
            raise InputError(f"Mixture of {len(components)} components: give each a weight of at least 0")
        self.components, self.weights = tuple(components), gamma / gamma.sum()
        self._mean = np.array([component.mean for component in components])
        self._std = np.array([component.std for component in components])
        self._total = np.array([component._total for component in components])

    def __repr__(self) -> str:
        return f"Mixture({len(self.components)} components)"

    @classmethod
    def fit(cls, buckets: Array, norms: Array, power: float = 2.0) -> Mixture:
        """One component for each bucket ``[n, d]`` of normalised values, weighted by ``norm^power``.

        Power 2 minimises the total squared error, power 1 the sum of the buckets' deviations.
        """
        chosen = np.unique(np.linspace(0, len(buckets) - 1, _MAX_COMPONENTS).astype(int))
        weights = norms[chosen].astype(np.float64) ** power
        if not weights.sum() > 0:
            weights = np.ones(len(chosen))
        return cls([TruncatedNormal.fit(buckets[index]) for index in chosen], weights)

    def density(self, x: Array) -> Array:
        z = (x[..., None] - self._mean) / self._std
        result: Array = np.exp(-0.5 * z * z) @ (self.weights / (math.sqrt(2 * math.pi) * self._std * self._total))
        return result

    def mass(self, low: Array, high: Array) -> Array:
        result: Array = self._masses(low, high) @ self.weights
        return result

    def _masses(self, low: Array, high: Array) -> Array:
        a, b = ((x[..., None] - self._mean) / self._std for x in (low, high))
        above = a > 0
        result: Array = (ndtr(np.where(above, -a, b)) - ndtr(np.where(above, -b, a))) / self._total
        return result

    def moments(self, low: Array, high: Array) -> tuple[Array, Array, Array]:
        masses, variance = self._masses(low, high), self._std**2
        density = []
        for x in (low, high):
            z = (x[..., None] - self._mean) / self._std
            density.append(np.exp(-0.5 * z * z) / (math.sqrt(2 * math.pi) * self._std * self._total))
        at_low, at_high = density
        first = self._mean * masses - variance * (at_high - at_low)
        second = (self._mean**2 + variance) * masses
        second -= variance * ((high[..., None] + self._mean) * at_high - (low[..., None] + self._mean) * at_low)
        return masses @ self.weights, first @ self.weights, second @ self.weights


class Empirical(Distribution):
    """The data themselves: weighted points, sums over intervals by cumulation."""

    def __init__(self, values: Array, weights: Array | None = None) -> None:
        order = np.argsort(values, kind="stable")
        self._values = np.clip(np.asarray(values, dtype=np.float64)[order], -1.0, 1.0)
        weight = np.ones(len(order)) if weights is None else np.asarray(weights, dtype=np.float64)[order]
        total = weight.sum()
        if not total > 0:
            raise InputError("levels can't be learned from no data, or from zeros alone")
        weight = weight / total
        powers = (weight, weight * self._values, weight * self._values**2)
        self._sums = [np.concatenate([[0.0], np.cumsum(power)]) for power in powers]

    def moments(self, low: Array, high: Array) -> tuple[Array, Array, Array]:
        # Points on the lower edge count, on the upper edge not, but for the very last: (x-c)(d-x) is 0 there anyway.
        start = np.searchsorted(self._values, low, side="left")
        end = np.searchsorted(self._values, high, side="left")
        end = np.where(high >= 1.0, len(self._values), end)
        mass, first, second = (sums[end] - sums[start] for sums in self._sums)
        return mass, first, second

    def density(self, x: Array) -> Array:
        return np.full_like(x, np.nan)  # points have none: Newton's step is never taken

    def _where_mass(self, low: Array, high: Array, share: Array) -> Array:
        start = np.searchsorted(self._values, low, side="left")
        place = np.searchsorted(self._sums[0], self._sums[0][start] + share, side="left")
        return np.clip(self._values[np.clip(place - 1, 0, len(self._values) - 1)], low, high)


class Symmetrised(Distribution):
    """``(f(x) + f(-x)) / 2``."""

    def __init__(self, distribution: Distribution) -> None:
        self._of = distribution

    def density(self, x: Array) -> Array:
        return (self._of.density(x) + self._of.density(-x)) / 2

    def moments(self, low: Array, high: Array) -> tuple[Array, Array, Array]:
        right, left = self._of.moments(low, high), self._of.moments(-high, -low)
        return (right[0] + left[0]) / 2, (right[1] - left[1]) / 2, (right[2] + left[2]) / 2


def sampled(values: Tensor, norms: Tensor) -> tuple[Array, Array]:
    """Some of the normalised values ``[n, d]`` of buckets, evenly spaced, and the squared norm each of them has."""
    flat, (_, size) = values.reshape(-1), values.shape
    stride = max(1, -(-flat.numel() // _MAX_VALUES))
    if stride > 1 and size % stride == 0:
        stride += 1  # not always the same place of a bucket
    chosen = flat[::stride].double().cpu().numpy()
    weights = norms.double().cpu().numpy()[np.arange(len(chosen)) * stride // size] ** 2
    return chosen, weights
