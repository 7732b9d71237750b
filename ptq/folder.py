"""A run folder: how its task was described, and which file holds what."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ptq.errors import InputError
from ptq.storage import read_json, write_json
from ptq.tasks import DEFAULT, folder_name

ROOT = Path("reports")


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """How a task is described on the command line; None is "not said"."""

    task: str | None = None
    model: str | None = None
    weights: str | None = None
    data: str | None = None
    batch_size: int | None = None
    image_size: int | None = None
    seed: int | None = None

    def completed_by(self, saved: TaskOptions) -> TaskOptions:
        """What was said now goes before what was said earlier on the same folder."""
        said = {key: value for key, value in asdict(self).items() if value is not None}
        return replace(saved, **said)

    @property
    def folder(self) -> Path:
        return ROOT / folder_name(self.task or self.model or DEFAULT)


class RunFolder:
    """The names of the files in a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description_file = folder / "run.json"
        self.calibration_file = folder / "calibration.safetensors"
        self.smoothed_file = folder / "smoothed.safetensors"
        self.smoothed_calibration_file = folder / "smoothed_calibration.safetensors"
        self.ledger_file = folder / "ledger.json"
        self.quantized_file = folder / "quantized.safetensors"
        self.mixed_file = folder / "mixed.json"
        self.packed_file = folder / "packed.safetensors"
        self.evaluation_file = folder / "evaluation.json"
        self.sweep_file = folder / "sweep.json"
        self.export_folder = folder / "export"
        self.sizes_file = folder / "calibration_sizes.json"

    def description(self) -> TaskOptions:
        """How the task was described by earlier commands on this folder."""
        if not self.description_file.exists():
            return TaskOptions()
        content = read_json(self.description_file)
        try:
            return TaskOptions(**content["options"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{self.description_file}: not a run description ({error}): delete it") from error

    def describe(self, options: TaskOptions) -> None:
        write_json(self.description_file, {"kind": "run", "schema": 1, "options": asdict(options)})
