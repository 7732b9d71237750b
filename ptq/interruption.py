"""Ctrl-C and SIGTERM: work that is done in units ends after the one under way, everything else at once."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ptq.journal import detail

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The process was asked to stop. Not an ``Exception``, so that nothing takes it for an error and goes on."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class _State:
    unit: str | None = None  # what the work under way is done in
    asked: int | None = None  # the signal that waits for the end of a unit


@contextmanager
def stoppable() -> Iterator[None]:
    """While this lasts, SIGINT and SIGTERM are raised as ``Stopped``."""
    if threading.current_thread() is not threading.main_thread():  # only there can Python handle signals
        yield
        return
    before: list[Any] = [signal.signal(number, _handle) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def units(name: str) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each unit of work whose result is kept: there the work may end."""
    begun = time.perf_counter()

    def finished() -> None:
        nonlocal begun
        detail(f"{name} finished", seconds=round(time.perf_counter() - begun, 3))
        begun = time.perf_counter()
        stop_if_asked()

    def stop_if_asked() -> None:
        if _State.asked is not None:
            raise Stopped(_State.asked)

    outer, _State.unit = _State.unit, name
    try:
        yield finished
        stop_if_asked()  # after the last unit
    finally:
        _State.unit, _State.asked = outer, None


def _handle(number: int, frame: FrameType | None) -> None:
    if _State.unit is not None and _State.asked is None:
        _State.asked = number
        sys.stderr.write(f"ptq: finishing the {_State.unit} under way; once more stops at once\n")
        return
    raise Stopped(number)
