"""Who works where: leases on run folders and on the runs of a grid, which need nothing of a file system but link(2).

A lease on ``NAME`` is a small file ``NAME.<generation>`` that says who holds it. It appears whole and at once, by a
hard link, which is atomic on network file systems, too. The holder touches it now and then. It is stale when its
process is gone (seen from the same machine) or when it wasn't touched for ``EXPIRY`` seconds (seen from others).

A stale lease is taken over by making the next generation, which only one can, and never by deleting: between looking at
a file and deleting it, it may have become somebody else's. The claim counts if nothing changed meanwhile; else it is
withdrawn.
"""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from ptq.errors import InputError, PtqError

BEAT = 15.0  # seconds between two touches
EXPIRY = 300.0  # seconds without one after which other machines take a lease over: network file systems cache times
FOLDER_LOCK = ".lock"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class HeldError(PtqError):
    """A lease that a living process holds."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease."""

    host: str
    machine: str  # the same for processes that can see each other
    pid: int
    born: str | None  # when the process started, in the system's own count: numbers of processes are used again
    since: float  # seconds since 1970
    command: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def myself(cls, command: str) -> Holder:
        pid, since = os.getpid(), time.time()
        return cls(
            host=socket.gethostname(), machine=_machine(), pid=pid, born=_born(pid), since=since, command=command
        )

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended; False where it can't be seen from here."""
        return self.machine == _machine() and (not _exists(self.pid) or _born(self.pid) != self.born)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"pid {self.pid} on {self.host} since {since} ({self.command})"


class Lease:
    """A lease that this process holds, touched in the background until it is released."""

    def __init__(self, path: Path, holder: Holder, beat: float = BEAT) -> None:
        self.path, self.holder = path, holder
        self._released = threading.Event()
        self._touching = threading.Thread(target=self._touch, args=(beat,), name=f"lease {path.name}", daemon=True)
        self._touching.start()

    @property
    def generation(self) -> int:
        """1, or more where it was taken over from a holder that ended without releasing it."""
        return int(self.path.suffix[1:])

    @property
    def is_mine(self) -> bool:
        """Whether it is still held: a process that stood still for long may have lost it."""
        held = _read(self.path)
        return held is not None and held.token == self.holder.token

    def release(self) -> None:
        self._released.set()
        self._touching.join()
        if self.is_mine:
            self.path.unlink(missing_ok=True)

    def _touch(self, beat: float) -> None:
        while not self._released.wait(beat):
            with suppress(OSError):  # a full or unreachable disk is no reason to stop the work
                os.utime(self.path)


def acquire(path: Path, command: str, *, beat: float = BEAT, expiry: float = EXPIRY) -> Lease | Holder:
    """The lease on ``path``, or who holds it."""
    mine = Holder.myself(command)
    draft = path.with_name(f"{path.name}.{mine.token}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(mine)), encoding="utf-8")
        while True:
            seen = _generations(path)
            if seen:
                newest = max(seen)
                holder = seen[newest]
                os.utime(draft)  # what time it is by the clock of the file system, which may be another machine's
                if not _is_stale(_file(path, newest), holder, draft, expiry):
                    return holder or _unknown()
            claim = _file(path, max(seen, default=0) + 1)
            if _link(draft, claim, mine):
                others = {number: held for number, held in _generations(path).items() if _file(path, number) != claim}
                if others == seen:
                    for number in seen:
                        _file(path, number).unlink(missing_ok=True)
                    _remove_dead_drafts(path, draft, expiry)
                    return Lease(claim, mine, beat)
                claim.unlink(missing_ok=True)
            time.sleep(random.uniform(0.001, 0.02))  # others try at this moment: let one of them win
    except OSError as error:
        raise InputError(f"{path.parent}: can't write there ({error.strerror}): choose another folder") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def holder_of(path: Path, *, expiry: float = EXPIRY) -> Holder | None:
    """Who holds a lease at the moment, if anybody; looks, and writes nothing."""
    seen = _generations(path)
    if not seen:
        return None
    newest = max(seen)
    holder = seen[newest]
    with suppress(FileNotFoundError):
        age = time.time() - _file(path, newest).stat().st_mtime
        if holder is None:
            return None if age > expiry else _unknown()
        same_machine = holder.machine == _machine()
        return None if holder.is_gone or (not same_machine and age > expiry) else holder
    return None


_HELD_FOLDERS: set[Path] = set()


@contextmanager
def holding(folder: Path, command: str, *, patience: float = 0.0) -> Iterator[None]:
    """Have a run folder for oneself; refused, after ``patience`` seconds, while another process has it.

    A folder that a killed process left is cleared of its unfinished files. A folder that is made for this and stays
    empty goes away again.
    """
    place = folder.resolve()
    if place in _HELD_FOLDERS:  # by this process: what a command calls may ask again
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file, not a folder: choose another one with --run")
    made = [parent for parent in (place, *place.parents) if not parent.exists()]
    deadline = time.monotonic() + patience
    while isinstance(lease := acquire(folder / FOLDER_LOCK, command), Holder):
        if time.monotonic() > deadline:
            raise HeldError(
                f"{folder}: in use by {lease}: wait until it has ended, or choose another folder with --run"
            )
        time.sleep(0.05)
    _HELD_FOLDERS.add(place)
    try:
        if lease.generation > 1:
            _clear_unfinished(place)
        yield
    finally:
        _HELD_FOLDERS.discard(place)
        lease.release()
        for empty in made:
            with suppress(OSError):
                empty.rmdir()


def _remove_dead_drafts(path: Path, mine: Path, expiry: float) -> None:
    """Remove what processes left that were killed while they asked for the lease."""
    for draft in path.parent.glob(f"{path.name}.*.draft"):
        holder = _read(draft)
        with suppress(FileNotFoundError):
            if draft != mine and ((holder and holder.is_gone) or mine.stat().st_mtime - draft.stat().st_mtime > expiry):
                draft.unlink()


def _clear_unfinished(folder: Path) -> None:
    """Remove what ``storage.replacing``, and safetensors below it, were writing when their process was killed."""
    for pattern in (".*.partial", ".tmp??????"):
        for partial in folder.rglob(pattern):
            partial.unlink(missing_ok=True)


def _file(path: Path, generation: int) -> Path:
    return path.with_name(f"{path.name}.{generation}")


def _generations(path: Path) -> dict[int, Holder | None]:
    """The files of a lease and who they name; None where that can't be read."""
    try:
        names = [file.name for file in path.parent.iterdir()]
    except FileNotFoundError:
        return {}
    prefix = f"{path.name}."
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return {int(number): _read(_file(path, int(number))) for number in numbers if number.isdecimal()}


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _is_stale(file: Path, holder: Holder | None, now: Path, expiry: float) -> bool:
    if holder is not None and holder.machine == _machine():
        return holder.is_gone
    try:
        return now.stat().st_mtime - file.stat().st_mtime > expiry
    except FileNotFoundError:
        return True  # released at this moment: making the next generation tells whether anything else happened


def _link(draft: Path, claim: Path, mine: Holder) -> bool:
    """Make ``claim`` appear, whole; False if it is there already."""
    try:
        os.link(draft, claim)
    except FileExistsError:
        return draft.stat().st_nlink == 2  # over a network, the answer to a link that worked may have been lost
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _create(claim, mine)
    return True


def _create(claim: Path, mine: Holder) -> bool:
    """Where the file system has no hard links; a reader that comes too early takes the holder for unknown."""
    try:
        with claim.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(mine)))
    except FileExistsError:
        return False
    return True


def _unknown() -> Holder:
    return Holder(host="an unknown host", machine="", pid=0, born=None, since=time.time(), command="unknown")


@lru_cache
def _machine() -> str:
    """What tells machines, restarts of them, and containers on them apart."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def _born(pid: int) -> str | None:
    """Field 22 of Linux's ``/proc/PID/stat``; a process that ended and wasn't waited for counts as gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
