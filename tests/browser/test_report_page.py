"""The report in a real browser: what a reader sees, clicks and reaches by keyboard."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ptq
from ptq.report.page import write_page

EVIL = "<img src=x onerror=alert(1)>\"'&"


def results(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


def visible_layers(page: Any) -> list[str]:
    names: list[str] = page.locator("tbody.layer:not([hidden]) .row th").all_inner_texts()
    return names


def heading(page: Any, group: str, title: str) -> Any:
    """The sort button of a column: the one with this title under this group."""
    columns = page.evaluate(
        """() => {
          const spans = [...document.querySelectorAll('#layer-table .groups th')].flatMap(
            (th) => Array(th.colSpan).fill(th.innerText));
          return [...document.querySelectorAll('#layer-table thead tr:nth-child(2) th')].map(
            (th, i) => [spans[i], th.innerText]);
        }"""
    )
    return page.locator("#layer-table thead tr:nth-child(2) th").nth(columns.index([group, title]))


def test_opens_without_an_error_and_without_the_network(open_page: Callable[..., Any]) -> None:
    opened = open_page()
    opened.page.mouse.wheel(0, 20_000)
    assert "top-1" in opened.page.locator("#verdict").inner_text()
    assert opened.problems == []
    assert (
        opened.page.evaluate("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:'))") == []
    )


def test_the_numbers_are_those_of_the_files(open_page: Callable[..., Any], folder: Path) -> None:
    page = open_page().page
    evaluation = results(folder, "evaluation.json")
    for index, network in enumerate(evaluation["networks"]):
        row = page.locator("#accuracy-table tbody tr").nth(index)
        low, high = network["interval"]
        expected = [network["name"], f"{network['top1']:.2f}", f"{low:.2f} … {high:.2f}", "", f"{network['top5']:.2f}"]
        assert row.locator("th, td").all_inner_texts()[:5] == expected
        assert float(row.locator("td").first.get_attribute("data-value")) == network["top1"]
    shown = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('tbody.layer')].map((layer) => [
             layer.querySelector('.row th').innerText,
             [...layer.querySelectorAll('.heat')].map((cell) => Number(cell.dataset.value))]))"""
    )
    assert shown == {
        name: [error[where]["l1"] for where in ("isolated", "accumulated") for error in layer["errors"].values()]
        for name, layer in evaluation["layers"].items()
    }
    page.get_by_text("All 4 points").click()
    rows = [row.split("\t") for row in page.locator("#points-table tbody tr").all_inner_texts()]
    points = {(bits, way): (float(score), int(changed)) for bits, way, score, _, changed in rows}
    assert points == {
        (point["bits"], "not smoothed" if point["alpha"] is None else f"α = {point['alpha']:g}"): (
            round(point["accuracy"]["score"], 2),
            point["changed"],
        )
        for point in results(folder, "sweep.json")["points"]
    }


def test_a_column_sorts_down_up_and_back(open_page: Callable[..., Any], folder: Path) -> None:
    page = open_page().page
    layers = results(folder, "evaluation.json")["layers"]
    as_they_run = visible_layers(page)
    assert as_they_run == list(layers)
    by_error = sorted(layers, key=lambda name: layers[name]["errors"]["W4A4"]["isolated"]["l1"])
    column = heading(page, "error alone", "W4A4")
    column.get_by_role("button").click()
    assert column.get_attribute("aria-sort") == "descending"
    assert visible_layers(page) == by_error[::-1]
    column.get_by_role("button").press("Enter")
    assert column.get_attribute("aria-sort") == "ascending"
    assert visible_layers(page) == by_error
    column.get_by_role("button").press("Space")
    assert column.get_attribute("aria-sort") is None
    assert visible_layers(page) == as_they_run


def test_another_column_takes_over_and_layers_without_a_number_come_last(
    open_page: Callable[..., Any], folder: Path
) -> None:
    page = open_page().page
    heading(page, "", "layer").get_by_role("button").click()
    assert visible_layers(page)[0] == "classifier"
    alphas = {entry["layer"]: entry["alpha"] for entry in results(folder, "ledger.json")["layers"]}
    unknown = {name for name, alpha in alphas.items() if alpha is None}
    assert unknown and len(unknown) < len(alphas)
    for _ in range(2):  # down and up
        heading(page, "smoothing", "α").get_by_role("button").click()
        assert page.locator("[aria-sort]").count() == 1
        assert set(visible_layers(page)[-len(unknown) :]) == unknown


def test_search_keeps_the_rows_with_all_words(open_page: Callable[..., Any], folder: Path) -> None:
    page = open_page().page
    page.get_by_label("Search").fill("Depthwise features.2")
    assert visible_layers(page) == ["features.2.depthwise.conv"]
    total = len(results(folder, "evaluation.json")["layers"])
    assert page.locator("#found").inner_text() == f"1 of {total} layers"
    page.get_by_label("Search").fill("")
    assert len(visible_layers(page)) == total
    page.get_by_label("Search").fill("no such thing")
    assert visible_layers(page) == []


def test_a_drawer_opens_by_keyboard_and_tells_everything(open_page: Callable[..., Any], folder: Path) -> None:
    page = open_page().page
    entry = next(e for e in results(folder, "ledger.json")["layers"] if e["action"] == "folded")
    button = page.get_by_role("button", name=entry["layer"], exact=True)
    drawer = page.locator("tbody.layer", has=button).locator(".inside")
    assert button.get_attribute("aria-expanded") == "false" and not drawer.is_visible()
    page.get_by_label("Search").focus()
    for _ in range(60):  # over the headings to the names
        page.keyboard.press("Tab")
        if button.evaluate("(button) => button === document.activeElement"):
            break
    outline = button.evaluate("(button) => getComputedStyle(button).outlineStyle")
    assert outline == "solid", "the focus has to be seen"
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true" and drawer.is_visible()
    assert button.get_attribute("aria-controls") == drawer.get_attribute("id")
    told = drawer.inner_text()
    assert entry["reason"] in told and f"α = {entry['alpha']:g}" in told and "SQNR" in told
    charts = drawer.locator("svg.chart")
    assert [charts.nth(i).get_attribute("aria-label") for i in range(charts.count())] == [
        "Largest |x| of each input channel",
        "Largest |w| of each input channel",
        "Histogram of the input with its clipping range",
        f"Error of {entry['layer']} against α",
    ]
    strokes = drawer.locator("line.clip").evaluate_all("(lines) => lines.map((line) => getComputedStyle(line).stroke)")
    assert strokes and "none" not in strokes, "clip marks are seen"
    page.keyboard.press("Enter")
    assert not drawer.is_visible()


def test_a_name_in_the_heat_map_leads_to_its_layer(open_page: Callable[..., Any]) -> None:
    page = open_page().page
    page.locator("svg.heat a").nth(4).click()
    layer = page.locator("tbody.layer").nth(4)
    assert layer.locator(".inside").is_visible()
    assert layer.locator(".row button").evaluate("(button) => button === document.activeElement")


def test_a_point_of_the_curve_is_read_by_mouse_and_by_arrow_keys(open_page: Callable[..., Any], folder: Path) -> None:
    page = open_page().page
    points = [p for p in results(folder, "sweep.json")["points"] if p["bits"] == "W4A4" and p["alpha"] is not None]
    curve = page.locator("#alpha .curve-group").first.locator(".point")
    tip = page.locator("#tip")
    assert not tip.is_visible()
    curve.nth(2).hover()
    assert tip.inner_text().startswith(f"W4A4, α = 0.8: {points[2]['accuracy']['score']:.2f} (")
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    assert [point.get_attribute("tabindex") for point in curve.all()] == ["0", "-1", "-1"]
    curve.first.focus()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith(f"W4A4, α = 0.5: {points[1]['accuracy']['score']:.2f} (")
    assert [point.get_attribute("tabindex") for point in curve.all()] == ["-1", "0", "-1"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button(open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(color_scheme=scheme).page

    def brightness() -> float:
        return contrast_parts(page, "body")[1]

    assert (brightness() > 0.5) == (scheme == "light")
    button = page.locator("#theme")
    assert button.inner_text() == ("Dark" if scheme == "light" else "Light")
    button.focus()
    page.keyboard.press("Enter")
    assert (brightness() > 0.5) == (scheme == "dark")
    page.reload()
    assert (brightness() > 0.5) == (scheme == "dark"), "a choice is remembered"


def contrast_parts(page: Any, selector: str) -> tuple[float, float]:
    """The relative luminances (WCAG 2) of an element's text and of the page behind it."""
    colours: list[str] = page.evaluate(
        """(selector) => [getComputedStyle(document.querySelector(selector)).color,
                          getComputedStyle(document.body).backgroundColor]""",
        selector,
    )

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    return luminance(colours[0]), luminance(colours[1])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(color_scheme=scheme).page
    for selector in ("body", ".note", "thead th", ".row button", "nav a", "figcaption"):
        dark, bright = sorted(contrast_parts(page, selector))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, selector


@pytest.mark.parametrize("width", [360, 1000])
def test_nothing_sticks_out_at_any_width(open_page: Callable[..., Any], width: int) -> None:
    page = open_page(viewport={"width": width, "height": 800}).page
    page.locator(".row button").first.click()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert page.locator(".inside").first.bounding_box()["width"] <= width


def test_readable_without_javascript(open_page: Callable[..., Any], folder: Path) -> None:
    page = open_page(java_script_enabled=False).page
    assert page.locator("#accuracy-table").is_visible() and page.locator("#alpha svg").is_visible()
    assert not page.locator("#search").is_visible() and not page.locator("#theme").is_visible()
    assert page.locator(".row").count() == len(results(folder, "evaluation.json")["layers"])
    drawer = page.locator("details.drawer").first
    assert not drawer.locator(".inside").is_visible()
    drawer.locator("summary").press("Enter")
    assert drawer.locator(".inside").is_visible()
    sizes = page.locator("#pictures img")
    assert sizes.count() == 2
    assert all(image.bounding_box()["height"] > 100 for image in sizes.all())


def test_prints_in_light_and_without_controls(open_page: Callable[..., Any]) -> None:
    page = open_page(color_scheme="dark").page
    page.emulate_media(media="print")
    assert contrast_parts(page, "body")[1] > 0.9
    assert not page.locator("nav").is_visible() and not page.locator("#theme").is_visible()
    assert not page.get_by_label("Search").is_visible()
    assert page.locator("#verdict").is_visible()
    assert page.pdf(format="A4")[:5] == b"%PDF-"


def test_a_name_that_is_markup_does_nothing(open_page: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict({EVIL: nn.Linear(4, 8), "<script>": nn.ReLU(), "</script>": nn.Linear(8, 3)}))
    batches = [(torch.randn(16, 4), torch.randint(0, 3, (16,))) for _ in range(2)]
    calibration = ptq.calibrate(model.eval(), batches)
    calibration.save(tmp_path / "calibration.safetensors")
    swept = ptq.sweep(model, calibration, batches, batches, alphas=[0.3, 0.6])
    (tmp_path / "sweep.json").write_text(json.dumps(swept.to_json()))
    options = dict.fromkeys(("model", "weights", "data", "batch_size", "image_size", "seed"))
    run = {"kind": "run", "schema": 1, "options": {**options, "task": EVIL}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    opened = open_page(write_page(tmp_path))
    page = opened.page
    assert page.locator("h1").inner_text() == EVIL
    assert visible_layers(page) == [EVIL, "</script>"]
    page.get_by_role("button", name=EVIL, exact=True).click()
    page.locator("svg.heat rect").first.hover()
    assert page.locator("#tip").inner_text().startswith(EVIL)
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1
    assert opened.problems == []
