"""What smoothing gives: a copy of the model that computes the same, its statistics, and a ledger of what was done."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from ptq import channels
from ptq.attention import split_attention
from ptq.calibration import Calibration
from ptq.errors import InputError, MismatchError
from ptq.smoothing.fold import replace_module
from ptq.smoothing.modules import ATTRIBUTE, NOTES, ChannelClamp, Undo, attach_notes, attach_scaling
from ptq.smoothing.proof import Proof
from ptq.storage import load_state, read_tensors, write_tensors

SCHEMA = 3
Alpha: TypeAlias = float | Literal["auto", "equalize"]
Explicit: TypeAlias = Literal["allow", "never"]
_FACTORS = "factors/"  # keys of a file, beside those of the state dict


@dataclass(frozen=True)
class LedgerEntry:
    """What smoothing did with one layer, and why."""

    layer: str
    kind: str
    action: str  # "folded": free at run time; "explicit": its input is divided at run time; "skipped"
    reason: str
    alpha: float | None = None
    shared_with: tuple[str, ...] = ()  # layers that have the factor in common
    absmax_before: float | None = None  # of its input
    absmax_after: float | None = None


@dataclass(kw_only=True)
class Smoothed:
    """A smoothed copy of a model; the original is untouched."""

    model: nn.Module
    calibration: Calibration  # of the smoothed model: no second pass over the data was needed
    factors: dict[str, Tensor]  # what each layer's input is divided by, in all
    ledger: list[LedgerEntry]
    alpha: Alpha
    explicit: Explicit = "allow"  # what was done where folding is impossible
    proof: Proof | None = None
    curves: dict[str, dict[float | None, float]] = field(default_factory=dict)  # layer → α (None: none) → error
    _undo: Undo = field(default_factory=Undo)

    @property
    def title(self) -> str:
        """``α = 0.5``, ``α by layer`` or ``equalized``."""
        if isinstance(self.alpha, str):
            return {"auto": "α by layer", "equalize": "equalized"}[self.alpha]
        return f"α = {self.alpha:g}"

    def undo(self) -> nn.Module:
        """Take the smoothing back, bit for bit, and return the model."""
        if not self._undo:
            raise InputError("there is no smoothing to take back: it was undone before, or loaded from a file")
        self._undo.run()
        return self.model

    def save(self, path: str | Path) -> None:
        metadata: dict[str, Any] = {
            "schema": SCHEMA,
            "alpha": self.alpha,
            "explicit": self.explicit,
            "model": self.calibration.model_fingerprint,
            "ledger": [asdict(entry) for entry in self.ledger],
            "proof": asdict(self.proof) if self.proof else None,
            "clamps": {
                name: module.axis for name, module in self.model.named_modules() if isinstance(module, ChannelClamp)
            },
        }
        factors = {f"{_FACTORS}{name}": factor for name, factor in self.factors.items()}
        write_tensors(Path(path), "smoothed model", self.model.state_dict() | factors, metadata)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, calibration: Calibration) -> Smoothed:
        """Rebuild what ``save`` wrote from the original model; the calibration is that of the smoothed model."""
        try:
            return cls._load(path, model, calibration)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: not as it was written ({error!r}): run `ptq smooth` again") from error

    @classmethod
    def _load(cls, path: str | Path, model: nn.Module, calibration: Calibration) -> Smoothed:
        tensors, metadata = read_tensors(Path(path), "smoothed model", SCHEMA)
        factors = {key.removeprefix(_FACTORS): value for key, value in tensors.items() if key.startswith(_FACTORS)}
        state = {key: value for key, value in tensors.items() if not key.startswith(_FACTORS)}
        smoothed = copy.deepcopy(model)
        split_attention(smoothed)
        layers = dict(channels.layers_of(smoothed))
        for name, factor in factors.items():
            if name not in layers or channels.input_channels(layers[name]) != len(factor):
                raise MismatchError(f"{path}: {name} doesn't fit this model: run `ptq smooth` with it again")
        for name, layer in layers.items():
            if f"{name}.{ATTRIBUTE}.factor" in state:
                attach_scaling(layer, factors[name])
            if f"{name}.{NOTES}.input" in state:
                attach_notes(layer, behind_batchnorm=name in calibration.batchnorms)
        for name, axis in metadata["clamps"].items():
            replace_module(smoothed, name, ChannelClamp(state[f"{name}.low"], state[f"{name}.high"], axis))
        load_state(smoothed, state, path)
        calibration.check(smoothed)
        return cls(
            model=smoothed,
            calibration=calibration,
            factors=factors,
            ledger=[
                LedgerEntry(**{**entry, "shared_with": tuple(entry["shared_with"])}) for entry in metadata["ledger"]
            ],
            alpha=metadata["alpha"],
            explicit=metadata["explicit"],
            proof=Proof(**metadata["proof"]) if metadata["proof"] else None,
        )
