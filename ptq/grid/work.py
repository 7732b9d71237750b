"""Working off a grid: claim a run, start a process for it, note what came out. Any number of these may go on at once.

A run's process reads its commands from the run's record and ticks them off one by one (``ptq grid execute``, in
``ptq.grid_commands``); so what a killed run had finished isn't done again. It ends when this process does, whatever the
reason: it holds the other end of a pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ptq.grid.plan import Planned
from ptq.grid.states import GridFolder, Record
from ptq.interruption import Stopped
from ptq.locking import FOLDER_LOCK, HeldError, Holder, Lease, acquire, holder_of, holding

STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes of a process that was asked to end
_POLL = 0.05


@dataclass
class _Underway:
    run: Planned
    lease: Lease
    process: subprocess.Popen[bytes]
    record: Record


def work(
    grid: GridFolder,
    workers: int = 1,
    *,
    retry: float | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> None:
    """Work off what nobody else works on, ``workers`` runs at a time, until nothing is left to claim.

    Runs that failed before ``retry``, in seconds since 1970, are tried again. SIGINT and SIGTERM are passed on to the
    runs, which finish their unit of work; then they are raised here.
    """
    started = time.time()
    underway: list[_Underway] = []
    settled: set[str] = set()  # runs that need no second look
    look = True  # for more runs; after one has ended, others may have left some behind
    threads = max(1, (os.cpu_count() or 1) // workers)
    _tidy(grid)
    try:
        while True:
            while look and len(underway) < workers:
                claimed = None if grid.cancelled_since(started) else _claim(grid, settled, retry)
                if claimed is None:
                    look = False
                    break
                settled.add(claimed[0].id)
                underway.append(_start(grid, *claimed, threads))
                say(f"{claimed[0].id}: {claimed[0].title}")
            if not underway:
                return
            time.sleep(_POLL)
            for one in [one for one in underway if one.process.poll() is not None]:
                underway.remove(one)
                _end(grid, one, say)
                look = True
    except Stopped as stop:
        for one in underway:
            one.process.send_signal(stop.exit_code - 128)
        for one in underway:
            one.process.wait()
            _end(grid, one, say)
        underway.clear()
        raise
    finally:
        for one in underway:  # an error here: nobody would look after them
            one.process.kill()
            one.process.wait()
            one.lease.release()


def _tidy(grid: GridFolder) -> None:
    """Remove what killed processes left: leases of runs, and in run folders the lock and what was half written."""
    for run in grid.runs:
        folder, lease = grid.run_folder(run), grid.lease(run)
        if _is_stale(lease) and isinstance(mine := acquire(lease, "ptq grid run"), Lease):
            mine.release()
        if _is_stale(folder / FOLDER_LOCK):
            with suppress(HeldError), holding(folder, "ptq grid run"):
                pass  # taking it over clears it


def _is_stale(lease: Path) -> bool:
    return any(lease.parent.glob(f"{lease.name}.*")) and holder_of(lease) is None


def wanted(record: Record | None, retry: float | None) -> bool:
    """Whether there is something to do: not finished, and not failed unless it is to be tried again."""
    if record is None:
        return True
    if record.finished:
        return False
    return not record.failed or (retry is not None and (record.ended or 0) < retry)


def _claim(grid: GridFolder, settled: set[str], retry: float | None) -> tuple[Planned, Lease, Record] | None:
    """The first run that is wanted and free. What is known of it is read again once it is held."""
    for run in grid.runs:
        if run.id in settled:
            continue
        if not wanted(grid.record(run), retry):
            settled.add(run.id)
            continue
        lease = acquire(grid.lease(run), f"ptq grid run, {run.title}")
        if isinstance(lease, Holder):
            continue
        record = grid.record(run)
        if wanted(record, retry):
            return run, lease, record or Record.of(run)
        lease.release()
    return None


def _start(grid: GridFolder, run: Planned, lease: Lease, record: Record, threads: int) -> _Underway:
    folder = grid.run_folder(run)
    record = replace(record, attempts=record.attempts + 1, exit_code=None, reason=None, host=lease.holder.host)
    record.save(folder)
    with grid.log(run).open("ab") as log:
        log.write(f"# attempt {record.attempts}, worker {lease.holder.pid}\n".encode())  # no host: logs are sent around
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "ptq", "grid", "execute", str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},  # runs at the same time share the cores
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        )
    return _Underway(run, lease, process, record)


def _end(grid: GridFolder, one: _Underway, say: Callable[[str], None]) -> None:
    code = one.process.returncode
    folder = grid.run_folder(one.run)
    if code and code not in STOPPED:
        record = replace(
            Record.load(folder),
            exit_code=code,
            reason=_last_line(grid.log(one.run)) if code > 0 else f"killed by {signal.Signals(-code).name}",
            ended=time.time(),
        )
        record.save(folder)
        say(f"{one.run.id}: failed, {record.reason}; all of it in {grid.log(one.run)}")
    if one.process.stdin is not None:
        one.process.stdin.close()
    one.lease.release()


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"


def end_with_parent() -> None:
    """End this process, and all it started, as soon as the other end of its standard input is closed."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="watch the parent", daemon=True).start()
