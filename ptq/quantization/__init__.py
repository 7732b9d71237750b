"""Quantized networks: the scheme says what gets how many bits, fake-quant modules carry it out."""

from ptq.batchnorm import FoldedBatchNorm, fold_batchnorms
from ptq.quantization.apply import Quantized, quantize
from ptq.quantization.modules import FakeQuantize
from ptq.quantization.scheme import Bits, Scheme

__all__ = ["Bits", "FakeQuantize", "FoldedBatchNorm", "Quantized", "Scheme", "fold_batchnorms", "quantize"]
