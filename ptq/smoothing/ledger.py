"""What happened to each layer, and why: nothing happens silently."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ptq import channels
from ptq.calibration import Calibration
from ptq.graph import ChannelGraph
from ptq.smoothing.result import LedgerEntry
from ptq.smoothing.search import Choice


def ledger_entry(
    name: str,
    layer: channels.Layer,
    calibration: Calibration,
    graph: ChannelGraph,
    skipped: str | None,
    choice: Choice | None,
    factor: Tensor | None,
    groups: Sequence[Sequence[str]],
) -> LedgerEntry:
    kind = channels.kind_of(layer)
    why_not_folded = graph.reasons.get(name, "the hook form was asked for")
    if factor is None or not bool((factor != 1).any()):
        if skipped is None and choice is None:
            skipped = f"can't be folded: {why_not_folded}"
        return LedgerEntry(name, kind, "skipped", skipped or "no α lowers its error")
    before = calibration.layers[name].activation_absmax
    ranges = float(before.max()), float((before / factor).max())
    alpha = choice.alpha if choice else None
    group = next((tuple(other for other in group if other != name) for group in groups if name in group), ())
    if not graph.foldable(name) and choice is not None and choice.alpha is not None:
        return LedgerEntry(name, kind, "explicit", why_not_folded, alpha, group, *ranges)
    return LedgerEntry(name, kind, "folded", f"into {_listing(graph.sources(name))}", alpha, group, *ranges)


def _listing(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
