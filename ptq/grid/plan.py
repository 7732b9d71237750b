"""From a small TOML file to the list of runs.

    [axes]                                  # every combination is a run
    alpha = ["none", 0.25, 0.5, 0.75]
    bits = ["W8A8", "W4A4"]

``commands`` says what a run does, as templates. ``{name}`` is the value of an axis, or of a constant of ``[fixed]``.
What stands in brackets is left out where one of its names is "none" or isn't there. Without ``commands``, a run goes
the main road (``MAIN_ROAD``). ``exclude`` lists combinations to leave out, as ``[{alpha = "none", bits = "W8A8"}]``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ptq.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Value: TypeAlias = str | int | float | bool
ROOT = Path("reports") / "grids"
NONE = "none"
_TASK = "[--task {task}] [--model {model}] [--weights {weights}] [--data {data}] [--seed {seed}] [--device {device}]"
MAIN_ROAD = (
    f"calibrate {_TASK} [--batch-size {{batch_size}}] [--batches {{batches}}] [--observer {{observer}}]",
    "[smooth --alpha {alpha} [--seed {seed}] [--device {device}]]",
    "quantize [--bits {bits}] --refine {refine} [--weight-format {format}] [--first-last {first_last}]"
    " [--activation-format {activation_format}] [--seed {seed}] [--device {device}]",
    "evaluate [--images {images}] [--device {device}]",
    "[train {train} [--epochs {epochs}] [--preset {preset}] [--seed {seed}] [--device {device}]]",
)
DEFAULTS = {"refine": "fast"}  # of what isn't left out at "none": that is a choice of its own here
MOST_RUNS = 100_000
_NAME = re.compile(r"\{([^{}]*)\}")
_INNERMOST = re.compile(r"\[([^\[\]]*)\]")
_KEYS = ("name", "folder", "commands", "axes", "fixed", "exclude")


@dataclass(frozen=True)
class Planned:
    """One run: a combination of the axes' values, and what there is to do for it."""

    settings: dict[str, Value]
    commands: tuple[tuple[str, ...], ...]

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the commands: what is done, not where it stands in the grid."""
        return hashlib.sha256(json.dumps(self.commands).encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Grid:
    """The runs of a grid, in the order of its axes."""

    name: str
    folder: Path
    axes: dict[str, tuple[Value, ...]]
    runs: tuple[Planned, ...]


def read_grid(file: Path) -> Grid:
    """Read a grid's file; everything that doesn't fit together is refused before anything runs."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: can't be read ({error.strerror}): give the grid's TOML file") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise InputError(f"{file}: not a TOML file ({error})") from error
    try:
        return _grid(content, file.stem)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def _grid(content: Mapping[str, Any], stem: str) -> Grid:
    unknown = sorted(set(content) - set(_KEYS))
    if unknown:
        raise InputError(f"{unknown[0]!r} means nothing here: a grid has {', '.join(_KEYS)}")
    name = content.get("name", stem)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise InputError(f"name {name!r}: use letters, digits and - alone, it names a folder")
    folder = content.get("folder", str(ROOT / name))
    if not isinstance(folder, str) or not folder:
        raise InputError(f"folder {folder!r}: give a path in quotes")
    axes = {axis: _values(axis, values) for axis, values in _table(content, "axes").items()}
    if not axes:
        raise InputError("no axes: give at least one under [axes], as alpha = [0.25, 0.5]")
    fixed = {key: _value(key, value) for key, value in _table(content, "fixed").items()}
    twice = sorted(set(axes) & set(fixed))
    if twice:
        raise InputError(f"{twice[0]} is an axis and fixed: give it once")
    given = content.get("commands")
    if given is not None and not (isinstance(given, list) and given and all(isinstance(line, str) for line in given)):
        raise InputError(f"commands {given!r}: give a list of texts, as ['calibrate', 'quantize --bits {{bits}}']")
    templates = MAIN_ROAD if given is None else tuple(given)
    _check_names(templates, [*axes, *fixed], complete=given is not None)
    size = 1
    for values in axes.values():
        size *= len(values)
    if size > MOST_RUNS:
        raise InputError(f"{size:,} runs are more than {MOST_RUNS:,}: split the grid")
    exclude = _exclusions(content.get("exclude", []), axes)
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    wanted = [chosen for chosen in combinations if not any(rule.items() <= chosen.items() for rule in exclude)]
    runs: dict[str, Planned] = {}
    for settings in wanted:
        run = Planned(settings, tuple(_commands(templates, {**fixed, **settings})))
        runs.setdefault(run.id, run)  # combinations that come to the same are done once
    if not runs:
        raise InputError("exclude leaves no run: exclude less")
    return Grid(name, Path(folder), axes, tuple(runs.values()))


def _table(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = content.get(key, {})
    if not isinstance(table, dict):
        raise InputError(f"{key} {table!r}: write a table, [{key}] with one line for each name")
    return table


def _value(name: str, value: Any) -> Value:
    if not isinstance(value, (str, int, float, bool)) or value == "":
        raise InputError(f"{name} = {value!r}: give texts or numbers")
    return value


def _values(axis: str, values: Any) -> tuple[Value, ...]:
    if not isinstance(values, list) or not values:
        raise InputError(f"axis {axis} = {values!r}: give a list of values, as [0.25, 0.5]")
    if len({str(value) for value in values}) < len(values):
        raise InputError(f"axis {axis} = {values!r}: a value stands there twice: give each once")
    return tuple(_value(f"axis {axis}", value) for value in values)


def _exclusions(rules: Any, axes: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    if not isinstance(rules, list) or not all(isinstance(rule, dict) and rule for rule in rules):
        raise InputError(f"exclude {rules!r}: give a list of combinations, as [{{alpha = 'none', bits = 'W8A8'}}]")
    for rule in rules:
        for axis, value in rule.items():
            if value not in axes.get(axis, ()):
                raise InputError(f"exclude {axis} = {value!r}: no axis has that value")
    return rules


def _check_names(templates: Sequence[str], known: Sequence[str], *, complete: bool) -> None:
    """Every axis is used, and of one's own commands every name is known."""
    used = {name for template in templates for name in _NAME.findall(template)}
    idle = [name for name in known if name not in used]
    if idle:
        raise InputError(f"{idle[0]}: no command uses it: choose from {', '.join(sorted(used)) or 'none'}")
    missing = sorted(used - set(known)) if complete else []
    if missing:
        raise InputError(f"{{{missing[0]}}} in commands: no axis and no fixed value has that name")
    for template in templates:
        opened, closed = template.count("["), template.count("]")
        if opened != closed:
            raise InputError(f"command {template!r}: {opened} [ and {closed} ]: close what is opened")


def _commands(templates: Sequence[str], values: Mapping[str, Value]) -> list[tuple[str, ...]]:
    resolved = [resolve(template, {**DEFAULTS, **values}) for template in templates]
    commands = [command for command in resolved if command]
    for command in commands:
        if command[0] in ("grid", "--run") or "--run" in command:
            raise InputError(f"command {shlex.join(command)!r}: every run has its own folder, leave --run and grid out")
    if not commands:
        raise InputError("commands: nothing is left to do for some run")
    return commands


def resolve(template: str, values: Mapping[str, Value]) -> tuple[str, ...]:
    """The arguments of one command; empty if all of it is left out.

    >>> resolve("quantize --bits {bits} [--first-last {outer}]", {"bits": "W4A4", "outer": "none"})
    ('quantize', '--bits', 'W4A4')
    """

    def kept(group: re.Match[str]) -> str:
        return "" if any(values.get(name, NONE) == NONE for name in _NAME.findall(group[1])) else group[1]

    while (shorter := _INNERMOST.sub(kept, template)) != template:
        template = shorter
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise InputError(f"command {template!r}: {error}: close the quotes") from error
    return tuple(_NAME.sub(lambda name: str(values[name[1]]), word) for word in words)
