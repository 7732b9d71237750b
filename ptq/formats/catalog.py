"""All formats side by side: what they take and what they lose, on distributions or on given tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.formats.base import Format, format

SHAPE = (4, 16, 32, 32)  # of the values drawn where no tensor is given
DISTANCES = ("l2", "l1", "median")
TOTAL_BITS = 8  # at which several steps per tensor are compared with one
SETS = (1, 2, 4, 8, 16, 32, 64, 128)  # of step and minimum, each comparison at the same bits in all
MAX_ELEMENTS = 2**18  # of a given tensor: enough for three digits of an error

# What ``ptq formats`` lists.
LISTED = (
    "affine:bits=8",
    "affine:bits=8,symmetric",
    "affine:bits=8,full",
    "affine:bits=8,power_of_two",
    "affine:bits=4",
    "affine:bits=4,axis=1",
    "affine:bits=4,group=64",
    "affine:bits=3",
    "affine:bits=2",
    "truncate:step=0.0625,bits=8,saturate",
    "truncate:step=0.0625,floor,bits=8,saturate",
    "multistep:parts=2,bits=7",
    "multistep:parts=4,bits=6",
    "multistep:parts=16,bits=4",
    "topk:ratio=0.1",
    "topk:ratio=0.1+affine:bits=4",
    "topk:ratio=0.1+multistep:parts=4,bits=6",
    "downsample:factor=2",
    "downsample:factor=2+affine:bits=8",
    "qsgd:bits=3",
    "qsgdinf:bits=3",
    "nuqsgd:bits=3",
    "terngrad",
    "alq:bits=3",
    "alqg:bits=3",
    "amq:bits=3",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One format on one tensor."""

    format: str
    shape: tuple[int, ...]
    nbytes: int
    bits: float  # per element, header included
    l1: float  # Σ|x - x̂| / Σ|x|
    l2: float  # ‖x - x̂‖ / ‖x‖
    median: float  # of |x - x̂|, over the mean of |x|: what the typical value suffers

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _laplace(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()


DISTRIBUTIONS: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "laplace": _laplace,
    "relu": lambda shape, generator: torch.randn(shape, generator=generator).relu(),
    "uniform": lambda shape, generator: torch.rand(shape, generator=generator) * 2 - 1,
}


def draw(distribution: str, shape: Sequence[int] = SHAPE, seed: int = 0) -> Tensor:
    """Values of a named distribution: normal, laplace, relu (a normal one after ReLU), uniform."""
    if distribution not in DISTRIBUTIONS:
        raise InputError(f"distribution {distribution!r} is unknown: choose one of {', '.join(DISTRIBUTIONS)}")
    return DISTRIBUTIONS[distribution](tuple(shape), torch.Generator().manual_seed(seed))


def measure(form: str | Format, x: Tensor, seed: int = 0) -> Measured:
    """Encode and decode a tensor once; stochastic rounding is fed by ``seed``."""
    form, x = format(form), x.detach()
    packed = form.encode(x, torch.Generator(device=x.device).manual_seed(seed))
    exact, error = x.double(), (packed.decode().double() - x.double())
    return Measured(
        format=str(form),
        shape=tuple(x.shape),
        nbytes=packed.nbytes,
        bits=packed.bits_per_element,
        l1=_ratio(float(error.abs().sum()), float(exact.abs().sum())),
        l2=_ratio(float(error.square().sum()), float(exact.square().sum())) ** 0.5,
        median=_ratio(float(error.abs().median()), float(exact.abs().mean())) if x.numel() else 0.0,
    )


def _ratio(error: float, size: float) -> float:
    return error / size if size else (0.0 if not error else float("inf"))


def listing(x: Tensor, formats: Iterable[str | Format] = LISTED, seed: int = 0) -> list[Measured]:
    """The formats on one tensor; those that need an axis it hasn't are left out."""
    return [measure(form, x, seed) for form in map(format, formats) if _applies(form, x)]


def _applies(form: Format, x: Tensor) -> bool:
    try:
        form.nbytes_for(x.shape, x.dtype)
    except InputError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Family:
    """Formats that differ in one option alone: a curve."""

    label: str
    formats: tuple[str, ...]


def _family(label: str, text: str, values: Sequence[object]) -> Family:
    return Family(label=label, formats=tuple(text.format(value) for value in values))


_BITS = (2, 3, 4, 5, 6, 8, 10)
_LEVEL_BITS = (2, 3, 4, 5, 6)
_RATIOS = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.8)
FAMILIES = (
    _family("affine, one scale", "affine:bits={}", _BITS),
    _family("affine, a scale per 64 values", "affine:bits={},group=64", _BITS),
    _family("2 sets of step and minimum", "multistep:parts=2,bits={}", (1, 2, 3, 4, 5, 7, 9)),
    _family("4 sets", "multistep:parts=4,bits={}", (1, 2, 3, 4, 6, 8)),
    _family("16 sets", "multistep:parts=16,bits={}", (1, 2, 4, 6)),
    _family("top-k, 4 bits", "topk:ratio={}+affine:bits=4", _RATIOS),
    _family("top-k, float", "topk:ratio={}", _RATIOS[:4]),
    _family("2 × 2 means, affine", "downsample:factor=2+affine:bits={}", (4, 8, 16)),
    _family("truncated at 8 deviations", "truncate:step={}", ()),
    _family("QSGD (stochastic)", "qsgd:bits={},bucket=512", _LEVEL_BITS),
    _family("QSGDinf (stochastic)", "qsgdinf:bits={},bucket=512", _LEVEL_BITS),
    _family("NUQSGD", "nuqsgd:bits={},linf,nearest,bucket=512", _LEVEL_BITS[:4]),
    _family("TernGrad (stochastic)", "terngrad:bucket={},clip=2.5", (512,)),
    _family("AMQ", "amq:bits={},linf,nearest,bucket=512", _LEVEL_BITS),
    _family("ALQ", "alq:bits={},linf,nearest,bucket=512", _LEVEL_BITS),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every family on every tensor, and several steps against one at the same bits in all."""

    curves: dict[str, dict[str, list[Measured]]]  # tensor → family → formats
    # tensor → number of sets → the format with that many, at 8 bits in all; one is the affine format
    sets: dict[str, dict[int, Measured]]

    def reasonable_sets(self, tensor: str, distance: str = "l2") -> int:
        """The fewest sets whose error, at 8 bits in all, is within a tenth of the least: 1 where one is enough.

        A set is 8 bytes; where they weigh more than a hundredth of the codes, the sets are too many for the tensor.
        """
        errors = {
            count: float(getattr(row, distance))
            for count, row in self.sets[tensor].items()
            if row.bits <= TOTAL_BITS * 1.01 or count == 1
        }
        return min(count for count, error in errors.items() if error <= 1.1 * min(errors.values()))

    def to_json(self) -> dict[str, Any]:
        return {
            "curves": {
                tensor: {label: [row.to_json() for row in rows] for label, rows in families.items()}
                for tensor, families in self.curves.items()
            },
            "sets": {
                tensor: {str(count): row.to_json() for count, row in rows.items()} for tensor, rows in self.sets.items()
            },
            "reasonable_sets": {
                tensor: {distance: self.reasonable_sets(tensor, distance) for distance in DISTANCES}
                for tensor in self.sets
            },
        }


def compare(tensors: Mapping[str, Tensor] | None = None, seed: int = 0) -> Comparison:
    """Measure all families on normal, Laplace and ReLU-normal values, and on the tensors given."""
    chosen = {name: draw(name, seed=seed) for name in ("normal", "laplace", "relu")}
    chosen.update({name: _limited(x) for name, x in (tensors or {}).items()})
    curves: dict[str, dict[str, list[Measured]]] = {}
    sets: dict[str, dict[int, Measured]] = {}
    for name, x in chosen.items():
        curves[name] = {family.label: listing(x, family.formats, seed) for family in _families_for(x)}
        sets[name] = {count: measure(_with_sets(count), x) for count in SETS}
    return Comparison(curves=curves, sets=sets)


def _with_sets(count: int) -> str:
    if count == 1:
        return f"affine:bits={TOTAL_BITS}"
    return f"multistep:parts={count},bits={TOTAL_BITS - (count - 1).bit_length()}"


def _families_for(x: Tensor) -> list[Family]:
    """Truncation has a step of its own: here, that which reaches eight deviations with the bits at hand."""
    reach = 8 * float(x.double().std(correction=0)) or 1.0
    steps = {bits: reach / 2 ** (bits - 1) for bits in (4, 5, 6, 8, 10)}
    truncated = tuple(f"truncate:step={step!r},bits={bits},saturate" for bits, step in steps.items())
    return [
        Family(label=family.label, formats=truncated) if family.label.startswith("truncated") else family
        for family in FAMILIES
    ]


def _limited(x: Tensor) -> Tensor:
    """The first samples of a large tensor."""
    x = x.detach()
    if x.numel() <= MAX_ELEMENTS or not x.dim():
        return x
    per_sample = x[0].numel()
    return x[: max(1, MAX_ELEMENTS // max(1, per_sample))] if x.dim() > 1 else x[:MAX_ELEMENTS]
