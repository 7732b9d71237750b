"""Refine a quantized network, in the order of execution."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

from ptq import distributed
from ptq.attention import split_attention
from ptq.batches import Batches, calls, limited, regrouped
from ptq.batchnorm import fold_batchnorms
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.hooks import evaluating
from ptq.quantization import Bits, Quantized, Scheme
from ptq.quantization.apply import quantize_by
from ptq.refinement.blocks import refine_blocks
from ptq.refinement.image import diffuse_image
from ptq.refinement.memory import channels_last, peak_memory
from ptq.refinement.network import recipe_for, refine_network
from ptq.refinement.steps import LAYER_STEPS, steps_of
from ptq.refinement.usage import Usage, layers_in, look_at_usage
from ptq.refinement.varying import can_be_varied, varied_samples
from ptq.refinement.walking import LayerRefiner, Networks, ways_through
from ptq.smoothing import Smoothed

SAMPLES = 1024
VARIATIONS = 1  # of each sample, beside the sample itself
ROWS = 2**17
MEMORY = 2**31  # bytes that the maps of all samples may take
_TOGETHER, _MAP_TOGETHER = 512, 2**25  # samples, and bytes of their largest map, that walk together: threads cost time
_MAPS_HELD = 6  # of the largest size, by a sample: input, output and shortcut in each of the two networks


@dataclass(kw_only=True)
class Refined(Quantized):
    """A quantized copy of a model whose layers were refined, and what was left as it was."""

    skipped: dict[str, str] = field(default_factory=dict)  # layer → why it is only rounded
    blocks: dict[str, list[str]] = field(default_factory=dict)  # what was learned as a whole → its layers
    learned_as_a_whole: bool = False  # in the end
    samples: int = 0  # that it was refined on
    smoothed: Smoothed | None = None  # what it was made from, if that was smoothed on the way: to load it again
    peak_memory: int | None = None  # bytes that the process took at most until it was refined


def refine(
    model: nn.Module,
    calibration: Calibration,
    scheme: Scheme,
    batches: Batches,
    effort: str = "fast",
    *,
    samples: int = SAMPLES,
    variations: int = VARIATIONS,
    rows: int = ROWS,
    memory: int = MEMORY,
    seed: int = 0,
    observer: str | None = None,
) -> Refined:
    """Quantize a copy of the model as the scheme says, and refine it layer by layer on unlabelled batches.

    In the order of execution each layer gets the rows that arrive in the quantized network, made of the layers
    refined so far, and those of the float one. On a sample of them are chosen: the range of the input, the weight by
    ridge least squares towards the float output, its rounding with compensation, its scales, and the bias, such that
    the mean residual is zero. With the effort ``best`` the layers of each block are then learned together. In the end
    those of the whole network are, with ``fast`` in a few steps and only if the network is small. A text that names
    some of the steps (``"rounding,bias"``) takes these alone; ``alpha`` is the caller's to take, before. The same seed
    and batches give the same network.

    Before all that, an image that the first layer reads in fewer than 8 bits is diffused, if the scheme lets it: its
    rounding errors are spread over neighbouring pixels, where that brings the answers closer.

    The first ``samples`` of the batches are used, and where these are floats so many ``variations`` of each: shifted,
    mirrored and mixed. There are fewer where their maps would take more than ``memory`` bytes. Each layer sees at most
    about ``rows`` rows.
    """
    steps = steps_of(effort)
    plain = quantize_by(scheme, model, calibration, observer)
    reference = copy.deepcopy(model)
    split_attention(reference)
    fold_batchnorms(reference, plain.batchnorms)
    networks = Networks(reference, plain.model)
    with evaluating(*networks.both), channels_last(*networks.both), torch.no_grad():
        first = next(iter(calls(batches, model, 1)), None)
        if first is None:
            raise InputError("refine: the data has no batch: give some of the calibration's")
        usage = look_at_usage(reference, first)
        largest_map = max(1, usage.largest_map)
        affordable = max(1, memory // (_MAPS_HELD * largest_map))
        used = regrouped(limited(batches, min(samples, affordable)), min(_TOGETHER, _MAP_TOGETHER // largest_map))
        given = list(calls(used, model))
        seen = given
        if variations and all(map(can_be_varied, given)):
            affordable //= sum(call.samples for call in given)
            seen = [*given, *varied_samples(given, min(variations, affordable - 1), seed)]
        skipped = {name: reason for name, bits in plain.bits.items() if (reason := _why_left(name, bits, usage))}
        names = [name for name in usage.layers if name in plain.bits and name not in skipped]
        refiner = LayerRefiner(networks, plain.bits, calibration, rows, seed, steps & LAYER_STEPS)
        image = next(iter(usage.layers))
        spread = "image" in steps and scheme.diffuse_image
        diffused = spread and image in names and diffuse_image(refiner, image, given)
        # What is only rounded passes no gradient on.
        blocks = {name: held for name, held in usage.blocks(names).items() if not layers_in(name, list(skipped))}
        if refiner.steps and "blocks" not in steps:
            ways = ways_through(networks, seen)
            refiner.refine([way for number, way in enumerate(ways) if distributed.is_mine(number)], names)
        with distributed.alone():  # learning is one step after the other: every process takes all of them
            if "blocks" in steps:
                refine_blocks(refiner, seen, names, blocks)
            recipe = recipe_for(effort, usage.multiplications) if "network" in steps else None
            # A single layer is as close as it gets.
            learnable = not skipped and len(names) > 1
            whole = learnable and recipe is not None and refine_network(refiner, given, names, list(blocks), recipe)
    return Refined(
        **{**vars(plain), "refine": effort, "diffused": (image,) if diffused else ()},
        skipped=skipped,
        blocks=blocks if "blocks" in steps else {},
        learned_as_a_whole=whole,
        samples=sum(call.samples for call in given),
        peak_memory=peak_memory(),
    )


def _why_left(name: str, bits: Bits, usage: Usage) -> str | None:
    if bits.weight_format or bits.activation_format:
        return "it is held in a number format of its own"
    times = usage.layers.get(name, 0)
    if times != 1:
        return f"it runs {times} times in a forward pass" if times else "it doesn't run on the first sample"
    return None
