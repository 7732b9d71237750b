"""The image that a network reads, on few levels: its rounding errors are spread to where the answers notice least."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.batches import Call
from ptq.formats import diffusion
from ptq.hooks import attached
from ptq.quantization.modules import ATTRIBUTE, FakeQuantize, diffuse_input
from ptq.refinement.blocks import squared_error
from ptq.refinement.learning import fresh
from ptq.refinement.walking import LayerRefiner

_ENOUGH_BITS = 8  # an image has no more
_MOST_CHANNELS = 16  # of what may still be called an image; they are rounded one after the other
_SAMPLES = 256  # that are looked at
_SHARES = (1.0, 0.9, 0.8)  # of the range


def diffuse_image(refiner: LayerRefiner, name: str, given: Sequence[Call]) -> bool:
    """Diffuse the input of this layer, the first one, if that brings the float network's answers closer.

    Closer than rounding to nearest: both are tried, in the float network, with several shares of the range. How errors
    are spread follows from the gradients of the answers. Returns whether it was done.
    """
    network = refiner.networks.reference
    reference, layer = refiner.networks.modules(name)
    quantizer = getattr(layer, ATTRIBUTE, None)
    if not isinstance(layer, nn.Conv2d) or type(quantizer) is not FakeQuantize or quantizer.bits >= _ENOUGH_BITS:
        return False
    extent = refiner.extent(name)
    if extent is None or channels.input_channels(layer) > _MOST_CHANNELS:
        return False
    parts = list(_first(given, _SAMPLES))
    generator = torch.Generator().manual_seed(refiner.seed)
    gradients = [_gradients(network, reference, part, generator) for part in parts]
    correlations = [diffusion.correlation_of(gradient) for gradient in gradients if gradient is not None]
    if len(correlations) < len(parts):
        return False
    plain, diffused = copy.deepcopy(quantizer), diffuse_input(copy.deepcopy(layer))
    diffused.spread.copy_(diffusion.spread_of(torch.stack(correlations).sum(0)))
    examples = [(part, fresh(part).run(network)) for part in parts]

    def error(tried: tuple[FakeQuantize, float]) -> float:
        with _input_through(reference, _set(*tried, extent)):
            return squared_error(network, examples)

    chosen, share = min(((each, share) for each in (plain, diffused) for share in _SHARES), key=error)
    if chosen is plain:
        return False
    setattr(layer, ATTRIBUTE, _set(chosen, share, extent))
    return True


def _first(given: Sequence[Call], samples: int) -> Iterator[Call]:
    for call in given:
        if samples > 0:
            yield replace(call, labels=None).first(samples)
        samples -= call.samples


def _set(quantizer: FakeQuantize, share: float, extent: tuple[float, float]) -> FakeQuantize:
    quantizer.set_range(extent[0] * share, extent[1] * share)
    return quantizer


@contextmanager
def _input_through(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, the layer gets its input changed."""

    def changed(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": change(kwargs["input"])}

    with attached([layer.register_forward_pre_hook(changed, with_kwargs=True)]):
        yield


def _gradients(network: nn.Module, layer: nn.Module, call: Call, generator: torch.Generator) -> Tensor | None:
    """Of the sum of a sample's answers, each with a random sign, by the images that the layer reads: [N, C, H, W].

    On average over signs, the square of such a gradient is that of all answers' gradients, summed. None where there is
    no image, or no gradient.
    """
    images: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        images.append(x.detach().clone().requires_grad_(x.is_floating_point()))
        return images[0]

    with torch.enable_grad(), _input_through(layer, leaf):
        answers = fresh(call).run(network)
    if not isinstance(answers, Tensor) or not answers.requires_grad or images[0].dim() != 4:
        return None
    signs = torch.randint(0, 2, answers.shape, generator=generator).to(answers) * 2 - 1
    (gradient,) = torch.autograd.grad(answers, images[0], signs, allow_unused=True)
    return gradient
