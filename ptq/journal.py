"""``log.jsonl`` in the run folder: one line for each command that ran there, with its times and its environment."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ptq.errors import PtqError

FILE = "log.jsonl"
_PACKAGES = ("ptq", "torch", "torchvision", "numpy", "onnxruntime", "transformers")


@contextmanager
def recording(folder: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Add a line about what happens inside, also when it breaks; bad input, which leaves nothing else, leaves none."""
    started, wall, processor = datetime.now(timezone.utc), time.perf_counter(), time.process_time()
    outcome: str | None = "finished"
    try:
        yield
    except PtqError:
        outcome = None
        raise
    except BaseException as error:
        outcome = without_home(f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    finally:
        line = {
            "kind": "command",
            "schema": 1,
            "started": started.isoformat(timespec="seconds"),
            "command": without_home(shlex.join(["ptq", *arguments])),
            "outcome": outcome,
            "seconds": round(time.perf_counter() - wall, 3),
            "processor_seconds": round(time.process_time() - processor, 3),
            "environment": environment(),
        }
        if outcome and folder.is_dir():
            _append(folder / FILE, json.dumps(line, ensure_ascii=False) + "\n")


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


def without_home(text: str) -> str:
    """Without the names of home folders: logs are sent around."""
    for folder in dict.fromkeys((str(Path.cwd()), str(Path.home()))):
        if folder not in ("", "/"):
            text = text.replace(folder, "." if folder == str(Path.cwd()) else "~")
    return text


def _append(path: Path, line: str) -> None:
    """One write of a whole line: several processes may append, and a killed one leaves no half of it."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError:
        pass  # a log that can't be written (full disk, read-only folder) must not hide what the command says itself
