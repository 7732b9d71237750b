"""The pictures show the calibrations' own numbers: read back from what was drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

import ptq
from ptq.calibration import Calibration, LayerStatistics
from ptq.errors import InputError, MismatchError
from ptq.report.channel_plots import all_layers_heatmap, channel_magnitudes
from ptq.report.plots import save
from ptq.tasks import Task


def statistics(activations: torch.Tensor, weights: torch.Tensor | None = None) -> LayerStatistics:
    weights = torch.ones_like(activations) if weights is None else weights
    return LayerStatistics(
        kind="Linear", minimum=-activations, maximum=activations, activation_absmax=activations, weight_absmax=weights
    )


def calibration(**layers: torch.Tensor | LayerStatistics) -> Calibration:
    return Calibration(
        layers={name: x if isinstance(x, LayerStatistics) else statistics(x) for name, x in layers.items()},
        observer="max",
        batches=1,
        samples=1,
        model_fingerprint="",
        data_fingerprint="",
    )


def drawn(figure: Figure) -> list[list[np.ndarray]]:
    """The heights of the channels in each panel, four a row."""
    panels = [[patch for patch in axes.patches if isinstance(patch, StepPatch)] for axes in figure.axes]
    assert all(len(patches) == 1 for patches in panels)
    values = [np.asarray(patches[0].get_data().values) for patches in panels]
    return [values[i : i + 4] for i in range(0, len(values), 4)]


def titles(figure: Figure) -> list[str]:
    return [title for axes in figure.axes if (title := axes.get_title(loc="left"))]


def heat_maps(figure: Figure) -> list[np.ndarray]:
    return [np.ma.filled(axes.images[0].get_array(), np.nan) for axes in figure.axes[:2]]


def test_the_true_data_on_one_scale(digits: Task, digits_calibration: Calibration) -> None:
    after = ptq.smooth(digits.model, digits_calibration, 0.5).calibration
    name = "features.4.expand.conv"
    figure = channel_magnitudes(digits_calibration, after, "digits", [name])
    old, new = digits_calibration.layers[name], after.layers[name]
    expected = [old.activation_absmax, new.activation_absmax, old.weight_absmax, new.weight_absmax]
    for panel, values, truth in zip(figure.axes, drawn(figure)[0], expected, strict=True):
        assert np.array_equal(values, truth.double().numpy())
        assert panel.lines[0].get_ydata()[0] == pytest.approx(float(truth.max()))
        assert f"max {float(truth.max()):.3g}, " in panel.texts[0].get_text()
    assert f"{old.outlier_ratio:.3g}× median" in figure.axes[0].texts[0].get_text()
    limits = [axes.get_ylim() for axes in figure.axes]
    assert limits[0] == limits[1] and limits[2] == limits[3]
    assert all(limit[1] > float(truth.max()) for limit, truth in zip(limits, expected, strict=True))


def test_by_default_the_layers_whose_outliers_shrank_most() -> None:
    outliers = {f"layer{i}": float(2**i) for i in range(6)}
    before = {name: torch.tensor([1.0, 1.0, size]) for name, size in outliers.items()}
    after = {name: torch.tensor([1.0, 1.0, 1.0]) for name in outliers} | {"layer5": before["layer5"]}
    figure = channel_magnitudes(calibration(**before), calibration(**after), "six layers")
    assert [title.split()[0] for title in titles(figure)] == ["layer1", "layer2", "layer3", "layer4"]


@pytest.mark.parametrize("channels", [1, 2, 3, 144, 4096])
def test_any_number_of_channels(channels: int, tmp_path: Path) -> None:
    values = torch.rand(channels, generator=torch.Generator().manual_seed(0)) + 0.5
    values[channels // 2] = 40.0
    pair = calibration(layer=values), calibration(layer=values.sqrt())
    figure = channel_magnitudes(*pair, "wide")
    assert [len(part) for part in drawn(figure)[0]] == [channels] * 4
    assert figure.axes[0].get_xlim() == (-0.5, channels - 0.5)
    save(figure, tmp_path / "channels.png")
    save(all_layers_heatmap(*pair, "wide"), tmp_path / "heat.png")
    assert (tmp_path / "channels.png").stat().st_size > 10_000


def test_a_single_outlier_among_thousands_is_seen() -> None:
    """Told because a filled shape of a tenth of a pixel fades away: pixels of its column stay dark to the top."""
    values = torch.ones(4096)
    values[1234] = 50.0
    figure = channel_magnitudes(calibration(layer=values), calibration(layer=values), "one")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., 0].astype(int)
    x, y = figure.axes[0].transData.transform((1234, 25.0))
    around = pixels[len(pixels) - 1 - round(y), round(x) - 3 : round(x) + 4]
    assert around.min() < 160


def test_zero_channels() -> None:
    mostly = torch.tensor([0.0, 0.0, 0.0, 4.0, 2.0])
    nothing = torch.zeros(5)
    pair = calibration(mostly=mostly, nothing=nothing), calibration(mostly=mostly / 2, nothing=nothing)
    figure = channel_magnitudes(*pair, "zeros")
    assert "∞" in figure.axes[0].texts[0].get_text()
    assert np.array_equal(drawn(figure)[1][0], np.zeros(5))
    before, after = heat_maps(all_layers_heatmap(*pair, "zeros"))
    image = all_layers_heatmap(*pair, "zeros").axes[0].images[0]
    assert before[0].max() == pytest.approx(np.log10(4 / 3))  # the median of those above zero is 3
    assert before[0].min() < image.norm.vmin  # zero: below the last colour
    assert np.isnan(before[1]).all() and np.isnan(after[1]).all()


@pytest.mark.parametrize("values", [[8.0, 1.0, 2.0, 4.0], [1.0, 300.0, 1.0], [5.0]], ids=["even", "outlier", "one"])
def test_the_heat_map_holds_every_channel_in_order(values: list[float]) -> None:
    """Runs of equal colour, left to right, are the sorted channels over their median; each as wide as its share."""
    tensor = torch.tensor(values)
    row = heat_maps(all_layers_heatmap(calibration(layer=tensor), calibration(layer=tensor * 7), "row"))
    assert np.allclose(row[0], row[1])  # a common factor changes nothing
    ordered = np.sort(values)[::-1]
    channels, columns = len(values), row[0].shape[1]
    for column in range(columns):
        share = (2 * channels) ** (column / columns - 1)
        assert row[0][0, column] == pytest.approx(np.log10(ordered[int(share * channels)] / np.median(values)))
    assert len(np.unique(row[0])) == len(np.unique(values))


def test_the_colours_reach_the_largest_outlier_and_one_bar_serves_both() -> None:
    figure = all_layers_heatmap(
        calibration(a=torch.tensor([1.0, 1.0, 30.0]), b=torch.ones(700)),
        calibration(a=torch.tensor([1.0, 1.0, 3.0]), b=torch.ones(700)),
        "bar",
    )
    images = [axes.images[0] for axes in figure.axes[:2]]
    assert [image.norm.vmax for image in images] == pytest.approx([np.log10(30)] * 2)
    assert len(figure.axes) == 3  # two panels, one bar
    assert [label.get_text() for label in figure.axes[2].get_yticklabels()][-1] == "30×"


def test_a_layer_that_is_missing_after() -> None:
    values = torch.tensor([1.0, 2.0, 9.0])
    before, after = calibration(here=values, gone=values), calibration(here=values.sqrt())
    assert [title.split()[0] for title in titles(channel_magnitudes(before, after, "some"))] == ["here"]
    first, second = heat_maps(all_layers_heatmap(before, after, "some"))
    assert np.isfinite(first).all() and np.isfinite(second[0]).all() and np.isnan(second[1]).all()
    with pytest.raises(InputError, match="gone: not in the calibration after smoothing"):
        channel_magnitudes(before, after, "some", ["gone"])
    with pytest.raises(InputError, match="no layer to draw"):
        channel_magnitudes(before, calibration(other=values), "none")


def test_calibrations_of_different_models_are_refused() -> None:
    with pytest.raises(MismatchError, match="layer: 3 channels before, 4 after"):
        channel_magnitudes(calibration(layer=torch.ones(3)), calibration(layer=torch.ones(4)), "two models")
    with pytest.raises(InputError, match="no layers"):
        all_layers_heatmap(replace(calibration(), layers={}), calibration(), "empty")


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    pair = calibration(layer=torch.tensor([1.0, 2.0, 9.0])), calibration(layer=torch.tensor([1.0, 2.0, 3.0]))
    for draw in (channel_magnitudes, all_layers_heatmap):
        for name in ("one.png", "two.png"):
            save(draw(*pair, "twice"), tmp_path / name)
        assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
