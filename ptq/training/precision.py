"""One network at every precision: float32, half, bfloat16 and integers, and what running on the codes would give."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ptq import channels
from ptq.batches import limited
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.evaluation import evaluate
from ptq.formats.affine import checked_bits
from ptq.quantization import Bits, Scheme
from ptq.quantization.apply import quantize_by
from ptq.storage import write_json
from ptq.tasks import Task
from ptq.training.comparison import weight_bytes

KIND, SCHEMA = "precisions", 1
FLOATS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Score:
    """In percent, with its 95 % interval."""

    score: float
    interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One row: a precision, and the scores of the three ways to use it."""

    name: str  # float, half, bfloat16, or the number of bits
    weights_only: Score
    with_activations: Score
    undequantized: Score | None  # the known mistake; integers only
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Precisions:
    """The same network on the same samples at several precisions."""

    task: str
    metric: str
    n: int
    rows: list[Precision]

    def save(self, path: Path) -> dict[str, Any]:
        """Write it; returns what was written."""
        content = {"kind": KIND, "schema": SCHEMA, **asdict(self)}
        write_json(path, content)
        return content


def parse_precisions(text: str) -> list[str]:
    """``float,half,8,4``: names of FLOATS or numbers of bits."""
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    for name in names:
        if name in FLOATS:
            continue
        if not name.isdigit():
            raise InputError(f"--bits {text}: {name!r} is neither a number of bits nor {', '.join(FLOATS)}")
        checked_bits(int(name))
    if not names:
        raise InputError(f"--bits {text!r}: give some, as float,half,bfloat16,16,8,6,4")
    return list(dict.fromkeys(names))


class Rounding(TorchFunctionMode):
    """Rounds what every operation returns to another floating-point type.

    The operations themselves compute in float32, as hardware accumulates. Computing in the type itself would give
    other numbers on other machines, and ends the process with an illegal instruction where a virtual machine
    announces matrix units (AMX) that it doesn't have.
    """

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.dtype == torch.float32:
            return output.to(self.kind).float()
        return output


class InPrecision(nn.Module):
    """A copy of a network whose weights, inputs and every result are rounded to another floating-point type."""

    def __init__(self, model: nn.Module, kind: torch.dtype) -> None:
        super().__init__()
        self.model, self.kind = rounded(model, kind), kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            return value.to(self.kind).float() if isinstance(value, Tensor) and value.is_floating_point() else value

        with Rounding(self.kind):
            return self.model(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def rounded(model: nn.Module, kind: torch.dtype) -> nn.Module:
    """A copy whose parameters and buffers are rounded to another type; it computes in float32."""
    return copy.deepcopy(model).to(kind).float()


def undequantized(model: nn.Module, bits: int) -> nn.Module:
    """The known mistake: a copy that runs on ``(w - min w) / (max w - min w) · (2^b - 1) - 2^(b-1)`` for weights w.

    They are neither rounded nor brought back: zero isn't zero any more, 4 bits are an affine copy of 8, and every
    layer answers in another scale than the next one was trained for.
    """
    model = copy.deepcopy(model)
    with torch.no_grad():
        for _, layer in channels.layers_of(model):
            low, high = layer.weight.aminmax()
            layer.weight.copy_((layer.weight - low) / (high - low) * (2**bits - 1) - 2 ** (bits - 1))
    return model


def precisions(task: Task, calibration: Calibration, names: Sequence[str], *, images: int | None = None) -> Precisions:
    """The task's network at every named precision, weights only and weights with activations.

    Integers are those of ``ptq.quantize`` without smoothing: per-channel weights, per-tensor activations, BatchNorm
    folded. half and bfloat16 with activations round the result of every operation, which itself is done in float32.
    """
    labelled = limited(task.evaluation, images)
    rows = []
    n = 0

    def score(model: nn.Module) -> Score:
        nonlocal n
        answers = evaluate(model, labelled, metric=task.metric)
        n = answers.n
        return Score(score=answers.score(), interval=answers.score_interval())

    for name in names:
        kind = FLOATS.get(name)
        if kind is None:
            both = quantize_by(Scheme(bits=Bits(int(name), int(name))), task.model, calibration)
            weights_only = quantize_by(Scheme(bits=Bits(int(name), None)), task.model, calibration)
            row = Precision(
                name=name,
                weights_only=score(weights_only.model),
                with_activations=score(both.model),
                undequantized=score(undequantized(task.model, int(name))),
                weight_bytes=weight_bytes(both.model, both),
            )
        else:
            halves = weight_bytes(copy.deepcopy(task.model).to(kind))
            row = Precision(
                name=name,
                weights_only=score(rounded(task.model, kind)),
                with_activations=score(InPrecision(task.model, kind)),
                undequantized=None,
                weight_bytes=halves,
            )
        rows.append(row)
    return Precisions(task=task.name, metric=task.metric, n=n, rows=rows)
