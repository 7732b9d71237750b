"""A grid on a SLURM cluster, through submitit: an array of workers that share out the runs by their leases.

A worker that is killed leaves its run to the others, and to the next submission; one that runs out of time is put back
into the queue by submitit.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptq.errors import InputError
from ptq.grid.states import GridFolder
from ptq.grid.work import work
from ptq.interruption import Stopped, stoppable
from ptq.storage import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What each worker asks the cluster for."""

    partition: str | None = None
    gpus: int = 0
    cpus: int | None = None
    minutes: int = 24 * 60
    options: tuple[str, ...] = ()  # of sbatch, as KEY=VALUE

    def parameters(self) -> dict[str, Any]:
        """In submitit's words."""
        pairs = [option.partition("=") for option in self.options]
        for key, equals, value in pairs:
            if not (key and equals and value):
                raise InputError(f"--slurm-option {key + equals + value}: write KEY=VALUE, as account=vision")
        parameters = {
            "slurm_partition": self.partition,
            "gpus_per_node": self.gpus or None,
            "cpus_per_task": self.cpus,
            "timeout_min": self.minutes,
            "slurm_additional_parameters": {key: value for key, _, value in pairs} or None,
        }
        return {key: value for key, value in parameters.items() if value is not None}


@dataclass(frozen=True)
class Worker:
    """What an element of the array does."""

    grid: GridFolder
    retry: float | None

    def __call__(self) -> dict[str, int]:
        with stoppable():
            try:
                work(self.grid, retry=self.retry, say=lambda message: print(message, flush=True))
            except Stopped:
                print("stopped: the run goes on in another worker, or at the next `ptq grid run`", flush=True)
        return dict(self.grid.counts())  # type: ignore[arg-type]

    def checkpoint(self) -> Any:
        """submitit asks for this when the time is up: the same again, which goes on where this was."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(grid: GridFolder, array_size: int, resources: Resources, *, retry: float | None = None) -> list[str]:
    """Put an array of so many workers into the queue; returns the numbers of its jobs."""
    try:
        import submitit
    except ImportError as error:
        raise InputError("--slurm: submitit isn't installed: pip install 'ptq[slurm]'") from error
    absolute = GridFolder(grid.path.resolve(), grid.runs)
    try:
        executor = submitit.AutoExecutor(folder=absolute.path / "slurm", cluster="slurm")
        executor.update_parameters(name=grid.path.name, slurm_array_parallelism=array_size, **resources.parameters())
        with executor.batch():
            jobs = [executor.submit(Worker(absolute, retry)) for _ in range(array_size)]
    except RuntimeError as error:  # submitit's: no sbatch here
        raise InputError(f"--slurm: {str(error).splitlines()[0]}: run this on a machine of the cluster") from error
    except submitit.core.utils.FailedJobError as error:
        raise InputError(f"--slurm: sbatch refused the jobs ({_reason(error)}): change the options") from error
    numbers = [str(job.job_id) for job in jobs]
    write_json(_jobs(grid.path), {"kind": "grid jobs", "schema": 1, "jobs": [*submitted(grid.path), *numbers]})
    return numbers


def submitted(folder: Path) -> list[str]:
    """The jobs that were put into the queue for a grid so far."""
    file = _jobs(folder)
    return [str(job) for job in read_json(file)["jobs"]] if file.exists() else []


def cancel(folder: Path) -> list[str]:
    """Take the jobs of a grid out of the queue; returns their numbers."""
    jobs = submitted(folder)
    arrays = sorted({job.partition("_")[0] for job in jobs})
    if arrays:
        try:
            subprocess.run(["scancel", *arrays], check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise InputError("scancel: not found: cancel on a machine of the cluster") from error
        except subprocess.CalledProcessError as error:
            raise InputError(f"scancel {' '.join(arrays)}: {error.stderr.strip().splitlines()[-1]}") from error
        _jobs(folder).unlink()
    return jobs


def _jobs(folder: Path) -> Path:
    return folder / "jobs.json"


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
