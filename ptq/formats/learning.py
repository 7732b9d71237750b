"""Levels that suit a distribution: ALQ by coordinate descent and by gradient, AMQ.

All minimise ``Ψ(ℓ) = Σ_j ∫ (x-ℓ_j)(ℓ_{j+1}-x) f(x) dx``, the variance that stochastic rounding to the levels adds.
Its derivative in a level e between c and d is ``∫_c^e (x-c) f - ∫_e^d (d-x) f``. Every start runs as one row of an
array; the lowest Ψ wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptq.errors import InputError
from ptq.formats.distributions import Array, Distribution, Symmetrised

SYMMETRIES = ("free", "even", "zero")
_MAX_BITS = 8
_SWEEPS, _NEWTON_STEPS, _GRADIENT_STEPS = 40, 60, 5000
_CONVERGED = 1e-12  # largest move of a level


@dataclass(frozen=True, eq=False)
class Multiplier:
    """What AMQ found: levels ``±p^j`` and their Ψ."""

    p: float
    levels: Array
    variance: float


def uniform(bits: int, *, zero: bool = False) -> Array:
    """``2^bits`` evenly spaced levels from -1 to 1; with zero among them, one less.

    >>> uniform(2, zero=True)
    array([-1.,  0.,  1.])
    """
    return np.linspace(-1.0, 1.0, _count(bits, zero=zero))


def exponential(bits: int, p: float = 0.5, *, zero: bool = False) -> Array:
    """``±p^j`` for j from 0 to ``2^(bits-1) - 1``; a zero takes the place of the smallest pair.

    >>> exponential(3, zero=True)
    array([-1.  , -0.5 , -0.25,  0.  ,  0.25,  0.5 ,  1.  ])
    """
    if not 0 < p < 1:
        raise InputError(f"p = {p}: choose between 0 and 1")
    positive = p ** np.arange(_count(bits, zero=zero) // 2, dtype=np.float64)
    return np.concatenate([-positive, [0.0] if zero else [], positive[::-1]])


def _count(bits: int, *, zero: bool) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= _MAX_BITS or (zero and bits < 2):
        raise InputError(f"bits = {bits}: choose from {2 if zero else 1} to {_MAX_BITS} for levels")
    return int(2**bits) - zero


def variance(levels: Array, distribution: Distribution) -> float:
    """``Ψ(ℓ) = Σ_j ∫ (x-ℓ_j)(ℓ_{j+1}-x) f(x) dx``."""
    return float(_psi(np.asarray(levels, dtype=np.float64)[None], distribution)[0])


def _psi(levels: Array, distribution: Distribution) -> Array:
    low, high = levels[:, :-1], levels[:, 1:]
    mass, first, second = distribution.moments(low, high)
    result: Array = ((low + high) * first - second - low * high * mass).sum(1)
    return result


def alq(distribution: Distribution, bits: int = 3, *, symmetry: str = "free", previous: Array | None = None) -> Array:
    """Levels of least Ψ: coordinate descent from several starts, then Newton's method on all levels at once.

    Returns ``2**bits`` ascending levels with ends -1 and 1. With ``symmetry="even"`` they are symmetric without, with
    ``"zero"`` (one level less) with a level at zero.
    """
    target, levels = _starts(distribution, bits, symmetry, previous)
    inner = levels.shape[1] - 2
    for _ in range(_SWEEPS if inner > 0 else 0):
        before = levels.copy()
        for first in (1, 2):  # levels with the same parity don't see each other
            place = slice(first, levels.shape[1] - 1, 2)
            low, high = levels[:, first - 1 : -2 : 2], levels[:, first + 1 :: 2]
            size = min(low.shape[1], high.shape[1])
            if size:
                levels[:, place] = target.between(low[:, :size], high[:, :size])
        if np.abs(levels - before).max() < _CONVERGED:
            break
    return _best(_newton(levels, target) if inner > 0 else levels, target, symmetry)


def alqg(
    distribution: Distribution,
    bits: int = 3,
    *,
    learning_rate: float = 1.0,
    symmetry: str = "free",
    previous: Array | None = None,
) -> Array:
    """Levels of least Ψ by gradient steps ``min(lr · |g|, gap / 2)``; lr is halved where Ψ would rise."""
    target, levels = _starts(distribution, bits, symmetry, previous)
    # A first step wider than the narrowest gap could carry a level to where a narrow distribution has no gradient.
    steepest = np.abs(_gradient(levels, target)).max(1, initial=1e-300)
    rate = np.minimum(learning_rate, np.diff(levels, axis=1).min(1) / steepest)[:, None]
    psi = _psi(levels, target)
    for _ in range(_GRADIENT_STEPS):
        gradient = _gradient(levels, target)
        gaps = np.diff(levels, axis=1)
        room = np.where(gradient > 0, gaps[:, :-1], gaps[:, 1:]) / 2
        step = np.sign(gradient) * np.minimum(rate * np.abs(gradient), room)
        trial = levels.copy()
        trial[:, 1:-1] -= step
        trial_psi = _psi(trial, target)
        better = trial_psi < psi
        if not better.any() and (np.abs(step).max(initial=0.0) < _CONVERGED or rate.max() < 1e-9):
            break
        levels = np.where(better[:, None], trial, levels)
        psi = np.where(better, trial_psi, psi)
        rate = np.where(better[:, None], rate * 1.2, rate / 2)
    return _best(levels, target, symmetry)


def amq(distribution: Distribution, bits: int = 3, *, previous: float | None = None) -> Multiplier:
    """The p of least Ψ for levels ``±p^j``, the middle interval ``[-p^s, p^s]`` included.

    Starts are the minima on a grid that contains .1, .2 … .9 and ``previous``; between a minimum's neighbours the
    derivative in p is brought to zero by bisection.
    """
    half = _count(bits, zero=False) // 2
    exponents = np.arange(half, dtype=np.float64)
    grid = np.unique(np.concatenate([np.arange(1, 100) / 100, [previous] if previous else []]))

    def levels_of(p: Array) -> Array:
        positive = p[:, None] ** exponents
        return np.concatenate([-positive, positive[:, ::-1]], axis=1)

    if half == 1:
        return Multiplier(0.5, np.array([-1.0, 1.0]), variance(np.array([-1.0, 1.0]), distribution))

    def slope(p: Array) -> Array:
        growth = exponents * p[:, None] ** np.maximum(exponents - 1, 0.0)
        direction = np.concatenate([-growth, growth[:, ::-1]], axis=1)[:, 1:-1]
        result: Array = (_gradient(levels_of(p), distribution) * direction).sum(1)
        return result

    psi = _psi(levels_of(grid), distribution)
    bounded = np.concatenate([[np.inf], psi, [np.inf]])
    minima = np.flatnonzero((psi <= bounded[:-2]) & (psi <= bounded[2:]))
    edges = np.concatenate([[1e-6], grid, [1 - 1e-6]])
    low, high = edges[minima], edges[minima + 2]
    for _ in range(50):
        middle = (low + high) / 2
        rising = slope(middle) > 0
        low, high = np.where(rising, low, middle), np.where(rising, middle, high)
    candidates = np.concatenate([(low + high) / 2, grid[minima]])
    psi = _psi(levels_of(candidates), distribution)
    best = int(psi.argmin())
    return Multiplier(float(candidates[best]), levels_of(candidates)[best], float(psi[best]))


def _starts(distribution: Distribution, bits: int, symmetry: str, previous: Array | None) -> tuple[Distribution, Array]:
    """Quantiles, uniform, exponential, and the previous best: ``[starts, levels]``."""
    if symmetry not in SYMMETRIES:
        raise InputError(f"symmetry = {symmetry!r}: choose one of {', '.join(SYMMETRIES)}")
    zero = symmetry == "zero"
    target = distribution if symmetry == "free" else Symmetrised(distribution)
    count = _count(bits, zero=zero)
    even = uniform(bits, zero=zero)
    quantiles = target.quantile(np.linspace(0.0, 1.0, count))
    # Ties among quantiles, as a spike gives them, are drawn apart.
    quantiles = np.clip(0.999 * quantiles + 0.001 * even, -1.0, 1.0)
    quantiles[0], quantiles[-1] = -1.0, 1.0
    starts = [np.maximum.accumulate(quantiles), even]
    starts += [exponential(bits, p, zero=zero) for p in (0.5, 0.7) if count > 2]
    if previous is not None:
        if np.shape(previous) != (count,):
            raise InputError(f"previous has {np.size(previous)} levels, {count} are asked for")
        starts.append(np.asarray(previous, dtype=np.float64))
    return target, np.stack(starts)


def _gradient(levels: Array, distribution: Distribution) -> Array:
    """``∂Ψ/∂ℓ_j`` of the interior levels."""
    low, high = levels[:, :-1], levels[:, 1:]
    mass, first, _ = distribution.moments(low, high)
    rising, falling = first - low * mass, high * mass - first  # ∫ (x-c) f and ∫ (d-x) f of each interval
    return rising[:, :-1] - falling[:, 1:]


def _newton(levels: Array, distribution: Distribution) -> Array:
    """Newton's method on the gradient, whose Jacobian is tridiagonal; a step is taken only where Ψ falls.

    Coordinate descent needs sweeps by the square of the number of levels; this needs a handful of steps.
    """
    psi, size = _psi(levels, distribution), levels.shape[1] - 2
    index = np.arange(size)
    damping = np.ones(len(levels))
    for _ in range(_NEWTON_STEPS):
        mass = distribution.mass(levels[:, :-1], levels[:, 1:])
        curvature = (levels[:, 2:] - levels[:, :-2]) * distribution.density(levels[:, 1:-1])
        if not np.isfinite(curvature).all():
            return levels  # data have no density: coordinate descent is all there is
        jacobian = np.zeros((len(levels), size, size))
        jacobian[:, index, index] = np.maximum(curvature, mass[:, :-1] + mass[:, 1:]) * 1e-9 + curvature + 1e-300
        jacobian[:, index[1:], index[:-1]] = jacobian[:, index[:-1], index[1:]] = -mass[:, 1:-1]
        try:
            step = np.linalg.solve(jacobian, _gradient(levels, distribution)[..., None])[..., 0]
        except np.linalg.LinAlgError:
            return levels
        trial = levels.copy()
        trial[:, 1:-1] -= damping[:, None] * step
        ordered = np.isfinite(trial).all(1) & (np.diff(trial, axis=1) > 0).all(1)
        trial_psi = _psi(np.where(ordered[:, None], trial, levels), distribution)
        better = ordered & (trial_psi < psi)
        levels = np.where(better[:, None], trial, levels)
        psi = np.where(better, trial_psi, psi)
        damping = np.where(better, np.minimum(1.0, damping * 4), damping / 4)
        moved = np.abs(step[better]).max(initial=0.0)
        if moved < _CONVERGED and (not better.any() or damping.max() < 1e-3 or moved > 0):
            break
    return levels


def _best(levels: Array, distribution: Distribution, symmetry: str) -> Array:
    best: Array = levels[int(_psi(levels, distribution).argmin())]
    return best if symmetry == "free" else (best - best[::-1]) / 2
