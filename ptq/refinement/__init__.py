"""Quantized networks refined without labels: ranges, weights, rounding and biases, layer by layer or block by block."""

from ptq.refinement.alone import rounded_weights
from ptq.refinement.apply import SAMPLES, Refined, refine
from ptq.refinement.quantizing import Refine, check_refine, quantize

__all__ = ["SAMPLES", "Refine", "Refined", "check_refine", "quantize", "refine", "rounded_weights"]
