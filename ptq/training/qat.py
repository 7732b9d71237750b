"""Quantization-aware training: a calibrated network goes on learning with its quantizers in place.

It begins as ``ptq.quantize`` would leave it, but for learned steps of weights, which begin where their squared error
is least, and ends as a ``Quantized`` that saves, loads and evaluates like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ptq import channels
from ptq.attention import split_attention
from ptq.batches import Batches
from ptq.batchnorm import fold_batchnorms
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.formats import format as read_format
from ptq.hooks import pass_input_through
from ptq.quantization import Quantized, Scheme
from ptq.quantization.apply import quantize_by
from ptq.quantization.modules import ATTRIBUTE, FakeQuantize
from ptq.training.loop import Engine, History, train
from ptq.training.quantizers import FormatWeight, InputSteps, WeightSteps, least_squares_steps
from ptq.training.recipe import Recipe
from ptq.training.samples import Samples
from ptq.training.scales import input_factor, smoothing_scales

STEPS = ("learned", "observed")
_ORIGINAL = "parametrizations.weight.original"


class QuantizedEngine(Engine):
    """Trains the float weights behind a quantized network, and with LSQ its steps."""

    kind = "qat"
    saves_weights = False  # the result is a quantized network, written as such

    def __init__(
        self,
        model: nn.Module,
        calibration: Calibration,
        scheme: Scheme,
        recipe: Recipe,
        *,
        steps: str = "learned",
        freeze_after: int | None = None,
        observer: str | None = None,
    ) -> None:
        if steps not in STEPS:
            raise InputError(f"steps {steps!r}: give {' or '.join(STEPS)}")
        if freeze_after is not None and freeze_after < 0:
            raise InputError(f"freeze after {freeze_after} epochs: give 0 or more")
        self.steps, self.freeze_after = steps, freeze_after
        self._quantized = quantize_by(scheme, model, calibration, observer)
        network = copy.deepcopy(model)
        split_attention(network)
        fold_batchnorms(network, self._quantized.batchnorms)
        for parameter in network.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        scales = smoothing_scales(network, calibration.graph, self._quantized.batchnorms)
        self._insert(network, calibration)
        super().__init__(network, recipe)
        self._preconditioned = self._in_original_scale(scales, calibration) if scales else []

    def _insert(self, network: nn.Module, calibration: Calibration) -> None:
        """Put trainable quantizers where the quantized network has its own, with their scales."""
        learned = self.steps == "learned"
        layers, references = dict(channels.layers_of(network)), dict(channels.layers_of(self._quantized.model))
        for name, bits in self._quantized.bits.items():
            layer, reference = layers[name], references[name]
            quantizer = getattr(reference, ATTRIBUTE, None)
            if isinstance(quantizer, FakeQuantize):
                quantizer = InputSteps(
                    quantizer.bits,
                    quantizer.scale,
                    quantizer.zero_point,
                    symmetric=quantizer.symmetric,
                    learned=learned,
                )
            if quantizer is not None:
                layer.add_module(ATTRIBUTE, quantizer)
                layer.register_forward_pre_hook(partial(pass_input_through, ATTRIBUTE), with_kwargs=True)
            weight: nn.Module | None = None
            if bits.weight_format:
                weight = FormatWeight(read_format(bits.weight_format))
            elif bits.weights is not None:
                device, scale = layer.weight.device, reference.get_buffer("weight_scale")
                places = torch.arange(channels.output_channels(layer), device=device)
                outputs = channels.over_outputs(places, layer.weight, layer)
                clip = torch.as_tensor(calibration.layers[name].weight_clip, dtype=torch.float32, device=device)
                if learned and not bool((clip != 1).any()):  # a clip that was searched for is a good start already
                    scale = least_squares_steps(layer.weight, scale, outputs, bits.weights)
                weight = WeightSteps(bits.weights, scale, outputs, clip, learned=learned)
            if weight is not None:
                parametrize.register_parametrization(layer, "weight", weight)

    @torch.no_grad()
    def _in_original_scale(self, scales: Mapping[str, Tensor], calibration: Calibration) -> list[tuple[Tensor, Tensor]]:
        """Parameters, and the c² that their gradients are multiplied by: SGD then does to ``θ = θ'/c`` what it would
        have done without smoothing.

        Where smoothing divided by 10, the gradient is 10 times as large and what it is taken from a tenth. Steps are
        as large as what they round: those of weights follow the norms of the channels, those of inputs the range.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        layers = dict(channels.layers_of(self.model))
        for name, scale in scales.items():
            layer_name, _, attribute = name.rpartition(".")
            parametrized = attribute == "weight" and parametrize.is_parametrized(layers.get(layer_name, self.model))
            place = f"{layer_name}.{_ORIGINAL}" if parametrized else name
            pairs.append((self.model.get_parameter(place), scale.square()))
        for name, layer in layers.items():
            quantizer, multiplied = getattr(layer, ATTRIBUTE, None), scales.get(f"{name}.weight")
            if isinstance(quantizer, InputSteps) and quantizer.learned:
                absmax = calibration.layers[name].activation_absmax.to(layer.weight)
                before = (absmax * input_factor(layer)).max()
                if before > 0:
                    pairs.append((quantizer.scale, (absmax.max() / before).square()))
            if multiplied is not None and parametrize.is_parametrized(layer, "weight"):
                steps = layer.get_submodule("parametrizations.weight.0")
                if isinstance(steps, WeightSteps) and steps.learned:
                    pairs.append((steps.scale, steps.shares(layer.get_parameter(_ORIGINAL), multiplied)))
        return pairs

    def gradients(self, inputs: Tensor, labels: Tensor, step: int) -> float | None:
        loss = super().gradients(inputs, labels, step)
        for parameter, factor in self._preconditioned:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return loss

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Steps are no weights: nothing pulls them to zero."""
        steps = [
            module.scale
            for module in self.model.modules()
            if isinstance(module, (WeightSteps, InputSteps)) and module.learned
        ]
        known = {id(step) for step in steps}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
        groups: list[dict[str, Any]] = [{"params": others}]
        return [*groups, {"params": steps, "weight_decay": 0.0}] if steps else groups

    def settings(self) -> dict[str, Any]:
        return {
            "source": self._quantized.source_fingerprint,
            "bits": {name: asdict(bits) for name, bits in self._quantized.bits.items()},
            "steps": self.steps,
            "freeze_after": self.freeze_after,
            "batchnorm": "folded" if self._quantized.batchnorms else "kept",
        }

    def begin_epoch(self, epoch: int) -> None:
        self.model.train()
        frozen = self.freeze_after is not None and epoch >= self.freeze_after
        for module in self.model.modules():
            if isinstance(module, InputSteps):
                module.frozen = frozen
            elif isinstance(module, _BatchNorm) and frozen:
                module.eval()

    @torch.no_grad()
    def result(self) -> Quantized:
        """The trained network on its grids, in the form that ``ptq.quantize`` gives."""
        quantized = copy.deepcopy(self._quantized)
        trained = {name: tensor for name, tensor in self.model.state_dict().items() if "parametrizations." not in name}
        state = quantized.model.state_dict()
        state |= {name: tensor for name, tensor in trained.items() if name in state}
        for name, layer in channels.layers_of(self.model):
            state[f"{name}.weight"] = layer.weight.detach()
            quantizer = getattr(layer, ATTRIBUTE, None)
            if isinstance(quantizer, InputSteps):
                state[f"{name}.{ATTRIBUTE}.scale"] = quantizer.step().detach()
            if parametrize.is_parametrized(layer, "weight"):
                steps = layer.get_submodule("parametrizations.weight.0")
                if isinstance(steps, WeightSteps):
                    original = layer.get_parameter(_ORIGINAL)
                    state[f"{name}.weight_scale"] = steps.step(original).detach()
        quantized.model.load_state_dict(state)
        quantized.model.eval()
        return quantized


def train_qat(
    model: nn.Module,
    calibration: Calibration,
    samples: Samples,
    recipe: Recipe,
    scheme: Scheme | None = None,
    *,
    steps: str = "learned",
    freeze_after: int | None = None,
    observer: str | None = None,
    folder: str | Path | None = None,
    evaluation: Batches | None = None,
    metric: str = "top1",
    stop_after: int | None = None,
    progress: bool = False,
) -> tuple[Quantized, History]:
    """Train a copy of a float or smoothed model for a scheme; ``calibration`` is the one made of (or for) it.

    BatchNorm is folded before training, as the scheme says; with ``Scheme(fold_batchnorm=False)`` it stays, and
    ``freeze_after`` so many epochs its statistics, and observed ranges, don't change any more.
    """
    engine = QuantizedEngine(
        model, calibration, scheme or Scheme(), recipe, steps=steps, freeze_after=freeze_after, observer=observer
    )
    history = train(
        engine,
        samples,
        folder=folder,
        evaluation=evaluation,
        metric=metric,
        stop_after=stop_after,
        progress=progress,
    )
    quantized = engine.result()
    history.model = quantized.model
    if folder is not None:
        quantized.save(Path(folder) / "quantized.safetensors")
    return quantized, history
