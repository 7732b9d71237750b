"""scripts/benchmark --link: what it says where it can't run, and that it cleans up where it can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmark_link"


@pytest.fixture(scope="module")
def link() -> ModuleType:
    module = ModuleType("benchmark_link")
    module.__file__ = str(SCRIPT)
    exec(compile(SCRIPT.read_text(), SCRIPT, "exec"), module.__dict__)
    return module


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_without_the_tools_it_is_skipped_with_what_is_missing(tmp_path: Path) -> None:
    skipped = run_script("--link", "100mbit", PATH=str(tmp_path))
    missing = "no ip and no tc here: install iproute2" if os.geteuid() == 0 else "need root"
    assert skipped.returncode == 0 and "skipped: " in skipped.stdout and missing in skipped.stdout


def test_rates_are_read_as_tc_reads_them(link: ModuleType) -> None:
    assert [link.bits_per_second(rate) for rate in ("100mbit", "1Gbit", "2.5kbit")] == [1e8, 1e9, 2500]
    wrong = run_script("--link", "fast")
    assert wrong.returncode == 1 and "--link fast: write 100mbit" in wrong.stderr


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def test_namespaces_are_gone_whatever_happens(link: ModuleType) -> None:
    missing = link.what_is_missing()
    if missing:
        pytest.skip(f"the link can't be made here: {missing}")
    own = {f"{link.PREFIX}{os.getpid()}-{side}" for side in link.SIDES}
    for end in (lambda: None, lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        try:
            with link.shaped_link("100mbit") as sides:
                assert own <= namespaces()
                for (namespace, device), other in zip(sides.values(), (2, 1), strict=True):
                    shaped = subprocess.run(
                        ["ip", "netns", "exec", namespace, "tc", "qdisc", "show", "dev", device],
                        capture_output=True, text=True, check=True,
                    ).stdout  # fmt: skip
                    assert "tbf" in shaped and "100Mbit" in shaped
                    route = ["ip", "-n", namespace, "route", "get", f"{link.NETWORK}.{other}"]
                    assert device in subprocess.run(route, capture_output=True, text=True, check=True).stdout
                end()
        except (ZeroDivisionError, SystemExit):
            pass
        assert not own & namespaces()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_leftovers_of_killed_runs_are_removed(link: ModuleType) -> None:
    if link.what_is_missing():
        pytest.skip("the link can't be made here")
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f"{link.PREFIX}{ended.pid}-a"
    subprocess.run(["ip", "netns", "add", name], check=True)
    link.remove_leftovers()
    assert name not in namespaces()
