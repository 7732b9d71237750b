"""Formats side by side: listings, comparisons, the picture, the benchmark."""

from __future__ import annotations

import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ptq.errors import InputError
from ptq.formats import catalog, format
from ptq.packing import pack
from ptq.report import format_plots, plots

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def comparison() -> catalog.Comparison:
    generator = torch.Generator().manual_seed(0)
    heavy = torch.randn(8, 4, 8, 8, generator=generator) ** 5
    return catalog.compare({"heavy tails": heavy, "a vector": heavy.flatten()[:1000]})


def test_listing_gives_true_sizes_and_errors() -> None:
    x = catalog.draw("laplace", (4, 8, 8))
    rows = catalog.listing(x)
    assert [row.format for row in rows] == [str(format(text)) for text in catalog.LISTED]
    for row in rows:
        form = format(row.format)
        assert row.nbytes == form.nbytes_for(x.shape) and row.bits == pytest.approx(8 * row.nbytes / 256)
        json.dumps(row.to_json(), allow_nan=False)
    exact = catalog.measure("raw", x)
    assert (exact.l1, exact.l2, exact.median, exact.bits) == (0, 0, 0, 32)
    half = catalog.measure("truncate:step=2,saturate", torch.tensor([1.0, 3.0, -4.0]))  # 0, 2, -4
    assert half.l1 == pytest.approx(2 / 8) and half.l2 == pytest.approx((2 / 26) ** 0.5)


def test_formats_that_need_an_axis_are_left_out_where_there_is_none() -> None:
    rows = catalog.listing(torch.ones(10), ["affine:bits=4,axis=1", "affine:bits=4"])
    assert [row.format for row in rows] == ["affine:bits=4"]


@pytest.mark.parametrize("name", catalog.DISTRIBUTIONS)
def test_draws_are_repeatable(name: str) -> None:
    assert torch.equal(catalog.draw(name, (100,)), catalog.draw(name, (100,)))
    assert catalog.draw(name, (2, 3)).dtype == torch.float32


def test_an_unknown_distribution_lists_the_known() -> None:
    with pytest.raises(InputError, match="normal, laplace, relu, uniform"):
        catalog.draw("cauchy")


def test_laplace_is_laplace() -> None:
    x = catalog.draw("laplace", (100_000,)).double()
    assert float(x.mean()) == pytest.approx(0, abs=0.02)
    assert float(x.var()) == pytest.approx(2, rel=0.03)
    assert float(x.abs().mean()) == pytest.approx(1, rel=0.02)


def test_several_sets_pay_for_the_typical_value_and_not_for_the_squared_error(comparison: catalog.Comparison) -> None:
    for name in ("normal", "laplace", "relu"):
        assert comparison.reasonable_sets(name, "l2") == 1
        assert comparison.sets[name][4].l2 > 1.1 * comparison.sets[name][1].l2
    assert comparison.sets["laplace"][4].median < 0.5 * comparison.sets["laplace"][1].median
    assert comparison.reasonable_sets("laplace", "median") in (4, 8, 16)
    for rows in comparison.sets.values():
        # At equal bits: nothing but the header of 8 bytes a set makes a difference.
        elements = torch.Size(rows[1].shape).numel()
        assert all(row.bits == pytest.approx(8 + 64 * count / elements) for count, row in rows.items())


def test_tiny_tensors_can_t_afford_many_sets(comparison: catalog.Comparison) -> None:
    assert comparison.reasonable_sets("a vector", "median") == 1  # one more set is a hundredth and a half of its codes


def test_the_picture_shows_every_tensor_and_family(comparison: catalog.Comparison, tmp_path: Path) -> None:
    figure = format_plots.error_against_bits(comparison, "formats")
    titles = {axes.get_title() for axes in figure.get_axes()}
    assert {"normal", "Laplace", "normal after ReLU", "heavy tails", "a vector"} <= titles
    assert len(figure.get_axes()[0].get_lines()) == len(catalog.FAMILIES)
    path = tmp_path / "formats.png"
    plots.save(figure, path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    json.dumps(comparison.to_json(), allow_nan=False)


def test_tables_name_formats_and_sizes(comparison: catalog.Comparison) -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(format_plots.formats_table(catalog.listing(catalog.draw("normal", (4, 8, 8))), "normal"))
    console.print(format_plots.sets_table(comparison))
    checkpoint = pack({"a.weight": torch.ones(4, 4), "a.bias": torch.ones(4)}, {"linear": "affine:bits=4"})
    console.print(format_plots.packed_table(checkpoint, 999))
    text = console.export_text()
    assert "affine:bits=4,group=64" in text and "heavy tails" in text and "80 bytes → 32" in text and "999" in text


def test_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "formats.json"
    monkeypatch.setattr(
        sys, "argv", ["benchmark_formats", "--elements", "70000", "--rounds", "1", "--sort", "--json", str(out)]
    )
    runpy.run_path(str(ROOT / "scripts" / "benchmark_formats"), run_name="__main__")
    content = json.loads(out.read_text(encoding="utf-8"))
    assert {row["format"] for row in content["formats"]} >= {"affine:bits=8", "multistep:parts=4,bits=6"}
    assert "ALQ, 3 bits" in capsys.readouterr().out
