"""What people and disks do to a command line: every case ends in one line that names the thing and the remedy."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from ptq.cli import main
from ptq.tasks.digits import WEIGHTS

Prepare = Callable[[Path], object]
RUN = "made"  # a run folder with a calibration, a smoothed and a quantized network


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder after the main road, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("road")
    for arguments in (["calibrate", "--batches", "2"], ["smooth"], ["quantize", "--refine", "none"], ["pack"]):
        code, _, err = run_in(folder, [*arguments, "--run", RUN, "--quiet"])
        assert code == 0, err
    return folder / RUN


def run_in(folder: Path, arguments: list[str]) -> tuple[int, str, str]:
    """``ptq ARGUMENTS`` in this process, in a folder."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd(), sys.argv, sys.stdout, sys.stderr
    try:
        os.chdir(folder)
        sys.argv, sys.stdout, sys.stderr = ["ptq", *arguments], out, err
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0), out.getvalue(), err.getvalue()
    finally:
        os.chdir(before[0])
        sys.argv, sys.stdout, sys.stderr = before[1:]
    raise AssertionError("main returned")


# Damage ------------------------------------------------------------------------------------------------------------


def header(length: int, text: bytes = b"{}") -> bytes:
    return struct.pack("<Q", length) + text


def state_with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    state = load_file(WEIGHTS)
    state[name] = change(state[name]).contiguous()
    return state


class Canary:
    """Unpickling this would make a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.file),)


def weights(content: bytes) -> Prepare:
    return lambda folder: (folder / "w.safetensors").write_bytes(content)


def saved(state: Callable[[], dict[str, torch.Tensor]]) -> Prepare:
    return lambda folder: save_file(state(), folder / "w.safetensors")


def pickled(folder: Path) -> None:
    (folder / "w.pt").write_bytes(pickle.dumps({"weight": Canary(folder / "it-ran")}))


def torch_pickled(folder: Path) -> None:
    torch.save({"state_dict": Canary(folder / "it-ran")}, folder / "w.pt")


def damaged(name: str, change: Callable[[bytes], bytes]) -> Prepare:
    """Change a file of the run folder."""

    def prepare(folder: Path) -> None:
        file = folder / RUN / name
        file.write_bytes(change(file.read_bytes() if file.exists() else b""))

    return prepare


def metadata_changed(name: str, key: str, value: object) -> Prepare:
    """Change one entry of the JSON in a safetensors file."""

    def prepare(folder: Path) -> None:
        file = folder / RUN / name
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8 : 8 + size])
        head["__metadata__"]["ptq"] = json.dumps({**json.loads(head["__metadata__"]["ptq"]), key: value})
        text = json.dumps(head).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return prepare


def swapped(name: str, by: str) -> Prepare:
    return lambda folder: shutil.copy(folder / RUN / by, folder / RUN / name)


def archive(**arrays: object) -> Prepare:
    good = {
        "x_train": np.zeros((8, 8, 8), np.uint8),
        "y_train": np.arange(8),
        "x_test": np.zeros((8, 8, 8), np.uint8),
        "y_test": np.arange(8),
    }
    return lambda folder: np.savez(folder / "d.npz", **{k: v for k, v in {**good, **arrays}.items() if v is not None})


def raw_archive(members: dict[str, bytes]) -> Prepare:
    def prepare(folder: Path) -> None:
        with zipfile.ZipFile(folder / "d.npz", "w") as file:
            for name, content in members.items():
                file.writestr(name, content)

    return prepare


def symlinked_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "d.npz", "w") as file:
        link = zipfile.ZipInfo("x_train.npy")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        file.writestr(link, "/etc/hostname")


def escaping_tar(folder: Path) -> None:
    """Where CIFAR-10 would be, an archive that reaches out of its folder."""
    (folder / "data").mkdir()
    with tarfile.open(folder / "data" / "cifar-10-python.tar.gz", "w:gz") as tar:
        for name in ("../escaped", "cifar-10-batches-py/data_batch_1"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"evil"))


def picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (12, 9), value: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "P", "I", "1") else (value,) * len(mode)).save(path)


def empty_folder(folder: Path) -> None:
    (folder / "images" / "cat").mkdir(parents=True)


def broken_picture(folder: Path) -> None:
    for index in range(4):
        picture(folder / "images" / "cat" / f"{index}.jpg")
        picture(folder / "images" / "dog" / f"{index}.jpg")
    file = folder / "images" / "cat" / "0.jpg"
    file.write_bytes(file.read_bytes()[:200])


def text_picture(folder: Path) -> None:
    picture(folder / "images" / "dog" / "1.png")
    (folder / "images" / "dog" / "0.png").write_text("not a picture")


def one_picture(folder: Path) -> None:
    picture(folder / "images" / "dog" / "0.png")


def other_classes(folder: Path) -> None:
    for split, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "cow")):
        picture(folder / "images" / split / name / "0.png")


def too_many_classes(folder: Path) -> None:
    for index in range(12):
        for number in range(2):
            picture(folder / "images" / f"class{index:02}" / f"{number}.png", value=index)


def glue(train: bytes, dev: bytes = b"source\t1\t\tA sentence.\n") -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / "glue").mkdir()
        (folder / "glue" / "train.tsv").write_bytes(train)
        (folder / "glue" / "dev.tsv").write_bytes(dev)

    return prepare


ALPHA = "\n[axes]\nalpha = [0.5]\n"


def grid(text: str) -> Prepare:
    return lambda folder: (folder / "g.toml").write_text(text)


def factory(module: str, returns: str) -> Prepare:
    text = f"def make():\n    return {returns}\n"
    return lambda folder: (folder / f"{module}.py").write_text(text)


@dataclass(frozen=True)
class Case:
    arguments: tuple[str, ...]
    says: tuple[str, ...]  # the thing and the remedy
    prepare: Prepare = lambda folder: None
    on_run: bool = False  # works on the folder after the main road
    makes: tuple[str, ...] = ()  # what is known to be wrong only after that was made, and stays


OPTIONS = {
    "alpha is infinite": Case(("smooth", "--alpha", "inf"), ("alpha = inf", "choose a number from 0")),
    "alpha below 0": Case(("smooth", "--alpha", "-0.1"), ("alpha = -0.1", "choose a number from 0")),
    "alpha in a sweep is nan": Case(("sweep", "--alphas", "nan"), ("alpha = nan", "choose a number from 0")),
    "no step in a sweep": Case(("sweep", "--alphas", "0:1:0"), ("--alphas '0:1:0'", "START:STOP:STEP")),
    "endless sweep": Case(("sweep", "--alphas", "0:inf:0.1"), ("--alphas '0:inf:0.1'", "START:STOP:STEP")),
    "sweep of 33 bits": Case(("sweep", "--bits", "W4A33"), ("33", "2 to 16")),
    "0 bits": Case(("quantize", "--weights", "0"), ("bits = 0", "2 to 16")),
    "activations of 1 bit": Case(("quantize", "--activations", "1"), ("bits = 1", "2 to 16")),
    "activations in words": Case(("quantize", "--activations", "eight"), ("eight", "float")),
    "first and last of 99 bits": Case(("quantize", "--first-last", "99"), ("99", "2 to 16")),
    "refine": Case(("quantize", "--refine", "superb"), ("--refine 'superb'", "none, fast or best")),
    "form": Case(("smooth", "--form", "paste"), ("paste", "fold")),
    "explicit": Case(("smooth", "--explicit", "perhaps"), ("perhaps", "allow")),
    "placement": Case(("evaluate", "--placement", "moon"), ("--placement 'moon'", "layers or deploy")),
    "batches below 0": Case(("calibrate", "--batches", "-3"), ("-3", "at least one batch")),
    "batches in words": Case(("calibrate", "--batches", "many"), ("--batches", "integer", "--help")),
    "batches of nothing": Case(("calibrate", "--batch-size", "0"), ("--batch-size 0", "positive number")),
    "images of no size": Case(("calibrate", "--image-size", "-1"), ("--image-size -1", "positive number")),
    "format of 99 bits": Case(("pack", "--linear", "affine:bits=99"), ("bits = 99", "2 to 16")),
    "shape of nothing": Case(("formats", "--shape", "4,0"), ("--shape '4,0'", "at least 1")),
    "recipe": Case(("train", "float", "--preset", "quick"), ("quick", "digits")),
    "no epochs": Case(("train", "float", "--epochs", "0"), ("epochs", "0", "at least")),
    "rate is nan": Case(("train", "float", "--learning-rate", "nan"), ("learning", "nan")),
    "no stages": Case(("train", "pipeline", "--stages", "0"), ("0", "stage")),
    "no ranks": Case(("train", "ddp", "--ranks", "0"), ("--ranks 0", "at least 1")),
    "gradients": Case(("train", "ddp", "--gradients", "powersgd:rank=x"), ("powersgd", "rank")),
    "module that isn't there": Case(("calibrate", "--task", "nowhere.at:all"), ("nowhere", "all")),
    "task that fails": Case(
        ("calibrate", "--task", "broken_task:make"), ("broken_task:make", "ZeroDivisionError"),
        factory("broken_task", "1 / 0"),
    ),
    "data that is no data": Case(
        ("calibrate", "--data", "seven_as_data:make"), ("seven_as_data:make", "not batches", "return a list"),
        factory("seven_as_data", "7"),
    ),
    "source": Case(("calibrate", "--data", "imagenet:folder"), ("imagenet:folder", "npz:FILE")),
    "export target": Case(("export", "--for", "toaster"), ("toaster", "onnxruntime"), on_run=True),
}  # fmt: skip

CHECKPOINT = ("calibrate", "--weights", "w.safetensors")
CHECKPOINTS = {
    "empty": Case(CHECKPOINT, ("w.safetensors", "is it complete"), weights(b"")),
    "a huge header": Case(CHECKPOINT, ("w.safetensors", "is it complete"), weights(header(2**62))),
    "header longer than the file": Case(CHECKPOINT, ("w.safetensors", "is it complete"), weights(header(5000))),
    "header that isn't JSON": Case(CHECKPOINT, ("w.safetensors", "is it complete"), weights(header(4, b"\xff\xfe{["))),
    "offsets outside the file": Case(
        CHECKPOINT, ("w.safetensors", "is it complete"),
        weights(header(60, b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}     ')),
    ),
    "cut off": Case(CHECKPOINT, ("w.safetensors", "is it complete"), weights(WEIGHTS.read_bytes()[:-100])),
    "a text": Case(CHECKPOINT, ("w.safetensors", "is it complete"), weights(b"weights, as promised")),
    "a folder": Case(CHECKPOINT, ("w.safetensors", "give --weights a safetensors file"),
                     lambda folder: (folder / "w.safetensors").mkdir()),
    "foreign": Case(CHECKPOINT, ("doesn't fit", "missing", "unexpected", "give the weights of this network"),
                    saved(lambda: {"encoder.weight": torch.zeros(3, 3)})),
    "wrong shape": Case(CHECKPOINT, ("classifier.weight is [5, ", "give the weights of this network"),
                        saved(lambda: state_with("classifier.weight", lambda tensor: tensor[:5]))),
    "whole numbers": Case(CHECKPOINT, ("classifier.weight", "int64", "float"),
                          saved(lambda: state_with("classifier.weight", lambda tensor: tensor.long()))),
    "infinite": Case(CHECKPOINT, ("features.0.conv: NaN or Inf in the weight", "give another one"),
                     saved(lambda: state_with("features.0.conv.weight", lambda tensor: tensor * torch.inf))),
    "NaN in the last layer": Case(CHECKPOINT, ("classifier: NaN or Inf in the weight", "give another one"),
                                  saved(lambda: state_with("classifier.weight", lambda tensor: tensor * torch.nan))),
    "nothing in it": Case(CHECKPOINT, ("w.safetensors", "save model.state_dict()"), saved(dict)),
    "a pickle with code": Case(("calibrate", "--weights", "w.pt"), ("w.pt", "could run code", "state_dict() alone"),
                               torch_pickled),
    "a bare pickle with code": Case(("calibrate", "--weights", "w.pt"), ("w.pt", "PyTorch checkpoint"), pickled),
}  # fmt: skip

RUN_FOLDERS = {
    "calibration cut off": Case(
        ("smooth",), ("calibration.safetensors", "make it again"), damaged("calibration.safetensors", lambda b: b[:900])
    ),
    "calibration empty": Case(
        ("smooth",), ("calibration.safetensors", "make it again"), damaged("calibration.safetensors", lambda b: b"")
    ),
    "calibration is another file": Case(
        ("smooth",), ("holds quantized model, not a calibration", "ptq calibrate"),
        swapped("calibration.safetensors", "quantized.safetensors"),
    ),
    "calibration of the future": Case(
        ("smooth",), ("calibration schema 99", "make it again"),
        metadata_changed("calibration.safetensors", "schema", 99),
    ),
    "calibration without layers": Case(
        ("smooth",), ("calibration.safetensors", "calibrate again"),
        metadata_changed("calibration.safetensors", "layers", None),
    ),
    "smoothed cut off": Case(
        ("quantize",), ("smoothed.safetensors", "make it again"), damaged("smoothed.safetensors", lambda b: b[:-9])
    ),
    "quantized cut off": Case(
        ("evaluate", "--images", "8"), ("quantized.safetensors", "make it again"),
        damaged("quantized.safetensors", lambda b: b[:-9]),
    ),
    "quantized is the calibration": Case(
        ("evaluate", "--images", "8"), ("holds calibration, not a quantized model", "ptq quantize"),
        swapped("quantized.safetensors", "calibration.safetensors"),
    ),
    "description is no JSON": Case(("smooth",), ("run.json", "delete it"), damaged("run.json", lambda b: b[:20])),
    "description is a list": Case(("smooth",), ("run.json", "JSON object"), damaged("run.json", lambda b: b"[1]")),
    "description of something else": Case(
        ("smooth",), ("run.json", "delete it"), damaged("run.json", lambda b: b'{"options": {"speed": 9}}')
    ),
    "description in another encoding": Case(
        ("smooth",), ("run.json", "delete it"), damaged("run.json", lambda b: b"\xff\xfe\x00")
    ),
    "another model than the calibration's": Case(
        ("quantize", "--weights", "w.safetensors"), ("other weights", "recalibrate"),
        saved(lambda: state_with("classifier.weight", lambda tensor: tensor * 2)),
    ),
    "layers that nobody has": Case(("quantize", "--include", "nothing*"), ("'nothing*' matches no layer", "24 in all")),
    "a ledger of a million layers": Case(
        ("quantize",), ("smoothed.safetensors", "not as it was written", "run `ptq smooth` again"),
        metadata_changed("smoothed.safetensors", "ledger", [{"layer": n} for n in range(10**6)]),
    ),
    "sweep of something else": Case(
        ("sweep", "--images", "8"), ("sweep", "delete it"), damaged("sweep.json", lambda b: b'{"points": [3]}')
    ),
}  # fmt: skip
RUN_FOLDERS = {name: Case(c.arguments, c.says, c.prepare, on_run=True) for name, c in RUN_FOLDERS.items()}

MADE_FIRST = (
    "calibration.safetensors", "run.json", "smoothed.safetensors", "smoothed_calibration.safetensors", "ledger.json",
    "quantized.safetensors",
)  # fmt: skip
NPZ = ("calibrate", "--data", "npz:d.npz")
FOLDER = ("calibrate", "--data", "imagefolder:images")
COLA = ("calibrate", "--task", "cola", "--data", "glue:glue")
DATA = {
    "npz is no archive": Case(NPZ, ("npz:d.npz", "numpy.savez"),
                              lambda folder: (folder / "d.npz").write_bytes(b"PK\x03\x04")),
    "npz without labels": Case(NPZ, ("has no y_test", "it needs x_train"), archive(y_test=None)),
    "npz of floats": Case(NPZ, ("x_train is float64", "give uint8"), archive(x_train=np.zeros((8, 8, 8)))),
    "npz of objects": Case(NPZ, ("npz:d.npz", "numpy.savez"), archive(y_train=np.array([{}] * 8, object))),
    "npz with too few labels": Case(NPZ, ("8 images", "one label per image"), archive(y_train=np.arange(3))),
    "npz with labels of 0.5": Case(NPZ, ("labels are float64", "whole numbers"), archive(y_train=np.full(8, 0.5))),
    "npz without images": Case(
        NPZ, ("no images", "at least one"), archive(x_train=np.zeros((0, 8, 8), np.uint8), y_train=np.arange(0))
    ),
    "npz with five channels": Case(NPZ, ("channels", "[N, H, W, C]"),
                                   archive(x_train=np.zeros((8, 8, 8, 5), np.uint8))),
    "npz with names of another folder": Case(NPZ, ("npz:d.npz", "it needs x_train"),
                                             raw_archive({"../../x_train.npy": b"", "/etc/x_test.npy": b""})),
    "npz with a symlink": Case(NPZ, ("npz:d.npz", "it needs x_train"), symlinked_archive),
    "npz with a huge array": Case(
        NPZ, ("npz:d.npz", "numpy.savez"),
        raw_archive({f"{name}.npy": b"\x93NUMPY\x01\x00\x76\x00{'descr': '|u1', 'fortran_order': False, 'shape': "
                     b"(9999999, 9999999, 9999)}".ljust(128) for name in ("x_train", "y_train", "x_test", "y_test")}),
    ),
    "label out of range": Case(
        ("evaluate", "--data", "npz:d.npz"), ("label", "12", "10"), archive(y_test=np.array([0, 1, 2, 3, 4, 5, 6, 12])),
        makes=MADE_FIRST,
    ),
    "label below 0": Case(
        ("evaluate", "--data", "npz:d.npz"), ("label", "-1"), archive(y_test=np.array([0, 1, 2, 3, 4, 5, 6, -1])),
        makes=MADE_FIRST,
    ),
    "no such folder": Case(FOLDER, ("imagefolder:images", "no such folder")),
    "a folder without pictures": Case(FOLDER, ("imagefolder:images", "one folder per class"), empty_folder),
    "a broken JPEG": Case(FOLDER, ("cat/0.jpg", "repair or remove it"), broken_picture),
    "a text called PNG": Case(FOLDER, ("0.png", "repair or remove it"), text_picture),
    "one picture": Case(FOLDER, ("imagefolder:images", "at least two"), one_picture),
    "other classes to measure on": Case(FOLDER, ("classes", "the same folders", "is in one alone"), other_classes),
    "more classes than outputs": Case(
        ("evaluate", "--data", "imagefolder:images"), ("label", "11", "10"), too_many_classes,
        makes=MADE_FIRST,
    ),
    "an archive that reaches out": Case(
        ("calibrate", "--data", "cifar10:data"), ("cifar10:data", "--download"), escaping_tar
    ),
    "GLUE without a label": Case(COLA, ("train.tsv, line 1", "label"), glue(b"a\t7\t\tA sentence.\n")),
    "GLUE with three columns": Case(COLA, ("train.tsv, line 2", "put tabs between them"),
                                    glue(b"a\t1\t\tA sentence.\na\t1\tA sentence.\n")),
    "GLUE in another encoding": Case(COLA, ("train.tsv, line 1", "UTF-8"), glue(b"a\t1\t\t\xff\xfe\n")),
    "GLUE without examples": Case(COLA, ("train.tsv", "no examples"), glue(b"")),
}  # fmt: skip

PLAN = ("grid", "plan", "g.toml")
GRIDS = {
    "not there": Case(PLAN, ("g.toml", "give the grid's TOML file")),
    "no TOML": Case(PLAN, ("g.toml", "not a TOML file"), grid("[axes")),
    "another encoding": Case(PLAN, ("g.toml", "not a TOML file"),
                             lambda folder: (folder / "g.toml").write_bytes(b"\xff\xfe")),
    "no axes": Case(PLAN, ("no axes", "[axes]"), grid("name = 'x'")),
    "an axis nobody uses": Case(PLAN, ("alhpa", "no command uses it", "alpha"), grid("[axes]\nalhpa = [0.5]")),
    "an axis that is no list": Case(PLAN, ("axis alpha = 0.5", "give a list"), grid("[axes]\nalpha = 0.5")),
    "a value twice": Case(PLAN, ("twice", "give each once"), grid("[axes]\nalpha = [0.5, 0.5]")),
    "a table as a value": Case(PLAN, ("axis alpha", "texts or numbers"), grid("[axes]\nalpha = [{a = 1}]")),
    "an unknown key": Case(PLAN, ("'speed' means nothing here",), grid("speed = 3\n[axes]\nalpha = [0.5]")),
    "a name that is a path": Case(PLAN, ("name '../x'", "it names a folder"), grid("name = '../x'\n[axes]\nalpha=[1]")),
    "a name in commands that nothing has": Case(
        PLAN, ("{bits} in commands", "no axis"), grid("commands = ['smooth --alpha {alpha} --x {bits}']" + ALPHA)
    ),
    "an open bracket": Case(PLAN, ("1 [ and 0 ]",), grid("commands = ['smooth [--alpha {alpha}']" + ALPHA)),
    "an open quote": Case(PLAN, ("close the quotes",), grid("commands = [\"smooth '{alpha}\"]\n[axes]\nalpha = [1]")),
    "a folder of one's own": Case(
        PLAN, ("leave --run", "own folder"), grid("commands = ['smooth --run x --alpha {alpha}']\n[axes]\nalpha = [1]")
    ),
    "an exclusion of nothing": Case(
        PLAN, ("exclude alpha = 0.7", "no axis has that value"), grid("exclude = [{alpha = 0.7}]" + ALPHA)
    ),
    "everything excluded": Case(
        PLAN, ("exclude leaves no run",), grid("exclude = [{alpha = 0.5}]" + ALPHA)
    ),
    "too many runs": Case(
        PLAN, ("1,000,000 runs", "split the grid"),
        grid("[axes]\n" + "\n".join(f"{axis} = {list(range(100))}" for axis in ("alpha", "bits", "seed"))),
    ),
    "no workers": Case(("grid", "run", "g.toml", "--workers", "0"), ("--workers 0", "at least 1"),
                       grid(ALPHA)),
    "a partition without a cluster": Case(
        ("grid", "run", "g.toml", "--partition", "debug"), ("--partition", "add --slurm"), grid(ALPHA)
    ),
    "nothing to collect": Case(("grid", "collect", "g.toml"), ("no run has finished yet", "ptq grid run"),
                               grid(ALPHA)),
    "nothing to cancel": Case(("grid", "cancel", "g.toml"), ("nothing to cancel",), grid(ALPHA)),
    "a file without an argument": Case(("grid", "plan"), ("FILE", "--help")),
}  # fmt: skip

TABLES = {"option": OPTIONS, "weights": CHECKPOINTS, "run": RUN_FOLDERS, "data": DATA, "grid": GRIDS}
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


def files_in(folder: Path) -> dict[str, bytes]:
    """All but the log of a folder that was there before: it notes failures, too."""
    files = [
        path for path in folder.rglob("*") if path.is_file() and (path.name, path.parent.name) != ("log.jsonl", RUN)
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_written(name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if case.on_run:
        shutil.copytree(made, tmp_path / RUN)
    case.prepare(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = files_in(tmp_path)
    code, out, err = run_in(tmp_path, [*case.arguments, *(["--run", RUN] if case.on_run else [])])
    told = [line for line in err.splitlines() if line.startswith("ptq: ")]
    assert code in (1, 2), (code, err)
    assert len(told) == 1 and err.splitlines()[-1] == told[0], err
    assert all(part in told[0] for part in case.says), told[0]
    assert "Traceback" not in err and out == ""
    after = files_in(tmp_path)
    assert {Path(path).name for path in after.keys() - before.keys() if "__pycache__" not in path} == set(case.makes)
    assert all(after[path] == content for path, content in before.items())
    assert not (tmp_path / "it-ran").exists()
    assert not (tmp_path.parent / "escaped").exists() and not (tmp_path / "escaped").exists()


def test_pictures_of_all_modes_and_sizes_and_of_one_class_are_read(tmp_path: Path) -> None:
    """Odd, but fine: they become what the network reads, and a remark says what the classes mean."""
    for index, mode in enumerate(("RGB", "L", "RGBA", "P", "1", "CMYK", "I;16", "LA")):
        file = tmp_path / "images" / "cat" / f"{index}.{'jpg' if mode == 'CMYK' else 'png'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (5 + index, 12 - index)).save(file)
    code, _, err = run_in(tmp_path, ["calibrate", "--data", "imagefolder:images"])
    assert code == 0 and "the data has 1: the accuracy is right only if" in err, err


def test_a_ledger_of_a_million_layers_is_reported(made: Path, tmp_path: Path) -> None:
    """ledger.json is for people and for the report, which shows the layers that the network has."""
    shutil.copytree(made, tmp_path / RUN)
    file = tmp_path / RUN / "ledger.json"
    content = json.loads(file.read_text())
    more = [{"layer": f"layer{number}", "kind": "linear"} for number in range(10**6)]
    file.write_text(json.dumps({**content, "layers": [*content["layers"], *more]}))
    code, out, err = run_in(tmp_path, ["report", "--run", RUN])
    assert (code, err) == (0, ""), err
    assert (tmp_path / RUN / "report.html").stat().st_size < 20e6 and "wrote made/report.html" in out
