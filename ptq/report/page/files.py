"""What a run folder holds, read once; what isn't there is None."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.formats.affine import code_range
from ptq.journal import FILE as LOG
from ptq.quantization.apply import SCHEMA as QUANTIZED_SCHEMA
from ptq.quantization.modules import ATTRIBUTE as INPUT_QUANTIZER
from ptq.storage import read_json, read_tensors
from ptq.sweeping import Sweep
from ptq.tasks import DEFAULT
from ptq.training.baselines import Baseline, baselines_in

REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The results of one run folder."""

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)  # how the task was described
    calibration: Calibration | None = None
    smoothed: Calibration | None = None
    ledger: Mapping[str, Any] | None = None
    quantized: Mapping[str, Any] | None = None  # the metadata
    clips: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # layer → where its input is clipped
    mixed: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] | None = None
    sweep: Sweep | None = None
    sizes: Mapping[str, Any] | None = None
    export: Mapping[str, Any] | None = None
    analysis: Mapping[str, Any] | None = None
    compare: Mapping[str, Any] | None = None
    precisions: Mapping[str, Any] | None = None
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    log: Sequence[Mapping[str, Any]] = ()  # the commands that ran here and finished, but for reports

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read what is there; refuses a folder in which there is nothing to report."""
        run = _json(folder / "run.json", "run")
        sweep = _json(folder / "sweep.json", "sweep")
        quantized, clips = _quantized(folder / "quantized.safetensors")
        files = cls(
            folder=folder,
            options=run["options"] if run else {},
            calibration=_calibration(folder / "calibration.safetensors"),
            smoothed=_calibration(folder / "smoothed_calibration.safetensors"),
            ledger=_json(folder / "ledger.json", "ledger"),
            quantized=quantized,
            clips=clips,
            mixed=_json(folder / "mixed.json", "mixed precision"),
            evaluation=_json(folder / "evaluation.json", "evaluation"),
            sweep=Sweep.from_json(sweep) if sweep else None,
            sizes=_json(folder / "calibration_sizes.json", "calibration sizes"),
            export=_json(folder / "export" / "export.json", "export"),
            analysis=_json(folder / "analysis.json", "analysis"),
            compare=_json(folder / "compare.json", "comparison"),
            precisions=_json(folder / "compare_bits.json", "precisions"),
            baselines=baselines_in(folder / "baselines"),
            log=_log(folder / LOG),
        )
        results = files.calibration, files.evaluation, files.sweep, files.baselines, files.compare, files.precisions
        if not any(results):
            raise InputError(f"{folder}: nothing to report there yet: run `ptq calibrate` and `ptq evaluate` first")
        return files

    @property
    def task(self) -> str:
        """The name of the task, as it was given or as its results say."""
        recorded = (self.evaluation or {}).get("task")
        return str(recorded or self.options.get("task") or self.options.get("model") or DEFAULT)

    @property
    def layers(self) -> dict[str, str]:
        """The names of the layers in the order in which they run, and their kinds as far as files tell."""
        if self.calibration:
            return {name: layer.kind for name, layer in self.calibration.layers.items()}
        if self.evaluation:
            return {name: layer["kind"] for name, layer in self.evaluation["layers"].items()}
        if self.ledger:
            return {entry["layer"]: entry["kind"] for entry in self.ledger["layers"]}
        if self.sweep and self.sweep.points:
            return dict.fromkeys(self.sweep.points[0].layer_l1, "")
        return {}

    @property
    def quantizes_smoothed(self) -> bool:
        """Whether the quantized network was made from the smoothed one, as far as files tell."""
        if self.quantized is None or self.smoothed is None:
            return self.smoothed is not None
        return bool(self.quantized["source"] == self.smoothed.model_fingerprint)

    @property
    def pictures(self) -> list[Path]:
        return sorted(self.folder.glob("*.png"))

    def hashes(self) -> list[tuple[str, int, str]]:
        """Name, size and SHA-256 of every file of the folder but the report itself and the log that it adds to."""
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        seen = (path for path in paths if path.name not in (REPORT, LOG) and not path.name.startswith("."))
        return [(path.relative_to(self.folder).as_posix(), path.stat().st_size, _sha256(path)) for path in seen]


def _json(path: Path, kind: str) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content = read_json(path)
    if content.get("kind") != kind:
        raise InputError(
            f"{path}: holds {content.get('kind') or 'no ptq data'}, not {kind}: delete it or make it again"
        )
    return content


def _log(path: Path) -> list[dict[str, Any]]:
    """The finished commands of the log; a line that can't be read is no reason to have no report."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            entry = json.loads(text)
            if entry.get("outcome") == "finished" and not entry["command"].startswith("ptq report"):
                found.append(entry)
    return found


def _calibration(path: Path) -> Calibration | None:
    return Calibration.load(path) if path.exists() else None


def _quantized(path: Path) -> tuple[dict[str, Any] | None, dict[str, tuple[float, float]]]:
    """The metadata of a quantized network, and the range of the grid that each layer's input is rounded to."""
    if not path.exists():
        return None, {}
    tensors, metadata = read_tensors(path, "quantized model", QUANTIZED_SCHEMA)
    clips = {}
    for name, bits in metadata["bits"].items():
        scale, zero_point = (tensors.get(f"{name}.{INPUT_QUANTIZER}.{part}") for part in ("scale", "zero_point"))
        if scale is not None and zero_point is not None and bits["activations"]:
            codes = code_range(bits["activations"], symmetric=metadata["scheme"]["symmetric_activations"])
            first, last = (float((code - zero_point) * scale) for code in codes)
            clips[name] = first, last
    return metadata, clips


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()
