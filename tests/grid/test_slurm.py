"""SLURM without a cluster: what is said where there is none. scripts/test-slurm runs a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ptq.errors import InputError
from ptq.grid.slurm import Resources, cancel, submitted
from ptq.storage import write_json

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "test-slurm"


@pytest.mark.parametrize(("required", "code"), [("0", 0), ("1", 1)])
def test_the_script_says_that_it_was_skipped_and_why(tmp_path: Path, required: str, code: int) -> None:
    nobody = tmp_path / "id"
    nobody.write_text("#!/bin/sh\necho 65534\n")
    nobody.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PTQ_REQUIRE_SLURM": required}
    ran = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (code, "test-slurm: SKIPPED: needs root, to start the daemons\n")


def test_resources_in_submitits_words() -> None:
    resources = Resources(partition="debug", gpus=1, cpus=4, minutes=30, options=("account=vision", "qos=low"))
    assert resources.parameters() == {
        "slurm_partition": "debug",
        "gpus_per_node": 1,
        "cpus_per_task": 4,
        "timeout_min": 30,
        "slurm_additional_parameters": {"account": "vision", "qos": "low"},
    }
    assert Resources().parameters() == {"timeout_min": 1440}


@pytest.mark.parametrize("option", ["account", "=vision", "account="])
def test_options_are_pairs(option: str) -> None:
    with pytest.raises(InputError, match=f"--slurm-option {option}: write KEY=VALUE"):
        Resources(options=(option,)).parameters()


def test_jobs_are_cancelled_where_the_cluster_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cancel(tmp_path) == []  # nothing was submitted
    write_json(tmp_path / "jobs.json", {"kind": "grid jobs", "schema": 1, "jobs": ["7_0", "7_1"]})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="scancel: not found: cancel on a machine of the cluster"):
        cancel(tmp_path)
    assert submitted(tmp_path) == ["7_0", "7_1"]
