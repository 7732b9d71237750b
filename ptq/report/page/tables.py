"""Tables of the page: columns, and rows of cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Cell:
    """A cell: what is read, what it is sorted by and compared with, and how strongly it is coloured (0 to 1)."""

    text: str
    value: float | str | None = None
    heat: float | None = None
    lines: Sequence[str] = ()  # commands, one below the other, in place of the text
    picture: Markup | None = None  # in place of the text


@dataclass(frozen=True)
class Column:
    """A column: its heading, the group that it stands under, and whether it holds numbers."""

    title: str
    group: str = ""
    number: bool = True
    hint: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def number(value: float | None, form: str = ".3g") -> Cell:
    """A number as text, with itself for sorting; empty where there is none."""
    if value is None or math.isnan(value):
        return Cell("")
    if math.isinf(value):
        return Cell("∞" if value > 0 else "-∞", math.copysign(1e300, value))
    return Cell(format(value, form), value)


def words(text: str) -> Cell:
    return Cell(text, text)


def interval(bounds: Sequence[float | None], form: str = ".2f") -> Cell:
    """Two bounds; one that is infinite was written as None."""
    low, high = ("∞" if bound is None else format(bound, form).replace("-", "−") for bound in bounds)
    return Cell(f"{low} … {high}", bounds[0])


def signed(value: float | None, form: str = "+.2f") -> Cell:
    """A number with its sign, a true minus."""
    cell = number(value, form)
    return Cell(cell.text.replace("-", "−"), cell.value)


def text_columns(*titles: str) -> list[Column]:
    return [Column(title, number=False) for title in titles]


def number_columns(*titles: str) -> list[Column]:
    return [Column(title) for title in titles]
