"""The same seed on the same machine gives the same bytes, for every step of the road."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ptq.cli import invoke

ROAD = (
    ("calibrate", "--batches", "3", "--observer", "entropy"),
    ("smooth", "--alpha", "0.6"),
    ("quantize", "--bits", "W4A4"),
    ("sweep", "--alphas", "0.3", "--bits", "W4A4", "--images", "48", "--no-auto"),
    ("train", "float", "--epochs", "2", "--images", "64"),
)
FILES = {
    "calibrate": ("calibration.safetensors", "run.json"),
    "smooth": ("smoothed.safetensors", "smoothed_calibration.safetensors", "ledger.json", "channels.png"),
    "quantize": ("quantized.safetensors",),
    "sweep": ("sweep.json", "alpha_sweep.png", "alpha_sweep_layers.png"),
}


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The whole road, twice, in folders of their own."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for folder in folders:
        for arguments in ROAD:
            assert invoke([*arguments, "--seed", "5", "--run", str(folder), "--quiet"]) == 0
    return folders


@pytest.mark.parametrize("command", FILES)
def test_the_same_seed_gives_the_same_bytes(command: str, twice: list[Path]) -> None:
    first, second = twice
    for name in FILES[command]:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_training_gives_the_same_weights_to_the_last_bit(twice: list[Path]) -> None:
    first, second = (load_file(folder / "baselines/float/model.safetensors") for folder in twice)
    assert first.keys() == second.keys()
    assert all(first[name].numpy().tobytes() == second[name].numpy().tobytes() for name in first)
    lines = [
        [json.loads(line) for line in (folder / "baselines/float/metrics.jsonl").read_text().splitlines()]
        for folder in twice
    ]
    timings = {"seconds", "seconds_per_step", "images_per_second"}
    kept = [[{key: value for key, value in line.items() if key not in timings} for line in run] for run in lines]
    assert kept[0] == kept[1] and len(kept[0]) == 2


def test_another_seed_trains_another_network(twice: list[Path], tmp_path: Path) -> None:
    shutil.copytree(twice[0], tmp_path / "run", ignore=shutil.ignore_patterns("baselines"))
    assert invoke([*ROAD[-1], "--seed", "6", "--run", str(tmp_path / "run"), "--quiet"]) == 0
    first, other = (load_file(folder / "baselines/float/model.safetensors") for folder in (twice[0], tmp_path / "run"))
    assert first["classifier.weight"].numpy().tobytes() != other["classifier.weight"].numpy().tobytes()
