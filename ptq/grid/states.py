"""The folder of a grid: which runs are waiting, running, finished or failed, and how long they took.

<folder>/grid.json                 the plan
<folder>/leases/<id>.1             who works on a run at the moment
<folder>/runs/<id>/run_record.json what was done of a run; beside it all that its commands write, and log.txt
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ptq.errors import InputError
from ptq.grid.plan import Grid, Planned, Value
from ptq.locking import Holder, holder_of
from ptq.storage import read_json, write_json

State = Literal["waiting", "running", "interrupted", "finished", "failed"]
STATES: tuple[State, ...] = ("waiting", "running", "interrupted", "finished", "failed")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was done of a run so far."""

    id: str
    settings: dict[str, Value]
    commands: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...] = ()  # of the commands that are finished, in order
    attempts: int = 0
    exit_code: int | None = None  # of the command that failed
    reason: str | None = None  # the last line it printed
    ended: float | None = None  # seconds since 1970, when the last attempt ended
    host: str | None = None

    @classmethod
    def of(cls, run: Planned) -> Record:
        return cls(id=run.id, settings=run.settings, commands=run.commands)

    @property
    def finished(self) -> bool:
        return len(self.seconds) == len(self.commands)

    @property
    def failed(self) -> bool:
        return not self.finished and self.exit_code is not None

    def after(self, seconds: float) -> Record:
        """One more command is finished."""
        return replace(self, seconds=(*self.seconds, round(seconds, 3)), ended=time.time(), exit_code=None, reason=None)

    def save(self, folder: Path) -> None:
        write_json(record_file(folder), {"kind": "grid run", "schema": 1, **asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> Record:
        content = read_json(record_file(folder))
        if (content.pop("kind", None), content.pop("schema", None)) != ("grid run", 1):
            raise InputError(f"{record_file(folder)}: not the record of a grid's run: delete it")
        try:
            commands = tuple(tuple(command) for command in content.pop("commands"))
            return cls(**{**content, "commands": commands, "seconds": tuple(content["seconds"])})
        except (KeyError, TypeError) as error:
            raise InputError(f"{record_file(folder)}: incomplete ({error}): delete it") from error


def record_file(folder: Path) -> Path:
    return folder / "run_record.json"


@dataclass(frozen=True)
class GridFolder:
    """Where the runs of a grid are, and what is known of them."""

    path: Path
    runs: tuple[Planned, ...] = field(repr=False)

    @classmethod
    def of(cls, grid: Grid) -> GridFolder:
        return cls(grid.folder, grid.runs)

    def run_folder(self, run: Planned) -> Path:
        return self.path / "runs" / run.id

    def log(self, run: Planned) -> Path:
        return self.run_folder(run) / "log.txt"

    def lease(self, run: Planned) -> Path:
        return self.path / "leases" / run.id

    def holder(self, run: Planned) -> Holder | None:
        return holder_of(self.lease(run))

    def record(self, run: Planned) -> Record | None:
        folder = self.run_folder(run)
        return Record.load(folder) if record_file(folder).exists() else None

    def state(self, run: Planned) -> State:
        record = self.record(run)
        if record is not None and record.finished:
            return "finished"
        if self.holder(run) is not None:
            return "running"
        if record is None or not record.attempts:
            return "waiting"
        return "failed" if record.failed else "interrupted"

    def states(self) -> dict[str, State]:
        return {run.id: self.state(run) for run in self.runs}

    def counts(self) -> dict[State, int]:
        states = list(self.states().values())
        return {state: states.count(state) for state in STATES}

    def records(self) -> list[Record]:
        return [record for run in self.runs if (record := self.record(run)) is not None]

    def remaining_seconds(self) -> dict[str, float | None]:
        """By run, how long what is left of it should take: the median of what its commands took elsewhere."""
        known = typical_seconds(self.records())
        result: dict[str, float | None] = {}
        for run in self.runs:
            record = self.record(run)
            left = run.commands[len(record.seconds) if record else 0 :]
            times = [known.get(verb(command)) for command in left]
            result[run.id] = None if None in times else sum(time for time in times if time is not None)
        return result

    def save_plan(self, grid: Grid) -> Path:
        """Write the plan, for people and for collecting; workers get theirs when they are started."""
        runs = [{"id": run.id, "settings": run.settings, "commands": run.commands} for run in grid.runs]
        axes = {name: list(values) for name, values in grid.axes.items()}
        file = self.path / "grid.json"
        write_json(file, {"kind": "grid", "schema": 1, "name": grid.name, "axes": axes, "runs": runs})
        return file

    # Cancelling: a date that workers look at. Those that started before it take no further run.

    @property
    def _cancelled(self) -> Path:
        return self.path / "cancelled.json"

    def cancel(self) -> None:
        write_json(self._cancelled, {"kind": "grid cancelled", "schema": 1, "time": time.time()})

    def cancelled_since(self, started: float) -> bool:
        return self._cancelled.exists() and float(read_json(self._cancelled)["time"]) >= started


def verb(command: Iterable[str]) -> str:
    """``train qat`` of ``train qat --epochs 2``: the words before the first option."""
    words: list[str] = []
    for word in command:
        if word.startswith("-"):
            break
        words.append(word)
    return " ".join(words)


def typical_seconds(records: Iterable[Record]) -> Mapping[str, float]:
    """The median duration of each kind of command."""
    seconds: dict[str, list[float]] = {}
    for record in records:
        for command, took in zip(record.commands, record.seconds, strict=False):
            seconds.setdefault(verb(command), []).append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def as_json(run: Planned, state: State, record: Record | None, holder: Holder | None) -> dict[str, Any]:
    return {
        "id": run.id,
        "settings": run.settings,
        "state": state,
        "seconds": sum(record.seconds) if record else None,
        "attempts": record.attempts if record else 0,
        "exit_code": record.exit_code if record else None,
        "reason": record.reason if record else None,
        "holder": str(holder) if holder else None,
    }
