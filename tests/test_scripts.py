"""The set-up of scripts/environment, with a stand-in for Python that records what pip is asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

FAKE_PYTHON = f"""#!/bin/sh
here="$(dirname "$0")"
case "$1 $2" in
  "-c import sys"*) echo "${{FAKE_VERSION:-3.12.0}}"; exit "${{FAKE_TOO_OLD:-0}}" ;;
  "-c import venv"*) exit "${{FAKE_WITHOUT_VENV:-0}}" ;;
  "-m venv") rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip")
    [ "$3" = install ] || exit "${{FAKE_WITHOUT_PIP:-0}}"
    echo "$@" >> "$here/../../pip-calls"
    exit "${{FAKE_PIP_FAILS:-0}}" ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""


class Clone:
    """A bare copy of the repository's set-up files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(REPOSITORY / "scripts", path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, path / name)
        self.python = path / "tools" / "python"
        self.tool("python", FAKE_PYTHON)
        self.tool("df", "#!/bin/sh\necho header\necho disk 9 9 ${FAKE_FREE_KIB:-99999999} 9% /\n")

    def tool(self, name: str, text: str) -> None:
        tool = self.path / "tools" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(text)
        tool.chmod(0o755)

    def ensure(self, *extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", 'set -euo pipefail; source "$0"; ensure_environment "$@"', "scripts/environment", *extras],
            cwd=self.path,
            env={
                **os.environ,
                "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHON": str(self.python),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def installed(self) -> list[str]:
        """What each call of pip was asked to install."""
        calls = self.path / "pip-calls"
        return [call.split()[-1] for call in calls.read_text().splitlines()] if calls.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    root = tmp_path / "a clone"
    root.mkdir()
    return Clone(root)


def test_installs_once_and_extras_add_up(clone: Clone) -> None:
    for extras in ((), (), ("dev",), (), ("dev",), ("onnx",), ("dev", "onnx")):
        result = clone.ensure(*extras)
        assert result.returncode == 0, result.stderr
    assert clone.installed == [".", ".[dev]", ".[dev,onnx]"]


def test_torch_is_always_pinned(clone: Clone) -> None:
    clone.ensure("dev")
    assert "--constraint constraints.txt" in (clone.path / "pip-calls").read_text()
    assert "torch==2.13.0\n" in (REPOSITORY / "constraints.txt").read_text()


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_installs_again_with_the_same_extras(clone: Clone, name: str) -> None:
    clone.ensure("dev")
    with (clone.path / name).open("a") as file:
        file.write("\n# changed\n")
    clone.ensure()
    assert clone.installed == [".[dev]", ".[dev]"]


def test_a_failed_install_is_taken_up_again(clone: Clone) -> None:
    result = clone.ensure(FAKE_PIP_FAILS="1")
    assert result.returncode == 1
    assert "pip could not install" in result.stderr
    assert clone.ensure().returncode == 0
    assert clone.installed == [".", "."]


def test_a_broken_environment_is_made_anew(clone: Clone) -> None:
    (clone.path / ".venv" / "bin").mkdir(parents=True)
    (clone.path / ".venv" / "bin" / "python").symlink_to(clone.path / "gone")
    result = clone.ensure()
    assert result.returncode == 0
    assert "Making .venv" in result.stderr


def test_an_environment_without_pip_is_made_anew(clone: Clone) -> None:
    """Making .venv was interrupted: Python is there and works, pip is not."""
    clone.ensure(FAKE_PIP_FAILS="1")
    assert "Making .venv" not in clone.ensure(FAKE_PIP_FAILS="1").stderr
    assert "Making .venv" in clone.ensure(FAKE_WITHOUT_PIP="1").stderr


def test_a_moved_environment_is_made_anew(clone: Clone) -> None:
    clone.ensure("dev")
    moved = clone.path.rename(clone.path.with_name("moved"))
    clone.path, clone.python = moved, moved / "tools" / "python"
    assert "Making .venv" in clone.ensure().stderr
    assert clone.installed == [".[dev]", ".[dev]"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        pytest.param({"FAKE_VERSION": "3.9.18", "FAKE_TOO_OLD": "1"}, "python is 3.9.18", id="too old"),
        pytest.param({"PYTHON": "no-such-python"}, "found none (looked for no-such-python)", id="no python"),
        pytest.param({"FAKE_WITHOUT_VENV": "1"}, "apt install python3-venv", id="no venv module"),
        pytest.param({"FAKE_FREE_KIB": "1048576"}, "1024 MiB are free", id="no space"),
    ],
)
def test_says_in_one_line_what_is_missing(clone: Clone, environment: dict[str, str], message: str) -> None:
    result = clone.ensure(**environment)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (clone.path / ".venv").exists()
