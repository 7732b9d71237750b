"""Why a quantized network loses what it loses: layer by layer, channel by channel, and what helps."""

from ptq.analysis.analyzing import Analysis, analyze
from ptq.analysis.errors import LayerAnalysis, Split
from ptq.analysis.outliers import Outliers
from ptq.analysis.prediction import DistanceStudy
from ptq.analysis.remedies import Remedies, Remedy
from ptq.analysis.sensitivity import LayerSensitivity, Sensitivities

__all__ = [
    "Analysis",
    "DistanceStudy",
    "LayerAnalysis",
    "LayerSensitivity",
    "Outliers",
    "Remedies",
    "Remedy",
    "Sensitivities",
    "Split",
    "analyze",
]
