"""Forward passes side by side: in order, one at a time, and gone afterwards."""

from __future__ import annotations

import threading

import pytest

from ptq.refinement.lockstep import Walker, side_by_side, stop_here


def walker(log: list[str], name: str, places: str, stops: str | None = None) -> Walker[str]:
    def walk() -> None:
        for place in places:
            stop_here(place, f"{name}{place}")
            log.append(f"{name}{place}")

    return Walker(walk, places if stops is None else stops)


def test_everybody_waits_at_each_place() -> None:
    log: list[str] = []
    for place, there in side_by_side([walker(log, name, "abc") for name in "12"], "abc"):
        assert [one.seen for one in there] == [f"1{place}", f"2{place}"]
        log.append(place)
    assert log == ["a", "1a", "2a", "b", "1b", "2b", "c", "1c", "2c"]


def test_different_ways_meet_again() -> None:
    log: list[str] = []
    found = [
        (place, len(there)) for place, there in side_by_side([walker(log, "1", "abd"), walker(log, "2", "acd")], "abcd")
    ]
    assert found == [("a", 2), ("b", 1), ("c", 1), ("d", 2)]


def test_other_places_are_passed_by() -> None:
    log: list[str] = []
    assert [place for place, _ in side_by_side([walker(log, "1", "abc", stops="b")], "b")] == ["b"]
    assert log == ["1a", "1b", "1c"]


def test_nobody_stops_outside() -> None:
    """Without a walker to wait for, the call comes back at once."""
    passing = threading.Thread(target=stop_here, args=("a", None), daemon=True)
    passing.start()
    passing.join(timeout=10)
    assert not passing.is_alive()


def test_an_error_comes_out_and_the_others_give_up() -> None:
    log: list[str] = []

    def fail() -> None:
        stop_here("a", None)
        raise ZeroDivisionError

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(side_by_side([walker(log, "1", "abc"), Walker(fail, "a")], "abc"))
    assert log == ["1a"]
    assert threading.active_count() == before


def test_leaving_early_ends_all() -> None:
    log: list[str] = []
    before = threading.active_count()
    steps = side_by_side([walker(log, name, "abc") for name in "12"], "abc")
    next(steps)
    steps.close()
    assert log == [] and threading.active_count() == before
