"""SmoothQuant: move the spread between channels from activations to weights, without changing the function."""

from ptq.smoothing.apply import LedgerEntry, Smoothed, smooth
from ptq.smoothing.factors import ALPHAS, checked_alpha, smoothing_factor

__all__ = ["ALPHAS", "LedgerEntry", "Smoothed", "checked_alpha", "smooth", "smoothing_factor"]
