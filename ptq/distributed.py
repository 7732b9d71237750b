"""Several processes on one job, as ``torchrun`` starts them.

Each runs its share of the batches, all of them know all results, and the first alone writes files. What they exchange
is put together in the order of the batches, so that the result doesn't depend on how many there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from typing import TypeVar

import torch.distributed as dist

from ptq.errors import PtqError
from ptq.locking import Holder

Value = TypeVar("Value")
Item = TypeVar("Item")

_shares_work = False  # training has process groups too, in which each process does what it is told
_members: list[Holder] = []  # by rank, so that one that ends can be named


def rank() -> int:
    return dist.get_rank() if _shares_work else 0


def size() -> int:
    return dist.get_world_size() if _shares_work else 1


@contextmanager
def joined() -> Iterator[None]:
    """Share work with the other processes of the same ``torchrun`` inside; alone, nothing happens."""
    global _shares_work
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    dist.init_process_group("gloo")
    _shares_work = True
    try:
        _members[:] = exchanged(Holder.myself("ptq"))
        yield
        wait()  # nobody leaves while another still waits for it
    finally:
        _shares_work = False
        _members.clear()
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process does what it is told by itself; nothing may be written there."""
    global _shares_work
    before, _shares_work = _shares_work, False
    try:
        yield
    finally:
        _shares_work = before


def is_mine(number: int) -> bool:
    """Whether batch number so-and-so is this process's."""
    return number % size() == rank()


def exchanged(value: Value) -> list[Value]:
    """The values of all processes, by rank."""
    if not _shares_work:
        return [value]
    found: list[Value | None] = [None] * size()
    _together(lambda: dist.all_gather_object(found, value))
    return found  # type: ignore[return-value]


def merged(share: dict[int, Value]) -> dict[int, Value]:
    """What all processes found for their batches, in the order of the batches."""
    everything = {number: found for one in exchanged(share) for number, found in one.items()}
    return {number: everything[number] for number in sorted(everything)}


def shared_out(items: Iterable[Item], do: Callable[[Item], Value]) -> list[Value]:
    """``[do(item) for item in items]``, each item by one process, and the whole list in all of them.

    The items may end at different places, as when time is over: the result ends before the first that nobody has done.
    """
    share = {}
    for number, item in enumerate(items):
        if is_mine(number):
            with alone():
                share[number] = do(item)
    everything = merged(share)
    return [everything[number] for number in takewhile(everything.__contains__, count())]


def wait() -> None:
    """Until all processes are here."""
    if _shares_work:
        _together(dist.barrier)


def _together(exchange: Callable[[], object]) -> None:
    """Do something that all processes take part in; where it breaks, say who is missing."""
    try:
        exchange()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PtqError(f"{_missing()}, and the others can't go on ({reason}): start the job again") from error


def _missing() -> str:
    """Who has ended, as far as it can be seen from this machine; the system may need a moment to notice."""
    deadline = time.monotonic() + 2
    while True:
        gone = [f"rank {number} (pid {member.pid})" for number, member in enumerate(_members) if member.is_gone]
        if gone or time.monotonic() > deadline:
            return f"{', '.join(gone) or 'a rank on another machine'} has ended"
        time.sleep(0.05)
