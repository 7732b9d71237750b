"""Killed, asked to stop, and without room: scripts/test-crash in short. The script by itself kills 200 times."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "test-crash"
KILLS = 24


def crash(*arguments: str) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *arguments], capture_output=True, text=True, timeout=900
    )
    assert finished.returncode == 0, finished.stderr
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


def test_killed_two_dozen_times() -> None:
    """calibrate, sweep and train; export and grid take longer and are for the script."""
    report = crash("--kills", str(KILLS), "--only", "calibrate", "--only", "sweep", "--only", "train")
    assert report["kills"] >= KILLS - 2  # shares are rounded
    assert all(report[name]["kills"] >= 6 for name in ("calibrate", "sweep", "train"))
    # Some sweeps and trainings were killed with work behind them, and went on from there.
    assert report["sweep"]["resumed_with_work_done"] + report["train"]["resumed_with_work_done"] > 0


def test_asked_to_stop() -> None:
    report = crash("--kills", "0", "--only", "train", "--only", "stop")
    assert report["stop"]["train SIGTERM"] > 0 and report["stop"]["train SIGINT"] > 0  # epochs that were kept


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can mount a small disk and a read-only one")
def test_a_full_disk_and_a_read_only_one() -> None:
    report = crash("--kills", "0", "--only", "train", "--only", "disk")
    assert "No space left on device" in report["disk"]["train on a full disk"]
    assert "Read-only file system" in report["disk"]["train on a read-only disk"]


def test_files_that_may_not_grow_are_absent_afterwards(tmp_path: Path) -> None:
    """A full disk as anybody can have it: files of at most 64 KiB."""
    finished = subprocess.run(
        [sys.executable, "-m", "ptq", "calibrate", "--batches", "1", "--run", "run"],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    assert re.fullmatch(r"ptq: run/calibration.safetensors: can't be written \(.*File too large.*\n", finished.stderr)
    assert not list(tmp_path.iterdir())
