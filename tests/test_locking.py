"""Leases: one holder at a time, dead holders replaced, living ones named."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ptq.cli import invoke
from ptq.errors import InputError
from ptq.locking import HeldError, Holder, Lease, acquire, holder_of, holding

HOLD = """
import sys, time
from pathlib import Path
from ptq.locking import acquire
assert not hasattr(acquire(Path(sys.argv[1]), "ptq sweep --seed 3"), "pid")
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A living process that holds the lease."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def held(path: Path) -> Lease:
    lease = acquire(path, "test")
    assert isinstance(lease, Lease)
    return lease


def test_only_one_at_a_time_and_again_after_release(tmp_path: Path) -> None:
    first = held(tmp_path / "a")
    assert acquire(tmp_path / "a", "second") == first.holder
    assert holder_of(tmp_path / "a") == first.holder
    other = held(tmp_path / "b")  # another name is another lease
    first.release()
    other.release()
    assert holder_of(tmp_path / "a") is None
    held(tmp_path / "a").release()
    assert list(tmp_path.iterdir()) == []


def test_a_living_holder_is_named_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    with another_process(tmp_path / ".lock") as process:
        with pytest.raises(HeldError) as refused, holding(tmp_path, "mine"):
            pass
        message = str(refused.value)
        assert message.startswith(f"{tmp_path}: in use by pid {process.pid} on {socket.gethostname()} since 20")
        assert "(ptq sweep --seed 3)" in message and message.endswith("choose another folder with --run")
        (tmp_path / "whole.json").write_text("{}")
        (tmp_path / "baselines").mkdir()
        for place in (tmp_path, tmp_path / "baselines"):
            (place / ".sweep.json.abc.partial").write_text("{")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with holding(tmp_path, "mine"):
            holder = holder_of(tmp_path / ".lock")
            assert holder is not None and holder.pid == os.getpid()
            assert sorted(path.name for path in tmp_path.rglob("*.partial")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["baselines", "whole.json"]


def test_a_second_command_on_a_run_folder_says_who_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with another_process(tmp_path / ".lock") as process:
        assert invoke(["calibrate", "--batches", "1", "--run", str(tmp_path)]) == 1
        out, err = capsys.readouterr()
        assert (
            out == "" and err.startswith(f"ptq: {tmp_path}: in use by pid {process.pid} on ") and err.count("\n") == 1
        )
        assert "(ptq sweep --seed 3)" in err
        assert [path.name for path in tmp_path.iterdir()] == [".lock.1"]  # nothing was written, not even a log
        assert invoke(["formats", "--shape", "2,3", "--run", str(tmp_path), "--quiet"]) == 0  # it writes nothing there


def test_waiting_for_a_holder_that_ends(tmp_path: Path) -> None:
    with another_process(tmp_path / ".lock") as process:
        os.kill(process.pid, signal.SIGSTOP)  # standing still is not being dead
        with pytest.raises(HeldError), holding(tmp_path, "mine", patience=0.2):
            pass
        process.kill()
        with holding(tmp_path, "mine", patience=20):
            pass


def test_a_used_number_of_a_process_is_not_its_first_owner(tmp_path: Path) -> None:
    mine = Holder.myself("somebody before me")
    (tmp_path / "a.1").write_text(json.dumps(asdict(replace(mine, born="1"))))
    lease = held(tmp_path / "a")
    assert lease.generation == 2
    lease.release()


@pytest.mark.parametrize(("age", "taken"), [(0, False), (200, False), (400, True)])
def test_other_machines_are_judged_by_the_age_of_the_last_touch(tmp_path: Path, age: float, taken: bool) -> None:
    file = tmp_path / "a.7"
    file.write_text(json.dumps(asdict(replace(Holder.myself("far away"), machine="another", host="node7"))))
    os.utime(file, (time.time() - age, time.time() - age))
    found = acquire(tmp_path / "a", "mine")
    if taken:
        assert isinstance(found, Lease) and found.generation == 8 and not file.exists()
        found.release()
    else:
        assert isinstance(found, Holder) and found.host == "node7"
        assert holder_of(tmp_path / "a") == found
    assert [path for path in tmp_path.iterdir() if path.name != "a.7"] == []


def test_drafts_of_killed_processes_go_away_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    mine = Holder.myself("asking at this moment")
    (tmp_path / "a.living.draft").write_text(json.dumps(asdict(mine)))
    (tmp_path / "a.dead.draft").write_text(json.dumps(asdict(replace(mine, born="1"))))
    (tmp_path / "a.fresh.draft").write_text("")
    (tmp_path / "a.old.draft").write_text("")
    os.utime(tmp_path / "a.old.draft", (1, 1))
    held(tmp_path / "a").release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.fresh.draft", "a.living.draft"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\x00\x01"])
def test_an_unreadable_lease_counts_until_it_is_old(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.1"
    file.write_text(content)
    found = acquire(tmp_path / "a", "mine")
    assert isinstance(found, Holder) and "unknown" in str(found)
    os.utime(file, (1, 1))
    held(tmp_path / "a").release()


def test_a_lease_is_touched_while_it_is_held(tmp_path: Path) -> None:
    lease = acquire(tmp_path / "a", "mine", beat=0.02)
    assert isinstance(lease, Lease)
    os.utime(lease.path, (1, 1))
    deadline = time.monotonic() + 10
    while lease.path.stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert lease.path.stat().st_mtime > time.time() - 60
    lease.release()


def test_a_lease_that_was_lost_is_noticed_and_left_alone(tmp_path: Path) -> None:
    lease = held(tmp_path / "a")
    lease.path.write_text(json.dumps(asdict(Holder.myself("somebody else"))))
    assert not lease.is_mine
    lease.release()
    assert lease.path.exists()


CONTENDER = """
import os, random, sys, time
from pathlib import Path
from ptq.locking import Lease, acquire

folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)
print("ready", flush=True)
sys.stdin.readline()
won = 0
while won < rounds:
    lease = acquire(folder / "lease", f"contender {seed}", beat=100)
    if not isinstance(lease, Lease):
        time.sleep(random.uniform(0, 0.002))
        continue
    # Inside, a file of one's own must be the only one: created exclusively, so that a second holder fails.
    inside = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)
    with (folder / "log").open("a") as log:
        log.write(f"{seed}\\n")
    won += 1
    time.sleep(random.uniform(0, 0.001))
    os.close(inside)
    (folder / "inside").unlink()
    if random.random() < 0.5:  # leave it behind as a process would that was killed
        data = lease.path.read_text().replace(f'"born": "{lease.holder.born}"', '"born": "1"')
        draft = folder / f"draft{seed}"
        draft.write_text(data)
        draft.replace(lease.path)
        lease._released.set()
    else:
        lease.release()
"""


def test_contenders_never_hold_it_together(tmp_path: Path) -> None:
    """Four processes, each taking the lease 40 times and leaving it stale every other time."""
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path), "40", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    for process in contenders:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    results = [process.communicate("go\n", timeout=60) for process in contenders]
    assert [(process.returncode, err) for process, (_, err) in zip(contenders, results, strict=True)] == [(0, "")] * 4
    assert sorted((tmp_path / "log").read_text().split()) == sorted(f"{seed}" for seed in range(4) for _ in range(40))


def test_without_hard_links_an_exclusive_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on FAT: the file system has no links, and says so."""

    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lease = held(tmp_path / "a")
    assert acquire(tmp_path / "a", "second") == lease.holder
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_folders_made_for_a_lock_go_away_if_they_stay_empty(tmp_path: Path) -> None:
    with holding(tmp_path / "reports" / "digits", "mine"):
        with holding(tmp_path / "reports" / "digits", "what it calls"):
            assert (tmp_path / "reports" / "digits" / ".lock.1").exists()
        assert (tmp_path / "reports" / "digits" / ".lock.1").exists()
    assert list(tmp_path.iterdir()) == []
    with holding(tmp_path / "reports" / "digits", "mine"):
        (tmp_path / "reports" / "digits" / "result.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["digits", "reports", "result.json"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match=re.escape(f"{file}: a file, not a folder")), holding(file, "mine"):
        pass
    with pytest.raises(InputError, match="can't write there \\(Not a directory\\)"), holding(file / "below", "mine"):
        pass
