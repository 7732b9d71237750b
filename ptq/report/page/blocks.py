"""What a section of the page is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ptq.report.page.tables import Table

SHOWN = 10  # rows of a long table that are seen at once


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a section; what is empty isn't shown."""

    id: str = ""
    heading: str = ""
    note: str = ""
    chart: Markup | None = None
    pairs: Sequence[tuple[str, str]] = ()
    table: Table | None = None
    more: Table | None = None  # behind a line to open
    more_title: str = ""
    lines: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Block:
    """A section of the page."""

    id: str
    title: str
    short: str = ""  # of the title, for the list of sections
    note: str = ""
    parts: Sequence[Part] = ()


def long_table(id: str, table: Table, what: str) -> Part:
    """The first rows of a table, and the others behind a line to open."""
    rest = table.rows[SHOWN:]
    return Part(
        id=id,
        table=Table(table.title, table.columns, table.rows[:SHOWN]),
        more=Table(f"{table.title}, continued", table.columns, rest) if rest else None,
        more_title=f"The other {len(rest)} {what}",
    )
