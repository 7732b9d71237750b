"""The error of each layer, by itself and in the quantized network, and which part of it weights and inputs make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from ptq import distributed
from ptq.analysis.grafting import PARTS, Graft, Grafted, Part, Tape, grafting
from ptq.analysis.measuring import within
from ptq.batches import Batches, Call, calls
from ptq.channels import kind_of
from ptq.errors import InputError
from ptq.evaluation.layers import Distance, DistanceSums


@dataclass(frozen=True, kw_only=True)
class Split:
    """A distance, and what it is with only the weights or only the activations quantized."""

    both: Distance
    weights: Distance
    activations: Distance

    def to_json(self) -> dict[str, Any]:
        return {part: getattr(self, part).to_json() for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class LayerAnalysis:
    """The errors of one layer's output, behind the BatchNorm that was folded into it."""

    layer: str
    kind: str
    bits: str  # W4A4, or float
    isolated: Split  # only this layer is quantized, its input is the float network's
    accumulated: Split  # all layers are quantized

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "isolated": self.isolated.to_json(), "accumulated": self.accumulated.to_json()}


class _Sums:
    """The sums of one layer."""

    def __init__(self) -> None:
        self.isolated = {part: DistanceSums() for part in PARTS}
        self.accumulated = {part: DistanceSums() for part in PARTS}

    def merge(self, other: _Sums) -> None:
        """Take in what another piece of the data gave."""
        for mine, others in ((self.isolated, other.isolated), (self.accumulated, other.accumulated)):
            for part in PARTS:
                largest = max(mine[part].largest, others[part].largest)
                added = {name: value + getattr(others[part], name) for name, value in vars(mine[part]).items()}
                mine[part] = DistanceSums(**{**added, "largest": largest})

    @staticmethod
    def split(sums: dict[Part, DistanceSums]) -> Split:
        return Split(**{part: sums[part].distance() for part in PARTS})


def analyze_layers(
    model: nn.Module,
    quantized: nn.Module,
    batches: Batches,
    *,
    max_batches: int = 8,
    budget: float = math.inf,
    progress: bool = False,
) -> tuple[list[LayerAnalysis], int]:
    """The errors of every layer that ran, in the order of execution, and the number of samples they come from.

    Only sums are kept; a batch is cut so that the float outputs of all layers, which wait to be compared with the
    quantized ones, take 64 MB at most. After ``budget`` seconds no further piece is begun. torchrun's processes share
    the pieces; sums are added up in the order of the pieces.
    """
    sums: dict[str, _Sums] = {}
    samples = 0
    with grafting(model, quantized) as network:
        pieces = (piece for call in calls(batches, model, max_batches) for piece in network.pieces(call))
        in_time = within(budget, tqdm(pieces, "layer errors", unit="piece", disable=not progress))
        for there, found in distributed.shared_out(in_time, lambda piece: _compared(network, piece)):
            samples += there
            for name, of_piece in found.items():
                sums.setdefault(name, _Sums()).merge(of_piece)
        layers = [
            LayerAnalysis(
                layer=name,
                kind=kind_of(network.grafts[name].quantized),
                bits=str(getattr(network.grafts[name].quantized, "quantized_to", "float")),
                isolated=_Sums.split(of_layer.isolated),
                accumulated=_Sums.split(of_layer.accumulated),
            )
            for name, of_layer in sums.items()
        ]
    if not layers:
        raise InputError("no layer ran: the data has no batch, or the model calls none of its layers")
    return layers, samples


def _compared(network: Grafted, call: Call) -> tuple[int, dict[str, _Sums]]:
    """Run the float network and its three quantized forms on one piece: its samples, and the sums of each layer."""
    sums: dict[str, _Sums] = {}
    tape = Tape()

    def alone(graft: Graft, x: Tensor, output: Tensor) -> None:
        of_layer = sums.setdefault(graft.name, _Sums())
        for part in PARTS:
            of_layer.isolated[part].add(output, graft.output(x, part))
        tape.record(graft, x, output)

    network.run(call, watch=alone)
    for part in PARTS:
        position = count()

        def in_all(graft: Graft, x: Tensor, output: Tensor, part: Part = part, position: count[int] = position) -> None:
            sums[graft.name].accumulated[part].add(tape.outputs[next(position)], output)

        network.run(call, network.whole(part), watch=in_all)
    return call.samples, sums
