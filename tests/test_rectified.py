"""Ranges behind a ReLU: the shortcut is taken where it is certain, and never changes a number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptq.calibration import calibrate
from ptq.errors import ActivationError
from ptq.hooks import attached
from ptq.observers import ChannelRange
from ptq.rectified import RectifiedInputs
from ptq.vision import torchvision


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


class Loop(nn.Module):
    """Calls a Sequential's modules one by one, and changes what the ReLU made."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(conv(), nn.ReLU(), conv())

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).neg_()
        return x


class Shared(nn.Module):
    """Runs its layer once behind a ReLU, and once more inside of another module."""

    def __init__(self) -> None:
        super().__init__()
        layer = conv()

        class Again(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(-x)

        self.parts = nn.Sequential(nn.ReLU(), layer, Again())

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def hooked() -> nn.Module:
    model = nn.Sequential(conv(), nn.ReLU(), conv())
    model[1].register_forward_hook(lambda module, args, output: output - 1)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(conv(), nn.ReLU(), conv())
    model[1].forward = lambda x: x - 1  # type: ignore[method-assign]
    return model


def rectified_layers(model: nn.Module, images: Tensor) -> list[nn.Module]:
    """The layers that were told to read a ReLU's output while the model ran."""
    rectified = RectifiedInputs(model)
    found = []

    def ask(layer: nn.Module, args: Any) -> None:
        if layer in rectified:
            found.append(layer)

    asking = (layer.register_forward_pre_hook(ask) for layer in model.modules() if isinstance(layer, nn.Conv2d))
    with torch.no_grad(), attached(chain(rectified.hooks(), asking)):
        model(images)
    return found


CERTAIN: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: nn.Sequential(conv(), nn.ReLU(), conv()),
    "nested": lambda: nn.Sequential(nn.Sequential(conv(), nn.ReLU6(inplace=True)), nn.Sequential(conv())),
}
UNCERTAIN: dict[str, Callable[[], nn.Module]] = {
    "called one by one": Loop,
    "shared": Shared,
    "a hook behind the ReLU": hooked,
    "another forward": patched,
    "no ReLU": lambda: nn.Sequential(conv(), nn.LeakyReLU(), conv()),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_what_a_sequential_runs_behind_a_relu_is_found(name: str) -> None:
    model = CERTAIN[name]()
    assert rectified_layers(model, torch.randn(2, 4, 6, 6)) == [list(model.modules())[-1]]


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_may_be_changed_on_its_way_is_not(name: str) -> None:
    assert rectified_layers(UNCERTAIN[name](), torch.randn(2, 4, 6, 6)) == []


def test_most_layers_of_mobilenetv2_are_found() -> None:
    model = torchvision("models").get_model("mobilenet_v2", weights=None).eval()
    # Two in each of its 17 blocks; the first block has no expansion and reads the stem's ReLU6.
    assert len(rectified_layers(model, torch.randn(1, 3, 32, 32))) == 33


@pytest.mark.parametrize("name", [*CERTAIN, *UNCERTAIN])
def test_statistics_are_those_of_all_inputs_kept(name: str) -> None:
    torch.manual_seed(0)
    model = (CERTAIN | UNCERTAIN)[name]().eval()
    batches = [torch.randn(3, 4, 6, 6) * size for size in (1, 0.1, 3)]
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, layer: nn.Module, args: Any) -> None:
        seen.setdefault(name, []).append(args[0].clone())

    convolutions = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad(), attached(m.register_forward_pre_hook(partial(keep, n)) for n, m in convolutions):
        for batch in batches:
            model(batch)
    for layer, statistics in calibrate(model, batches).layers.items():
        x = torch.cat(seen[layer])
        assert torch.equal(statistics.minimum, x.amin((0, 2, 3)))
        assert torch.equal(statistics.maximum, x.amax((0, 2, 3)))


def test_a_channel_that_never_was_zero_is_looked_at_on() -> None:
    generator = torch.Generator().manual_seed(0)
    lifts = torch.tensor([0.0, 0.5, 0.0])[:, None, None]  # the second channel has no zero
    batches = [torch.randn(4, 3, 5, 5, generator=generator).relu() + lifts * size for size in (1.0, 0.5, 2.0)]
    found, expected = ChannelRange(3), ChannelRange(3)
    for batch in batches:
        found.collect(batch, 1, rectified=True)
        expected.collect(batch, 1)
    assert torch.equal(found.minimum, expected.minimum) and torch.equal(found.maximum, expected.maximum)
    assert found.minimum.tolist() == [0.0, 0.25, 0.0]


@pytest.mark.parametrize(("value", "word"), [(torch.nan, "NaN"), (torch.inf, "Inf")])
def test_nan_and_inf_show_behind_a_relu_too(value: float, word: str) -> None:
    model = nn.Sequential(nn.ReLU(), conv())
    batches = [torch.randn(2, 4, 6, 6) for _ in range(3)]
    batches[2][1, 3, 2, 2] = value
    with pytest.raises(ActivationError, match=f"1: {word} in the input, batch 2, channel 3"):
        calibrate(model, batches)
