"""Hooks, modes and threads that are as before when the ``with`` block ends, also when it ends with an exception."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def attached(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """``with attached(m.register_forward_hook(f) for m in modules): ...``"""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode and give every module its own mode back afterwards."""
    modes: list[tuple[Any, bool]] = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def one_thread() -> Iterator[None]:
    """torch runs on one thread inside: for work that is too small for several, or that is to be timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pass_input_through(
    attribute: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """A forward pre-hook, with ``partial`` over the first argument: the input goes through ``layer.<attribute>``.

    A plain function, so that models that carry it can be copied and pickled.
    """
    module = getattr(layer, attribute)
    if args:
        return (module(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": module(kwargs["input"])}
