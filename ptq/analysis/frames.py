"""Rows as a pandas DataFrame, where pandas is."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptq.errors import InputError


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A ``pandas.DataFrame`` with a row for each mapping; what is nested in it becomes ``outer.inner`` columns."""
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise InputError("to_frame: pandas isn't installed: pip install pandas, or use to_json()") from error
    return pandas.DataFrame([dict(_flat(row)) for row in rows])


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
