"""Number formats: pure numerics, no modules and no networks.

``format("affine:bits=4,symmetric,axis=0")`` reads a format from its text; formats that select or reduce compose
with ``+``, as in ``"topk:ratio=0.1+affine:bits=4"``. Every format has ``encode``, ``decode``, ``fake`` and ``spec``.
"""

from __future__ import annotations

from ptq.formats.base import NAMES, Format, Packed, format, from_spec

__all__ = ["NAMES", "Format", "Packed", "format", "from_spec"]
