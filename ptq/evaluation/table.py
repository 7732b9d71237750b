"""The networks of an evaluation side by side, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ptq.calibration import Calibration
from ptq.evaluation.layers import LayerError
from ptq.evaluation.metrics import Evaluation
from ptq.smoothing import Smoothed


@dataclass(frozen=True)
class Row:
    """One network of an evaluation."""

    name: str
    evaluation: Evaluation
    errors: dict[str, LayerError] | None  # None for the float network


def networks_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What each network reached, and how its answers differ from those of the first."""
    return [_row_json(row, rows[0]) for row in rows]


def layers_json(rows: Sequence[Row], calibration: Calibration, smoothed: Smoothed | None) -> dict[str, Any]:
    """The range of each layer's input before and after smoothing, and its errors in each network."""
    return {name: _layer_json(name, rows, calibration, smoothed) for name in calibration.layers}


def _row_json(row: Row, reference: Row) -> dict[str, Any]:
    paired = asdict(row.evaluation.against(reference.evaluation)) if row is not reference else None
    return {"name": row.name, **row.evaluation.to_json(), "against_float": paired}


def _layer_json(name: str, rows: Sequence[Row], calibration: Calibration, smoothed: Smoothed | None) -> dict[str, Any]:
    after = smoothed.calibration.layers[name] if smoothed else None
    errors = {row.name: row.errors[name] for row in rows if row.errors and name in row.errors}
    return {
        "kind": calibration.layers[name].kind,
        "absmax": float(calibration.layers[name].activation_absmax.max()),
        "absmax_smoothed": float(after.activation_absmax.max()) if after else None,
        "errors": {
            network: {
                "isolated": error.isolated.to_json(),
                "accumulated": error.accumulated.to_json() if error.accumulated else None,
            }
            for network, error in errors.items()
        },
    }
