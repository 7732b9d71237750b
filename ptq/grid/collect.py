"""What came out of a grid, as one table: a row for each finished run, a column for each axis and each result."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptq.grid.plan import Grid
from ptq.grid.states import GridFolder
from ptq.storage import read_json, replacing, write_json

Columns = dict[str, Any]


def _of_evaluation(content: Mapping[str, Any]) -> Iterator[Columns]:
    """The float network, and the last one of the evaluation: smoothed or refined, where it was."""
    networks = content["networks"]
    first, last = networks[0], networks[-1]
    metric = last["metric"]
    interval = last.get(f"{metric}_interval", last["interval"])
    yield {
        "metric": metric,
        "float": first[metric],
        "score": last[metric],
        "low": interval[0],
        "high": interval[1],
        "n": last["n"],
        "changed": last["against_float"]["changed"] if last["against_float"] else None,
    }


def _of_sweep(content: Mapping[str, Any]) -> Iterator[Columns]:
    """The best of each number of bits."""
    for bits in dict.fromkeys(point["bits"] for point in content["points"]):
        best = max((p for p in content["points"] if p["bits"] == bits), key=lambda point: point["accuracy"]["score"])
        yield {f"{bits} best": best["accuracy"]["score"], f"{bits} best alpha": best["alpha"]}


def _of_baseline(content: Mapping[str, Any]) -> Iterator[Columns]:
    training = content["training"]
    yield {f"{training} score": content["score"], f"{training} seconds": content["seconds"]}


def _of_export(content: Mapping[str, Any]) -> Iterator[Columns]:
    agreement = content["agreement"]
    yield {"file top1": agreement["top1"], "same answers": agreement["same_top1"], "file bytes": content["bytes"]}


# Which files of a run folder hold results, and what is taken from them.
_RESULTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Columns]]] = {
    "evaluation.json": _of_evaluation,
    "sweep.json": _of_sweep,
    "baselines/*/baseline.json": _of_baseline,
    "export/export.json": _of_export,
}


@dataclass(frozen=True)
class Collected:
    """The table of a grid."""

    name: str
    axes: tuple[str, ...]
    rows: list[Columns]
    missing: int  # runs that aren't finished

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def scores(self) -> list[str]:
        """The columns that can be drawn: results in percent."""
        return [name for name in self.columns if name == "score" or name.endswith((" score", " best"))]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "grid results",
            "schema": 1,
            "name": self.name,
            "axes": list(self.axes),
            "missing": self.missing,
            "rows": self.rows,
        }

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def save(self, folder: Path) -> list[Path]:
        table, numbers = folder / "results.csv", folder / "results.json"
        with replacing(table) as partial:
            partial.write_text(self.to_csv(), encoding="utf-8")
        write_json(numbers, self.to_json())
        return [table, numbers]


def collect(grid: Grid) -> Collected:
    """Read the results of all finished runs."""
    folder, rows = GridFolder.of(grid), []
    for run in grid.runs:
        record = folder.record(run)
        if record is None or not record.finished:
            continue
        rows.append({"id": run.id, **run.settings, "seconds": sum(record.seconds), **results(folder.run_folder(run))})
    return Collected(grid.name, tuple(grid.axes), rows, len(grid.runs) - len(rows))


def results(run_folder: Path) -> Columns:
    """What the files of one run folder say."""
    found: Columns = {}
    for pattern, read in _RESULTS.items():
        for file in sorted(run_folder.glob(pattern)):
            for columns in read(read_json(file)):
                found |= columns
    return found


def varying(rows: Sequence[Columns], axes: Sequence[str]) -> list[str]:
    """The axes along which the rows differ."""
    return [axis for axis in axes if len({str(row[axis]) for row in rows}) > 1]
