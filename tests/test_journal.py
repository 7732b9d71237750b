"""The log of a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ptq.errors import InputError
from ptq.journal import FILE, recording, without_home


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_line_for_each_command_also_for_those_that_fail(tmp_path: Path) -> None:
    with recording(tmp_path, ["calibrate", "--batches", "3"]):
        pass
    with pytest.raises(ValueError, match="broken"), recording(tmp_path, ["sweep"]):
        raise ValueError("broken\nin two lines")
    first, second = lines(tmp_path)
    assert (first["command"], first["outcome"]) == ("ptq calibrate --batches 3", "finished")
    assert (second["command"], second["outcome"]) == ("ptq sweep", "ValueError: broken")
    environment = first["environment"]
    assert isinstance(environment, dict) and {"python", "torch", "processors"} <= environment.keys()


def test_bad_input_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bits"), recording(tmp_path, ["quantize", "--bits", "W1A1"]):
        raise InputError("bits = 1: choose more")
    assert not list(tmp_path.iterdir())


def test_no_folder_no_log(tmp_path: Path) -> None:
    with recording(tmp_path / "missing", ["evaluate"]):
        pass
    assert not (tmp_path / "missing").exists()


def test_home_folders_are_nobodys_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "somebody"
    work = home / "project"
    work.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    assert without_home(f"--data {home}/data --run {work}/reports") == "--data ~/data --run ./reports"
    with recording(work, ["evaluate", "--data", f"npz:{home}/secret.npz"]):
        pass
    assert str(home) not in (work / FILE).read_text()


def test_a_log_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()  # in the way
    with pytest.raises(KeyError, match="the message"), recording(tmp_path, ["evaluate"]):
        raise KeyError("the message")
