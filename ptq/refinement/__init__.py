"""Quantized networks refined without labels: ranges, weights, rounding and biases, layer by layer or block by block."""

from ptq.refinement.alone import rounded_weights
from ptq.refinement.apply import SAMPLES, Refined, refine
from ptq.refinement.quantizing import SMOOTHING, quantize, smooths_first
from ptq.refinement.steps import steps_of

__all__ = ["SAMPLES", "SMOOTHING", "Refined", "quantize", "refine", "rounded_weights", "smooths_first", "steps_of"]
