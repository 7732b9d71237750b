"""What compression does, measured against scikit-learn's and scipy's answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine
from scipy.stats import bootstrap, spearmanr

from ptq.errors import InputError
from ptq.formats import format as read_format
from ptq.training.checkpoints import read_lines
from ptq.training.record import Recorder, distortion, rank_correlations, spearman


def test_measures_are_those_of_numpy_and_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    sent = torch.randn(3, 50, generator=generator)
    received = sent + 0.1 * torch.randn(3, 50, generator=generator)
    found = distortion(sent, received)
    x, y = sent.double().numpy().ravel(), received.double().numpy().ravel()
    assert found["l1"] == pytest.approx(np.abs(x - y).sum() / np.abs(x).sum())
    assert found["sqnr"] == pytest.approx(-20 * np.log10(np.linalg.norm(x - y) / np.linalg.norm(x)))
    assert found["cosine"] == pytest.approx(1 - cosine(x, y))


def test_a_uniform_quantizer_has_six_decibels_a_bit() -> None:
    sent = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = [distortion(sent, read_format(f"affine:bits={bits}").fake(sent))["sqnr"] for bits in (6, 7, 8)]
    assert np.diff(np.array(found, dtype=float)) == pytest.approx(6.02, abs=0.15)


def test_what_has_no_value_is_none() -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    assert distortion(zeros, zeros) == {"l1": None, "sqnr": None, "cosine": None}
    assert distortion(ones, ones) == {"l1": 0.0, "sqnr": None, "cosine": pytest.approx(1.0)}


def test_lines_of_steps_that_are_trained_again_are_dropped(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "deep" / "boundaries.jsonl", every=5)
    recorder.forget_from(0)
    for step in range(20):
        if recorder.wants(step):
            recorder.add({"step": step, "direction": "forward"}, torch.ones(2), torch.tensor([1.0, 0.5]))
    recorder.forget_from(10)
    lines = read_lines(recorder.path)
    assert [line["step"] for line in lines] == [0, 5]
    assert lines[0]["l1"] == 0.25 and lines[0]["elements"] == 2
    with pytest.raises(InputError, match="record every 0 steps"):
        Recorder(tmp_path / "x", 0)


def test_rank_correlation_over_runs() -> None:
    means, scores = [0.1, 0.4, 0.2, 0.9], [99.0, 97.0, 98.0, 97.5]
    runs = [
        ([{"direction": "forward", "l1": mean - 0.05, "sqnr": None, "cosine": 1.0},
          {"direction": "forward", "l1": mean + 0.05, "sqnr": None, "cosine": 1.0}], score)
        for mean, score in zip(means, scores, strict=True)
    ]  # fmt: skip
    found = rank_correlations(runs)
    forward = found["forward l1"]
    assert forward is not None and forward.runs == 4
    assert forward.value == pytest.approx(spearmanr(means, scores).statistic)
    assert found["forward sqnr"] is None and found["forward cosine"] is None and found["backward l1"] is None
    assert rank_correlations(runs[:3])["forward l1"] is None


def test_intervals_of_rank_correlations_are_those_of_scipys_bootstrap() -> None:
    generator = np.random.default_rng(3)
    first = generator.normal(size=25)
    second = np.round(first + generator.normal(size=25), 1)  # with ties
    found = spearman(first, second)
    assert found is not None and found.value == pytest.approx(spearmanr(first, second).statistic)
    reference = bootstrap(
        (first, second), lambda x, y: spearmanr(x, y).statistic, paired=True, vectorized=False, n_resamples=2000,
        method="percentile", rng=np.random.default_rng(8),
    ).confidence_interval  # fmt: skip
    assert found.interval == pytest.approx((reference.low, reference.high), abs=0.04)
    monotone = spearman([1, 2, 3, 4, 5], [10, 8, 6, 4, 2])
    assert monotone is not None and (monotone.value, *monotone.interval) == pytest.approx((-1, -1, -1))
