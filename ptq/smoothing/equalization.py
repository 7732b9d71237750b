"""Cross-layer equalization: what makes a channel and what reads it get weights of one size, whatever the data.

After Nagel et al. (2019), "Data-Free Quantization Through Weight Equalization and Bias Correction". A bias counts among
the weights that make its channel: one that is almost nothing but bias would else be stretched until the others have no
levels left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptq import channels
from ptq.batchnorm import folded_parameters
from ptq.graph import ChannelGraph

_SWEEPS = 10_000  # at most; a factor reaches as many layers as there were sweeps
_DONE = 1e-4  # a sweep that changes no factor by more, as a share of it, is the last


@dataclass(frozen=True)
class _Connections:
    """The largest ``|w|`` from each channel that a layer reads to each that it makes, and the classes of both."""

    weights: Tensor  # [g, O/g, C/g]
    biases: Tensor  # [O]
    made: Tensor  # [O]
    read: Tensor  # [C]

    def largest(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Of each channel that is made, and of each that is read, with inputs and outputs divided by their factors."""
        groups, outputs, inputs = self.weights.shape
        weights = self.weights * factors[self.read].view(groups, 1, inputs)
        made = torch.maximum(weights.amax(2).flatten(), self.biases) / factors[self.made]
        return made, (weights / factors[self.made].view(groups, outputs, 1)).amax(1).flatten()


@torch.no_grad()
def equalizing_factors(model: nn.Module, graph: ChannelGraph, batchnorms: Mapping[str, str]) -> Tensor:
    """The factor of each class of the graph: ``s_c = √(made_c / read_c)``, repeated until nothing changes.

    ``made`` is the largest weight or bias that makes the channels of a class, ``read`` the largest weight that reads
    them, both as they are after the factors so far; divided and multiplied by s_c they are equal. Ones where there is
    nothing to compare.
    """
    count = 1 + max((int(classes.max()) for classes in graph.readers.values()), default=0)
    layers = list(_connections(model, graph, batchnorms))
    factors = torch.ones(count, dtype=torch.float64)
    for _ in range(_SWEEPS):
        made, read = torch.zeros_like(factors), torch.zeros_like(factors)
        for layer in layers:
            makes, reads = layer.largest(factors)
            made.scatter_reduce_(0, layer.made, makes, "amax")
            read.scatter_reduce_(0, layer.read, reads, "amax")
        step = torch.where((made > 0) & (read > 0), (made / read).sqrt(), torch.ones_like(factors))
        step[0] = 1  # class 0 can't be scaled
        factors *= step
        if float((step - 1).abs().max()) < _DONE:
            break
    return factors.float()


def _connections(model: nn.Module, graph: ChannelGraph, batchnorms: Mapping[str, str]) -> Iterator[_Connections]:
    for name, layer in channels.layers_of(model):
        batchnorm = model.get_submodule(batchnorms[name]) if name in batchnorms else None
        made = graph.producers.get(name)
        weight, bias = layer.weight, layer.bias
        if isinstance(batchnorm, _BatchNorm):
            made = graph.parameters.get(f"{batchnorms[name]}.weight")
            weight, bias = folded_parameters(layer, batchnorm)
        unknown = weight.new_zeros(channels.output_channels(layer), dtype=torch.int64)
        view = channels.grouped_view(weight.detach().double(), layer).abs()
        yield _Connections(
            view.reshape(*view.shape[:3], -1).amax(3).cpu(),
            (torch.zeros(len(unknown)).double() if bias is None else bias.detach().double().abs()).cpu(),
            (unknown if made is None else made).cpu(),
            graph.readers.get(name, torch.zeros(channels.input_channels(layer), dtype=torch.int64)).cpu(),
        )
