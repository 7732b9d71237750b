"""What flows through one layer: its input, and the gradient that comes back to it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ptq.batches import Batch, as_call, device_of
from ptq.errors import InputError
from ptq.hooks import attached, evaluating


def input_and_gradient(model: nn.Module, batch: Batch, layer: str) -> tuple[Tensor, Tensor]:
    """The input of a layer on a labelled batch, and the gradient of the cross-entropy there.

    Works on a copy, so that no gradient stays behind in the caller's model.
    """
    call = as_call(batch, device_of(model))
    if call.labels is None:
        raise InputError("a gradient needs labels: give batches of (inputs, labels)")
    model = copy.deepcopy(model)
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A copy that requires a gradient, also where nothing before it does.
        x = args[0].clone().requires_grad_() if not args[0].requires_grad else args[0].clone()
        x.retain_grad()
        kept.append(x)
        return (x, *args[1:])

    with torch.enable_grad(), evaluating(model), attached([model.get_submodule(layer).register_forward_pre_hook(keep)]):
        logits = call.logits(model)
        functional.cross_entropy(logits, call.labels.to(logits.device).long()).backward()  # type: ignore[no-untyped-call]
    if not kept or kept[0].grad is None:
        raise InputError(f"{layer}: the loss doesn't depend on this layer's input: choose another")
    return kept[0].detach(), kept[0].grad.detach()
