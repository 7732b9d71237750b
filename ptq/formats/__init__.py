"""Number formats: pure numerics, no modules and no networks.

``format("affine:bits=4,symmetric,axis=0")`` reads a format from its text; formats that select or reduce compose
with ``+``, as in ``"topk:ratio=0.1+affine:bits=4"``. Every format has ``encode``, ``decode``, ``fake`` and ``spec``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ptq.formats.base import NAMES, Format, Packed, format, from_spec

if TYPE_CHECKING:
    from ptq.formats.affine import Affine
    from ptq.formats.downsample import Downsample
    from ptq.formats.levels import Levels
    from ptq.formats.multistep import MultiStep
    from ptq.formats.raw import Raw
    from ptq.formats.topk import TopK
    from ptq.formats.truncate import Truncate

__all__ = [
    "NAMES",
    "Affine",
    "Downsample",
    "Format",
    "Levels",
    "MultiStep",
    "Packed",
    "Raw",
    "TopK",
    "Truncate",
    "format",
    "from_spec",
]

# Imported when first used: levels bring scipy with them.
_CLASSES = ("Affine", "Downsample", "Levels", "MultiStep", "Raw", "TopK", "Truncate")


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'ptq.formats' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ptq.formats.{name.lower()}"), name)
