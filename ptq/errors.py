"""What can go wrong, as exceptions whose message names the thing and the remedy in one line."""

from __future__ import annotations


class PtqError(Exception):
    """Base of every error that a user can cause and can put right."""


class InputError(PtqError):
    """An option, a file or a data set that can't be used as it is."""


class MismatchError(PtqError):
    """Two things that don't belong together: a calibration and a model, weights and a network."""


class ActivationError(PtqError):
    """An activation that can't be calibrated on: NaN or Inf."""


class EquivalenceError(PtqError):
    """A rewritten network that no longer computes what the original did."""
