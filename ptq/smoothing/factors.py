"""The smoothing factor of each channel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ptq.errors import InputError

ALPHAS = tuple(round(0.05 * i, 2) for i in range(1, 20))  # 0.05 … 0.95


def checked_alpha(alpha: float) -> float:
    if not (isinstance(alpha, (int, float)) and math.isfinite(alpha) and 0 <= alpha <= 1):
        raise InputError(f"alpha = {alpha}: choose a number from 0 (weights stay) to 1 (activations become even)")
    return float(alpha)


def smoothing_factor(activation_absmax: Tensor, weight_absmax: Tensor, alpha: float) -> Tensor:
    """``s_c = a_c^α / w_c^(1-α)``, and 1 where a or w is 0 or not finite.

    The input is divided by s and the weight multiplied by it: X' = X / s, W' = W · s.
    """
    a, w = activation_absmax.double(), weight_absmax.double()
    factor = a**alpha / w ** (1 - alpha)
    # Float32 has to hold both s and 1/s: a factor outside of that is as useless as none.
    usable = (a > 0) & (w > 0) & a.isfinite() & w.isfinite() & (factor > 1e-30) & (factor < 1e30)
    return torch.where(usable, factor, torch.ones_like(factor)).float()
