"""Layers learned together: weights, biases and the scales of inputs, towards what the float layers give, unlabelled.

Inputs are quantized while learning, and rounding passes the gradient straight through (LSQ). Weights may leave their
grid, to be rounded again: moved on it by such gradients they end up worse than compensated rounding left them, at a few
hundred steps. With a few thousand, and a network of layers to round again, they had better stay on it, and learn its
scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ptq import channels
from ptq.batches import Call
from ptq.formats import affine
from ptq.hooks import attached
from ptq.quantization.modules import ATTRIBUTE, FakeQuantize, weight_codes

Part = TypeVar("Part")
Example: TypeAlias = tuple[Call, Mapping[str, Tensor]]  # what modules are to return for a call; "" is the block itself


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and how fast to learn; the rates fall to zero along a cosine."""

    steps: int
    samples: int = 32  # in a step
    weights: float = 0.02  # rate of the weights, in steps of their grid
    scales: float = 0.002  # rate of the inputs' scales, and of the weights' on a grid, as a share of them
    biases: float = 0.002  # rate of the biases, in steps of the weight times the range of the input


def learn(
    block: nn.Module,
    layers: Mapping[str, channels.Layer],
    examples: Iterable[Example],
    recipe: Recipe,
    *,
    bits: Mapping[str, int | None] | None = None,
    shares: Mapping[str, float] | None = None,
) -> None:
    """Move the weights, biases and input scales of a block's layers: each example is a call and what to answer.

    The loss is the squared error of the block's output, minimised by Adam in one step for each example. With ``shares``
    it is a sum of such errors, of what these modules of the block return: each over the variance of what is wanted and
    times its share. ``layers`` are by name within the block. Weights stay on the grid of so many ``bits``, where a
    layer has any there, and its scales are learned, too; the others leave theirs.
    """
    shares = shares or {"": 1.0}
    units: dict[str, float] = {}  # of squared errors: the variance of the first targets
    with torch.enable_grad(), _learned_inputs(layers) as inputs, watched(block, shares) as outputs:
        held = bits or {}
        learned = [_LearnedLayer(name, layer, held.get(name)) for name, layer in layers.items()]
        optimizer = torch.optim.Adam(_parameters(learned, inputs, recipe), fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
        for call, targets in examples:
            overrides = {key: value for layer in learned for key, value in layer.parameters().items()}
            ours = fresh(call)
            functional_call(block, overrides, ours.args, ours.kwargs)
            units = units or {
                name: float(target.var(0, correction=0).mean()) or 1.0 for name, target in targets.items()
            }
            losses = [share / units[name] * F.mse_loss(outputs[name], targets[name]) for name, share in shares.items()]
            if not any(loss.requires_grad for loss in losses):
                break  # the network cuts its gradients off
            optimizer.zero_grad()
            torch.autograd.backward(losses)
            optimizer.step()
            schedule.step()
        for layer in learned:
            layer.write()


@contextmanager
def watched(network: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Inside, what these modules returned last, by name; ``""`` is the network itself."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[name] = output

    with attached(network.get_submodule(name).register_forward_hook(partial(keep, name)) for name in names):
        yield outputs


def drawn_parts(given: Sequence[Call], targets: Sequence[Tensor], recipe: Recipe, seed: int) -> Iterator[Example]:
    """As many examples as the recipe has steps: parts of these calls, in random order."""
    parts = [part for pair in zip(given, targets, strict=True) for part in parts_of(*pair, recipe.samples)]
    for call, target in shuffled(parts, recipe.steps, torch.Generator().manual_seed(seed)):
        yield call, {"": target}


def fresh(call: Call) -> Call:
    """The same call on copies of its tensors: a block may well change its input in place."""

    def copied(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(copied(part) for part in value)
        return value.clone() if isinstance(value, Tensor) else value

    return Call(copied(call.args), {key: copied(value) for key, value in call.kwargs.items()}, None)


def straight_through(x: Tensor, scale: Tensor, first: float, last: float) -> Tensor:
    """``s · clamp(round(x / s), first, last)`` with the gradients of LSQ.

    Inside the range the gradient passes to x, and that of s is ``round(x/s) - x/s`` times it; outside x gets none,
    and s the code of the end.
    """
    found: Tensor = _StraightThrough.apply(x, scale, first, last)  # type: ignore[no-untyped-call]
    return found


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, first: float, last: float) -> Tensor:
        steps = x / scale
        codes = steps.round().clamp_(first, last)
        ctx.save_for_backward(steps, codes, scale)
        # A hair outside, since what is passed on is what lies between them.
        ctx.ends = np.nextafter(np.float32(first), -np.inf), np.nextafter(np.float32(last), np.inf)
        return codes * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        steps, codes, scale = ctx.saved_tensors
        passed = torch.ops.aten.hardtanh_backward(gradient, steps, *map(float, ctx.ends))
        of_scale = None
        if ctx.needs_input_grad[1] and scale.numel() == 1:
            of_scale = (_dot(gradient, codes) - _dot(passed, steps)).view_as(scale)
        elif ctx.needs_input_grad[1]:
            of_scale = torch.addcmul(gradient * codes, passed, steps, value=-1).sum_to_size(scale.shape)
        return (passed if ctx.needs_input_grad[0] else None), of_scale, None, None


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """``Σ a b``, as b lies in memory."""
    if b.dim() == 4 and b.is_contiguous(memory_format=torch.channels_last):
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    return torch.dot(a.flatten(), b.flatten())


class _LearnedInput(nn.Module):
    """Stands in for a FakeQuantize while its scale is learned."""

    def __init__(self, quantizer: FakeQuantize) -> None:
        super().__init__()
        self.quantizer, self.start = quantizer, quantizer.scale.clone()
        self.logarithm = nn.Parameter(torch.zeros_like(self.start))  # of the scale over the one at the start
        first, last = affine.code_range(quantizer.bits, symmetric=quantizer.symmetric)
        zero_point = float(quantizer.zero_point)
        self._first, self._last = first - zero_point, last - zero_point

    @property
    def scale(self) -> Tensor:
        return self.start * self.logarithm.exp()

    @property
    def reach(self) -> float:
        return self.quantizer.reach

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(x, self.scale, self._first, self._last)


class _LearnedLayer:
    """What is learned of one layer: a change of its weight, a shift of its bias and, with bits, a stretch of its grid.

    All are in units that make one rate fit all: the weight's in steps of its grid, or shares of its mean size where
    it has none; the bias's in such steps times the range of the input; the grid's as the logarithm of its scales.
    """

    def __init__(self, name: str, layer: channels.Layer, bits: int | None) -> None:
        self._prefix, self._layer, self._bits = f"{name}." if name else "", layer, bits
        scale = getattr(layer, "weight_scale", None)
        self._step = layer.weight.detach().abs().mean().expand(channels.output_channels(layer))  # [O]
        if isinstance(scale, Tensor):
            self._step = scale.detach().clone()
        self._shift_unit = self._step * getattr(getattr(layer, ATTRIBUTE, None), "reach", 1.0)
        self.change = torch.zeros_like(layer.weight).detach().requires_grad_()
        self.shift = torch.zeros_like(self._step).requires_grad_()
        self.stretch = torch.zeros_like(self._step).requires_grad_()

    @property
    def _scale(self) -> Tensor:
        return self._step * self.stretch.exp()

    def parameters(self) -> dict[str, Tensor]:
        """To run the layer with, by name within the block."""
        over_outputs = partial(channels.over_outputs, weight=self._layer.weight, layer=self._layer)
        step = over_outputs(self._step)
        weight = self._layer.weight.detach() + self.change * step
        if self._bits is not None:
            zero_point, *ends = weight_codes(self._layer, self._bits)
            moved = over_outputs(zero_point)
            codes = straight_through(weight / step + moved, step.new_ones(()), *ends)
            weight = (codes - moved) * over_outputs(self._scale)
        found = {f"{self._prefix}weight": weight}
        if self._layer.bias is not None:
            found[f"{self._prefix}bias"] = self._layer.bias.detach() + self.shift * self._shift_unit
        return found

    @torch.no_grad()
    def write(self) -> None:
        """Put what was learned into the layer."""
        learned = self.parameters()
        self._layer.weight.copy_(learned[f"{self._prefix}weight"])
        if self._layer.bias is not None:
            self._layer.bias.copy_(learned[f"{self._prefix}bias"])
        if self._bits is not None:
            self._layer.weight_scale.copy_(self._scale)  # type: ignore[operator]


@contextmanager
def _learned_inputs(layers: Mapping[str, channels.Layer]) -> Iterator[dict[str, _LearnedInput]]:
    """Inside, the quantizers of the layers' inputs learn their scales, which they keep afterwards."""
    learned: dict[str, _LearnedInput] = {}
    try:
        for name, layer in layers.items():
            quantizer = getattr(layer, ATTRIBUTE, None)
            if type(quantizer) is FakeQuantize:  # a diffused image keeps its grid: its errors are no function of it
                learned[name] = _LearnedInput(quantizer)
                setattr(layer, ATTRIBUTE, learned[name])
        yield learned
        with torch.no_grad():
            for stand_in in learned.values():
                stand_in.quantizer.scale.copy_(stand_in.scale)
    finally:
        for name, stand_in in learned.items():
            setattr(layers[name], ATTRIBUTE, stand_in.quantizer)


def _parameters(
    learned: Sequence[_LearnedLayer], inputs: Mapping[str, _LearnedInput], recipe: Recipe
) -> list[dict[str, Any]]:
    """For the optimizer: what has one rate, together."""
    return [
        {"params": [layer.change for layer in learned], "lr": recipe.weights},
        {"params": [stand_in.logarithm for stand_in in inputs.values()], "lr": recipe.scales},
        {"params": [layer.stretch for layer in learned], "lr": recipe.scales},
        {"params": [layer.shift for layer in learned], "lr": recipe.biases},
    ]


def parts_of(call: Call, target: Tensor, size: int) -> Iterator[tuple[Call, Tensor]]:
    """A call and its output in parts of so many samples.

    Cut is what has as many entries as the output; a mask or an embedding for all samples goes with each part.
    """
    for start in range(0, len(target), size):
        cut = partial(_cut, samples=len(target), start=start, stop=start + size)
        kwargs = {key: cut(value) for key, value in call.kwargs.items()}
        yield Call(tuple(cut(value) for value in call.args), kwargs, None), target[start : start + size]


def _cut(value: Any, samples: int, start: int, stop: int) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(part, samples, start, stop) for part in value)
    return value[start:stop] if isinstance(value, Tensor) and value.dim() and len(value) == samples else value


def shuffled(parts: Sequence[Part], steps: int, generator: torch.Generator) -> Iterator[Part]:
    """So many parts, in a new random order each time all of them have come."""
    for _ in range(math.ceil(steps / len(parts))):
        for index in torch.randperm(len(parts), generator=generator).tolist()[:steps]:
            yield parts[index]
        steps -= len(parts)
