"""The race: its tests against scipy's, its error rate on answers of known probabilities, its cost, and the digits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

import ptq
from ptq.cli import invoke
from ptq.errors import InputError
from ptq.racing import Race, Shuffled, Stretch, hold, sign_test, upper_bound
from ptq.sweeping import Sweep

ALPHAS = tuple(round(0.05 * step, 2) for step in range(1, 20))


def drawn(right: NDArray[np.float64], images: int, seed: int) -> NDArray[np.bool_]:
    """Answers that are right with these probabilities; an image that is hard for one network is hard for all.

    P(right) of contender k is exactly ``right[k]``: its answer is right if a standard normal, of which most is shared
    between the contenders, lies below the quantile.
    """
    generator = np.random.default_rng(seed)
    shared, own = generator.standard_normal(images), generator.standard_normal((len(right), images))
    return np.sqrt(0.9) * shared + np.sqrt(0.1) * own < stats.norm.ppf(right)[:, None]


def raced(answers: NDArray[np.bool_]) -> Race:
    """A race whose contenders give these answers."""
    race = Race(tuple(range(len(answers))), answers.shape[1])
    while (missing := race.missing()) is not None:
        until, waiting = missing
        for contender in waiting:
            race.add(contender, answers[int(contender), len(race.answers[contender]) : until])
    return race


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (0, 7), (7, 0), (30, 12), (12, 30), (400, 380)])
def test_the_sign_test_is_scipys(wins: int, losses: int) -> None:
    ours = float(sign_test(np.array(wins), np.array(losses)))
    expected = stats.binomtest(wins, wins + losses, alternative="greater").pvalue if wins + losses else 1.0
    assert ours == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("successes", "trials"), [(0, 20), (7, 20), (20, 20), (3, 5000)])
def test_the_bound_is_clopper_and_pearsons(successes: int, trials: int) -> None:
    test = stats.binomtest(successes, trials, alternative="less")
    expected = test.proportion_ci(confidence_level=0.999, method="exact").high
    assert float(upper_bound(np.array(successes), np.array(trials), 0.001)) == pytest.approx(expected, rel=1e-6)


def test_a_clear_winner_is_found_for_less_than_a_third() -> None:
    right = np.array([0.6, 0.65, 0.7, 0.72, 0.9, 0.72, 0.7, 0.65, 0.6, 0.55])
    race = raced(drawn(right, 5000, seed=1))
    assert race.survivors == [4] and race.winner == 4 and race.margin() == 0
    assert race.cost < 1 / 4 and len(race.answers[4]) == 5000
    for contender, dropped in race.dropped.items():
        assert right[int(dropped.by)] > right[int(contender)]
        assert dropped.confidence >= 0.95


def test_the_cost_is_bounded_where_nothing_can_be_told_apart() -> None:
    race = raced(drawn(np.full(12, 0.8), 3000, seed=2))
    assert len(race.survivors) > 1
    assert race.cost <= 1 / 3
    assert len(race.finalists) >= 2 and all(len(race.answers[finalist]) == 3000 for finalist in race.finalists)
    assert 0 < race.margin() < 10


def test_error_rates_on_known_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """In at most 5 % of races is the best one thrown out, or better than the winner by more than the margin.

    The best leads by nothing or next to nothing, which is where a rule without a correction for many looks and many
    pairs fails: that one is raced as well.
    """
    races, wrong, wrong_uncorrected = 120, 0, 0
    for lead in (0.0, 0.01):
        right = np.array([0.8 + lead, *[0.8] * 5, 0.78, 0.76])
        fields = [drawn(right, 1500, seed) for seed in range(races // 2)]
        for race in map(raced, fields):
            behind = 100 * (right[0] - right[int(race.winner)])
            wrong += 0 not in race.survivors or behind > race.margin()
        with monkeypatch.context() as uncorrected:
            uncorrected.setattr(Race, "_tests", 1)
            wrong_uncorrected += sum(0 not in race.survivors for race in map(raced, fields))
    assert wrong <= 0.05 * races
    assert wrong_uncorrected > 0.1 * races


def test_a_race_goes_on_where_it_was() -> None:
    answers = drawn(np.array([0.7, 0.72, 0.75, 0.8, 0.79, 0.6, 0.6, 0.79]), 3000, seed=3)
    undisturbed = raced(answers)
    race = Race(tuple(range(8)), 3000)
    while (missing := race.missing()) is not None:
        until, waiting = missing
        race.add(waiting[0], answers[int(waiting[0]), len(race.answers[waiting[0]]) : until])
        race = Race.from_json(json.loads(json.dumps(race.to_json())))  # interrupted after every single answer
    assert race.to_json() == undisturbed.to_json()
    assert undisturbed.to_json()["finished"] and not Race(tuple(range(8)), 3000).to_json()["finished"]


class Counted:
    """Batches that count how often they are read."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter(self.batches)


def test_stretches_of_the_order_make_up_the_data() -> None:
    labels = torch.arange(103)
    batches = [(part[:, None].float(), part) for part in labels.split(10)]
    data = Shuffled(batches, memory=2**20)
    assert len(data) == 103
    found = [data.between(start, stop) for start, stop in ((0, 20), (20, 64), (64, 103))]
    sizes = [len(target) for part in found for _, target in part.batches]
    assert max(sizes) <= 10 and sum(sizes) == 103 and len(sizes) < 16  # not a batch for each handful
    parts = [torch.cat([target for _, target in part.batches]) for part in found]
    assert all(torch.equal(part, torch.from_numpy(stretch.indices)) for part, stretch in zip(parts, found, strict=True))
    assert [len(part) for part in parts] == [20, 44, 39]
    assert torch.equal(torch.cat(parts).sort().values, labels)
    assert all(torch.equal(images[:, 0].long(), target) for part in found for images, target in part.batches)
    assert parts[0].max() > 60 and parts[0].min() < 40  # spread over the data


def test_data_that_exceed_the_memory_come_in_pieces() -> None:
    batches = Counted([(torch.arange(40.0)[:, None] + 40 * number, torch.arange(40)) for number in range(5)])
    asked: list[int] = []

    def right(contender: float, stretch: Stretch) -> NDArray[np.bool_]:
        values = torch.cat([images[:, 0] for images, _ in stretch.batches])
        asked.append(len(values))
        return (values >= 20 * contender).numpy()

    race = Race(tuple(map(float, range(8))), 200)
    list(hold(race, Shuffled(batches, memory=4 * 7), right))
    assert max(asked) == 7
    assert race.seen >= 32 and race.winner == 0 and race.answers[0.0].all()
    in_one = Race(tuple(map(float, range(8))), 200)
    list(hold(in_one, Shuffled(batches, memory=2**20), right))
    assert [answers.sum() for answers in in_one.answers.values()] == [a.sum() for a in race.answers.values()]


def test_batches_of_other_shapes_are_not_joined() -> None:
    batches = [{"ids": torch.zeros(8, 3 + number), "labels": torch.zeros(8).long()} for number in range(3)]
    parts = Shuffled(batches, memory=2**20).between(0, 12).batches
    assert sum(len(part["labels"]) for part in parts) == 12
    assert [part["ids"].shape[1] for part in parts] == sorted({part["ids"].shape[1] for part in parts})


@pytest.fixture(scope="module")
def full_sweep(digits: ptq.Task, digits_calibration: ptq.Calibration) -> Sweep:
    alphas = ALPHAS[::3]
    return ptq.sweep(digits.model, digits_calibration, digits.calibration, digits.evaluation, alphas, 3, 3)


def test_digits(digits: ptq.Task, digits_calibration: ptq.Calibration, full_sweep: Sweep) -> None:
    """What wins the race is as good as the best of the full sweep, for a third of its cost."""
    arguments = (digits.model, digits_calibration, digits.calibration, digits.evaluation, ALPHAS[::3], 3, 3)
    saved: list[str] = []
    result = ptq.sweep(*arguments, race=True, on_point=lambda so_far: saved.append(json.dumps(so_far.to_json())))
    race = result.races["W3A3"]
    assert race.cost <= 1 / 3
    winner, best = result.best("W3A3"), full_sweep.best("W3A3")
    assert [point.alpha for point in result.points] == [None, race.winner]
    assert winner == full_sweep.find("W3A3", race.winner)
    assert best.accuracy.interval[0] <= winner.accuracy.score <= best.accuracy.interval[1]
    assert best.accuracy.score - winner.accuracy.score <= race.margin() or race.margin() == 0
    for alpha, dropped in race.dropped.items():
        worse, better = full_sweep.find("W3A3", alpha), full_sweep.find("W3A3", dropped.by)
        assert worse is not None and better is not None and worse.accuracy.score < better.accuracy.score
    half_done = Sweep.from_json(json.loads(saved[len(race.contenders) + 2]))
    resumed = ptq.sweep(*arguments, race=True, resume=half_done)
    assert resumed.to_json() == result.to_json()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--race", "--bits", "w3a3", "--alphas", "0.1:0.9:0.1", "--no-auto", "--images", "150"]
    assert invoke([*command, "--run", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    race = json.loads((tmp_path / "sweep.json").read_text())["races"]["W3A3"]
    assert race["finished"] and [entry["alpha"] for entry in race["contenders"]] == [n / 10 for n in range(1, 10)]
    assert f"race at W3A3: α = {race['winner']:g}" in shown and "95% confidence" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("alphas", "metric", "message"),
    [((0.2, 0.5), "top1", "a race of 2 α"), (ALPHAS, "matthews", "judged by matthews")],
    ids=["too few", "metric"],
)
def test_what_can_not_be_raced(
    alphas: tuple[float, ...],
    metric: str,
    message: str,
    digits: ptq.Task,
    digits_calibration: ptq.Calibration,
) -> None:
    with pytest.raises(InputError, match=message):
        ptq.sweep(
            digits.model, digits_calibration, digits.calibration, digits.evaluation, alphas, metric=metric, race=True
        )
