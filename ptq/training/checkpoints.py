"""What a training run leaves in its folder: one whole checkpoint, and a line of measurements for each epoch."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptq.errors import InputError, MismatchError
from ptq.storage import replacing

SCHEMA = 1


class Folder:
    """The files of a run: ``checkpoint.pt``, ``metrics.jsonl``, ``model.safetensors``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def weights(self) -> Path:
        return self.path / "model.safetensors"

    def save(self, content: Mapping[str, Any]) -> None:
        """Write a checkpoint of tensors and plain values; the one before it stays until this one is whole."""
        memory = io.BytesIO()  # of a full disk, torch.save would only say that a position is unexpected
        torch.save({"schema": SCHEMA, **content}, memory)
        with replacing(self.checkpoint) as partial:
            partial.write_bytes(memory.getbuffer())

    def settings(self) -> dict[str, Any] | None:
        """What the last checkpoint was trained with, if there is one."""
        content = self._read()
        return None if content is None else dict(content["settings"])

    def load(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The last checkpoint, if there is one; refused if it was made with other settings."""
        content = self._read()
        if content is None:
            return None
        found = content["settings"]
        differing = [key for key in {**settings, **found} if settings.get(key) != found.get(key)]
        if differing:
            key = differing[0]
            raise MismatchError(
                f"{self.checkpoint}: was trained with {key} = {found.get(key)}, not {settings.get(key)}: "
                "go on with the same settings, or in another folder"
            )
        return content

    def _read(self) -> dict[str, Any] | None:
        if not self.checkpoint.exists():
            return None
        try:
            content = dict(torch.load(self.checkpoint, map_location="cpu", weights_only=True))
            schema, _ = content["schema"], dict(content["settings"])
        except Exception as error:  # whatever a damaged pickle makes torch raise
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise InputError(f"{self.checkpoint}: not a readable checkpoint ({reason}): delete it") from error
        if schema != SCHEMA:
            raise InputError(f"{self.checkpoint}: schema {schema}, this version reads {SCHEMA}: train again")
        return content

    def start_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Begin the measurements with those of the epochs that are done."""
        with replacing(self.metrics) as partial:
            partial.write_text("".join(json_line(line) for line in lines), encoding="utf-8")

    def add_metrics(self, line: Mapping[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json_line(line))


def json_line(content: Mapping[str, Any]) -> str:
    """One line of a JSONL file."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: not a file of JSON lines ({error})") from error


def momentum_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters, so that it doesn't depend on their order."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def restore_momentum(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        if name in state:
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, torch.Tensor) else value
                for key, value in state[name].items()
            }
