"""The float network with any of its layers quantized, whole or in part: quantized layers grafted onto the float ones.

All that an analysis compares is a run of one network: nothing grafted is the float network, everything grafted the
quantized one. A grafted layer gets the input of the float network's scale and answers in it, whatever smoothing did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.attention import splitting_attention
from ptq.batches import Call
from ptq.batchnorm import FoldedBatchNorm
from ptq.errors import MismatchError
from ptq.hooks import evaluating
from ptq.quantization.modules import ATTRIBUTE as QUANTIZER
from ptq.quantization.modules import is_quantized
from ptq.smoothing.modules import ATTRIBUTE as SMOOTHING
from ptq.smoothing.modules import InputScaling, folding_of

Part: TypeAlias = Literal["both", "weights", "activations"]
PARTS: tuple[Part, ...] = ("both", "weights", "activations")
Watch: TypeAlias = Callable[["Graft", Tensor, Tensor], None]  # (layer, its input, its output)
HELD_BYTES = 64 * 2**20  # of outputs that are kept at a time


class Graft:
    """A float layer with the BatchNorm that reads it, and the quantized layer that does the work of both."""

    def __init__(self, name: str, layer: nn.Module, batchnorm: nn.Module | None, quantized: channels.Layer) -> None:
        self.name, self.layer, self.batchnorm, self.quantized = name, layer, batchnorm, quantized
        # Called directly, past the hooks: what happens to an input is done here, step by step.
        self._float_layer: Callable[..., Tensor] = layer.forward
        self._float_batchnorm: Callable[[Tensor], Tensor] | None = batchnorm.forward if batchnorm else None
        self._more: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        notes = folding_of(quantized)
        self._axis = channels.channel_axis(quantized)
        self._input_factor = notes.input if notes else None
        same_place = notes is not None and notes.behind_batchnorm == (batchnorm is not None)
        self._output_factor = notes.output if notes and same_place else None
        explicit = getattr(quantized, SMOOTHING, None)
        if isinstance(explicit, InputScaling):  # a division at run time is one more factor
            folded = 1.0 if self._input_factor is None else self._input_factor
            self._input_factor = explicit.factor * folded

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.quantized)

    def called_with(self, *args: Any, **kwargs: Any) -> None:
        """What the current call of the layer was given beside its input, as a transposed convolution may be."""
        self._more = args, kwargs

    def output(self, x: Tensor, part: Part | None) -> Tensor:
        """What comes out behind the BatchNorm: of the float layer (None), or with this part of it quantized."""
        if part is None:
            return self._float_output(x)
        if part == "activations":
            return self._float_output(self.rounded(x))
        args, kwargs = self._more
        prepared = self._scaled(x) if part == "weights" else self._quantized(self._scaled(x))
        found: Tensor = self.quantized.forward(prepared, *args, **kwargs)
        return found if self._output_factor is None else found * self._over_channels(self._output_factor, found)

    def rounded(self, x: Tensor) -> Tensor:
        """What the layer's quantizer leaves of an input, in the input's own scale."""
        rounded = self._quantized(self._scaled(x))
        return rounded if self._input_factor is None else rounded * self._over_channels(self._input_factor, x)

    def _float_output(self, x: Tensor) -> Tensor:
        args, kwargs = self._more
        output = self._float_layer(x, *args, **kwargs)
        return output if self._float_batchnorm is None else self._float_batchnorm(output)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._input_factor is None else x / self._over_channels(self._input_factor, x)

    def _quantized(self, scaled: Tensor) -> Tensor:
        quantizer = getattr(self.quantized, QUANTIZER, None)
        return scaled if quantizer is None else quantizer(scaled)

    def _over_channels(self, factor: Tensor, x: Tensor) -> Tensor:
        return channels.over_inputs(factor, self._axis, x).to(x.dtype)


class Tape:
    """The outputs of the layers of one run, in the order of their calls."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.outputs: list[Tensor] = []

    def record(self, graft: Graft, x: Tensor, output: Tensor) -> None:
        self.names.append(graft.name)
        self.outputs.append(output.clone())  # an in-place activation is about to overwrite it


class Grafted:
    """A float network whose layers can be exchanged for quantized ones, run by run; made by ``grafting``."""

    def __init__(self, model: nn.Module, grafts: dict[str, Graft]) -> None:
        self._model, self.grafts = model, grafts
        self._parts: Mapping[str, Part] = {}
        self._watch: Watch | None = None
        self._replayed: list[Tensor] = []

    def run(
        self,
        call: Call,
        parts: Mapping[str, Part] | None = None,
        *,
        watch: Watch | None = None,
        tape: Tape | None = None,
        until: str | None = None,
    ) -> Tensor:
        """The logits with these parts of these layers quantized.

        Up to the first call of the layer ``until`` the outputs on the tape, recorded with the same parts before that
        layer, take the place of their computation. ``watch`` sees every layer that is computed.
        """
        self._parts, self._watch = parts or {}, watch
        self._replayed = tape.outputs[: tape.names.index(until)][::-1] if tape and until in tape.names else []
        return call.logits(self._model)

    def whole(self, part: Part = "both") -> dict[str, Part]:
        """This part of every quantized layer."""
        return {name: part for name, graft in self.grafts.items() if graft.is_quantized}

    def pieces(self, call: Call, held_bytes: int = HELD_BYTES) -> Iterator[Call]:
        """Cut a batch so that the outputs of all layers, kept for one piece, stay within the memory allowed."""
        sizes: list[int] = []
        self.run(call.first(1), watch=lambda graft, x, output: sizes.append(output.numel() * output.element_size()))
        yield from call.split(max(1, held_bytes // max(1, sum(sizes))))

    def forward(self, graft: Graft, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What a layer of the network does while the grafting lasts; its BatchNorm is done here, too."""
        if self._replayed:
            return self._replayed.pop().clone()
        graft.called_with(*args, **kwargs)
        output = graft.output(input, self._parts.get(graft.name))
        if self._watch is not None:
            self._watch(graft, input, output)
        return output


@contextmanager
def grafting(model: nn.Module, quantized: nn.Module) -> Iterator[Grafted]:
    """Both networks are in eval mode inside, and the model's layers answer to the ``Grafted``; afterwards as before."""
    with torch.inference_mode(), evaluating(model, quantized), splitting_attention(model), ExitStack() as stack:
        grafted = Grafted(model, dict(_pairs(model, quantized)))
        for graft in grafted.grafts.values():
            stack.enter_context(_forwarding(graft.layer, partial(grafted.forward, graft)))
            if graft.batchnorm is not None:
                stack.enter_context(_forwarding(graft.batchnorm, nn.Identity().forward))
        yield grafted


def _pairs(model: nn.Module, quantized: nn.Module) -> Iterator[tuple[str, Graft]]:
    batchnorms = {
        module.into: name for name, module in quantized.named_modules() if isinstance(module, FoldedBatchNorm)
    }
    modules = dict(model.named_modules())
    for name, layer in channels.layers_of(quantized):
        batchnorm = batchnorms.get(name)
        if name not in modules or (batchnorm and batchnorm not in modules):
            raise MismatchError(f"{name}: the float model has no such layer: compare with the model it was made from")
        yield name, Graft(name, modules[name], modules[batchnorm] if batchnorm else None, layer)


@contextmanager
def _forwarding(module: Any, forward: Callable[..., Tensor]) -> Iterator[None]:
    """The module runs this in place of its own ``forward``."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
