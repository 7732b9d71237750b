"""Where the numbers come from: versions, seeds and fingerprints."""

from __future__ import annotations

from ptq.journal import environment as present_environment
from ptq.report.page.files import RunFiles

_ORDER = ("ptq", "python", "torch", "torchvision", "numpy", "onnxruntime", "transformers")


def environment(files: RunFiles) -> list[tuple[str, str]]:
    """What the last command ran with, as the log says; what is here now where there is no log."""
    found = dict(files.log[-1]["environment"]) if files.log else present_environment()
    facts = [(name, str(found[name])) for name in _ORDER if name in found]
    facts.append(("system", f"{found['system']} {found['machine']}, {found['processors']} processors"))
    if "threads" in found:
        facts.append(("threads", str(found["threads"])))
    if files.export and files.export["cpu"].get("model"):
        facts.append(("CPU of the latencies", str(files.export["cpu"]["model"])))
    return facts


def seeds(files: RunFiles) -> list[tuple[str, str]]:
    found = [("run", str(files.options.get("seed") or 0))]
    return found + [(f"baseline {name}", str(item.recipe.get("seed", 0))) for name, item in files.baselines.items()]


def fingerprints(files: RunFiles) -> list[tuple[str, str]]:
    """SHA-256 of the networks' weights, and the checksum of the calibration data."""
    found = []
    if files.calibration:
        found += [("float weights", files.calibration.model_fingerprint)]
        found += [("calibration data", files.calibration.data_fingerprint)]
    elif files.sweep:
        found += [("float weights", files.sweep.model_fingerprint), ("calibration data", files.sweep.data_fingerprint)]
    if files.smoothed:
        found.append(("smoothed weights", files.smoothed.model_fingerprint))
    return found
