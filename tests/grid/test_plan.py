"""From TOML to runs: combinations, templates, stable names."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from ptq.grid.plan import MAIN_ROAD, Grid, read_grid, resolve


def grid_of(tmp_path: Path, text: str) -> Grid:
    (tmp_path / "study.toml").write_text(text)
    return read_grid(tmp_path / "study.toml")


def test_every_combination_is_a_run_in_the_order_of_the_axes(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "[axes]\nalpha = [0.25, 0.5]\nbits = ['W8A8', 'W4A4', 'W3A3']\nseed = [0, 1]")
    expected = itertools.product([0.25, 0.5], ["W8A8", "W4A4", "W3A3"], [0, 1])
    assert [tuple(run.settings.values()) for run in grid.runs] == list(expected)
    assert len({run.id for run in grid.runs}) == 12
    assert (grid.name, grid.folder) == ("study", Path("reports/grids/study"))


def test_the_main_road_says_what_the_axes_say_and_the_refinement(tmp_path: Path) -> None:
    text = "[axes]\nalpha = ['none', 0.5]\ntrain = ['none', 'qat']\n[fixed]\nbits = 'W4A4'\nseed = 3\nepochs = 2"
    runs = grid_of(tmp_path, text).runs
    quantize = ("quantize", "--bits", "W4A4", "--refine", "fast", "--seed", "3")
    assert runs[0].commands == (("calibrate", "--seed", "3"), quantize, ("evaluate",))
    assert runs[3].commands == (
        ("calibrate", "--seed", "3"),
        ("smooth", "--alpha", "0.5", "--seed", "3"),
        quantize,
        ("evaluate",),
        ("train", "qat", "--epochs", "2", "--seed", "3"),
    )


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        pytest.param("a {x}", {"x": 1}, "a|1", id="a value"),
        pytest.param("a [--b {x}]", {"x": "none"}, "a", id="none is left out"),
        pytest.param("a [--b {x}]", {}, "a", id="absent is left out"),
        pytest.param("a [--b {x}] [--c {y}]", {"y": 2}, "a|--c|2", id="groups by themselves"),
        pytest.param("[a {x} [--b {y}]]", {"x": 1}, "a|1", id="inner group"),
        pytest.param("[a {x} [--b {y}]]", {"y": 1}, "", id="outer group takes the inner one with it"),
        pytest.param("a [--flag]", {}, "a|--flag", id="a group without names stays"),
        pytest.param("a {x}", {"x": "two words"}, "a|two words", id="a value stays one word"),
        pytest.param("a '--b={x} c'", {"x": "[y]"}, "a|--b=[y] c", id="quotes, and brackets in a value"),
        pytest.param("a {x} {x}", {"x": True}, "a|True|True", id="twice"),
    ],
)
def test_templates(template: str, values: dict[str, str | int], expected: str) -> None:
    assert "|".join(resolve(template, values)) == expected


def test_the_name_of_a_run_is_what_it_does(tmp_path: Path) -> None:
    """The SHA-256 of the commands, so it survives new axes, another order and another machine."""
    quantize = ("quantize", "--refine", "fast")
    before = grid_of(tmp_path, "[axes]\nalpha = [0.25, 0.5]")
    assert before.runs[0].commands == (("calibrate",), ("smooth", "--alpha", "0.25"), quantize, ("evaluate",))
    text = '[["calibrate"], ["smooth", "--alpha", "0.25"], ["quantize", "--refine", "fast"], ["evaluate"]]'
    assert json.loads(text) and before.runs[0].id == hashlib.sha256(text.encode()).hexdigest()[:12]
    after = grid_of(tmp_path, "[axes]\nrefine = ['none', 'fast']\nalpha = [0.75, 0.5, 0.25]")
    assert {run.id for run in before.runs} < {run.id for run in after.runs}
    assert len(after.runs) == 6


def test_combinations_that_come_to_the_same_are_one_run(tmp_path: Path) -> None:
    text = "commands = ['quantize --bits {bits}', '[train qat --epochs {epochs}]']\n"
    runs = grid_of(tmp_path, text + "[axes]\nbits = ['W8A8']\nepochs = ['none', 1, 2]").runs
    assert [len(run.commands) for run in runs] == [1, 2, 2]
    text = "commands = ['[quantize --bits {bits} --refine {refine}]', 'calibrate']\n"
    runs = grid_of(tmp_path, text + "[axes]\nbits = ['none', 'W4A4']\nrefine = ['none', 'fast', 'best']").runs
    assert [run.settings["refine"] for run in runs] == ["none", "fast", "best"]


def test_exclusions(tmp_path: Path) -> None:
    text = "exclude = [{alpha = 'none', bits = 'W8A8'}, {bits = 'W3A3'}]\n"
    runs = grid_of(tmp_path, text + "[axes]\nalpha = ['none', 0.5]\nbits = ['W8A8', 'W4A4', 'W3A3']").runs
    kept = [("none", "W4A4"), (0.5, "W8A8"), (0.5, "W4A4")]
    assert [(run.settings["alpha"], run.settings["bits"]) for run in runs] == kept


def test_the_main_road_is_made_of_real_options() -> None:
    """Each command and each option of the templates is one that the command line knows."""
    import typer

    import ptq.cli
    import ptq.commands
    import ptq.train_commands

    root = typer.main.get_command(ptq.cli.app)
    for template in MAIN_ROAD:
        words = template.replace("[", " ").replace("]", " ").split()
        command = root.commands[words[0]]  # type: ignore[attr-defined]
        if words[0] == "train":
            command = command.commands["qat"]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, template
