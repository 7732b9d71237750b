"""Every file reader, fed damaged files: it reads them or refuses them as a ``PtqError``, and never anything else.

A fixed budget here; ``PTQ_FUZZ=100 pytest tests/test_fuzz.py`` looks a hundred times longer.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ptq
from ptq.calibration import Calibration
from ptq.errors import PtqError
from ptq.grid.plan import read_grid
from ptq.grid.states import Record
from ptq.packing import PackedCheckpoint, pack
from ptq.quantization import Quantized, Scheme
from ptq.quantization.apply import quantize_by
from ptq.smoothing import Smoothed
from ptq.storage import read_json
from ptq.sweeping import Sweep
from ptq.tasks.checkpoints import read_state
from ptq.tasks.glue import COLA, RTE, read_examples
from ptq.tasks.sources import Request, load_data
from ptq.tasks.task import Normalization
from ptq.training.checkpoints import Folder, read_lines

EXAMPLES = round(20 * float(os.environ.get("PTQ_FUZZ", "1")))
LONGER = EXAMPLES > 20
GRAY = Normalization(image_size=8, mean=(0.5,), std=(0.5,))


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)).eval()
BATCHES = [torch.randn(2, 1, 8, 8) for _ in range(2)]
CALIBRATION = ptq.calibrate(MODEL, BATCHES, "entropy")
SMOOTHED = ptq.smooth(MODEL, CALIBRATION, 0.5, batches=BATCHES)


def safetensors_bytes(folder: Path) -> dict[str, bytes]:
    """A small calibration, smoothed and quantized network and packed checkpoint, as they are written."""
    model = MODEL
    CALIBRATION.save(folder / "calibration")
    SMOOTHED.save(folder / "smoothed")
    quantize_by(Scheme(), model, CALIBRATION).save(folder / "quantized")
    pack(model.state_dict(), {"conv": "affine:bits=4", "linear": "affine:bits=4"}, model=model).save(folder / "packed")
    torch.save(model.state_dict(), folder / "pickle.pt")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def npz_bytes() -> bytes:
    images, labels = np.zeros((3, 8, 8), np.uint8), np.arange(3)
    file = io.BytesIO()
    np.savez(file, x_train=images, y_train=labels, x_test=images, y_test=labels)
    return file.getvalue()


def checkpoint_bytes() -> bytes:
    file = io.BytesIO()
    torch.save({"schema": 1, "settings": {"epochs": 3}, "epoch": 1}, file)
    return file.getvalue()


SWEEP = {
    "model_fingerprint": "m", "data_fingerprint": "d", "images": None, "form": "fold",
    "reference": {"metric": "top1", "score": 1.0, "interval": [0, 1], "n": 2},
    "points": [{"bits": "W4A4", "alpha": 0.5, "changed": 1, "layer_l1": {"a": 0.1},
                "accuracy": {"metric": "top1", "score": 1.0, "interval": [0, 1], "n": 2}}],
}  # fmt: skip
RECORD = {
    "kind": "grid run", "schema": 1, "id": "x", "settings": {"a": 1}, "commands": [["calibrate"]], "seconds": [1.0],
    "attempts": 1, "exit_code": None, "reason": None, "ended": 1.0, "host": "h",
}  # fmt: skip
GRID = (
    b"name = 'g'\nexclude = [{a = 1}]\ncommands = ['smooth [--alpha {a}] {b}']\n[axes]\na = [1, 2]\n[fixed]\nb = 'x'\n"
)
GLUE = b"index\tsentence1\tsentence2\tlabel\n0\tA b.\tC d.\tentailment\n1\tE.\tF.\t1\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return {
        **safetensors_bytes(tmp_path_factory.mktemp("whole")),
        "json": json.dumps(RECORD).encode(),
        "sweep": json.dumps(SWEEP).encode(),
        "npz": npz_bytes(),
        "checkpoint": checkpoint_bytes(),
        "grid": GRID,
        "glue": GLUE,
        "cola": b"a\t1\t\tA sentence.\nb\t0\t*\tSentence a.\n",
    }


def load_npz(path: Path) -> None:
    data = load_data(f"npz:{path}", Request(normalization=GRAY))
    for batches in (data.calibration, data.evaluation):
        next(iter(batches))


def load_packed(path: Path) -> None:
    PackedCheckpoint.load(path).state_dict()


def load_record(path: Path) -> None:
    path.replace(path.with_name("run_record.json"))
    Record.load(path.parent)


def load_checkpoint(path: Path) -> None:
    path.replace(path.with_name("checkpoint.pt"))
    Folder(path.parent).settings()


# The reader, the file it is fed in damaged form, and the name that file has.
READERS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "calibration": (Calibration.load, "calibration", "c.safetensors"),
    "smoothed model": (lambda path: Smoothed.load(path, MODEL, SMOOTHED.calibration), "smoothed", "s.safetensors"),
    "quantized model": (lambda path: Quantized.load(path, MODEL, CALIBRATION), "quantized", "q.safetensors"),
    "packed checkpoint": (load_packed, "packed", "p.safetensors"),
    "safetensors weights": (read_state, "packed", "w.safetensors"),
    "pickled weights": (read_state, "pickle.pt", "w.pt"),
    "npz": (load_npz, "npz", "d.npz"),
    "JSON": (read_json, "json", "f.json"),
    "JSON lines": (read_lines, "json", "f.jsonl"),
    "sweep": (lambda path: Sweep.from_json(read_json(path)), "sweep", "s.json"),
    "GLUE with a header": (lambda path: read_examples(path, RTE), "glue", "train.tsv"),
    "GLUE without a header": (lambda path: read_examples(path, COLA), "cola", "train.tsv"),
    "training checkpoint": (load_checkpoint, "checkpoint", "c.pt"),
    "grid": (read_grid, "grid", "g.toml"),
    "record of a run": (load_record, "json", "r.json"),
}


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """One to four of: bytes changed, a part cut out, noise put in, the end cut off, another length in front."""
    kinds = draw(st.lists(st.sampled_from(["change", "cut", "insert", "end", "length"]), min_size=1, max_size=4))
    steps = [(kind, draw(st.floats(0, 1)), draw(st.binary(min_size=1, max_size=9))) for kind in kinds]

    def apply(content: bytes) -> bytes:
        for kind, where, noise in steps:
            # Half of the damage goes to the beginning, where the headers are.
            place = int(where * 2 * min(len(content), 400)) if where < 0.5 else int((where - 0.5) * 2 * len(content))
            if kind == "change":
                content = content[:place] + noise + content[place + len(noise) :]
            elif kind == "cut":
                content = content[:place] + content[place + 7 * len(noise) :]
            elif kind == "insert":
                content = content[:place] + noise + content[place:]
            elif kind == "end":
                content = content[:place]
            else:
                content = struct.pack("<Q", int.from_bytes(noise, "little") % 2**64) + content[8:]
        return content

    return apply


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name: str, files: dict[str, bytes], tmp_path: Path) -> None:
    read, source, file_name = READERS[name]
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / file_name).write_bytes(files[source])
    read(whole / file_name)  # the undamaged file is fine

    @settings(
        max_examples=EXAMPLES, derandomize=not LONGER, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(damage() | st.binary(max_size=60).map(lambda noise: lambda content: noise))
    def feed(apply: Callable[[bytes], bytes]) -> None:
        path = tmp_path / file_name
        path.write_bytes(apply(files[source]))
        try:
            read(path)
        except PtqError as error:
            assert str(error) and "\n" not in str(error)

    feed()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def replaced(content: Any, path: list[int], value: Any) -> Any:
    """The same nested content with the part that the path leads to replaced."""
    if not path or not isinstance(content, (dict, list)) or not content:
        return value
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    changed = {**content} if isinstance(content, dict) else [*content]
    changed[key] = replaced(content[key], path[1:], value)
    return changed


_STRUCTURED = ["calibration", "smoothed model", "quantized model", "packed checkpoint", "sweep", "record of a run"]


@pytest.mark.parametrize("name", _STRUCTURED)
def test_well_formed_files_with_wrong_contents_are_read_or_refused(
    name: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    """JSON that parses, with any value anywhere: what a newer version or another program might write."""
    read, source, file_name = READERS[name]
    whole = files[source]

    @settings(
        max_examples=EXAMPLES, derandomize=not LONGER, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(st.lists(st.integers(0, 20), min_size=1, max_size=5), _VALUES)
    def feed(path_to: list[int], value: Any) -> None:
        path = tmp_path / file_name
        if file_name.endswith(".json"):
            path.write_text(json.dumps(replaced(json.loads(whole), path_to, value)))
        else:
            size = struct.unpack("<Q", whole[:8])[0]
            head = json.loads(whole[8 : 8 + size])
            metadata = replaced(json.loads(head["__metadata__"]["ptq"]), path_to, value)
            head["__metadata__"]["ptq"] = json.dumps(metadata)
            text = json.dumps(head).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
        try:
            read(path)
        except PtqError as error:
            assert str(error)

    feed()
