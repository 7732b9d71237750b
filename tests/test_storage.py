"""Files: whole or absent, refused when they are something else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ptq.errors import InputError
from ptq.storage import checksum, fingerprint, read_json, read_tensors, replacing, write_json, write_tensors


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"old": 1})
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("half of the new")
        raise KeyboardInterrupt
    assert read_json(path) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        write_json(tmp_path / "file.json", {})
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file.json").stat().st_mode) == 0o644


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't write there"):
        write_json(tmp_path / "file" / "below.json", {})


def test_numbers_that_are_none_never_reach_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "file.json", {"value": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_json_that_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(InputError, match=r"file.json"):
        read_json(tmp_path / "file.json")


def test_tensors_come_back_with_their_metadata_also_when_they_share_memory(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4)
    write_tensors(tmp_path / "t", "calibration", {"a": tensor, "b": tensor.t()}, {"schema": 1, "x": [1, "ä"]})
    tensors, metadata = read_tensors(tmp_path / "t", "calibration", 1)
    assert torch.equal(tensors["a"], tensor) and torch.equal(tensors["b"], tensor.t())
    assert metadata["x"] == [1, "ä"]


def foreign(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path)


def truncated(path: Path) -> None:
    write_tensors(path, "calibration", {"a": torch.zeros(1000)}, {"schema": 1})
    path.write_bytes(path.read_bytes()[:-100])


FILES = {
    "missing": (lambda path: None, "no such file: run `ptq calibrate` first"),
    "empty": (lambda path: path.write_bytes(b""), "not a readable safetensors file"),
    "text": (lambda path: path.write_text("hello, this is text"), "not a readable safetensors file"),
    "huge header": (lambda path: path.write_bytes(b"\xff" * 7 + b"\x00rest"), "not a readable safetensors file"),
    "truncated": (truncated, "not a readable safetensors file"),
    "foreign": (foreign, "holds no ptq data, not a calibration"),
    "another kind": (
        lambda path: write_tensors(path, "quantized model", {"a": torch.zeros(1)}, {"schema": 1}),
        "holds quantized model, not a calibration",
    ),
    "another schema": (
        lambda path: write_tensors(path, "calibration", {"a": torch.zeros(1)}, {"schema": 99}),
        "calibration schema 99, this version reads 1",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_refused(name: str, tmp_path: Path) -> None:
    make, message = FILES[name]
    make(tmp_path / "c.safetensors")
    with pytest.raises(InputError, match=message) as caught:
        read_tensors(tmp_path / "c.safetensors", "calibration", 1)
    assert "\n" not in str(caught.value)


def test_fingerprints_see_names_shapes_and_values() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    same = nn.Linear(3, 4)
    same.load_state_dict(model.state_dict())
    assert fingerprint(same) == fingerprint(model)
    same.bias.data[0] += 1e-6
    assert fingerprint(same) != fingerprint(model)
    assert fingerprint(nn.Sequential(model)) != fingerprint(model)


def test_checksums_add_up_over_batches_and_see_every_place() -> None:
    x = torch.randn(12, 3, 5, generator=torch.Generator().manual_seed(0))
    whole = checksum(x)
    assert sum(checksum(part) for part in x.split(5)) % 2**64 == whole
    assert sum(checksum(part) for part in reversed(x.split(1))) % 2**64 == whole
    swapped = x.clone()
    swapped[0, 0, 0], swapped[0, 0, 1] = x[0, 0, 1], x[0, 0, 0]
    assert checksum(swapped) != whole
    assert checksum(torch.arange(6)) == checksum(torch.arange(6)) != checksum(torch.arange(1, 7))
