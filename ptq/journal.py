"""The log of a run folder: a line for every command that ran there, with its times and its environment, and before it
the messages on the way.

Whoever has something to say says it to ``logger``. ``showing`` brings it to the screen and ``recording`` to the file,
both from the level on that ``--log-level`` names. What is logged has no home folders, host names or user names in it.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import platform
import re
import shlex
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ptq.errors import InputError, PtqError

FILE = "log.jsonl"
LEVELS = ("debug", "info", "warning", "error")
logger = logging.getLogger("ptq")
logger.addHandler(logging.NullHandler())  # silent as a library, until somebody listens
_PACKAGES = ("ptq", "torch", "torchvision", "numpy", "onnxruntime", "transformers")


def checked_level(name: str) -> str:
    if name not in LEVELS:
        raise InputError(f"--log-level {name!r}: choose one of {', '.join(LEVELS)}")
    return name


def detail(text: str, **facts: float | int | str) -> None:
    """Say something that only ``--log-level debug`` wants to know, with numbers that the log keeps apart."""
    logger.debug(text, extra={"facts": facts})


@contextmanager
def showing(show: Callable[[str], None], level: str = "info") -> Iterator[None]:
    """Inside, what is said from this level on is shown; Python's warnings are said, too."""

    def line(record: logging.LogRecord) -> None:
        kind = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        facts = ", ".join(f"{name} {value}" for name, value in _facts(record).items())
        show(kind + record.getMessage() + (f" ({facts})" if facts else ""))

    with _listening(line, level):
        yield


@contextmanager
def recording(folder: Path, arguments: Sequence[str], level: str = "info") -> Iterator[None]:
    """Log what is said inside from this level on, and at the end a line about the whole, also when it breaks.

    Messages wait for the end: bad input, which leaves nothing else, leaves no log either. Those of the level debug,
    which tell of work that is kept, don't wait: they are what is known of a command that was killed.
    """
    started, wall, processor = datetime.now(timezone.utc), time.perf_counter(), time.process_time()
    outcome: str | None = "finished"
    waiting: list[dict[str, Any]] = []

    def note(record: logging.LogRecord) -> None:
        said = {"time": _moment(record.created), "level": record.levelname.lower(), "text": record.getMessage()}
        waiting.append({"kind": "message", "schema": 1, **said, **_facts(record)})
        if record.levelno == logging.DEBUG and folder.is_dir():
            _append(folder / FILE, waiting)
            waiting.clear()

    with _listening(note, level):
        try:
            yield
        except PtqError:
            outcome = None
            raise
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}".splitlines()[0]
            raise
        finally:
            line = {
                "kind": "command",
                "schema": 1,
                "started": started.isoformat(timespec="seconds"),
                "command": shlex.join(["ptq", *arguments]),
                "outcome": outcome,
                "seconds": round(time.perf_counter() - wall, 3),
                "processor_seconds": round(time.process_time() - processor, 3),
                "environment": environment(),
            }
            if outcome and folder.is_dir():
                _append(folder / FILE, [*waiting, line])


def environment() -> dict[str, str | int]:
    """What results depend on besides the options."""
    found: dict[str, str | int] = {"python": platform.python_version(), "system": platform.system()}
    found |= {"machine": platform.machine(), "processors": os.cpu_count() or 1}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if (torch := sys.modules.get("torch")) is not None:
        found["threads"] = torch.get_num_threads()
    return found


def without_names(text: str) -> str:
    """Without home folders (``~``), this one (``.``), and the names of user and host: logs are sent around."""
    here = {str(Path.cwd()), os.environ.get("PWD", "")}
    home = {str(Path.home()), str(Path.home().resolve())}
    for folders, short in ((here, "."), (home, "~")):
        for folder in sorted(folders - {"", "/"}, key=len, reverse=True):
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])", short, text)
    text = re.sub(r"(?<![\w.-])/(home|Users)/[^/\s'\":,;)]+", "~", text)  # other people's
    user, host = _names()
    text = re.sub(rf"(?<=/){re.escape(user)}(?![\w.-])", "USER", text) if user else text
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "HOST", text) if host else text


@lru_cache
def _names() -> tuple[str, str]:
    """The user's name and the host's."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # nobody has this number, as in some containers
        user = ""
    host = socket.gethostname()
    return user, "" if host == "localhost" else host


class _Listener(logging.Handler):
    def __init__(self, hear: Callable[[logging.LogRecord], None], level: str) -> None:
        super().__init__(level.upper())
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record)


@contextmanager
def _listening(hear: Callable[[logging.LogRecord], None], level: str) -> Iterator[None]:
    listener = _Listener(hear, level)
    before = logger.level, logger.propagate, warnings.showwarning
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # other packages set up the root logger, and would say everything twice
    logger.addHandler(listener)
    warnings.showwarning = _say_warning
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.level, logger.propagate, warnings.showwarning = before


def _say_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    """In place of Python's own way, which tells on which line of which folder."""
    first = next(iter(str(message).splitlines()), "")
    logger.warning("%s: %s", category.__name__, first)


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, "facts", {})
    return found


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _append(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Whole lines in one write: several processes may append, and a killed one leaves no half of it."""
    lines = "".join(json.dumps(_without_names(entry), ensure_ascii=False) + "\n" for entry in entries)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, lines.encode())
        finally:
            os.close(handle)
    except OSError:
        pass  # a log that can't be written (full disk, read-only folder) must not hide what the command says itself


def _without_names(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_names(value) for key, value in content.items()}
    return without_names(content) if isinstance(content, str) else content
