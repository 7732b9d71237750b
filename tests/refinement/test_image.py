"""Images in few bits, diffused where that brings the answers closer, and left alone where it can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.formats import affine
from ptq.quantization import Bits, Quantized, Scheme
from ptq.quantization.modules import DiffusedQuantize, FakeQuantize
from ptq.refinement import Refined, quantize, refine


class Averages(nn.Module):
    """Sees no single pixel: a smooth convolution, then averages over windows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blur, self.head = nn.Conv2d(3, 8, 5, padding=2), nn.Linear(8 * 9, 5)
        with torch.no_grad():
            self.blur.weight.copy_(torch.rand(8, 3, 1, 1) * torch.ones(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.adaptive_avg_pool2d(self.blur(x), 3).flatten(1))


@pytest.fixture
def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [nn.functional.avg_pool2d(torch.randn(16, 3, 18, 18, generator=generator), 3, 1) for _ in range(6)]


def refined(model: nn.Module, batches: list[Tensor], bits: str = "W8A3", **options: Any) -> Quantized:
    calibration = ptq.calibrate(model, batches)
    return quantize(model, calibration, bits=bits, refine="fast", batches=batches, **options)


@torch.no_grad()
def error(found: nn.Module, expected: nn.Module, batches: list[Tensor]) -> float:
    return sum(float((found(batch) - expected(batch)).square().sum()) for batch in batches)


def test_answers_to_unseen_images_are_several_times_closer(images: list[Tensor]) -> None:
    model = Averages().eval()
    seen, others = images[:3], images[3:]
    diffused, rounded = (
        refined(model, seen, "W16A3", overrides={"head": "W16A16"}, diffuse_image=how) for how in (True, False)
    )
    assert (diffused.diffused, rounded.diffused) == (("blur",), ())
    assert error(diffused.model, model, others) < 0.2 * error(rounded.model, model, others)


def test_the_image_is_on_the_grid(images: list[Tensor]) -> None:
    quantizer = refined(Averages().eval(), images).model.blur.input_quantizer
    assert isinstance(quantizer, DiffusedQuantize)
    codes = (quantizer(images[0]) / quantizer.scale).round() + quantizer.zero_point
    first, last = affine.code_range(3)
    assert set(codes.unique().tolist()) <= set(range(first, last + 1))
    torch.testing.assert_close(quantizer(images[0]), (codes - quantizer.zero_point) * quantizer.scale)
    assert torch.equal(quantizer(images[0][0]), quantizer(images[0])[0])  # an image without a batch


@pytest.mark.parametrize("bits", ["W4A8", "W4A16", "W4"])
def test_eight_bits_are_enough_for_an_image(images: list[Tensor], bits: str) -> None:
    assert refined(Averages().eval(), images, bits).diffused == ()


def test_the_outer_layers_may_have_eight_bits(images: list[Tensor]) -> None:
    assert refined(Averages().eval(), images, first_last=8).diffused == ()


class NoGradient(Averages):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class EachPixel(nn.Module):
    """Every pixel is an answer of its own, so there is nowhere to spread an error to."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Conv2d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x).flatten(1)


def test_where_it_does_not_help_images_are_rounded(images: list[Tensor]) -> None:
    assert refined(NoGradient().eval(), images).diffused == ()
    plain = refined(EachPixel().eval(), [batch[:, :1] for batch in images], "W16A4")
    assert plain.diffused == () and type(plain.model.read.input_quantizer) is FakeQuantize
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)).eval()
    assert refined(flat, images).diffused == ()


@pytest.mark.parametrize("effort", ["fast", "best"])
def test_a_file_gives_the_same_network(images: list[Tensor], tmp_path: Path, effort: str) -> None:
    model = Averages().eval()
    calibration = ptq.calibrate(model, images)
    smoothed = ptq.smooth(model, calibration, 0.5)
    saved = quantize(smoothed.model, smoothed.calibration, bits="W4A4", refine=effort, batches=images)
    assert isinstance(saved, Refined) and saved.diffused == ("blur",)
    saved.save(tmp_path / "refined.safetensors")
    loaded = Quantized.load(tmp_path / "refined.safetensors", smoothed.model, smoothed.calibration)
    assert (loaded.scheme, loaded.diffused) == (saved.scheme, saved.diffused)
    with torch.no_grad():
        assert torch.equal(loaded.model(images[0]), saved.model(images[0]))


def test_digits(digits: ptq.Task, digits_calibration: ptq.Calibration) -> None:
    """Unseen digits in 3 bits, the rest in 8: closer to the float network's answers than rounded ones."""
    images = [images for images, _ in digits.evaluation]
    errors = []
    for how in (True, False):
        first = (("features.0.conv", Bits(8, 3)),)
        scheme = Scheme(bits=Bits(8, 8), overrides=first, diffuse_image=how)
        made = refine(digits.model, digits_calibration, scheme, digits.calibration, samples=128, rows=2048)
        assert bool(made.diffused) is how
        errors.append(error(made.model, digits.model, images))
    assert errors[0] < 0.9 * errors[1]
