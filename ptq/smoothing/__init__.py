"""SmoothQuant: move the spread between channels from activations to weights, without changing the function."""

from ptq.smoothing.apply import Form, check_smoothing, sampled_errors, smooth
from ptq.smoothing.factors import ALPHAS, checked_alpha, smoothing_factor
from ptq.smoothing.result import Alpha, Explicit, LedgerEntry, Smoothed

__all__ = [
    "ALPHAS",
    "Alpha",
    "Explicit",
    "Form",
    "LedgerEntry",
    "Smoothed",
    "check_smoothing",
    "checked_alpha",
    "sampled_errors",
    "smooth",
    "smoothing_factor",
]
