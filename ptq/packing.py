"""Checkpoints on disk in few bits: weights by the rules of their kind, everything else untouched.

A packed checkpoint holds, for each packed weight, the bytes of its format and the few facts needed to read them; for
everything else, the tensor itself. Reading it back gives an ordinary state dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.errors import InputError
from ptq.formats import Format, Packed
from ptq.formats import format as read_format
from ptq.storage import read_tensors, write_tensors

SCHEMA = 1
KIND = "packed checkpoint"
RULES = ("conv", "linear")
_CONVOLUTION_AXES = (3, 4, 5)
_NOT_LINEAR = re.compile(r"(^|[._])(embed\w*|emb|wte|wpe|lookup|position\w*|pos_\w*|token\w*)([._]|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the checkpoint: what it is, and how many bytes it takes before and after."""

    name: str
    kind: str  # conv, linear, or kept
    format: str  # the text of the format, or "" where the tensor is kept
    shape: tuple[int, ...]
    source_bytes: int
    packed_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedCheckpoint:
    """A state dict whose convolution and linear weights are packed."""

    packed: dict[str, Packed]
    kept: dict[str, Tensor]
    kinds: dict[str, str]  # of the packed weights
    order: tuple[str, ...]  # of the state dict's keys

    @property
    def entries(self) -> list[Entry]:
        return [self._entry(name) for name in self.order]

    def _entry(self, name: str) -> Entry:
        if name not in self.packed:
            tensor = self.kept[name]
            size = tensor.numel() * tensor.element_size()
            shape = tuple(tensor.shape)
            return Entry(name=name, kind="kept", format="", shape=shape, source_bytes=size, packed_bytes=size)
        packed = self.packed[name]
        return Entry(
            name=name,
            kind=self.kinds[name],
            format=str(packed.format),
            shape=packed.shape,
            source_bytes=packed.dtype.itemsize * torch.Size(packed.shape).numel(),
            packed_bytes=packed.nbytes,
        )

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors as they were."""
        return sum(entry.source_bytes for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are; a file has a few more for their names."""
        return sum(entry.packed_bytes for entry in self.entries)

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors again, unpacked, in the order they had."""
        return {name: self.packed[name].decode() if name in self.packed else self.kept[name] for name in self.order}

    def save(self, path: str | Path) -> int:
        """Write one safetensors file; returns its size in bytes."""
        tensors = {**self.kept, **{name: packed.payload for name, packed in self.packed.items()}}
        places = {name: place for place, name in enumerate(sorted(tensors))}
        # Names stand in the file once already; what all weights of a kind share is written once.
        metadata = {
            "schema": SCHEMA,
            "order": [places[name] for name in self.order],
            "formats": {self.kinds[name]: packed.format.spec() for name, packed in self.packed.items()},
            "packed": {
                places[name]: [self.kinds[name], *(packed.to_json()[key] for key in ("dtype", "shape"))]
                for name, packed in self.packed.items()
            },
        }
        write_tensors(Path(path), KIND, tensors, metadata)
        return Path(path).stat().st_size

    @classmethod
    def load(cls, path: str | Path) -> PackedCheckpoint:
        """Read what ``save`` wrote."""
        tensors, metadata = read_tensors(Path(path), KIND, SCHEMA)
        names = sorted(tensors)
        try:
            facts: dict[str, list[Any]] = {names[int(place)]: fact for place, fact in metadata["packed"].items()}
            packed = {
                name: Packed.from_json(
                    {"dtype": dtype, "shape": shape, "format": metadata["formats"][kind]}, tensors[name]
                )
                for name, (kind, dtype, shape) in facts.items()
            }
            return cls(
                packed=packed,
                kept={name: tensor for name, tensor in tensors.items() if name not in packed},
                kinds={name: fact[0] for name, fact in facts.items()},
                order=tuple(names[place] for place in metadata["order"]),
            )
        except (AttributeError, KeyError, IndexError, ValueError, TypeError) as error:
            raise InputError(f"{path}: damaged ({error!r}): pack the checkpoint again") from error


def pack(
    state_dict: Mapping[str, Tensor], rules: Mapping[str, str | Format], *, model: nn.Module | None = None
) -> PackedCheckpoint:
    """Pack convolution and linear weights, each by its rule: ``{"conv": "affine:bits=8", "linear": "affine:bits=4"}``.

    A kind without a rule is kept. Which tensors are weights of which kind is read off the ``model`` if one is given;
    else a floating-point tensor named ``weight`` (or ``….weight``) is a convolution's with 3 to 5 axes and a linear
    layer's with 2, unless its name speaks of an embedding. Biases, norms, running statistics and integers are kept as
    they are, and the given tensors are not changed.
    """
    unknown = [name for name in rules if name not in RULES]
    if unknown:
        raise InputError(f"rule {unknown[0]!r} is unknown: the rules are {', '.join(RULES)}")
    formats = {kind: read_format(rule) for kind, rule in rules.items()}
    kinds = _kinds_of_model(model) if model is not None else {}
    packed: dict[str, Packed] = {}
    kept: dict[str, Tensor] = {}
    found: dict[str, str] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: holds {type(tensor).__name__}, not a tensor: give the state dict alone")
        kind = kinds.get(name) if model is not None else _kind_by_shape(name, tensor)
        if kind in formats and tensor.is_floating_point():
            try:
                packed[name] = formats[kind].encode(tensor)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            found[name] = kind
        else:
            kept[name] = tensor.detach().clone()
    if formats and not packed:
        raise InputError(f"nothing was packed: the checkpoint has no {' or '.join(formats)} weights")
    return PackedCheckpoint(packed=packed, kept=kept, kinds=found, order=tuple(state_dict))


def _kinds_of_model(model: nn.Module) -> dict[str, str]:
    return {
        f"{name}.weight" if name else "weight": "linear" if isinstance(layer, nn.Linear) else "conv"
        for name, layer in channels.layers_of(model)
    }


def _kind_by_shape(name: str, tensor: Tensor) -> str | None:
    if name.rpartition(".")[2] != "weight" or not tensor.is_floating_point():
        return None
    if tensor.dim() in _CONVOLUTION_AXES:
        return "conv"
    return "linear" if tensor.dim() == 2 and not _NOT_LINEAR.search(name) else None
