"""Smooth a copy of a model, keep a ledger of what happened to each layer, and prove that nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptq import channels
from ptq.batches import Batches
from ptq.batchnorm import folded_parameters
from ptq.calibration import Calibration, LayerStatistics, calibrate
from ptq.errors import InputError, MismatchError
from ptq.smoothing.factors import checked_alpha, smoothing_factor
from ptq.smoothing.modules import attach_scaling, is_smoothed, smooth_layer
from ptq.smoothing.proof import Proof, prove_equivalence
from ptq.storage import fingerprint, load_state, read_tensors, write_tensors

SCHEMA = 1


@dataclass(frozen=True)
class LedgerEntry:
    """What smoothing did with one layer, and why."""

    layer: str
    kind: str
    action: str  # "explicit": its input is divided at run time; "skipped"
    reason: str
    absmax_before: float | None = None  # of its input
    absmax_after: float | None = None


@dataclass(kw_only=True)
class Smoothed:
    """A smoothed copy of a model; the original is untouched."""

    model: nn.Module
    calibration: Calibration  # of the smoothed model: no second pass over the data was needed
    factors: dict[str, Tensor]
    ledger: list[LedgerEntry]
    alpha: float
    proof: Proof | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> nn.Module:
        """Take the smoothing back, bit for bit, and return the model."""
        if not self._undo:
            raise InputError("there is no smoothing to take back: it was undone before, or loaded from a file")
        while self._undo:
            self._undo.pop()()
        return self.model

    def save(self, path: str | Path) -> None:
        metadata: dict[str, Any] = {
            "schema": SCHEMA,
            "alpha": self.alpha,
            "model": self.calibration.model_fingerprint,
            "ledger": [asdict(entry) for entry in self.ledger],
            "proof": asdict(self.proof) if self.proof else None,
        }
        write_tensors(Path(path), "smoothed model", self.model.state_dict(), metadata)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, calibration: Calibration) -> Smoothed:
        """Rebuild what ``save`` wrote from the original model; the calibration is that of the smoothed model."""
        state, metadata = read_tensors(Path(path), "smoothed model", SCHEMA)
        ending = ".smoothing.factor"
        factors = {key.removesuffix(ending): value for key, value in state.items() if key.endswith(ending)}
        smoothed = copy.deepcopy(model)
        layers = dict(channels.layers_of(smoothed))
        for name, factor in factors.items():
            if name not in layers or channels.input_channels(layers[name]) != len(factor):
                raise MismatchError(f"{path}: {name} doesn't fit this model: run `ptq smooth` with it again")
            attach_scaling(layers[name], factor)
        load_state(smoothed, state, path)
        calibration.check(smoothed)
        return cls(
            model=smoothed,
            calibration=calibration,
            factors=factors,
            ledger=[LedgerEntry(**entry) for entry in metadata["ledger"]],
            alpha=metadata["alpha"],
            proof=Proof(**metadata["proof"]) if metadata["proof"] else None,
        )


def smooth(
    model: nn.Module,
    calibration: Calibration,
    alpha: float = 0.5,
    *,
    batches: Batches | None = None,
    proof_batches: int = 2,
) -> Smoothed:
    """Smooth a copy of the model: ``X / s`` by a pre-hook, ``W · s`` in the weights, for every layer that ran.

    With ``batches`` the equivalence is proven on the first ``proof_batches`` of them, and a calibration with
    histograms gets new ones (a histogram of the whole tensor can't be rescaled channel by channel).
    """
    checked_alpha(alpha)
    if any(is_smoothed(layer) for _, layer in channels.layers_of(model)):
        raise InputError("the model is smoothed already: undo() it first, or smooth the original")
    calibration.check(model)
    smoothed = copy.deepcopy(model)
    factors: dict[str, Tensor] = {}
    ledger: list[LedgerEntry] = []
    undo: list[Callable[[], None]] = []
    owners = channels.weight_owners(smoothed)
    for name, layer in channels.layers_of(smoothed):
        kind = channels.kind_of(layer)
        reason = _reason_to_skip(calibration.layers.get(name)) or channels.why_fixed(name, layer, owners)
        if reason:
            ledger.append(LedgerEntry(name, kind, "skipped", reason))
            continue
        statistics = calibration.layers[name]
        weight = _weight_to_quantize(smoothed, layer, calibration.batchnorms.get(name))
        factor = smoothing_factor(statistics.activation_absmax, channels.weight_absmax(weight, layer).cpu(), alpha)
        undo.append(smooth_layer(layer, factor))
        factors[name] = factor
        after = float((statistics.activation_absmax / factor).max())
        before = float(statistics.activation_absmax.max())
        ledger.append(LedgerEntry(name, kind, "explicit", "its input is divided by a pre-hook", before, after))
    if not factors:
        reasons = "; ".join(f"{entry.layer}: {entry.reason}" for entry in ledger[:3])
        raise InputError(f"no layer was smoothed ({reasons})")
    proof = None
    rescaled = _rescaled(calibration, factors, smoothed)
    if batches is not None:
        proof = prove_equivalence(model, smoothed, batches, limit=proof_batches)
        if any(layer.histogram is not None for layer in calibration.layers.values()):
            rescaled = calibrate(smoothed, batches, calibration.observer, calibration.batches)
    return Smoothed(
        model=smoothed,
        calibration=rescaled,
        factors=factors,
        ledger=ledger,
        alpha=alpha,
        proof=proof,
        _undo=undo,
    )


def _weight_to_quantize(model: nn.Module, layer: channels.Layer, batchnorm_name: str | None) -> Tensor:
    """The weight as it will be quantized, with the BatchNorm that will be folded into it.

    Its factors decide how the channels of one output compare; leaving them out costs ResNet-20 at W4A4 two points.
    """
    batchnorm = model.get_submodule(batchnorm_name) if batchnorm_name else None
    return folded_parameters(layer, batchnorm)[0] if isinstance(batchnorm, _BatchNorm) else layer.weight


def _reason_to_skip(statistics: LayerStatistics | None) -> str | None:
    if statistics is None:
        return "never ran during calibration"
    if not bool((statistics.activation_absmax > 0).any()):
        return "its input was always zero"
    if not bool((statistics.weight_absmax > 0).any()):
        return "its weight is zero"
    return None


def _rescaled(calibration: Calibration, factors: dict[str, Tensor], smoothed: nn.Module) -> Calibration:
    """The statistics after smoothing: ranges divided by s, weights measured again; histograms don't survive."""
    weights = dict(channels.layers_of(smoothed))

    def rescale(name: str, statistics: LayerStatistics) -> LayerStatistics:
        statistics = replace(statistics, histogram=None)
        if name not in factors:
            return statistics
        minimum, maximum = statistics.minimum / factors[name], statistics.maximum / factors[name]
        return replace(
            statistics,
            minimum=minimum,
            maximum=maximum,
            activation_absmax=channels.absmax_of(minimum, maximum),
            weight_absmax=channels.weight_absmax(weights[name].weight, weights[name]).float().cpu(),
        )

    return replace(
        calibration,
        layers={name: rescale(name, statistics) for name, statistics in calibration.layers.items()},
        model_fingerprint=fingerprint(smoothed),
    )
