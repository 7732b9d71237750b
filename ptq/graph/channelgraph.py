"""What a look at a network's forward pass found out about its channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ptq.errors import InputError


@dataclass(frozen=True)
class ChannelGraph:
    """Channels in classes: all elements of one class carry one factor, whoever produces or reads them.

    Class 0 can't be scaled. Dividing what produces a class (rows of layers, elements of parameters, bounds of clamps)
    by a factor and multiplying the weights that read it leaves the function as it is.
    """

    readers: dict[str, Tensor] = field(default_factory=dict)  # layer → the class of each input channel
    siblings: list[list[str]] = field(default_factory=list)  # layers that read one and the same tensor
    producers: dict[str, Tensor] = field(default_factory=dict)  # layer → the class of each output channel
    parameters: dict[str, Tensor] = field(default_factory=dict)  # parameter → the class of each element
    clamps: dict[str, Tensor] = field(default_factory=dict)  # ReLU6 or Hardtanh → the class of each channel
    clamp_axes: dict[str, int] = field(default_factory=dict)  # where a clamp has its channels
    reasons: dict[str, str] = field(default_factory=dict)  # layer → why its input can't be scaled by its producers
    batchnorms: dict[str, str] = field(default_factory=dict)  # layer → the BatchNorm that alone reads its output
    fixed: dict[str, str] = field(default_factory=dict)  # layer → why its weight can't be multiplied by anything

    def foldable(self, layer: str) -> bool:
        """Whether every channel that the layer reads can be scaled by what produces it."""
        return layer in self.readers and bool((self.readers[layer] > 0).all())

    def groups(self) -> list[list[str]]:
        """The foldable layers in groups that share factors, in the order of execution."""
        group_of: dict[int, list[str]] = {}
        for name in filter(self.foldable, self.readers):
            classes = set(self.readers[name].tolist())
            met = {id(group_of[c]): group_of[c] for c in classes if c in group_of}
            merged = [member for group in met.values() for member in group]
            merged.append(name)
            for c in classes.union(*(self.readers[member].tolist() for member in merged)):
                group_of[c] = merged
        order = {name: index for index, name in enumerate(self.readers)}
        unique = {id(group): sorted(group, key=order.__getitem__) for group in group_of.values()}
        return sorted(unique.values(), key=lambda group: order[group[0]])

    def sources(self, layer: str) -> list[str]:
        """What produces the channels that the layer reads: modules, or parameters that stand alone."""
        found = [name for c in dict.fromkeys(self.readers[layer].tolist()) for name in self._made_by.get(c, ())]
        return list(dict.fromkeys(found))

    @cached_property
    def _made_by(self) -> dict[int, list[str]]:
        """Class → what produces it."""
        made_by: dict[int, list[str]] = {}
        for name, classes in (*self.producers.items(), *self.parameters.items()):
            module, _, attribute = name.rpartition(".")
            source = module if name in self.parameters and attribute in ("weight", "bias") else name
            for c in set(classes.tolist()):
                made_by.setdefault(c, []).append(source)
        made_by.pop(0, None)
        return made_by

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a safetensors file: tensors, and what JSON holds."""
        tensors = {
            f"graph/{kind}/{name}": classes.to(torch.int32)
            for kind in _KINDS
            for name, classes in getattr(self, kind).items()
        }
        order = {kind: list(getattr(self, kind)) for kind in _KINDS}
        described = {
            "order": order,
            "clamp_axes": self.clamp_axes,
            "reasons": self.reasons,
            "batchnorms": self.batchnorms,
            "fixed": self.fixed,
            "siblings": self.siblings,
        }
        return tensors, described

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> ChannelGraph:
        try:
            fields: dict[str, Any] = {
                kind: {name: tensors[f"graph/{kind}/{name}"].long() for name in described["order"][kind]}
                for kind in _KINDS
            }
            fields |= {key: dict(described[key]) for key in ("clamp_axes", "reasons", "batchnorms", "fixed")}
            fields["siblings"] = [list(names) for names in described["siblings"]]
        except KeyError as error:
            raise InputError(f"the graph of the calibration lacks {error}: calibrate again") from error
        return cls(**fields)


_KINDS = ("readers", "producers", "parameters", "clamps")
