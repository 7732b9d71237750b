"""Quantized networks refined without labels: ranges, weights, rounding and biases, layer by layer or block by block."""

from ptq.refinement.apply import Refined, refine
from ptq.refinement.quantizing import Refine, quantize

__all__ = ["Refine", "Refined", "quantize", "refine"]
