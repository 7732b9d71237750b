"""How good a network is, and where its error comes from."""

from ptq.evaluation.layers import Distance, LayerError, layer_errors
from ptq.evaluation.metrics import Evaluation, Paired, evaluate
from ptq.evaluation.table import Row, layers_json, networks_json

__all__ = [
    "Distance",
    "Evaluation",
    "LayerError",
    "Paired",
    "Row",
    "evaluate",
    "layer_errors",
    "layers_json",
    "networks_json",
]
