"""The log of a run folder, and what reaches the screen."""

from __future__ import annotations

import getpass
import json
import socket
import warnings
from pathlib import Path

import pytest

from ptq import journal
from ptq.cli import invoke
from ptq.errors import InputError
from ptq.journal import FILE, LEVELS, detail, logger, recording, showing, without_names


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


def say_something() -> None:
    detail("a unit", seconds=1.5)
    logger.info("a remark")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("two\nlines", UserWarning, stacklevel=1)
    logger.error("a failure")


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_lets_itself_and_the_worse_ones_pass(tmp_path: Path, level: str) -> None:
    """To the screen and to the log alike; the line about the command comes last at every level."""
    shown: list[str] = []
    with showing(shown.append, level), recording(tmp_path, ["sweep"], level):
        say_something()
    expected = ["debug: a unit (seconds 1.5)", "a remark", "warning: UserWarning: two", "error: a failure"]
    assert shown == expected[LEVELS.index(level) :]
    *messages, command = lines(tmp_path)
    assert [message["level"] for message in messages] == list(LEVELS[LEVELS.index(level) :])
    assert command["outcome"] == "finished"
    if level == "debug":
        assert (messages[0]["text"], messages[0]["seconds"]) == ("a unit", 1.5)


def test_afterwards_nobody_listens(tmp_path: Path) -> None:
    before = warnings.showwarning, logger.level, list(logger.handlers)
    with showing(lambda line: None), recording(tmp_path, ["sweep"]):
        assert warnings.showwarning is not before[0]
    assert (warnings.showwarning, logger.level, list(logger.handlers)) == before


def test_what_a_killed_command_had_finished_is_logged(tmp_path: Path) -> None:
    """Messages wait for the end, since bad input leaves nothing; work that is kept doesn't wait."""
    with recording(tmp_path, ["sweep"], "debug"):
        logger.info("a remark")
        assert not (tmp_path / FILE).exists()
        detail("point finished")
        assert [line["text"] for line in lines(tmp_path)] == ["a remark", "point finished"]
    assert len(lines(tmp_path)) == 3


def test_levels_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["sweep", "--alphas", "0.5", "--bits", "W8A8", "--images", "8", "--no-auto", "--run", str(tmp_path)]
    assert invoke(["calibrate", "--batches", "1", "--run", str(tmp_path), "--quiet"]) == 0
    assert invoke([*sweep, "--log-level", "debug", "--json"]) == 0
    units = [line for line in capsys.readouterr().err.splitlines() if line.startswith("debug: point finished (sec")]
    assert len(units) == 2  # without smoothing, and α = 0.5
    logged = [line for line in lines(tmp_path) if line.get("text") == "point finished"]
    assert len(logged) == 2 and all(line["level"] == "debug" and line["seconds"] >= 0 for line in logged)  # type: ignore[operator]
    (tmp_path / FILE).unlink()
    for level, remarks in (("info", 1), ("warning", 0), ("error", 0)):
        assert invoke(["quantize", "--no-smooth", "--run", str(tmp_path), "--log-level", level]) == 0
        out, err = capsys.readouterr()
        assert err.count("quantizing the model as it is") == remarks and "wrote " in out, level
    assert [line["kind"] for line in lines(tmp_path)] == ["message", "command", "command", "command"]
    assert invoke(["quantize", "--run", str(tmp_path), "--log-level", "loud"]) == 1
    assert "--log-level 'loud': choose one of debug, info, warning, error" in capsys.readouterr().err


def test_names_are_nobodys_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "people" / "somebody"
    work = home / "project"
    work.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(journal, "_names", lambda: ("alice", "node-17"))
    monkeypatch.chdir(work)
    monkeypatch.setenv("PWD", str(work))
    for text, expected in {
        f"--data {home}/data --run {work}/reports": "--data ~/data --run ./reports",
        f"npz:{home}": "npz:~",
        f"{home}body/x": f"{home}body/x",
        "/home/bob/x.npz, '/Users/carol/y'": "~/x.npz, '~/y'",
        "/scratch/alice/x /scratch/alice2/x alice": "/scratch/USER/x /scratch/alice2/x alice",
        "no route to node-17:29500, node-170": "no route to HOST:29500, node-170",
    }.items():
        assert without_names(text) == expected


def test_nothing_private_in_the_log_of_real_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that finish, remark, warn and break, in a home folder, with absolute paths."""
    home = tmp_path / "people" / "somebody"
    run = home / "project" / "run"
    run.parent.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(run.parent)
    for arguments in (["calibrate", "--batches", "1"], ["quantize"], ["pack"]):
        assert invoke([*arguments, "--run", str(run), "--log-level", "debug", "--quiet"]) == 0
    with pytest.raises(OSError), recording(run, ["export", f"--data=npz:{home}/x.npz"], "debug"):
        logger.info("%s isn't there on %s", home / "x.npz", socket.gethostname())
        raise OSError(f"{home}: no route to {socket.gethostname()}")
    text = (run / FILE).read_text()
    assert len(text.splitlines()) >= 5 and "~/x.npz isn't there on HOST" in text and "--run ./run" in text
    assert str(home) not in text and socket.gethostname() not in text and f"/{getpass.getuser()}/" not in text


def test_a_log_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()  # in the way
    with pytest.raises(KeyError, match="the message"), recording(tmp_path, ["evaluate"]):
        raise KeyError("the message")
