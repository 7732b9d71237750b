"""Learned levels: closed forms against quadrature, optima against known values."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import truncnorm

from ptq.errors import InputError
from ptq.formats import format, learning, levels
from ptq.formats.distributions import Array, Distribution

NORMAL = levels.TruncatedNormal(mean=0.0, std=0.1)
MIXTURE = levels.Mixture([levels.TruncatedNormal(0.1, 0.3), levels.TruncatedNormal(-0.2, 0.05)], weights=[3, 1])


def reference(mean: float, std: float) -> truncnorm:
    return truncnorm((-1 - mean) / std, (1 - mean) / std, mean, std)


def test_the_values_worked_out_elsewhere() -> None:
    two = levels.alq(NORMAL, bits=2)
    np.testing.assert_allclose(two, [-1, -0.12111397, 0.12111397, 1], atol=1e-8)
    assert levels.variance(two, NORMAL) == pytest.approx(1.6963313e-2, abs=1e-9)
    three = levels.alq(NORMAL, bits=3)
    positive = [0.0380329, 0.12229105, 0.25064618, 1]
    np.testing.assert_allclose(three, [*(-np.array(positive[::-1])), *positive], atol=1e-8)
    assert three.dtype == np.float64
    assert levels.variance(three, NORMAL) == pytest.approx(1.6756063e-3, abs=1e-10)
    found = levels.amq(NORMAL, bits=3)
    assert found.p == pytest.approx(0.36029364, abs=1e-8)
    assert levels.variance(found.levels, NORMAL) == found.variance == pytest.approx(2.4043582e-3, abs=1e-10)
    assert levels.variance(levels.uniform(3), NORMAL) == pytest.approx(1.4342226e-2, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(-0.8, 0.8), st.floats(0.02, 2), st.floats(-1, 1), st.floats(-1, 1))
def test_partial_moments_are_the_integrals(mean: float, std: float, a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    density = reference(mean, std).pdf
    found = levels.TruncatedNormal(mean, std).moments(np.array(low), np.array(high))
    for power, moment in enumerate(found):
        points = [mean] if low < mean < high else None
        expected = quad(lambda x, power=power: x**power * density(x), low, high, points=points, limit=200)[0]
        assert float(moment) == pytest.approx(expected, abs=1e-7)


def test_a_mixture_is_the_sum_of_its_parts() -> None:
    low, high = np.array([-1.0, -0.3]), np.array([0.2, 1.0])
    parts = [component.moments(low, high) for component in MIXTURE.components]
    for index, moment in enumerate(MIXTURE.moments(low, high)):
        np.testing.assert_allclose(moment, 0.75 * parts[0][index] + 0.25 * parts[1][index], rtol=1e-12)
    np.testing.assert_allclose(MIXTURE.mass(low, high), MIXTURE.moments(low, high)[0], rtol=1e-12)


def test_a_spike_that_quadrature_misses_is_seen() -> None:
    spike = levels.TruncatedNormal(0.3, 1e-5)
    assert float(spike.mass(np.array(-1.0), np.array(1.0))) == pytest.approx(1.0)
    found = levels.alq(spike, bits=3)
    assert np.all((found[1:-1] > 0.299) & (found[1:-1] < 0.301))
    assert levels.variance(found, spike) < 1e-7


DISTRIBUTIONS: dict[str, Distribution] = {
    "narrow": levels.TruncatedNormal(0.0, 0.01),
    "wide": levels.TruncatedNormal(0.0, 5.0),
    "to one side": levels.TruncatedNormal(0.6, 0.2),
    "mixture": MIXTURE,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_alq_is_a_minimum(name: str, bits: int) -> None:
    distribution = DISTRIBUTIONS[name]
    found = levels.alq(distribution, bits)
    assert len(found) == 2**bits and found[0] == -1 and found[-1] == 1 and (np.diff(found) > 0).all()
    best = levels.variance(found, distribution)
    # The stated equation, level by level: ∫_c^e (x-c) f = ∫_e^d (d-x) f.
    assert np.abs(_balance(found, distribution)).max(initial=0.0) < 1e-9
    assert best <= levels.variance(levels.uniform(bits), distribution) + 1e-15
    if bits > 1:
        assert best <= levels.amq(distribution, bits).variance + 1e-12
    generator = np.random.default_rng(0)
    for _ in range(20):
        moved = found.copy()
        moved[1:-1] += generator.normal(0, 1e-4, len(found) - 2)
        assert levels.variance(np.sort(moved), distribution) >= best - 1e-12


def _balance(found: Array, distribution: Distribution) -> Array:
    c, e, d = found[:-2], found[1:-1], found[2:]
    left, right = distribution.moments(c, e), distribution.moments(e, d)
    return (left[1] - c * left[0]) - (d * right[0] - right[1])


@pytest.mark.parametrize("name", ["wide", "to one side", "mixture"])
@pytest.mark.parametrize("bits", [2, 3])
def test_the_gradient_finds_what_coordinate_descent_finds(name: str, bits: int) -> None:
    distribution = DISTRIBUTIONS[name]
    best, found = levels.alq(distribution, bits), levels.alqg(distribution, bits)
    assert levels.variance(found, distribution) == pytest.approx(levels.variance(best, distribution), abs=1e-9)


def test_the_gradient_stays_where_a_narrow_distribution_is() -> None:
    narrow = levels.TruncatedNormal(0.0, 0.003)  # a first step of the full learning rate leaves it behind
    best, found = levels.alq(narrow, 3), levels.alqg(narrow, 3)
    assert levels.variance(found, narrow) == pytest.approx(levels.variance(best, narrow), rel=1e-9)


def test_the_symmetric_forms() -> None:
    even = levels.alq(MIXTURE, bits=3, symmetry="even")
    np.testing.assert_array_equal(even, -even[::-1])
    folded = learning.Symmetrised(MIXTURE)
    e, d = even[4:5], even[5:6]
    # The first positive level solves 2e [F(e) - F(0)] = ∫_e^d (d-x) f.
    mass, first, _ = folded.moments(e, d)
    assert 2 * e * folded.mass(np.zeros(1), e) == pytest.approx(d * mass - first, abs=1e-10)
    zero = levels.alq(MIXTURE, bits=3, symmetry="zero")
    assert len(zero) == 7 and zero[3] == 0
    np.testing.assert_array_equal(zero, -zero[::-1])
    with pytest.raises(InputError, match="free, even, zero"):
        levels.alq(NORMAL, symmetry="odd")


@pytest.mark.parametrize("std", [0.03, 0.1, 0.5])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_amq_is_the_best_of_a_fine_grid(std: float, bits: int) -> None:
    distribution = levels.TruncatedNormal(0.0, std)
    found = levels.amq(distribution, bits)
    grid = [levels.variance(levels.exponential(bits, p), distribution) for p in np.linspace(0.005, 0.995, 199)]
    assert found.variance <= min(grid) + 1e-12
    np.testing.assert_allclose(found.levels, levels.exponential(bits, found.p), rtol=1e-12)


def test_variance_is_what_stochastic_rounding_adds() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.from_numpy(reference(0.0, 0.2).rvs(20_000, random_state=0)).float()
    values[0] = 1.0  # so that the L∞ norm is 1
    distribution = levels.TruncatedNormal(0.0, 0.2)
    for found in (levels.uniform(3), levels.alq(distribution, 3), levels.amq(distribution, 3).levels):
        form = levels.Levels(bits=3, levels=tuple(found), norm="linf", bucket=len(values))
        error = float((form.fake(values, generator) - values).double().square().mean())
        assert error == pytest.approx(levels.variance(found, distribution), rel=0.05)


@pytest.mark.parametrize("model", ["data", "mixture", "normal"])
@pytest.mark.parametrize("method", ["alq", "amq", "alqg"])
def test_levels_are_learned_from_data(method: str, model: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator) * torch.rand(64, 1, generator=generator)
    learned = levels.Levels.fit(x, bits=3, method=method, model=model, bucket=512)
    assert learned.method == "fixed" and learned.levels is not None and len(learned.levels) == 8
    assert format(str(learned)) == learned
    plain = format("qsgd:bits=3,bucket=512")

    def error(form: levels.Levels) -> float:
        return float((form.fake(x, torch.Generator().manual_seed(1)) - x).square().mean())

    assert isinstance(plain, levels.Levels)
    assert error(learned) < 0.2 * error(plain)
    again = levels.Levels.fit(x, bits=3, method=method, model=model, bucket=512, previous=learned)
    assert error(again) < 1.01 * error(learned)


def test_data_with_a_spike_at_zero_are_learned_too() -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).relu()
    learned = levels.Levels.fit(x, bits=3, norm="linf")
    assert learned.levels is not None
    assert (learned.fake(x) - x).square().mean() < (format("qsgdinf:bits=3").fake(x) - x).square().mean()
    assert min(abs(level) for level in learned.levels) < 0.02


def test_nothing_to_learn_from_is_said() -> None:
    with pytest.raises(InputError, match="empty"):
        levels.Levels.fit(torch.zeros(0))
    with pytest.raises(InputError, match="zeros alone"):
        levels.Levels.fit(torch.zeros(10))
    with pytest.raises(InputError, match="choose one of alq, alqg, amq"):
        levels.Levels.fit(torch.ones(10), method="uniform")
    with pytest.raises(InputError, match="above 0"):
        levels.TruncatedNormal(0, 0)
    with pytest.raises(InputError, match="nothing of it lies between"):
        levels.TruncatedNormal(5, 0.001)
    with pytest.raises(InputError, match="give each a weight"):
        levels.Mixture([NORMAL], weights=[1, 2])


def test_level_sets() -> None:
    np.testing.assert_allclose(levels.exponential(3), [-1, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1])
    np.testing.assert_allclose(levels.uniform(2), [-1, -1 / 3, 1 / 3, 1])
    assert format("terngrad").fake(torch.tensor([2.0, -2.0, 0.0])).tolist() == [2, -2, 0]


def test_clipping_is_at_deviations_of_the_bucket() -> None:
    x = torch.tensor([1.0, -1.0] * 50 + [50.0, 0, 0, 0])
    largest = format("terngrad:clip=2.5").fake(x).abs().max()
    assert float(largest) == pytest.approx(2.5 * float(x.std(correction=0)), rel=1e-5)


def test_three_bits_are_learned_in_twenty_milliseconds() -> None:
    distribution = levels.TruncatedNormal(0.01, 0.07)
    levels.alq(distribution)
    fastest = float("inf")
    for _ in range(5):
        started = time.process_time()  # a busy machine doesn't count
        levels.alq(distribution)
        fastest = min(fastest, time.process_time() - started)
    assert fastest < 0.02
