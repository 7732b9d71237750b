"""The report of a run folder: which sections there are, what they say, and that nothing in them can do harm."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shlex
import shutil
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ptq.cli import invoke
from ptq.errors import InputError
from ptq.quantization.apply import SCHEMA as QUANTIZED_SCHEMA
from ptq.report.page import MOST_BYTES, RunFiles, render, write_page
from ptq.report.page.drawing import Scale, narrowed
from ptq.report.page.layers import layer_table
from ptq.report.page.pictures import embedded
from ptq.report.page.results import results
from ptq.report.page.retracing import commands
from ptq.storage import read_tensors

ROAD = (
    "calibrate --observer percentile --batches 4",
    "smooth --alpha 0.4",
    "quantize --bits W4A8 --first-last 8 --override 'features.2*=W6A6' --exclude '*.3.*' --refine none",
    "evaluate",
    "sweep --alphas 0.2,0.5 --bits W4A4 --images 20 --no-auto",
)


def ptq(*arguments: str) -> None:
    """Run a command as a shell would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ptq", *arguments])  # which the log tells
        assert invoke() == 0, arguments


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of the embedded task, made by commands; don't change it."""
    folder = tmp_path_factory.mktemp("run") / "reports" / "digits"
    for command in ROAD:
        ptq(*shlex.split(command), "--run", str(folder), "--quiet")
    return folder


@pytest.fixture(scope="module")
def page(made: Path) -> str:
    return render(RunFiles.read(made))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "reports" / "digits"))


class Structure(HTMLParser):
    """Every element is closed in order, no id occurs twice, and nothing refers to the world outside."""

    VOID = frozenset({"meta", "img", "input", "br", "wbr", "link", "hr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.seen: Counter[str] = Counter()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        assert len(given) == len(attributes), f"an attribute twice on {name}"
        self.seen[name] += 1
        if name not in self.VOID:
            self.open.append(name)
        if given.get("id"):
            self.ids[str(given["id"])] += 1
        self.links += [str(given[key]) for key in ("href", "src", "action", "data", "xlink:href") if key in given]
        assert not any(key.startswith("on") for key in given), "no handlers in attributes"

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open.pop() == name, f"</{name}> closes something else"


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="([^"]+)"', page)


def test_every_element_is_closed_and_every_link_stays_inside(page: str) -> None:
    structure = Structure(page)
    assert max(structure.ids.values()) == 1
    for link in structure.links:
        assert link.startswith("data:image/png;base64,") or link[1:] in structure.ids, link[:80]
    assert structure.seen["script"] == structure.seen["style"] == structure.seen["h1"] == 1


def test_small_and_the_same_each_time(page: str, made: Path) -> None:
    assert len(page.encode()) < MOST_BYTES
    assert render(RunFiles.read(made)) == page


def test_the_only_script_is_the_one_that_the_policy_names(page: str) -> None:
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_sections_are_in_order(page: str) -> None:
    assert sections(page) == ["verdict", "accuracy", "alpha", "heat-map", "layers", "pictures", "reproduce"]


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        (["evaluation.json"], {"accuracy"}),
        (["sweep.json"], {"alpha", "heat-map"}),
        (["channels.png", "channels_layers.png"], {"pictures"}),
        (["calibration.safetensors", "smoothed_calibration.safetensors", "quantized.safetensors"], set()),
        (["ledger.json", "run.json"], set()),
    ],
    ids=["no evaluation", "no sweep", "no pictures", "only what is committed", "no ledger"],
)
def test_a_section_is_there_only_if_its_file_is(folder: Path, page: str, missing: list[str], gone: set[str]) -> None:
    for name in missing:
        (folder / name).unlink()
    left = render(RunFiles.read(folder))
    assert set(sections(page)) - set(sections(left)) == gone
    Structure(left)  # whole


def test_layers_alone_are_a_report_too(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "calibration.safetensors":
            path.unlink()
    left = render(RunFiles.read(folder))
    assert sections(left) == ["verdict", "layers", "reproduce"]
    assert "nothing was measured yet" in left


def test_an_empty_folder_has_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to report there yet: run `ptq calibrate`"):
        write_page(tmp_path)


def test_a_file_of_another_kind_is_refused(folder: Path) -> None:
    shutil.copy(folder / "sweep.json", folder / "evaluation.json")
    with pytest.raises(InputError, match=r"evaluation.json: holds sweep, not evaluation"):
        write_page(folder)


def test_the_command_writes_the_page(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent.parent)
    ptq("report", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == ["reports/digits/report.html"]
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert result["bytes"] == len(text.encode()) and text.startswith("<!DOCTYPE html>")
    ptq("report", "--quiet")
    assert (folder / "report.html").read_text(encoding="utf-8") == text, "the report isn't part of itself"


def test_the_commands_make_the_same_files_again(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read off the files, run in an empty folder: the same numbers come out."""
    retraced = commands(RunFiles.read(made))
    assert [command.split()[1] for command in retraced] == [
        "calibrate", "smooth", "quantize", "evaluate", "sweep", "report",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for command in retraced:
        ptq(*shlex.split(command)[1:], "--quiet")
    for name in ("run.json", "ledger.json", "evaluation.json", "sweep.json"):
        again = json.loads((tmp_path / "reports" / "digits" / name).read_text())
        assert again == json.loads((made / name).read_text()), name


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--bits", "W4A4", "--refine", "alpha,bias"], ["calibrate", "quantize", "report"]),
        (["--bits", "W4A4", "--refine", "alpha,bias", "--no-smooth"], ["calibrate", "quantize", "report"]),
    ],
    ids=["smoothed by quantize", "left unsmoothed"],
)
def test_quantize_is_retraced_with_what_it_smoothed(
    options: list[str], steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    ptq("calibrate", "--batches", "2", "--quiet")
    ptq("quantize", *options, "--quiet")
    retraced = commands(RunFiles.read(Path("reports/digits")))
    assert [command.split()[1] for command in retraced] == steps
    monkeypatch.chdir(folders[1])
    for command in retraced[:-1]:
        ptq(*shlex.split(command)[1:], "--quiet")
    names = {path.name for path in (folders[1] / "reports/digits").iterdir()}
    assert ("ledger.json" in names) == ("--no-smooth" not in options)
    for name in names - {"log.jsonl"}:
        one, other = ((folder / "reports/digits" / name).read_bytes() for folder in folders)
        assert one == other, name


def test_a_folder_elsewhere_is_named(made: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(made, tmp_path / "my run"))
    assert all(shlex.split(command)[-2:] == ["--run", "my run"] for command in commands(RunFiles.read(elsewhere))[1:])
    assert str(tmp_path) not in render(RunFiles.read(elsewhere)), "where it was made is nobody's business"


def test_hashes_are_those_of_the_files(made: Path) -> None:
    hashes = RunFiles.read(made).hashes()
    assert {name for name, _, _ in hashes} >= {"run.json", "sweep.json", "calibration.safetensors"}
    for name, size, digest in hashes:
        content = (made / name).read_bytes()
        assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())


def test_clip_marks_are_the_ends_of_the_quantizer_s_grid(made: Path) -> None:
    files = RunFiles.read(made)
    tensors, metadata = read_tensors(made / "quantized.safetensors", "quantized model", QUANTIZED_SCHEMA)
    quantized = [name for name, bits in metadata["bits"].items() if bits["activations"]]
    assert set(files.clips) == set(quantized) and len(quantized) > 10
    for name in quantized:
        codes = 2 ** metadata["bits"][name]["activations"]
        scale = float(tensors[f"{name}.input_quantizer.scale"])
        low, high = files.clips[name]
        assert low <= 0 <= high
        assert high - low == pytest.approx((codes - 1) * scale, rel=1e-5)
        assert low / scale == pytest.approx(round(low / scale), abs=1e-3), "zero is on the grid"


def test_layers_have_a_row_each_with_their_own_numbers(made: Path) -> None:
    files = RunFiles.read(made)
    table = layer_table(files)
    assert [row.name for row in table.rows] == list(files.layers)
    assert files.calibration is not None and files.smoothed is not None
    titles = [(column.group, column.title) for column in table.columns]
    for row in table.rows:
        cells = dict(zip(titles, row.cells, strict=True))
        before, after = (calibration.layers[row.name] for calibration in (files.calibration, files.smoothed))
        assert cells["", "channels"].value == before.channels
        assert cells["largest input", "before"].value == float(before.activation_absmax.max())
        assert cells["largest input", "after"].value == float(after.activation_absmax.max())
        expected = "W6A6" if row.name.startswith("features.2") else "float" if ".3." in row.name else "W4A8"
        first_or_last = row.name in (table.rows[0].name, table.rows[-1].name)
        assert cells["", "bits"].text == ("W8A8" if first_or_last else expected)
        assert len(row.figures) == 4 and row.ledger is not None and row.ledger["layer"] == row.name
    assert sum(span for _, span in table.groups) == len(table.columns)


def test_a_calibration_without_histograms_shows_its_sample(folder: Path) -> None:
    ptq("calibrate", "--batches", "2", "--run", str(folder), "--quiet")
    for name in ("smoothed.safetensors", "smoothed_calibration.safetensors"):
        (folder / name).unlink()
    captions = [figure.caption for row in layer_table(RunFiles.read(folder)).rows for figure in row.figures]
    assert any(re.fullmatch(r"Input values, of [\d,]+ sampled input values", caption) for caption in captions)


def test_the_log_tells_what_ran(folder: Path) -> None:
    files = RunFiles.read(folder)
    entry = dict(files.log[-1])
    lines = [{**entry, "command": "ptq quantize --refine fast --bits W4A4"}, {**entry, "command": "ptq report"}]
    lines.append({**entry, "command": "ptq quantize --refine best", "outcome": "InputError: no"})
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"broken')
    files = RunFiles.read(folder)
    assert [line["command"] for line in files.log] == ["ptq quantize --refine fast --bits W4A4"]
    assert "What ran here, as the log has it (1)" in render(files)


def noise(path: Path, width: int = 600, height: int = 40) -> Path:
    """A picture that hardly compresses."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_pictures_shrink_until_they_fit(tmp_path: Path) -> None:
    paths = [noise(tmp_path / f"{name}.png") for name in ("first", "second")]
    (whole, _) = embedded(paths, 10**8)
    assert (whole.width, whole.height) == (600, 40)
    assert base64.b64decode(whole.uri.partition(",")[2]) == paths[0].read_bytes(), "as it is, while there is room"
    small = embedded(paths, 50_000)
    assert len(small) == 2 and sum(len(picture.uri) for picture in small) <= 50_000
    with Image.open(io.BytesIO(base64.b64decode(small[0].uri.partition(",")[2]))) as image:
        assert image.size == (small[0].width, small[0].height) and image.width == 450
        assert image.width / image.height == pytest.approx(15)
    assert [picture.name for picture in embedded(paths, 4_500)] == ["first.png"], "the last is left out"
    assert embedded(paths, 1000) == []


def test_a_heavy_folder_stays_below_the_limit(folder: Path) -> None:
    room = MOST_BYTES - len(write_page(folder).read_bytes())
    (folder / "heavy.png").write_bytes(noise(folder / "heavy.png").read_bytes() + bytes(room))  # PNGs may have a tail
    assert len(write_page(folder).read_bytes()) < MOST_BYTES


def test_a_broken_picture_is_named(folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"broken.png: not a readable picture"):
        write_page(folder)


def test_narrowed_channels_keep_every_outlier() -> None:
    values = np.arange(1000, dtype=np.float64) % 7
    values[[3, 500, 999]] = 100, 200, 300
    few = narrowed(values, 64)
    assert len(few) == 64 and set(few[few > 7]) == {100, 200, 300}
    assert few[0] == 100 and few[-1] == 300
    assert narrowed(values, 1000) is values


def test_ticks_are_round_and_inside() -> None:
    scale = Scale(0.13, 0.97, 0, 100)
    assert scale.ticks(5) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert (scale(0.13), scale(0.97)) == (0, 100)


ESCAPED: list[dict[str, Any]] = [{"task": "<script>alert(1)</script>"}, {"task": "\"'><b onclick=x>"}]


@pytest.mark.parametrize("change", ESCAPED, ids=["script", "attribute"])
def test_names_are_escaped_wherever_they_stand(folder: Path, change: dict[str, Any]) -> None:
    """Every name of the evaluation, the ledger and the sweep becomes markup: none of it gets through."""
    (name, evil), evil_layer = ("features.0.conv", change["task"]), f"layer {change['task']}"
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text().replace(f'"{name}"', json.dumps(evil_layer)))
        if path.name == "evaluation.json":
            content["task"] = evil
            content["networks"][1]["name"] = evil
        path.write_text(json.dumps(content))
    text = render(RunFiles.read(folder))
    structure = Structure(text)  # also: no handlers
    assert structure.seen["script"] == 1 and structure.seen["b"] < 40
    assert evil not in text.replace(text[text.index("<style>") : text.index("</style>")], "")


def test_bits_by_layer_are_shown_as_they_were_chosen(folder: Path) -> None:
    ptq("quantize", "--bits", "W8A8", "--budget", "5", "--refine", "none", "--run", str(folder), "--quiet")
    chosen = json.loads((folder / "mixed.json").read_text())
    files = RunFiles.read(folder)
    page = render(files)
    assert "mixed" in sections(page) and f"{chosen['average']:.2f} bits a weight on average" in page
    (block,) = (block for block in results(files) if block.id == "mixed")
    tables = [table for part in block.parts for table in (part.table, part.more) if table]
    shown = {row[0].text: row[2].text for table in tables for row in table.rows}
    assert shown == {name: str(layer["bits"]) for name, layer in chosen["layers"].items()}
