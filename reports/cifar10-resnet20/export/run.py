"""python run.py images.npy: [N, H, W] or [N, H, W, C], raw pixels at the size that model.json names."""
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime

folder = Path(__file__).parent
about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
session = onnxruntime.InferenceSession(str(folder / about["file"]), providers=["CPUExecutionProvider"])
images, steps = np.load(sys.argv[1]), about["preprocessing"]
if steps:
    images = images[..., None] if images.ndim == 3 else images
    if images.shape[1:3] != (steps["image_size"], steps["image_size"]):
        sys.exit(f"{sys.argv[1]}: resize the images to {steps['image_size']} x {steps['image_size']} first")
    images = (images / steps["peak"] - steps["mean"]) / steps["std"]
    images = images.transpose(0, 3, 1, 2).astype(np.float32)
for logits in session.run(None, {about["inputs"][0]: images})[about["output"]]:
    chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    best = int(chances.argmax())
    print(about["labels"][best] if about["labels"] else best, f"{chances[best]:.3f}")
