"""Layers that read a ReLU's output: nothing below zero comes, and half of a range's work may be left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ptq.channels import LAYER_TYPES


class RectifiedInputs:
    """Which layers of a model read a ReLU's output at this moment: ``layer in rectified``.

    Only ``nn.Sequential`` says so for certain: while its own forward runs, nothing comes between two of its modules,
    not even an in-place operation. The same modules called one by one may read anything.
    """

    def __init__(self, model: nn.Module) -> None:
        places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self._behind = {}
        for sequential in model.modules():
            layers = {layer for layer in _behind_rectifiers(sequential) if places[layer] == 1}
            if layers:
                self._behind[sequential] = layers
        self._running: list[nn.Module] = []

    def __contains__(self, layer: nn.Module) -> bool:
        return any(layer in self._behind[sequential] for sequential in self._running)

    def hooks(self) -> Iterator[RemovableHandle]:
        """Put hooks on the model that follow what runs."""
        for sequential in self._behind:
            yield sequential.register_forward_pre_hook(self._begin)
            yield sequential.register_forward_hook(self._end, always_call=True)

    def _begin(self, sequential: nn.Module, args: Any) -> None:
        self._running.append(sequential)

    def _end(self, sequential: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()


def _behind_rectifiers(sequential: nn.Module) -> Iterator[nn.Module]:
    if _is_plain(sequential, nn.Sequential):
        for before, layer in pairwise(_steps(sequential)):
            rectified = _is_plain(before, nn.ReLU) or _is_plain(before, nn.ReLU6)
            if rectified and isinstance(layer, LAYER_TYPES) and not layer._forward_pre_hooks:
                yield layer


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    """What runs one after the other."""
    if _is_plain(module, nn.Sequential):
        for part in module._modules.values():
            yield from _steps(part) if part is not None else ()
    else:
        yield module


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module does what this kind does and nothing else."""
    if not isinstance(module, kind):  # scripted modules are of no such kind, and have no forward to look at
        return False
    own = type(module).forward is kind.forward and "forward" not in vars(module)
    return own and not module._forward_pre_hooks and not module._forward_hooks
