"""A classifier for an encoder that has none: logistic regression on its frozen features, kept for the next time."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from ptq.batches import Batches, as_call
from ptq.errors import InputError
from ptq.storage import fingerprint, read_tensors, write_tensors
from ptq.tasks.encoders import PooledClassifier

KIND, SCHEMA = "classifier head", 1  # a change of how it is fitted is a new schema
DEAD = 1e-6  # a feature that varies this little beside the others is left out (some of MiniLM's are about 1e-30)
REGULARIZATION = 0.01  # scikit-learn's C: hundreds of features and few labels want a strong one


def fit_head(model: PooledClassifier, batches: Batches, description: str, *, progress: bool = False) -> Path | None:
    """Give the model the classifier that fits labelled batches, or the one that did so before.

    The file it is kept in is named by all that decides about it: the encoder, its ``description`` and the batches.
    Returns that file, None if it can't be written.
    """
    path = _cache_folder() / f"head-{_key(model, batches, description)}.safetensors"
    try:
        head, _ = read_tensors(path, KIND, SCHEMA)
        kept = True
    except InputError:  # not there, or damaged
        head = _fitted(model, batches, progress)
        kept = _written(path, head)
    model.classifier.load_state_dict(head)
    return path if kept else None


def _written(path: Path, head: dict[str, Tensor]) -> bool:
    try:
        write_tensors(path, KIND, head, {"schema": SCHEMA})
    except InputError:  # a read-only home: fitted again the next time
        return False
    return True


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptq"


def _key(model: PooledClassifier, batches: Batches, description: str) -> str:
    digest = hashlib.sha256(f"{SCHEMA} {REGULARIZATION} {fingerprint(model.encoder)} {description}".encode())
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tuple(tensor.shape)};".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def _fitted(model: PooledClassifier, batches: Batches, progress: bool) -> dict[str, Tensor]:
    features, labels = [], []
    with torch.inference_mode():
        for batch in tqdm(batches, "fitting a classifier", unit="batch", disable=not progress, leave=False):
            call = as_call(batch)
            assert call.labels is not None
            features.append(model.features(**call.kwargs))
            labels.append(call.labels)
    weight, bias = logistic_regression(torch.cat(features).double().numpy(), torch.cat(labels).numpy())
    return {"weight": torch.from_numpy(weight).float(), "bias": torch.from_numpy(bias).float()}


def logistic_regression(
    features: NDArray[np.float64], labels: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weight [classes, width] and bias [classes] whose softmax is the fitted probability of each class.

    Fitted to standardised features, each class with the same say, however often it occurs; the standardisation is
    then part of the weight: ``w/σ · x + (b - w/σ · μ)``.
    """
    from sklearn.linear_model import LogisticRegression

    mean, deviation = features.mean(0), features.std(0)
    deviation[deviation <= DEAD * deviation.max()] = np.inf
    regression = LogisticRegression(C=REGULARIZATION, class_weight="balanced", max_iter=1000)
    regression.fit((features - mean) / deviation, labels)
    weight = regression.coef_ / deviation  # [classes, width], or [1, width] for two classes
    bias = regression.intercept_ - weight @ mean
    if len(weight) == 1:  # one score z for two classes: -z/2 and z/2
        halves = np.array([[-0.5], [0.5]])
        weight, bias = halves * weight, (halves * bias)[:, 0]
    return weight, bias
