"""Quantize a copy of a model with the ranges of a calibration."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from ptq import channels
from ptq.attention import split_attention
from ptq.batchnorm import fold_batchnorms
from ptq.calibration import Calibration
from ptq.errors import InputError, MismatchError
from ptq.quantization.modules import diffuse_input, is_quantized, prepare_layer, quantize_layer
from ptq.quantization.scheme import Bits, Scheme
from ptq.ranges import checked_observer
from ptq.storage import load_state, read_tensors, write_tensors

SCHEMA = 2


@dataclass(kw_only=True)
class Quantized:
    """A quantized copy of a model: an ``nn.Module`` with the same inputs and outputs."""

    model: nn.Module
    scheme: Scheme
    bits: dict[str, Bits]  # of each quantized layer
    observer: str
    source_fingerprint: str  # of the float, possibly smoothed model that was quantized
    batchnorms: dict[str, str]
    refine: str = "none"  # how far it went beyond rounding to the nearest
    diffused: tuple[str, ...] = ()  # layers whose input, an image, has its rounding errors spread

    def save(self, path: str | Path) -> None:
        metadata = {
            "schema": SCHEMA,
            "scheme": self.scheme.to_json(),
            "bits": {name: asdict(bits) for name, bits in self.bits.items()},
            "observer": self.observer,
            "source": self.source_fingerprint,
            "batchnorms": self.batchnorms,
            "refine": self.refine,
            "diffused": self.diffused,
        }
        write_tensors(Path(path), "quantized model", self.model.state_dict(), metadata)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, calibration: Calibration) -> Quantized:
        """Rebuild what ``save`` wrote on the float (or smoothed) model it was made from."""
        try:
            return cls._load(path, model, calibration)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: not as it was written ({error!r}): run `ptq quantize` again") from error

    @classmethod
    def _load(cls, path: str | Path, model: nn.Module, calibration: Calibration) -> Quantized:
        state, metadata = read_tensors(Path(path), "quantized model", SCHEMA)
        if metadata["source"] != calibration.model_fingerprint:
            raise MismatchError(f"{path}: was quantized from another model or smoothing: run `ptq quantize` again")
        calibration.check(model)
        quantized = cls(
            model=copy.deepcopy(model),
            scheme=Scheme.from_json(metadata["scheme"]),
            bits={name: Bits(**bits) for name, bits in metadata["bits"].items()},
            observer=metadata["observer"],
            source_fingerprint=metadata["source"],
            batchnorms=metadata["batchnorms"],
            refine=metadata.get("refine", "none"),
            diffused=tuple(metadata.get("diffused", ())),
        )
        quantized._prepare()
        load_state(quantized.model, state, path)
        return quantized

    def _prepare(self) -> None:
        split_attention(self.model)
        fold_batchnorms(self.model, self.batchnorms)
        layers = dict(channels.layers_of(self.model))
        for name, bits in self.bits.items():
            prepare_layer(layers[name], bits, self.scheme)
        for name in self.diffused:
            diffuse_input(layers[name])


def quantize(
    model: nn.Module,
    calibration: Calibration,
    weights: int | None = 8,
    activations: int | None = 8,
    *,
    bits: str | None = None,
    weight_format: str | None = None,
    activation_format: str | None = None,
    first_last: int | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    overrides: Mapping[str, str] | None = None,
    symmetric_activations: bool = False,
    symmetric_weights: bool = False,
    keep_batchnorm: bool = False,
    diffuse_image: bool = True,
    observer: str | None = None,
) -> Quantized:
    """Quantize a copy of the model; ``bits="W4A4"`` says the same as ``weights=4, activations=4``.

    ``include`` and ``exclude`` are shell patterns over layer names, ``overrides`` maps such patterns to bits
    (``{"classifier*": "W8A8"}``). ``observer`` defaults to the calibration's own. ``weight_format`` and
    ``activation_format`` are texts of ``ptq.format`` that take the place of the bits, except in layers that
    ``first_last`` or ``overrides`` name; an activation format finds its ranges in each batch. ``symmetric_weights`` and
    ``diffuse_image`` say what refinement may do: give weights in fewer than 8 bits zero-points, and spread the rounding
    errors of an image in fewer than 8 bits.
    """
    scheme = Scheme(
        bits=replace(
            Bits.parse(bits) if bits else Bits(weights, activations),
            weight_format=weight_format,
            activation_format=activation_format,
        ),
        first_last=first_last,
        include=tuple(include),
        exclude=tuple(exclude),
        overrides=tuple((pattern, Bits.parse(text)) for pattern, text in (overrides or {}).items()),
        symmetric_activations=symmetric_activations,
        symmetric_weights=symmetric_weights,
        fold_batchnorm=not keep_batchnorm,
        diffuse_image=diffuse_image,
    )
    return quantize_by(scheme, model, calibration, observer)


def quantize_by(scheme: Scheme, model: nn.Module, calibration: Calibration, observer: str | None = None) -> Quantized:
    """Quantize a copy of the model as the scheme says."""
    model = copy.deepcopy(model)
    split_attention(model)
    layers = dict(channels.layers_of(model))
    if any(is_quantized(layer) for layer in layers.values()):
        raise InputError("the model is quantized already: quantize the float model")
    calibration.check(model)
    owners = channels.weight_owners(model)
    assigned = scheme.assign(list(calibration.layers))
    for name in assigned:
        reason = channels.why_fixed(name, layers[name], owners)
        if reason:
            raise InputError(f"{name}: can't be quantized, {reason}; or exclude it")
    quantized = Quantized(
        model=model,
        scheme=scheme,
        bits=assigned,
        observer=checked_observer(observer or calibration.observer),
        source_fingerprint=calibration.model_fingerprint,
        batchnorms=dict(calibration.batchnorms) if scheme.fold_batchnorm else {},
    )
    quantized._prepare()
    for name, layer_bits in assigned.items():
        quantize_layer(layers[name], layer_bits, calibration.layers[name], quantized.observer)
    return quantized
