"""What every number format is: encode, decode, fake, spec, and a text that names it.

A format is a small frozen dataclass: its fields are its options, validated on creation. Subclasses say how a checked
tensor becomes bytes (``_pack``), how the bytes become a tensor again (``_unpack``), and how many bytes a shape takes
(``nbytes_for``): the number depends on the shape and the dtype alone, so that both ends of a wire know it.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ptq.errors import InputError

FLOATS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

# What a text may start with: the module and the class behind a name, and the options the name stands for.
_HOMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "raw": ("raw", "Raw", {}),
    "affine": ("affine", "Affine", {}),
    "truncate": ("truncate", "Truncate", {}),
    "topk": ("topk", "TopK", {}),
    "downsample": ("downsample", "Downsample", {}),
    "multistep": ("multistep", "MultiStep", {}),
    "levels": ("levels", "Levels", {}),
    "qsgd": ("levels", "Levels", {"method": "uniform", "norm": "l2"}),
    "qsgdinf": ("levels", "Levels", {"method": "uniform", "norm": "linf"}),
    "nuqsgd": ("levels", "Levels", {"method": "exponential", "norm": "l2", "p": 0.5}),
    "terngrad": ("levels", "Levels", {"method": "ternary", "norm": "linf", "bits": 2}),
    "alq": ("levels", "Levels", {"method": "alq"}),
    "alqg": ("levels", "Levels", {"method": "alqg"}),
    "amq": ("levels", "Levels", {"method": "amq"}),
}
NAMES = tuple(_HOMES)

_Self = TypeVar("_Self", bound="Format")


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """An encoded tensor: one run of bytes with everything that has to travel, scales, levels and indices included.

    Shape, dtype and format are what sender and receiver agree on; they are not counted in ``nbytes``.
    """

    payload: Tensor  # uint8, [nbytes]
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: Format

    @property
    def nbytes(self) -> int:
        return self.payload.numel()

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / math.prod(self.shape) if math.prod(self.shape) else 0.0

    def decode(self) -> Tensor:
        return self.format.decode(self)

    def to(self, device: torch.device | str) -> Packed:
        return replace(self, payload=self.payload.to(device))

    def to_json(self) -> dict[str, Any]:
        """What has to stand beside the payload in a file."""
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "format": self.format.spec(),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], payload: Tensor) -> Packed:
        """Put a payload and what ``to_json`` gave together again."""
        try:
            shape, dtype = tuple(int(size) for size in content["shape"]), FLOATS[content["dtype"]]
            packed = cls(payload=payload, shape=shape, dtype=dtype, format=from_spec(content["format"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"a packed tensor needs shape, dtype and format; {dict(content)!r} hasn't them") from error
        packed.format._check_payload(packed)
        return packed


class Format(ABC):
    """A number format; see the module's docstring for what a subclass supplies."""

    name: ClassVar[str]

    @abstractmethod
    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload of any tensor of this shape."""

    @abstractmethod
    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor: ...

    @abstractmethod
    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Packed:
        """Pack a float tensor of any shape; ``generator`` feeds stochastic rounding and is otherwise unused."""
        x = _checked(x, generator)
        return Packed(payload=self._pack(x, generator), shape=tuple(x.shape), dtype=x.dtype, format=self)

    def decode(self, packed: Packed) -> Tensor:
        """The tensor that ``encode`` packed, in its shape and dtype, on the device of the payload."""
        if packed.format != self:
            raise InputError(f"packed as {packed.format}, can't be decoded as {self}")
        self._check_payload(packed)
        return self._unpack(packed.payload, packed.shape, packed.dtype)

    def fake(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``decode(encode(x))``, bit for bit, whose gradient passes straight through."""
        return cast(Tensor, _StraightThrough.apply(x, self, generator))  # type: ignore[no-untyped-call]

    def _fake(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        # Formats that can do without the bytes override this.
        return self._unpack(self._pack(x, generator), tuple(x.shape), x.dtype)

    def _check_payload(self, packed: Packed) -> None:
        expected = self.nbytes_for(packed.shape, packed.dtype)
        if packed.payload.dtype != torch.uint8 or packed.payload.dim() != 1 or packed.nbytes != expected:
            raise InputError(
                f"{self}: {list(packed.shape)} takes {expected} bytes, the payload has {packed.nbytes} "
                f"({packed.payload.dtype}): it was cut or belongs to another tensor"
            )

    def bits_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> float:
        """True bits per element, header included."""
        return 8 * self.nbytes_for(shape, dtype) / max(1, math.prod(shape))

    def spec(self) -> dict[str, Any]:
        """The format as plain JSON data; ``from_spec`` reads it back."""
        options = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        plain = {key: _plain(value) for key, value in options.items()}
        return {"format": self.name, **plain}

    def __str__(self) -> str:
        """A text that ``format`` reads back: numbers always, everything else where it isn't the default."""
        name, implied = self._alias()
        parts, then = [], ""
        for field in fields(cast(Any, self)):
            value = getattr(self, field.name)
            if isinstance(value, Format):
                then = "" if value.name == "raw" else f"+{value}"
            elif value is True:
                parts.append(field.name)
            elif value is None or value is False or field.name in implied:
                continue
            elif isinstance(value, tuple):
                parts.append(f"{field.name}={'/'.join(repr(number) for number in value)}")
            elif isinstance(value, str):
                if value != field.default:
                    parts.append(value if value in field.metadata.get("choices", ()) else f"{field.name}={value}")
            else:
                parts.append(f"{field.name}={value!r}")
        return name + (":" if parts else "") + ",".join(parts) + then

    def _alias(self) -> tuple[str, dict[str, Any]]:
        """The name that says most, and the options that it stands for."""
        kind = type(self).__name__
        fitting = [
            (name, options)
            for name, (_, home, options) in _HOMES.items()
            if home == kind and all(getattr(self, key) == value for key, value in options.items())
        ]
        return max(fitting, key=lambda pair: len(pair[1]))


def _plain(value: Any) -> Any:
    if isinstance(value, Format):
        return value.spec()
    return list(value) if isinstance(value, tuple) else value


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Format, generator: torch.Generator | None) -> Tensor:
        return form._fake(_checked(x, generator), generator)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def _checked(x: Tensor, generator: torch.Generator | None) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype not in FLOATS.values():
        found = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"a number format takes a tensor of {', '.join(FLOATS)}; this is {found}")
    if generator is not None and generator.device.type != x.device.type:
        raise InputError(f"the generator is on {generator.device}, the tensor on {x.device}: make one there")
    return x.detach()


# Reading formats


def format(text: str | Format) -> Format:
    """Read a format from its text: ``name:option=value,flag``, several joined by ``+``.

    >>> format("affine:bits=4,symmetric,axis=0")
    Affine(bits=4, symmetric=True, full=False, axis=0, group=None, power_of_two=False, rounding='nearest')
    >>> str(format("topk:ratio=0.1+affine:bits=4"))
    'topk:ratio=0.1+affine:bits=4'
    """
    if isinstance(text, Format):
        return text
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"format {text!r}: write NAME:OPTION=VALUE,…; the names are {', '.join(NAMES)}")
    then: Format | None = None
    for part in reversed(text.split("+")):
        name, _, rest = part.strip().partition(":")
        kind, options = _kind(name.strip().lower(), text)
        for option in filter(None, (option.strip() for option in rest.split(","))):
            options.update(_option(kind, option, text))
        if then is not None:
            if "then" not in kind.__dataclass_fields__:  # type: ignore[attr-defined]
                takers = "topk, downsample"
                raise InputError(f"format {text!r}: {name} ends a chain, only {takers} take another format after '+'")
            options["then"] = then
        then = _made(kind, options, text)
    assert then is not None
    return then


def from_spec(spec: Mapping[str, Any]) -> Format:
    """The format that ``spec()`` described."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("format"), str):
        raise InputError(f"format {spec!r}: a spec is a mapping with the key 'format'")
    kind, options = _kind(spec["format"], str(dict(spec)))
    for key, value in spec.items():
        if key == "format":
            continue
        if key not in kind.__dataclass_fields__:  # type: ignore[attr-defined]
            raise InputError(_unknown_option(kind, key, str(dict(spec))))
        if key == "then":
            value = from_spec(value)
        options[key] = tuple(value) if isinstance(value, list) else value
    return _made(kind, options, str(dict(spec)))


def _made(kind: type[Format], options: dict[str, Any], text: str) -> Format:
    try:
        return kind(**options)
    except TypeError as error:  # a spec with a word where a number belongs
        raise InputError(f"format {text!r}: an option has a value of the wrong kind ({error})") from error


def _kind(name: str, text: str) -> tuple[type[Format], dict[str, Any]]:
    if name not in _HOMES:
        raise InputError(f"format {text!r}: {name!r} is unknown, the names are {', '.join(NAMES)}")
    module, kind, options = _HOMES[name]
    return getattr(importlib.import_module(f"ptq.formats.{module}"), kind), dict(options)


def _option(kind: type[Format], option: str, text: str) -> dict[str, Any]:
    """One ``key=value``; a bare word is a flag, or the value of the option that has it among its choices."""
    declared = {field.name: field for field in fields(cast(Any, kind))}
    key, equals, value = (part.strip() for part in option.partition("="))
    if not equals:
        owners = [field.name for field in declared.values() if key in field.metadata.get("choices", ())]
        if owners:
            return {owners[0]: key}
        if key in declared and isinstance(declared[key].default, bool):
            return {key: True}
    if key not in declared or key == "then" or not equals:
        raise InputError(_unknown_option(kind, option, text))
    try:
        return {key: _value(value, declared[key].type)}
    except ValueError as error:
        raise InputError(f"format {text!r}: {option} needs {_kind_of_value(declared[key].type)}") from error


def _value(text: str, annotation: Any) -> Any:
    # Annotations are texts here: "int | None" and the like.
    if "None" in annotation and text.lower() == "none":
        return None
    if annotation.startswith("bool"):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    if annotation.startswith("tuple"):
        return tuple(float(part) for part in text.split("/"))
    for prefix, read in (("int", int), ("float", float)):
        if annotation.startswith(prefix):
            return read(text)
    return text


def _kind_of_value(annotation: Any) -> str:
    names = {"int": "a whole number", "float": "a number", "bool": "true or false", "tuple": "numbers separated by /"}
    return next((name for start, name in names.items() if annotation.startswith(start)), "a word")


def _unknown_option(kind: type[Format], option: str, text: str) -> str:
    known = []
    for field in fields(cast(Any, kind)):
        if field.name == "then":
            continue
        choices = field.metadata.get("choices")
        values = "|".join(choices) if choices else ""
        known.append(field.name if isinstance(field.default, bool) else f"{field.name}={values or '…'}")
    listed = ", ".join(known) if known else "none"
    return f"format {text!r}: {option!r} is not an option of {kind.name}; its options are {listed}"
