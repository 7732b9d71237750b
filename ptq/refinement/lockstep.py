"""Several forward passes side by side: each stops in front of every layer until all of them are there.

So a layer can be looked at, and changed, with the inputs of all batches at hand, and each part of the network runs
once: without knowing how the network is made, and whatever the batches look like.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from ptq import distributed

Seen = TypeVar("Seen")
_here = threading.local()


class Walker(Generic[Seen]):
    """One forward pass, in a thread of its own. Never more than one of them runs."""

    def __init__(self, walk: Callable[[], object], places: Collection[str]) -> None:
        self.places = places  # where it stops
        self.place: str | None = None  # where it waits; None before the start and after the end
        self.seen: Seen | None = None  # what it brought there
        self._walk = walk
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def advance(self) -> None:
        """Let it walk to its next stop, or to its end."""
        if not self._thread.is_alive():
            self._thread.start()
        self.place = self.seen = None
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Make it give up where it waits."""
        if self._thread.is_alive():
            self._abandoned = True
            self._go.release()
            self._thread.join()

    def _stop(self, place: str, seen: Seen) -> None:
        self.place, self.seen = place, seen
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _AbandonedError

    def _run(self) -> None:
        _here.walker = self
        self._go.acquire()
        try:
            if not self._abandoned:
                with torch.no_grad():  # is a matter of each thread
                    self._walk()
        except _AbandonedError:
            pass
        except BaseException as error:  # raised again where advance() was called
            self._error = error
        finally:
            self.place = self.seen = None
            self._stopped.release()


def stop_here(place: str, seen: Any) -> None:
    """In the thread of a walker that stops at this place: wait until everybody is here. Elsewhere: nothing."""
    walker: Walker[Any] | None = getattr(_here, "walker", None)
    if walker is not None and place in walker.places:
        walker._stop(place, seen)


def side_by_side(walkers: Sequence[Walker[Seen]], order: Sequence[str]) -> Iterator[tuple[str, list[Walker[Seen]]]]:
    """Every place with the walkers that wait there, first the one that comes first in ``order``.

    Whoever waits there goes on when the next place is asked for. Processes that share the work go from place to place
    together: one none of whose walkers is there comes along with an empty list.
    """
    rank = {place: index for index, place in enumerate(order)}
    try:
        for walker in walkers:
            walker.advance()
        while waited_for := _of_all({walker.place for walker in walkers if walker.place is not None}):
            place = min(waited_for, key=lambda name: rank[name])
            there = [walker for walker in walkers if walker.place == place]
            yield place, there
            for walker in there:
                walker.advance()
    finally:
        for walker in walkers:
            walker.abandon()


def _of_all(places: set[str]) -> set[str]:
    return set().union(*distributed.exchanged(places))


class _AbandonedError(Exception):
    """Unwinds the forward pass of a walker that isn't needed any more."""
