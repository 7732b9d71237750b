"""What the answers lose when only one layer is quantized, and what they regain when only one is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from ptq import distributed
from ptq.analysis.grafting import Grafted, Part, Tape, grafting
from ptq.analysis.measuring import Answers, Change, answers_to, loss_change, score_change, within
from ptq.batches import Batches, Call, calls, limited


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A change of the loss (mean cross-entropy) and of the score (points)."""

    loss: Change
    score: Change

    @classmethod
    def between(cls, before: Answers, after: Answers) -> Effect:
        return cls(loss=loss_change(before, after), score=score_change(before, after))

    def to_json(self) -> dict[str, Any]:
        return {"loss": self.loss.to_json(), "score": self.score.to_json()}


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """How much one layer matters to the answers."""

    layer: str
    enable: Effect  # from the float network to the one where only this layer is quantized
    disable: Effect  # from the quantized network to the one where all but this layer is quantized

    def to_json(self) -> dict[str, Any]:
        return {"layer": self.layer, "enable": self.enable.to_json(), "disable": self.disable.to_json()}


@dataclass(frozen=True, kw_only=True)
class Sensitivities:
    """The sensitivity of every quantized layer, in the order of execution, all on the same samples."""

    samples: int
    seconds: float
    reference: Answers  # the float network
    quantized: Answers
    layers: list[LayerSensitivity]

    def most(self, count: int, by: str = "disable") -> list[str]:
        """The layers whose quantization costs most: by what is regained without it, or by what it costs alone."""

        def cost(layer: LayerSensitivity) -> float:
            return -layer.disable.loss.change if by == "disable" else layer.enable.loss.change

        return [layer.layer for layer in sorted(self.layers, key=cost, reverse=True)[:count]]

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "seconds": self.seconds,
            "reference": self.reference.to_json(),
            "quantized": self.quantized.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
        }


@dataclass(frozen=True)
class _Trials:
    """The answers to one piece of a batch: of a base network, and with each layer changed."""

    base: Answers
    changed: dict[str, Answers]


def _effects(pieces: Sequence[_Trials]) -> tuple[Answers, dict[str, Effect]]:
    """The answers of the base network to all pieces, and what each layer's change does to them."""
    base = Answers.joined([piece.base for piece in pieces])
    names = dict.fromkeys(name for piece in pieces for name in piece.changed)
    changed = {name: Answers.joined([p.changed[name] for p in pieces if name in p.changed]) for name in names}
    return base, {name: Effect.between(base, answers) for name, answers in changed.items()}


def sensitivities(
    model: nn.Module,
    quantized: nn.Module,
    labelled_batches: Batches,
    *,
    samples: int = 512,
    budget: float = 60.0,
    metric: str = "top1",
    progress: bool = False,
) -> Sensitivities:
    """Measure enable-one and disable-one for every quantized layer on the first ``samples``.

    The samples are taken piece by piece, all layers on each, until ``budget`` seconds are over; at least one piece is.
    What comes before the changed layer isn't computed again: its outputs in the base network are kept, 64 MB at most.
    torchrun's processes share the pieces.
    """
    start = time.monotonic()
    with grafting(model, quantized) as network, tqdm(total=samples, desc="layers", disable=not progress) as bar:
        whole = network.whole()

        def trials(piece: Call) -> tuple[_Trials, _Trials]:
            alone = _try_layers(network, piece, {}, lambda name: {name: whole[name]}, metric)
            without = _try_layers(network, piece, whole, lambda name: _without(whole, name), metric)
            bar.update(piece.samples)
            return alone, without

        given = calls(limited(labelled_batches, samples), model)
        pieces = within(budget, (piece for call in given for piece in network.pieces(call)))
        found = distributed.shared_out(pieces, trials)
    reference, enable = _effects([alone for alone, _ in found])
    of_quantized, disable = _effects([without for _, without in found])
    layers = [LayerSensitivity(layer=name, enable=enable[name], disable=disable[name]) for name in enable]
    return Sensitivities(
        samples=reference.n,
        seconds=time.monotonic() - start,
        reference=reference,
        quantized=of_quantized,
        layers=layers,
    )


def _without(parts: Mapping[str, Part], name: str) -> dict[str, Part]:
    return {other: part for other, part in parts.items() if other != name}


def _try_layers(
    network: Grafted,
    call: Call,
    base: Mapping[str, Part],
    changed: Callable[[str], Mapping[str, Part]],
    metric: str,
) -> _Trials:
    """Run the base network, then with each layer that it called changed, from that layer on."""
    tape = Tape()
    answers = answers_to(call, network.run(call, base, watch=tape.record), metric)
    names = [name for name in dict.fromkeys(tape.names) if network.grafts[name].is_quantized]
    logits = {name: network.run(call, changed(name), tape=tape, until=name) for name in names}
    return _Trials(answers, {name: answers_to(call, found, metric) for name, found in logits.items()})
