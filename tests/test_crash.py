"""Killed, asked to stop, and without room: scripts/test-crash in short. The script by itself kills 200 times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_asked_to_stop_and_without_room() -> None:
    report = crash("--kills", "0", "--only", "train", "--only", "stop", "--only", "disk")
    assert report["stop"]["train SIGTERM"] > 0 and report["stop"]["train SIGINT"] > 0  # epochs that were kept
    if os.geteuid() == 0:  # who may mount a small disk
        assert "No space left on device" in report["disk"]["train on a full disk"]
        assert "Read-only file system" in report["disk"]["train on a read-only disk"]
    else:
        assert report["disk"].startswith("skipped")
