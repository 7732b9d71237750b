"""Several processes on one job, as ``torchrun`` starts them.

Each runs its share of the batches, all of them know all results, and the first alone writes files. What they exchange
is put together in the order of the batches, so that the result doesn't depend on how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


_shares_work = False  # training has process groups too, in which each process does what it is told


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
        yield
        dist.barrier()  # nobody leaves while another still waits for it
    finally:
        _shares_work = False
        dist.destroy_process_group()


def is_mine(number: int) -> bool:
    """Whether batch number so-and-so is this process's."""
    return number % size() == rank()


def exchanged(value: Value) -> list[Value]:
    """The values of all processes, by rank."""
    if not _shares_work:
        return [value]
    found: list[Value | None] = [None] * size()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]


def wait() -> None:
    """Until all processes are here."""
    if _shares_work:
        dist.barrier()
