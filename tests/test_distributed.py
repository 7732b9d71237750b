"""torchrun: as many processes as you like, the same files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ptq
from ptq import distributed
from ptq.cli import invoke
from ptq.storage import read_json
from ptq.tasks import resolve

# Batches of 20 end in the middle of a block of samples, and 4 processes have 4, 3, 3 and 3 of 13.
CALIBRATE = ("calibrate", "--observer", "percentile", "--batches", "13", "--batch-size", "20")


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(folder: Path, ranks: int, *arguments: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *launcher, "-m", "ptq", *arguments, "--run-folder", str(folder)]


def run(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = command(folder, ranks, *arguments)
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def finished(folder: Path, ranks: int, *arguments: str) -> str:
    if ranks == 1:
        assert invoke([*arguments, "--run-folder", str(folder), "--quiet"]) == 0
        return ""
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
    printed = finished(tmp_path, ranks, *CALIBRATE)
    assert (tmp_path / "calibration.safetensors").read_bytes() == (alone / "calibration.safetensors").read_bytes()
    assert printed.count("wrote ") == 1, "the first process alone reports"


def test_two_processes_evaluate_like_one(alone: Path, tmp_path: Path) -> None:
    """From the same calibration; what is evaluated is quantized first, by two processes, too."""
    folders = alone, tmp_path / "two"
    shutil.copytree(alone, folders[1])
    for ranks, folder in enumerate(folders, 1):
        finished(folder, ranks, "quantize", "--bits", "W4A4", "--refine", "none")
        finished(folder, ranks, "evaluate", "--batch-size", "20")
    one, two = (read_json(folder / "evaluation.json") for folder in folders)
    assert one == two
    quantized = [(folder / "quantized.safetensors").read_bytes() for folder in folders]
    assert quantized[0] == quantized[1]


ANALYSIS = """
import json, sys
import torch
from torch import nn
import ptq
from ptq import distributed
from ptq.analysis import analyze
from ptq.mixed import choose_bits
from ptq.quantization import Bits, Scheme
from ptq.refinement import refine
from ptq.storage import fingerprint

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2), nn.ReLU(), nn.Flatten(),
    nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 5),
).eval()
images, labels = torch.randn(96, 1, 8, 8), torch.randint(5, (96,))
batches = [(images[i : i + 12], labels[i : i + 12]) for i in range(0, 96, 12)]
with distributed.joined():
    calibration = ptq.calibrate(model, batches, max_batches=5)
    scheme = Scheme(bits=Bits(4, 4))
    quantized = refine(model, calibration, scheme, batches, "fast")
    bits = choose_bits(model, calibration, scheme, batches, lambda scheme: quantized.model, budget=3.5)
    analysis = analyze(model, quantized, calibration, batches, batches, max_batches=5, samples=32, budget=1000)
    found = {"refined": fingerprint(quantized.model), "bits": bits.to_json(), "analysis": analysis.to_json()}
    if distributed.rank() == distributed.size() - 1:  # all ranks know everything; the last one tells
        print(json.dumps(found))
"""


def without_seconds(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: without_seconds(value) for key, value in content.items() if key != "seconds"}
    return [without_seconds(value) for value in content] if isinstance(content, list) else content


def test_two_processes_analyze_and_refine_like_one(tmp_path: Path) -> None:
    """Layer errors, sensitivities, remedies, distances, a refined network and bits by layer: equal to the last bit."""
    script = tmp_path / "analysis.py"
    script.write_text(ANALYSIS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    outputs = [
        subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
        for launcher in ([sys.executable], torchrun)
    ]
    assert [process.returncode for process in outputs] == [0, 0], outputs[1].stderr
    one, two = (without_seconds(json.loads(process.stdout)) for process in outputs)
    assert one == two
    remedies, distances = one["analysis"]["remedies"], one["analysis"]["distances"]
    assert len(remedies["tried"]) >= 8 and len(distances[0]["points"]) == 27


def rank_of(pid: int) -> int | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [variable[5:] for variable in variables if variable.startswith(b"RANK=")]
    return int(found[0]) if found else None


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_a_killed_process_ends_the_job_within_seconds_and_is_named(tmp_path: Path) -> None:
    """torchrun notices, names the rank and its signal, and ends the others."""
    line = command(tmp_path, 2, "calibrate", "--batches", "100000", "--batch-size", "1", "--observer", "entropy")
    job = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    ranks: dict[int | None, int] = {}
    while not (tmp_path / ".lock.1").exists() or len(ranks) < 2:
        assert job.poll() is None
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        ranks = {rank_of(int(pid)): int(pid) for pid in children}
        time.sleep(0.05)
    killed = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, told = job.communicate(timeout=60)
    assert job.returncode != 0 and time.monotonic() - killed < 60  # 2 s on an idle machine
    assert re.search(rf"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9 \(pid: {ranks[1]}\)", told), told
    assert not (tmp_path / "calibration.safetensors").exists() and not (tmp_path / ".lock.1").exists()


RANK = """
import sys, time
from ptq import distributed
from ptq.errors import PtqError
try:
    with distributed.joined():
        print(distributed.shared_out(range(7), lambda number: number * number), flush=True)
        if distributed.rank() == 1:
            time.sleep(600)
        distributed.wait()
except PtqError as error:
    print(error, flush=True)
"""


def test_without_torchrun_the_survivor_names_the_dead_one() -> None:
    """As under srun, where nobody ends the others for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    line = [sys.executable, "-c", RANK]
    environments = [{**meeting, "RANK": str(rank)} for rank in range(2)]
    ranks = [subprocess.Popen(line, env=own, stdout=subprocess.PIPE, text=True) for own in environments]
    outputs = [process.stdout for process in ranks]
    assert [output and output.readline() for output in outputs] == ["[0, 1, 4, 9, 16, 25, 36]\n"] * 2
    ranks[1].kill()
    told, _ = ranks[0].communicate(timeout=60)
    assert told.startswith(f"rank 1 (pid {ranks[1].pid}) has ended") and told.endswith("start the job again\n")
    ranks[1].communicate()


def test_shared_out_ends_before_the_first_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which the second ran out of time after its second item: 0 to 4 are there, 6 is too much."""
    shares = {0: {0: "a", 2: "c", 4: "e", 6: "g"}, 1: {1: "b", 3: "d"}}
    monkeypatch.setattr(distributed, "exchanged", lambda share: list(shares.values()))
    assert distributed.shared_out(range(9), str) == ["a", "b", "c", "d", "e"]
    monkeypatch.undo()
    assert distributed.shared_out(range(3), str) == ["0", "1", "2"]


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
