"""One process a rank, started here or by torchrun; when one of them dies, all end, with its message."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ptq.allocator import tune_allocator
from ptq.errors import InputError, PtqError
from ptq.vision import torchvision

GRACE = 2.0  # seconds in which ranks that lost another may end by themselves
TIMEOUT = timedelta(minutes=30)


class _Torchvision:
    """A process that gets it imports torchvision through its one door, before the networks that are made of it."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return torchvision, ()


class RankError(PtqError):
    """A rank that died."""


def run_ranks(
    function: Callable[..., Any], arguments: Sequence[Any], count: int, *, threads: int = 1, backend: str | None = None
) -> list[Any]:
    """``function(rank, *arguments)`` in each of ``count`` processes of one process group.

    The function has to be one that another process can import; what it returns are tensors and plain values.
    Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) this process is one of them already; the results of all
    ranks are then known to each.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        world = int(os.environ["WORLD_SIZE"])
        if world != count:
            raise InputError(f"torchrun started {world} processes, {count} are needed: give --nproc-per-node {count}")
        results: list[Any] = []
        _in_group(function, arguments, int(os.environ["RANK"]), count, "env://", threads, backend, results)
        return results
    with tempfile.TemporaryDirectory(prefix="ptq-ranks-") as name:
        folder = Path(name)
        context = mp.get_context("spawn")
        door = _Torchvision() if "torchvision" in sys.modules else None
        ranks = [
            context.Process(
                target=_entry, args=(door, function, arguments, rank, count, name, threads, backend), daemon=True
            )
            for rank in range(count)
        ]
        with _one_thread_for_children():
            for process in ranks:
                process.start()
        try:
            _watch(ranks, folder)
        finally:
            _end(ranks)
        # Written by our own processes a moment ago, and still read as data alone.
        return [torch.load(_result(folder, rank), weights_only=True) for rank in range(count)]


def device_of_rank(rank: int) -> torch.device:
    """The GPU of a rank where they talk by nccl, else the CPU."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))


class _one_thread_for_children:
    """Children read OMP_NUM_THREADS when they start: without it they all take every core."""

    def __enter__(self) -> None:
        self._before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = self._before


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.pt"


def _error(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def _entry(
    _door: Any,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    count: int,
    name: str,
    threads: int,
    backend: str | None,
) -> None:
    tune_allocator()  # as the command did for the process that started this one
    folder = Path(name)
    try:
        # A file to meet at: a port that is free now may not be when it is needed.
        result = _in_group(function, arguments, rank, count, f"file://{folder / 'store'}", threads, backend)
    except BaseException as error:
        told = isinstance(error, PtqError)
        message = str(error) if told else "".join(traceback.format_exception_only(type(error), error)).strip()
        record = {"time": time.time(), "message": message.splitlines()[0], "told": told}
        partial = _error(folder, rank).with_suffix(".partial")
        partial.write_text(json.dumps(record))
        partial.replace(_error(folder, rank))
        if not told and not isinstance(error, KeyboardInterrupt):
            traceback.print_exc()
        os._exit(1)  # without waiting for peers that wait for this one
    torch.save(result, _result(folder, rank))


def _in_group(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    count: int,
    meeting: str,
    threads: int,
    backend: str | None,
    results: list[Any] | None = None,
) -> Any:
    """The function's result; ``results``, if given, is filled with those of all ranks."""
    torch.set_num_threads(threads)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", count))  # ranks on this machine
    backend = backend or ("nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= here else "gloo")
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=count, timeout=TIMEOUT)
    if backend == "nccl":
        torch.cuda.set_device(device_of_rank(rank))
    result = function(rank, *arguments)
    if results is not None:
        results.extend([None] * count)
        dist.all_gather_object(results, result)
    dist.barrier()  # nobody leaves while another still sends
    dist.destroy_process_group()
    return result


def _watch(ranks: Sequence[Any], folder: Path) -> None:
    """Wait for all ranks; raises with the message of the one that died first."""
    waiting = list(ranks)
    while waiting:
        ended = wait([process.sentinel for process in waiting])
        for process in waiting:
            if process.sentinel in ended:
                process.join()
        waiting = [process for process in waiting if process.sentinel not in ended]
        if any(process.exitcode for process in ranks if process.exitcode is not None):
            wait_until = time.monotonic() + GRACE
            for process in waiting:
                process.join(max(0.0, wait_until - time.monotonic()))
            raise RankError(_cause(ranks, folder))


def _cause(ranks: Sequence[Any], folder: Path) -> str:
    """A rank that left no record was killed, and the errors of the others follow from that; else the first record."""
    records = {}
    for rank, process in enumerate(ranks):
        if not process.exitcode:
            continue
        if not _error(folder, rank).exists():
            code = process.exitcode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"rank {rank} {how}: the others were stopped; go on from the last checkpoint"
        records[rank] = json.loads(_error(folder, rank).read_text())
    rank, record = min(records.items(), key=lambda item: item[1]["time"])
    return f"rank {rank}: {record['message']}"


def _end(ranks: Sequence[Any]) -> None:
    for process in ranks:
        if process.is_alive():
            process.terminate()
    for process in ranks:
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            process.join()
