"""Losses, paired intervals and the parts of labelled data, against closed forms and brute force."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from ptq.analysis.measuring import Answers, loss_change, paired_interval, score_change, within
from ptq.analysis.prediction import DistancePoint, bootstrap_interval, correlations, spearman
from ptq.analysis.subsets import after, count_samples
from ptq.batches import as_call


def answers(logits: list[list[float]], labels: list[int], metric: str = "top1") -> Answers:
    return Answers.of(torch.tensor(logits), torch.tensor(labels), metric)


def test_losses_are_cross_entropies() -> None:
    found = answers([[0.0, math.log(3)], [math.log(4), 0.0]], [1, 1])
    assert found.losses.tolist() == pytest.approx([-math.log(0.75), -math.log(0.2)])
    assert found.loss == pytest.approx(-math.log(0.75 * 0.2) / 2)
    assert found.evaluation.top1 == 50


def test_a_change_of_loss_has_the_interval_of_a_mean_of_differences() -> None:
    generator = np.random.default_rng(0)
    before, later = generator.exponential(size=(2, 40))
    evaluation = answers([[1.0, 0.0]] * 40, [0] * 40).evaluation
    change = loss_change(Answers(torch.tensor(before), evaluation), Answers(torch.tensor(later), evaluation))
    interval = stats.norm.interval(0.95, np.mean(later - before), stats.sem(later - before))
    assert change.change == pytest.approx(np.mean(later - before))
    assert change.interval == pytest.approx(interval)
    assert not change.is_clear
    one = loss_change(Answers(torch.tensor(before[:1]), evaluation), Answers(torch.tensor(later[:1]), evaluation))
    assert one.to_json()["interval"] == [None, None]  # JSON has no infinity


def test_the_paired_interval_covers_as_often_as_it_says() -> None:
    """20,000 draws of 200 pairs with 6 % lost and 2 % gained: the true difference is in 95 of 100 intervals."""
    generator = np.random.default_rng(1)
    draws = generator.multinomial(200, [0.06, 0.02, 0.92], size=20_000)
    inside = [low <= -0.04 <= high for low, high in (paired_interval(int(b), int(c), 200) for b, c, _ in draws)]
    assert 0.94 < np.mean(inside) < 0.97
    low, high = paired_interval(0, 0, 100)
    assert low < 0 < high  # nothing changed among a hundred is not a proof


def test_a_change_of_score_is_in_points_and_paired() -> None:
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    before = answers([right] * 8 + [wrong] * 2, [0] * 10)
    later = answers([right] * 9 + [wrong], [0] * 10)
    change = score_change(before, later)
    assert change.change == pytest.approx(10)
    assert change.interval == pytest.approx([100 * end for end in paired_interval(0, 1, 10)])
    # Another metric gets a bootstrap: the interval holds the change.
    labels = [0, 1] * 30
    logits = [[1.0, 0.0] if label == 0 else [0.0, 1.0] for label in labels]
    flipped = [row[::-1] if i % 6 == 0 else row for i, row in enumerate(logits)]
    fall = score_change(answers(logits, labels, "matthews"), answers(flipped, labels, "matthews"))
    assert fall.interval[0] < fall.change < fall.interval[1] < 0


def test_time_that_is_over_still_gives_one_item() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    assert list(within(0, endless())) == [1]
    assert list(within(math.inf, [1, 2, 3])) == [1, 2, 3]


def test_what_follows_the_first_samples() -> None:
    batches = [(torch.arange(4) + 4 * i, torch.arange(4) + 4 * i) for i in range(3)]
    for skipped in (0, 1, 3, 4, 6, 11):
        rest = [as_call(batch) for batch in after(batches, skipped)]
        assert torch.cat([call.args[0] for call in rest]).tolist() == list(range(skipped, 12))
        assert torch.cat([call.labels for call in rest if call.labels is not None]).tolist() == list(range(skipped, 12))
    assert after(batches, 12) is batches  # nothing follows: all of it
    texts = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}]
    assert as_call(next(iter(after(texts, 3)))).kwargs["input_ids"].tolist() == [3]
    assert count_samples(batches) == 12
    assert count_samples(iter(batches)) is None


@pytest.mark.parametrize("seed", range(3))
def test_rank_correlations_equal_scipy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=30)
    y = np.round(x + generator.normal(size=30), 0)  # with ties
    assert spearman(x.tolist(), y.tolist()) == pytest.approx(stats.spearmanr(x, y).statistic)
    low, high = bootstrap_interval(x.tolist(), y.tolist())
    reference = stats.bootstrap(
        (x, y), lambda a, b: stats.spearmanr(a, b).statistic, paired=True, method="percentile",
        vectorized=False, n_resamples=300, rng=seed,
    ).confidence_interval  # fmt: skip
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=0.12)
    assert low < spearman(x.tolist(), y.tolist()) < high


def test_the_distance_that_ranks_networks_best_comes_first() -> None:
    points = [
        DistancePoint(
            bits=f"W{bits}A{bits}",
            alpha=None,
            distances={"noise": (7 * i) % 11, "good": float(i), "constant": 1.0},
            drop=float(i**2),
            loss_increase=float(-i),
        )
        for i, bits in enumerate([8] * 5 + [4] * 5)
    ]
    found = correlations(points)
    assert [correlation.distance for correlation in found] == ["good", "noise"]  # a constant predicts nothing
    assert found[0].spearman == pytest.approx(1)
    assert found[0].within == pytest.approx(1)
    assert found[0].with_loss == pytest.approx(-1)
    assert correlations([points[0], points[0]]) == []  # no drop differs
