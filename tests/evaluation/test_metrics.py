"""Accuracy and correlation against scikit-learn, intervals against scipy, and answers compared in pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, matthews_corrcoef, top_k_accuracy_score
from torch import Tensor, nn

import ptq
from ptq.errors import InputError
from ptq.evaluation import Row
from ptq.evaluation.metrics import Evaluation, wilson_interval
from ptq.report.tables import accuracy_table


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 10, generator=generator), torch.randint(0, 10, (n,), generator=generator)) for n in (50, 7)]


def test_top1_and_top5_equal_scikit_learns(batches: list[tuple[Tensor, Tensor]]) -> None:
    result = ptq.evaluate(nn.Identity(), batches)
    scores = np.concatenate([x.numpy() for x, _ in batches])
    labels = np.concatenate([y.numpy() for _, y in batches])
    assert result.n == 57
    assert result.top1 == pytest.approx(100 * accuracy_score(labels, scores.argmax(1)))
    assert result.top5 == pytest.approx(100 * top_k_accuracy_score(labels, scores, k=5, labels=range(10)))


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (1, 450), (445, 450), (9173, 10000), (5, 10)])
def test_interval_equals_scipys(successes: int, n: int) -> None:
    expected = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_pairs_count_each_way(batches: list[tuple[Tensor, Tensor]]) -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.roll(1, 1)

    reference, other = ptq.evaluate(nn.Identity(), batches), ptq.evaluate(Shifted(), batches)
    paired = other.against(reference)
    was, now = reference.correct.numpy(), other.correct.numpy()
    assert paired.lost == int((was & ~now).sum()) > 0
    assert paired.gained == int((~was & now).sum()) > 0
    assert paired.changed == 57  # every answer moved by one class
    assert other.top1 - reference.top1 == pytest.approx(100 * (paired.gained - paired.lost) / 57)


def test_fewer_than_five_classes() -> None:
    assert ptq.evaluate(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 0]))]).top5 == 100.0


def test_logits_out_of_a_dict_a_tuple_or_an_attribute() -> None:
    class Wrapped(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.wrap = wrap

        def forward(self, x: Tensor) -> object:
            return self.wrap(x)

    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    batch = [(torch.eye(3), torch.tensor([0, 1, 2]))]
    for wrap in (lambda x: {"logits": x}, lambda x: (x, None), Output, lambda x: {"out": x}):
        assert ptq.evaluate(Wrapped(wrap), batch).top1 == 100.0


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batch"),
        ([torch.eye(3)], "without labels"),
        ([(torch.eye(3), torch.tensor([0, 1, 3]))], "labels from 0 to 3, but the model has 3 classes"),
        ([(torch.eye(3), torch.tensor([0, 1]))], "for 2 labels"),
        ([(torch.zeros(2, 3, 4), torch.tensor([0, 1]))], r"\[samples, classes\]"),
    ],
    ids=["empty", "no labels", "label out of range", "too few labels", "not a classifier"],
)
def test_data_that_cannot_be_evaluated(batches: list[object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ptq.evaluate(nn.Identity(), batches)


def test_different_images_are_not_compared() -> None:
    one = ptq.evaluate(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 2]))])
    other = ptq.evaluate(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 1]))])
    with pytest.raises(InputError, match="same images"):
        one.against(other)


def test_the_mode_of_the_model_is_given_back() -> None:
    model = nn.Sequential(nn.Dropout(0.9)).train()
    assert ptq.evaluate(model, [(torch.eye(3), torch.tensor([0, 1, 2]))]).top1 == 100.0
    assert model.training and model[0].training


def answers(labels: np.ndarray, predictions: np.ndarray, metric: str = "top1") -> Evaluation:
    right = torch.from_numpy(labels == predictions)
    return Evaluation(torch.from_numpy(predictions), torch.from_numpy(labels), right, metric)


def noisy(n: int, classes: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and answers that are right by more than chance."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, n)
    return labels, np.where(generator.random(n) < share, labels, generator.integers(0, classes, n))


@pytest.mark.parametrize(
    ("labels", "predictions"),
    [
        pytest.param(*noisy(1043, 2, 0.3), id="two classes"),
        pytest.param(*noisy(500, 7, 0.5), id="seven classes"),
        pytest.param(np.array([0, 1, 1]), np.array([1, 0, 0]), id="all wrong"),
        pytest.param(np.array([0, 1, 1]), np.array([0, 1, 1]), id="all right"),
        pytest.param(np.array([0, 1, 1]), np.array([1, 1, 1]), id="one answer"),
        pytest.param(np.array([1, 1, 1]), np.array([0, 1, 1]), id="one label"),
    ],
)
def test_matthews_equals_scikit_learns(labels: np.ndarray, predictions: np.ndarray) -> None:
    result = answers(labels, predictions)
    assert result.matthews == pytest.approx(100 * matthews_corrcoef(labels, predictions), abs=1e-9)
    assert result.score("matthews") == result.matthews


def test_matthews_interval_is_the_bootstraps() -> None:
    """Against samples drawn one by one; the ends of two such intervals differ by a fraction of their width."""
    labels, predictions = noisy(200, 2, 0.4)
    low, high = answers(labels, predictions).score_interval("matthews")
    generator = np.random.default_rng(1)
    draws = [generator.integers(0, 200, 200) for _ in range(1000)]
    expected = np.percentile([100 * matthews_corrcoef(labels[draw], predictions[draw]) for draw in draws], (2.5, 97.5))
    assert (low, high) == pytest.approx(tuple(expected), abs=2.0)
    assert high - low > 20
    assert answers(labels, predictions).score_interval("matthews") == (low, high)  # the seed is fixed


def test_scores_by_name() -> None:
    result = answers(*noisy(100, 3, 0.5))
    assert result.score() == result.score("top1") == result.top1
    assert result.score_interval() == result.score_interval("top1") == result.interval
    assert result.score_interval("top5") == pytest.approx(result.interval)  # in_top5 holds the right ones here
    with pytest.raises(InputError, match="no metric 'f1': give top1, top5, matthews"):
        result.score("f1")
    with pytest.raises(InputError, match="no metric 'f1'"):
        ptq.evaluate(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 2]))], metric="f1")


def test_the_metric_stands_in_json_and_table() -> None:
    labels, predictions = noisy(300, 2, 0.4)
    accuracy, correlation = answers(labels, predictions).to_json(), answers(labels, predictions, "matthews").to_json()
    assert accuracy["metric"] == "top1"
    assert "matthews" not in accuracy
    assert correlation["metric"] == "matthews"
    assert correlation["top1"] == accuracy["top1"]
    assert correlation["matthews"] == pytest.approx(100 * matthews_corrcoef(labels, predictions))
    low, high = correlation["matthews_interval"]
    assert low < correlation["matthews"] < high
    for metric, titles in (("top1", ["top-1", "top-5"]), ("matthews", ["Matthews", "top-1"])):
        result = answers(labels, predictions, metric)
        table = accuracy_table([Row("float", result, None), Row("W8A8", result, {})])
        assert [str(table.columns[place].header) for place in (1, 3)] == titles
        cells = list(table.columns[1].cells)
        assert cells == [f"{result.score():.2f}"] * 2
