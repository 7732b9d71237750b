"""``ptq train``: options reach the recipe, and a trained network takes the place of a quantized one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ptq.cli import invoke


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands in an empty folder leave the embedded task's results."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "reports" / "digits"


def content(path: Path) -> Any:
    return json.loads(path.read_text())


def test_what_is_said_takes_the_place_of_the_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--epochs", "1", "--batch", "32", "--images", "64", "--label-smoothing", "0.1", "--learning-rate", "0.05"]
    assert invoke(["train", "float", *said, "--test-images", "40", "--name", "short"]) == 0
    baseline = content(folder / "baselines/short/baseline.json")
    recipe = baseline["recipe"]
    given = {"epochs": 1, "batch_size": 32, "images": 64, "label_smoothing": 0.1, "learning_rate": 0.05}
    assert recipe.items() >= given.items() and recipe["momentum"] == 0.9
    assert (baseline["n"], baseline["images"]) == (40, 64)
    assert "samples/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["float", "--label-smoothing", "1"], "label_smoothing = 1"),
        (["float", "--preset", "nonsense"], "no preset 'nonsense'"),
        (["ddp", "--update-levels", "often"], "level updates 'often'"),
        (["ddp", "--gradients", "qsgd:bits=3", "--normalised"], "give alq, alqg or amq"),
        (["qat", "--override", "W8A8"], "write PATTERN=BITS"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_what_makes_no_sense_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], message: str
) -> None:
    assert invoke(["train", *wrong, "--epochs", "1", "--quiet"]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_network_trained_for_a_scheme_is_the_folders_own_for_every_command(folder: Path) -> None:
    assert invoke(["calibrate", "--batches", "2", "--quiet"]) == 0
    scheme = ["--bits", "W4A8", "--first-last", "8", "--override", "features.1.*=W6A8", "--symmetric"]
    training = ["--epochs", "1", "--images", "64", "--test-images", "60", "--name", "aware"]
    assert invoke(["train", "qat", *scheme, *training, "--use", "--quiet"]) == 0
    assert invoke(["evaluate", "--images", "60", "--error-batches", "1", "--quiet"]) == 0
    baseline, evaluation = content(folder / "baselines/aware/baseline.json"), content(folder / "evaluation.json")
    assert evaluation["scheme"] == baseline["settings"]["scheme"]
    assert evaluation["scheme"]["first_last"] == 8 and evaluation["scheme"]["symmetric_activations"]
    assert evaluation["networks"][-1]["top1"] == pytest.approx(baseline["score"])

    quick = ["--no-remedies", "--no-distances", "--samples", "32", "--error-batches", "1", "--quiet"]
    assert invoke(["analyze", *quick]) == 0
    analysis = content(folder / "analysis.json")
    assert {layer["layer"] for layer in analysis["layers"]["layers"]} == set(evaluation["layers"])
    assert invoke(["export", "--images", "60", "--quiet"]) == 0
    agreement = content(folder / "export/export.json")["agreement"]
    assert agreement["reference_top1"] == pytest.approx(baseline["score"]) and agreement["same_top1"] > 98
