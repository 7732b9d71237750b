"""Grids that run: once each, resumed, retried, shared between processes, collected."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ptq.cli import invoke
from ptq.grid import GridFolder, Planned, Record, read_grid, work
from ptq.grid.collect import collect
from ptq.grid.plots import results_against
from ptq.grid.states import record_file, typical_seconds
from ptq.grid.work import wanted
from ptq.locking import Holder, Lease, acquire

# Two commands that compute something, the second one for a while.
QUICK = "commands = ['formats --shape {shape} --quiet', '[formats --shape {second} --quiet]']\n"
LONG = "700,2000"
PTQ = [sys.executable, "-m", "ptq"]

Ptq = Callable[..., dict[str, Any]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ptq(here: Path, capsys: pytest.CaptureFixture[str]) -> Ptq:
    """``ptq … --json`` in this process; what it starts are processes of their own."""

    def run(*arguments: str) -> dict[str, Any]:
        code = invoke([*arguments, "--json"])
        out, err = capsys.readouterr()
        assert out, err
        return {**json.loads(out), "code": code}

    return run


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def first_command_done(grid: GridFolder, run: Planned) -> bool:
    record = grid.record(run)
    return record is not None and len(record.seconds) > 0


def test_the_life_of_a_grid(here: Path, ptq: Ptq) -> None:
    """Run, one failure, another value, a retry: nothing that is finished is done again."""
    file = here / "g.toml"
    file.write_text("commands = ['{what} --help']\n[axes]\nwhat = ['calibrate', 'calibrat']")
    ran = ptq("grid", "run", "g.toml", "--workers", "2")
    assert (ran["code"], ran["counts"]["finished"], ran["counts"]["failed"]) == (1, 1, 1)
    failed = next(run for run in ran["runs"] if run["state"] == "failed")
    assert failed["exit_code"] == 2 and "No such command 'calibrat'" in failed["reason"]
    log = here / "reports/grids/g/runs" / failed["id"] / "log.txt"
    assert "$ ptq calibrat --help\n" in log.read_text()

    folder = here / "reports/grids/g/runs" / read_grid(file).runs[0].id
    untouched = record_file(folder).stat().st_mtime_ns
    file.write_text("commands = ['{what} --help']\n[axes]\nwhat = ['calibrate', 'calibrat', 'smooth']")
    planned = ptq("grid", "plan", "g.toml")
    assert [run["state"] for run in planned["runs"]] == ["finished", "failed", "waiting"]
    assert ptq("grid", "status", "g.toml")["counts"]["failed"] == 1
    again = ptq("grid", "run", "g.toml", "--workers", "1", "--retry")
    assert [run["attempts"] for run in again["runs"]] == [1, 2, 1]
    assert [run["state"] for run in again["runs"]] == ["finished", "failed", "finished"]
    assert record_file(folder).stat().st_mtime_ns == untouched
    assert log.read_text().count("# attempt") == 2
    assert list((here / "reports/grids/g/leases").iterdir()) == []
    assert ptq("grid", "run", "g.toml")["runs"] == again["runs"]  # nothing was left to do


def test_two_processes_share_the_runs_and_one_is_killed(here: Path) -> None:
    """Each takes one run. When one is killed, its run's process ends, too, and the other goes on where that was."""
    (here / "g.toml").write_text(QUICK + f"[axes]\nshape = ['2,3', '3,2']\nsecond = ['{LONG}']")
    grid = GridFolder.of(read_grid(here / "g.toml"))
    workers = [subprocess.Popen([*PTQ, "grid", "run", "g.toml", "--workers", "1", "--quiet"]) for _ in range(2)]
    wait_until(lambda: all(first_command_done(grid, run) for run in grid.runs))
    # The one that came last has just begun its long command, however slow the machine is.
    later = max(grid.runs, key=lambda run: record_file(grid.run_folder(run)).stat().st_mtime_ns)
    holders = {run.id: grid.holder(run) for run in grid.runs}
    assert {holder.pid for holder in holders.values() if holder} == {worker.pid for worker in workers}
    child = json.loads((grid.run_folder(later) / ".lock.1").read_text())["pid"]
    holder, before = holders[later.id], grid.record(later)
    killed = next(worker for worker in workers if holder and worker.pid == holder.pid)
    killed.kill()
    killed.wait()
    wait_until(lambda: not Path(f"/proc/{child}").exists())
    other = next(worker for worker in workers if worker is not killed)
    assert other.wait(240) == 0
    after = {run.id: grid.record(run) for run in grid.runs}
    assert all(record and record.finished for record in after.values())
    assert {name: record.attempts for name, record in after.items() if record} == {
        run.id: 2 if run is later else 1 for run in grid.runs
    }
    resumed = after[later.id]
    assert before is not None and resumed is not None and resumed.seconds[0] == before.seconds[0]
    assert not any(path.name.startswith(".") for path in here.rglob("*"))
    assert list((here / "reports/grids/g/leases").iterdir()) == []


def test_cancelled_it_starts_nothing_new_and_says_how_to_go_on(here: Path, ptq: Ptq) -> None:
    (here / "g.toml").write_text(QUICK + f"[axes]\nshape = ['2', '3', '4', '5']\nsecond = ['{LONG}']")
    grid = GridFolder.of(read_grid(here / "g.toml"))
    worker = subprocess.Popen([*PTQ, "grid", "run", "g.toml", "--workers", "1"], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: first_command_done(grid, grid.runs[0]))
    assert ptq("grid", "cancel", "g.toml")["pids"] == [worker.pid]
    _, err = worker.communicate(timeout=240)
    assert worker.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1].startswith("ptq: stopped") and "ptq grid run g.toml --workers 1" in err
    assert list(grid.counts().values()) == [3, 0, 1, 0, 0]  # three waiting, one interrupted
    assert not any(path.name.startswith(".lock") for path in here.rglob("*"))


def test_what_a_killed_run_was_writing_goes_away(here: Path) -> None:
    """The lock of a killed run was taken away without its half-written files: nobody knew of them any more."""
    (here / "g.toml").write_text(QUICK + "[axes]\nshape = ['2', '3']\nsecond = ['none']")
    grid = GridFolder.of(read_grid(here / "g.toml"))
    dead = json.dumps(asdict(replace(Holder.myself("ptq grid run"), born="1")))
    for run in grid.runs:
        folder = grid.run_folder(run)
        Record.of(run).after(1.0).save(folder)  # finished: no process will come here again
        (folder / ".calibration.safetensors.abc.partial").write_text("{")
        (folder / ".lock.1").write_text(dead)
    grid.lease(grid.runs[0]).parent.mkdir()
    grid.lease(grid.runs[0]).with_name(f"{grid.runs[0].id}.1").write_text(dead)
    work(grid)
    assert {path.name for path in grid.path.rglob("*") if path.is_file()} == {"run_record.json"}


def test_a_run_somebody_holds_is_left_alone(here: Path) -> None:
    (here / "g.toml").write_text(QUICK + "[axes]\nshape = ['2']\nsecond = ['none']")
    grid = GridFolder.of(read_grid(here / "g.toml"))
    lease = acquire(grid.lease(grid.runs[0]), "somebody else")
    assert isinstance(lease, Lease)
    work(grid)
    assert grid.state(grid.runs[0]) == "running" and grid.record(grid.runs[0]) is None
    lease.release()
    assert grid.state(grid.runs[0]) == "waiting"


def test_after_it_was_cancelled_a_worker_takes_no_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "g.toml").write_text(QUICK + "[axes]\nshape = ['2']\nsecond = ['none']")
    grid = GridFolder.of(read_grid(here / "g.toml"))
    grid.cancel()
    assert grid.cancelled_since(time.time() - 60) and not grid.cancelled_since(time.time() + 60)
    monkeypatch.setattr(time, "time", lambda: 1.0)  # a worker that started long before
    work(grid)
    assert grid.record(grid.runs[0]) is None


def record(seconds: tuple[float, ...] = (), exit_code: int | None = None, ended: float = 0.0) -> Record:
    commands = (("calibrate", "--batches", "2"), ("train", "qat", "--epochs", "1"))
    return Record(id="x", settings={}, commands=commands, seconds=seconds, exit_code=exit_code, ended=ended)


def test_what_is_wanted() -> None:
    assert wanted(None, None) and wanted(record(), None) and wanted(record((1.0,)), None)
    assert not wanted(record((1.0, 2.0)), None) and not wanted(record((1.0, 2.0)), 1e12)
    failed = record((1.0,), exit_code=1, ended=100.0)
    assert not wanted(failed, None)
    assert wanted(failed, 101.0) and not wanted(failed, 99.0)  # failed again since: once per request


def test_durations_are_medians_by_command() -> None:
    records = [record((1.0, 10.0)), record((3.0, 30.0)), record((2.0,))]
    assert typical_seconds(records) == {"calibrate": 2.0, "train qat": 20.0}


def finished_run(folder: Path, index: int) -> None:
    """The files that commands leave, with numbers that tell the runs apart."""
    network = {"metric": "top1", "top1": 90.0 + index, "interval": [80.0, 99.0], "n": 10}
    paired = {"changed": index, "lost": 0, "gained": 0}
    networks = [{**network, "top1": 95.0, "against_float": None}, {**network, "against_float": paired}]
    (folder / "evaluation.json").write_text(json.dumps({"networks": networks}))
    (folder / "baselines/qat").mkdir(parents=True)
    baseline = {"training": "qat", "score": 50.0 + index, "seconds": 9.0}
    (folder / "baselines/qat/baseline.json").write_text(json.dumps(baseline))
    scores = {None: 70.0, 0.5: 71.0 + index, 0.75: 60.0}
    points = [{"bits": "W4A4", "alpha": alpha, "accuracy": {"score": score}} for alpha, score in scores.items()]
    (folder / "sweep.json").write_text(json.dumps({"points": points}))


def test_results_of_all_kinds_are_collected_and_drawn(here: Path) -> None:
    """Rows are runs, columns are axes and results, and the picture has a point for each."""
    text = "commands = ['evaluate --images {images} --seed {seed}']\n[axes]\nimages = [10, 20]\nseed = [0, 1]"
    (here / "g.toml").write_text(text)
    grid = read_grid(here / "g.toml")
    for index, run in enumerate(grid.runs[:3]):
        folder = GridFolder.of(grid).run_folder(run)
        Record.of(run).after(1.5).save(folder)
        finished_run(folder, index)
    collected = collect(grid)
    assert collected.missing == 1 and len(collected.rows) == 3
    assert [row["score"] for row in collected.rows] == [90.0, 91.0, 92.0]
    assert [row["qat score"] for row in collected.rows] == [50.0, 51.0, 52.0]
    assert [(row["W4A4 best"], row["W4A4 best alpha"]) for row in collected.rows] == [(71, 0.5), (72, 0.5), (73, 0.5)]
    files = collected.save(here / "out")
    rows = list(csv.DictReader(io.StringIO(files[0].read_text())))
    assert [(row["images"], row["seed"], row["float"]) for row in rows] == [
        ("10", "0", "95.0"),
        ("10", "1", "95.0"),
        ("20", "0", "95.0"),
    ]
    content = json.loads(files[1].read_text())
    assert (content["kind"], content["missing"], content["rows"]) == ("grid results", 1, collected.rows)
    figure = results_against(collected)
    assert figure is not None
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "20"]
    assert list(axes.containers[0].lines[0].get_ydata()) == [90.5, 92.0]  # means over seeds
    assert axes.get_ylabel() == "top1 (%)" and "3 runs, mean and range over 2 seeds" in axes.get_title("left")
