from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ptq.tasks.checkpoints import load_weights
from ptq.tasks.networks.digits import DigitsNet

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_digits"


def test_an_epoch_gives_weights_that_fit(tmp_path: Path) -> None:
    output = tmp_path / "digits.safetensors"
    command = [sys.executable, str(SCRIPT), "--epochs", "1", "--batch-size", "256", "--output", str(output)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "held-out top-1" in finished.stdout
    load_weights(DigitsNet(), output)
