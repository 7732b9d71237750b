"""What refinement takes of the machine's memory, and how the networks lie in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def peak_memory() -> int | None:
    """Bytes that were resident at most since the process began; None where the system doesn't say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def channels_last(*networks: nn.Module) -> Iterator[None]:
    """Inside, weights of 2d convolutions, and so the maps, have their channels side by side in memory.

    A step of learning a ResNet-20 takes a quarter less time then. Files want the usual layout back.
    """
    for network in networks:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        yield
    finally:
        for network in networks:
            network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
