"""BatchNorm folded into the layer before it, as every runtime does: exact, and on a copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptq import channels
from ptq.errors import MismatchError


class FoldedBatchNorm(nn.Identity):
    """Stands where a BatchNorm was; ``into`` names the layer that does its work now."""

    def __init__(self, into: str) -> None:
        super().__init__()
        self.into = into


def fold_batchnorms(model: nn.Module, pairs: Mapping[str, str]) -> None:
    """Fold, in place, each BatchNorm into its layer (``pairs``: layer → BatchNorm, as a calibration knows them)."""
    owners = channels.weight_owners(model)
    for layer_name, batchnorm_name in pairs.items():
        layer, batchnorm = model.get_submodule(layer_name), model.get_submodule(batchnorm_name)
        if isinstance(batchnorm, FoldedBatchNorm):
            continue
        if not isinstance(layer, channels.LAYER_TYPES) or not isinstance(batchnorm, _BatchNorm):
            raise MismatchError(
                f"{layer_name}, {batchnorm_name}: not a layer and its BatchNorm: recalibrate this model"
            )
        if channels.why_fixed(layer_name, layer, owners):
            continue  # the BatchNorm stays where it is, which is just as right
        weight, bias = folded_parameters(layer, batchnorm)
        layer.weight = nn.Parameter(weight, layer.weight.requires_grad)
        layer.bias = nn.Parameter(bias, layer.weight.requires_grad)
        parent, _, attribute = batchnorm_name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, FoldedBatchNorm(layer_name))


@torch.no_grad()
def folded_parameters(layer: channels.Layer, batchnorm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of the one layer that does the work of both: ``W·γ/√(σ²+ε)``, ``(b-μ)·γ/√(σ²+ε) + β``."""
    assert batchnorm.running_mean is not None and batchnorm.running_var is not None
    mean, variance = batchnorm.running_mean.double(), batchnorm.running_var.double()
    gamma = torch.ones_like(mean) if batchnorm.weight is None else batchnorm.weight.double()
    beta = torch.zeros_like(mean) if batchnorm.bias is None else batchnorm.bias.double()
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.double()
    factor = gamma / (variance + batchnorm.eps).sqrt()  # [O]
    weight = layer.weight.double()
    if weight is layer.weight:  # a float64 layer: double() gave the parameter itself
        weight = weight.clone()
    channels.scale_outputs(weight, layer, factor)
    dtype = layer.weight.dtype
    return weight.to(dtype), ((bias - mean) * factor + beta).to(dtype)
