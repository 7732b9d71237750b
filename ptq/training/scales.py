"""What smoothing multiplied the parameters of a network by, so that training can go on in the scale they had before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.graph import ChannelGraph
from ptq.smoothing.modules import ATTRIBUTE, InputScaling, folding_of


@torch.no_grad()
def smoothing_scales(model: nn.Module, graph: ChannelGraph, batchnorms: Mapping[str, str]) -> dict[str, Tensor]:
    """By parameter: c of ``θ' = c · θ``, for those that smoothing changed.

    ``batchnorms`` (layer → BatchNorm) are folded into their layers already. A layer's weight has
    ``c = s_in / s_out``, its bias and other producers of a channel ``1 / s_out``.
    """
    layers = dict(channels.layers_of(model))
    folded = _folded(layers, graph)
    scales = {}
    for name, layer in layers.items():
        leaving = (
            graph.parameters.get(f"{batchnorms[name]}.weight") if name in batchnorms else graph.producers.get(name)
        )
        scale = torch.ones_like(layer.weight)
        channels.scale_inputs(scale, layer, input_factor(layer).to(scale))
        scales[f"{name}.weight"] = scale
        if leaving is not None:
            inverse = (1 / folded[leaving]).to(scale)
            channels.scale_outputs(scale, layer, inverse)
            if layer.bias is not None:
                scales[f"{name}.bias"] = inverse
    parameters = dict(model.named_parameters())
    for name, classes in graph.parameters.items():
        if name in parameters:
            scales[name] = (1 / folded[classes]).view(parameters[name].shape).to(parameters[name])
    return {name: scale for name, scale in scales.items() if bool((scale != 1).any())}


def input_factor(layer: channels.Layer) -> Tensor:
    """``[C]``: what a layer's input is divided by, before it arrives and in front of the layer."""
    notes, scaling = folding_of(layer), getattr(layer, ATTRIBUTE, None)
    factor = torch.ones(channels.input_channels(layer), device=layer.weight.device)
    if notes is not None:
        factor = factor * notes.input
    return factor * scaling.factor if isinstance(scaling, InputScaling) else factor


def _folded(layers: Mapping[str, channels.Layer], graph: ChannelGraph) -> Tensor:
    """The factor of each class of channels, from the notes of the layers that read it."""
    every = [*graph.readers.values(), *graph.producers.values(), *graph.parameters.values()]
    folded = torch.ones(1 + max((int(classes.max()) for classes in every if classes.numel()), default=0))
    for name, layer in layers.items():
        notes = folding_of(layer)
        if notes is not None and name in graph.readers:
            folded[graph.readers[name]] = notes.input.to(folded)
    return folded
