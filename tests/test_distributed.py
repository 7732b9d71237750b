"""torchrun: as many processes as you like, the same files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ptq
from ptq.storage import read_json
from ptq.tasks import resolve

# Batches of 20 end in the middle of a block of samples, and 4 processes have 4, 3, 3 and 3 of 13.
CALIBRATE = ("calibrate", "--observer", "percentile", "--batches", "13", "--batch-size", "20")


def run(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "ptq", *arguments, "--run-folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def finished(folder: Path, ranks: int, *arguments: str) -> str:
    process = run(folder, ranks, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    finished(folder, 1, *CALIBRATE)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_calibrations_are_equal_byte_for_byte(alone: Path, tmp_path: Path, ranks: int) -> None:
    printed = finished(
        tmp_path, ranks, "calibrate", "--observer", "percentile", "--batches", "13", "--batch-size", "20"
    )
    assert (tmp_path / "calibration.safetensors").read_bytes() == (alone / "calibration.safetensors").read_bytes()
    assert printed.count("wrote ") == 1, "the first process alone reports"


def test_two_processes_evaluate_like_one(alone: Path, tmp_path: Path) -> None:
    for folder, ranks in ((alone, 1), (tmp_path, 2)):
        finished(folder, ranks, "evaluate", "--batch-size", "20")
    one, two = (read_json(folder / "evaluation.json") for folder in (alone, tmp_path))
    assert one["networks"] == two["networks"]


def test_a_process_that_fails_ends_all_of_them(tmp_path: Path) -> None:
    process = run(tmp_path, 2, "calibrate", "--weights", "missing.safetensors")
    assert process.returncode != 0
    assert "missing.safetensors" in process.stderr
    assert not (tmp_path / "calibration.safetensors").exists()


def test_batch_sizes_agree_to_rounding() -> None:
    found = []
    for size in (1, 7, 64):
        task = resolve("digits", batch_size=size)
        found.append(ptq.calibrate(task.model, task.calibration, max_batches=448 // size))
    one, *others = found
    assert {calibration.samples for calibration in found} == {448}
    for other in others:
        for name, layer in one.layers.items():
            for statistic in ("minimum", "maximum", "activation_absmax", "weight_absmax", "rows"):
                expected, value = getattr(layer, statistic).float(), getattr(other.layers[name], statistic).float()
                tolerance = 1e-5 if statistic != "rows" else 2e-3  # rows are float16
                torch.testing.assert_close(value, expected, atol=tolerance, rtol=tolerance)
