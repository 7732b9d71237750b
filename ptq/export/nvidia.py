"""Ranges to and from NVIDIA's quantizers: ModelOpt's, or those of an installed pytorch-quantization.

Both keep a range as ``amax``: the grid is ``amax / 127 · [-127 … 127]``, or ``amax / 255 · [0 … 255]`` for unsigned
inputs, and both hang quantizers on a layer as ``input_quantizer`` and ``weight_quantizer``. A table of amax by the
quantizers' names is therefore all that goes back and forth.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.calibration import Calibration
from ptq.errors import InputError, MismatchError
from ptq.export.packages import required
from ptq.formats import affine
from ptq.quantization import FakeQuantize, Quantized
from ptq.quantization.modules import ATTRIBUTE as INPUT
from ptq.quantization.modules import ZERO_POINT, DiffusedQuantize

WEIGHT = "weight_quantizer"
_KINDS = (INPUT, WEIGHT)


def amax_of(quantized: Quantized) -> dict[str, Tensor]:
    """The amax table of a quantized network: ``{"conv.input_quantizer": [], "conv.weight_quantizer": [O, 1…]}``."""
    table: dict[str, Tensor] = {}
    for name, bits in quantized.bits.items():
        layer = quantized.model.get_submodule(name)
        assert isinstance(layer, channels.LAYER_TYPES)
        quantizer = getattr(layer, INPUT, None)
        if isinstance(quantizer, DiffusedQuantize):
            raise InputError(f"{name}: its image is diffused, NVIDIA's quantizers round: quantize with --no-diffuse")
        if bits.weight_format or not (quantizer is None or isinstance(quantizer, FakeQuantize)):
            raise InputError(f"{name}: a number format has no amax: quantize it with bits, or exclude it")
        if quantizer is not None:
            table[f"{name}.{INPUT}"] = quantizer.scale.detach().cpu() * _levels(name, quantizer)
        if hasattr(layer, ZERO_POINT) and bool(layer.get_buffer(ZERO_POINT).any()):
            raise InputError(
                f"{name}: its weights have zero-points, NVIDIA's quantizers have none: quantize with symmetric weights"
            )
        if bits.weights is not None:
            scale = layer.weight_scale.detach().cpu()  # type: ignore[operator]
            spread = channels.over_outputs(scale, layer.weight, layer)
            table[f"{name}.{WEIGHT}"] = spread * affine.code_range(bits.weights, symmetric=True)[1]
    return table


def amax_of_calibration(calibration: Calibration, observer: str | None = None, bits: int = 8) -> dict[str, Tensor]:
    """The amax of every calibrated input, as the observer chooses it."""
    table = {}
    for name, statistics in calibration.layers.items():
        low, high = statistics.range(observer or calibration.observer, bits)
        table[f"{name}.{INPUT}"] = torch.tensor(max(-low, high))
    return table


def amax_table(model: nn.Module) -> dict[str, Tensor]:
    """What the quantizers of a ModelOpt or pytorch-quantization model hold, by their names."""
    table = {}
    for name, quantizer in _quantizers(model):
        amax = getattr(quantizer, "amax", None)
        if amax is not None:
            table[name] = torch.as_tensor(amax).detach().cpu().float()
    if not table:
        raise InputError("no quantizer of the model has an amax: calibrate it with NVIDIA's tools first")
    return table


def load_amax(model: nn.Module, table: Mapping[str, Tensor]) -> None:
    """Set the amax of a ModelOpt or pytorch-quantization model's quantizers, all of the table."""
    present = dict(_quantizers(model))
    for name, amax in table.items():
        if name not in present:
            raise MismatchError(f"{name}: the model has no such quantizer: quantize this model with NVIDIA's tools")
        quantizer: Any = present[name]
        held = getattr(quantizer, "amax", None)
        if held is not None and torch.as_tensor(held).numel() != amax.numel():
            raise MismatchError(
                f"{name}: holds an amax of shape {list(torch.as_tensor(held).shape)}, the table has "
                f"{list(amax.shape)}: use the same granularity on both sides"
            )
        quantizer.amax = amax if held is None else amax.reshape(torch.as_tensor(held).shape)


def set_ranges(quantized: Quantized, table: Mapping[str, Tensor]) -> None:
    """Take the input ranges of an amax table over into a quantized network of ours, in place."""
    for name in quantized.bits:
        quantizer = getattr(quantized.model.get_submodule(name), INPUT, None)
        amax = table.get(f"{name}.{INPUT}")
        if not isinstance(quantizer, FakeQuantize) or amax is None:
            continue
        if amax.numel() != 1:
            raise MismatchError(f"{name}: amax for {amax.numel()} channels of the input: ours is one for the tensor")
        largest = float(amax)
        unsigned = not quantizer.symmetric and int(quantizer.zero_point) == affine.code_range(quantizer.bits)[0]
        quantizer.set_range(0.0 if unsigned else -largest, largest)


def with_nvidia_quantizers(quantized: Quantized) -> nn.Module:
    """A copy whose layers carry ModelOpt's quantizers in place of ours, with our ranges: what TensorRT's tools take.

    Activations must be symmetric, or start at zero; smoothing that didn't fold comes along.
    """
    required("modelopt", extra="nvidia")
    table = amax_of(quantized)
    model = _bare_copy(quantized.model)
    with _quiet():
        import modelopt.torch.quantization as modelopt
        from modelopt.torch.quantization.config import QuantizerAttributeConfig

        configuration = {**copy.deepcopy(modelopt.INT8_DEFAULT_CFG), "algorithm": None}  # the ranges are ours
        model = cast(nn.Module, modelopt.quantize(model, configuration))
        for name, quantizer in _quantizers(model):
            layer, _, kind = name.rpartition(".")
            if name not in table:
                quantizer.disable()  # type: ignore[operator]
                continue
            bits = quantized.bits[layer]
            ours = getattr(quantized.model.get_submodule(layer), INPUT, None)
            attributes = QuantizerAttributeConfig(
                num_bits=bits.activations if kind == INPUT else bits.weights,
                axis=None if kind == INPUT else _axis(quantized.model.get_submodule(layer)),
                unsigned=kind == INPUT and isinstance(ours, FakeQuantize) and _is_unsigned(ours),
                narrow_range=not (kind == INPUT and isinstance(ours, FakeQuantize) and not ours.symmetric),
            )
            quantizer.set_from_attribute_config(attributes)  # type: ignore[operator]
            quantizer.enable()  # type: ignore[operator]
            quantizer.amax = table[name]
    return model


def _levels(name: str, quantizer: FakeQuantize) -> int:
    """How many steps amax is above zero."""
    if int(quantizer.zero_point) == 0:
        return affine.code_range(quantizer.bits, symmetric=True)[1]
    if _is_unsigned(quantizer):
        return int(2**quantizer.bits - 1)
    raise InputError(
        f"{name}: its input has zero-point {int(quantizer.zero_point)}, NVIDIA's quantizers have none: "
        "quantize with symmetric activations"
    )


def _is_unsigned(quantizer: FakeQuantize) -> bool:
    return int(quantizer.zero_point) == affine.code_range(quantizer.bits)[0]


def _axis(layer: nn.Module) -> int:
    return 1 if isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)) else 0


def _quantizers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _KINDS and hasattr(module, "amax"):
            yield name, module


def _bare_copy(model: nn.Module) -> nn.Module:
    """A copy without our quantizers, hooks included; their attribute's name is NVIDIA's too."""
    bare = copy.deepcopy(model).cpu().eval()
    for _, layer in channels.layers_of(bare):
        for key, hook in list(layer._forward_pre_hooks.items()):
            if isinstance(hook, partial) and hook.args == (INPUT,):
                del layer._forward_pre_hooks[key]
                layer._forward_pre_hooks_with_kwargs.pop(key, None)
        for attribute in (INPUT, "weight_scale", ZERO_POINT, "quantized_to"):
            if hasattr(layer, attribute):
                delattr(layer, attribute)
    return bare


@contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt tells which of its plugins it can't load, and on stdout how many quantizers it made."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
