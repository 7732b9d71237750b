"""Peak memory of ResNet-50 at batch 32: ``python tests/analysis/resnet50_memory.py plain``, then ``analysis``.

``plain`` is one forward of the float network; ``analysis`` calibrates and quantizes it, and analyzes its layers on the
same batch: the difference of the two is what analysis adds, the quantized copy of the weights included. ``analysis
60`` gives the layers' errors and then their sensitivity 60 seconds each.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

import ptq
from ptq.analysis.errors import analyze_layers
from ptq.analysis.sensitivity import sensitivities
from ptq.tasks.models import load_model


def main() -> None:
    ptq.tune_allocator()
    model = load_model("torchvision:resnet50", "random", 0).model
    batch = torch.randn(32, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    start, samples = time.monotonic(), len(batch)
    if sys.argv[1] == "plain":
        with torch.inference_mode():
            model(batch)
    else:
        quantized = ptq.quantize(model, ptq.calibrate(model, [batch[:2]]), bits="W4A4")
        budget = float(sys.argv[2]) if len(sys.argv) > 2 else float("inf")
        _, samples = analyze_layers(model, quantized.model, [batch], budget=budget)
        if budget < float("inf"):
            labels = torch.arange(len(batch))
            found = sensitivities(model, quantized.model, [(batch, labels)], budget=budget)
            print(f"{len(found.layers)} layers' sensitivity on {found.samples} samples in {found.seconds:.0f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{sys.argv[1]}: peak {peak:.0f} MB, {samples} samples, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
