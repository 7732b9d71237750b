"""Write factors into a model: into what produces each channel, what reads it, and, where that is impossible, a hook."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.graph import ChannelGraph
from ptq.smoothing.modules import ATTRIBUTE, NOTES, ChannelClamp, Undo, attach_notes, attach_scaling


@torch.no_grad()
def write_factors(model: nn.Module, graph: ChannelGraph, folded: Tensor, factors: Mapping[str, Tensor]) -> Undo:
    """Divide every input of a layer by its factor, in place, and leave the model's function as it is.

    ``folded`` is the factor of each class of the graph, divided out where the class is produced; ``factors`` has the
    whole factor of each layer. What of it isn't folded is divided by a hook in front of the layer.
    """
    undo = Undo()
    layers = dict(channels.layers_of(model))
    for name, classes in graph.producers.items():
        layer, factor = layers[name], folded[classes]
        if bool((factor != 1).any()):
            undo.about_to_write(layer.weight, layer.bias)
            channels.scale_outputs(layer.weight, layer, (1 / factor.double()).to(layer.weight))
            if layer.bias is not None:
                layer.bias.div_(factor.to(layer.bias))
    for name, classes in graph.parameters.items():
        factor = folded[classes]
        if bool((factor != 1).any()):
            parameter = model.get_parameter(name)
            undo.about_to_write(parameter)
            parameter.div_(factor.view(parameter.shape).to(parameter))
    for name, classes in graph.clamps.items():
        if bool((folded[classes] != 1).any()):
            clamp = model.get_submodule(name)
            assert isinstance(clamp, nn.Hardtanh)
            device = next(iter(layers.values())).weight.device
            new = ChannelClamp.replacing(clamp, folded[classes].to(device), graph.clamp_axes[name])
            vars(new).update({key: value for key, value in vars(clamp).items() if "hooks" in key})
            new.train(clamp.training)
            undo.add(lambda name=name, clamp=clamp: replace_module(model, name, clamp))  # type: ignore[misc]
            replace_module(model, name, new)
    for name, layer in layers.items():
        arriving = folded[graph.readers[name]] if name in graph.readers else torch.ones(channels.input_channels(layer))
        _write_reader(layer, arriving, factors.get(name, arriving), undo)
        _note(name, layer, graph, folded, arriving, undo)
    return undo


def _write_reader(layer: channels.Layer, arriving: Tensor, factor: Tensor, undo: Undo) -> None:
    """``arriving`` is what the layer's input is divided by already."""
    if bool((factor != 1).any()):
        undo.about_to_write(layer.weight)
        channels.scale_inputs(layer.weight.detach(), layer, factor.to(layer.weight))
    if not torch.equal(arriving, factor):
        handle = attach_scaling(layer, factor / arriving)
        undo.add(lambda: delattr(layer, ATTRIBUTE))
        undo.add(handle.remove)


def _note(name: str, layer: channels.Layer, graph: ChannelGraph, folded: Tensor, arriving: Tensor, undo: Undo) -> None:
    batchnorm = graph.batchnorms.get(name)
    leaving = graph.parameters.get(f"{batchnorm}.weight") if batchnorm else graph.producers.get(name)
    output = folded[leaving] if leaving is not None else torch.ones(channels.output_channels(layer))
    if bool((arriving != 1).any()) or bool((output != 1).any()):
        notes = attach_notes(layer, behind_batchnorm=batchnorm is not None)
        notes.input.copy_(arriving)
        notes.output.copy_(output)
        undo.add(lambda: delattr(layer, NOTES))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another, under every name that it has."""
    old = model.get_submodule(name)
    for parent in model.modules():
        for attribute in [attribute for attribute, child in parent._modules.items() if child is old]:
            setattr(parent, attribute, module)
