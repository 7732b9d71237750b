"""What gets how many bits: a default, the outer layers, and patterns for single layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ptq.errors import InputError
from ptq.formats import format as read_format
from ptq.formats.affine import checked_bits

_SHORTHAND = re.compile(r"w(\d+|float)(?:a(\d+|float))?", re.IGNORECASE)


@dataclass(frozen=True)
class Bits:
    """Bits of the weights and of the activations of a layer; None stays in float.

    >>> str(Bits.parse("W4A8"))
    'W4A8'

    A text of ``ptq.format`` in place of a number of bits holds the values in that number format.
    """

    weights: int | None = 8
    activations: int | None = 8
    weight_format: str | None = None
    activation_format: str | None = None

    def __post_init__(self) -> None:
        for text in filter(None, (self.weight_format, self.activation_format)):
            read_format(text)
        for what, bits in (("weights", self.weights), ("activations", self.activations)):
            if bits is not None:
                checked_bits(bits, what)

    @classmethod
    def parse(cls, text: str) -> Bits:
        """``W8A8``, ``w4a4``, ``W4`` (weights only), ``W4Afloat``."""
        match = _SHORTHAND.fullmatch(text.strip())
        if not match:
            raise InputError(f"bits {text!r}: write W8A8, w4a4, or W4 for weights alone")
        weights, activations = (parse_bits(part or "float") for part in match.groups())
        return cls(weights, activations)

    def __str__(self) -> str:
        weights = f"[{self.weight_format}]" if self.weight_format else self.weights
        activations = f"[{self.activation_format}]" if self.activation_format else self.activations
        return (
            "".join(f"{letter}{bits}" for letter, bits in (("W", weights), ("A", activations)) if bits is not None)
            or "float"
        )


def parse_bits(text: str) -> int | None:
    """A number of bits; ``float`` or 32 leave the values as they are."""
    if text.lower() in ("float", "32"):
        return None
    try:
        return checked_bits(int(text))
    except ValueError as error:
        raise InputError(f"bits {text!r}: give a whole number from 2 to 16, or float") from error


def parse_override(text: str) -> tuple[str, Bits]:
    """``classifier*=W8A8``."""
    pattern, equals, bits = text.partition("=")
    if not (pattern and equals):
        raise InputError(f"override {text!r}: write PATTERN=BITS, as 'classifier*=W8A8'")
    return pattern, Bits.parse(bits)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a network is quantized: weights per output channel, activations affine per tensor.

    Weights rounded to nearest are symmetric; those in fewer than 8 bits get zero-points by refinement, if they may.
    """

    bits: Bits = field(default_factory=Bits)
    first_last: int | None = None  # bits of the first and the last layer that runs
    include: tuple[str, ...] = ("*",)  # shell patterns over layer names
    exclude: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Bits], ...] = ()  # pattern → bits; the last that matches wins
    symmetric_activations: bool = False
    symmetric_weights: bool = False  # refinement gives weights in fewer than 8 bits no zero-points
    fold_batchnorm: bool = True
    diffuse_image: bool = True  # refinement may spread the rounding errors of an image in fewer than 8 bits

    def __post_init__(self) -> None:
        if self.first_last is not None:
            checked_bits(self.first_last, "first_last")

    def assign(self, layers: Sequence[str]) -> dict[str, Bits]:
        """The bits of each layer, given their names in the order of execution; excluded ones are left out."""
        for pattern in (*self.include, *self.exclude, *(pattern for pattern, _ in self.overrides)):
            if not any(fnmatchcase(name, pattern) for name in layers):
                raise InputError(f"pattern {pattern!r} matches no layer: the layers are {_abbreviated(layers)}")
        assigned: dict[str, Bits] = {}
        for index, name in enumerate(layers):
            if not _matches(name, self.include) or _matches(name, self.exclude):
                continue
            bits = self.bits
            if self.first_last is not None and index in (0, len(layers) - 1):
                bits = Bits(self.first_last, None if bits.activations is None else self.first_last)
            for pattern, override in self.overrides:
                if fnmatchcase(name, pattern):
                    bits = override
            assigned[name] = bits
        if not assigned:
            raise InputError("the include and exclude patterns leave no layer to quantize")
        return assigned

    def shifts_weights(self, bits: int | None) -> bool:
        """Whether weights in so many bits may get zero-points, one for each output channel.

        Codes of 8 bits less their zero-point would need 9; with fewer they still fit into a runtime's int8.
        """
        return bits is not None and bits < 8 and not self.symmetric_weights

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Scheme:
        return cls(
            **{
                **content,
                "bits": Bits(**content["bits"]),
                "include": tuple(content["include"]),
                "exclude": tuple(content["exclude"]),
                "overrides": tuple((pattern, Bits(**bits)) for pattern, bits in content["overrides"]),
            }
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _abbreviated(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")
