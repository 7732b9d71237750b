"""How good a network is, and where its error comes from."""

from ptq.evaluation.layers import Distance, LayerError, layer_errors
from ptq.evaluation.metrics import Evaluation, Paired, evaluate

__all__ = ["Distance", "Evaluation", "LayerError", "Paired", "evaluate", "layer_errors"]
