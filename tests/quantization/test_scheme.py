"""The shorthand for bits, and a scheme's way through JSON."""

from __future__ import annotations

import json

import pytest

from ptq.errors import InputError
from ptq.quantization import Bits, Scheme
from ptq.quantization.scheme import parse_override


@pytest.mark.parametrize(
    ("text", "weights", "activations", "written"),
    [
        ("W8A8", 8, 8, "W8A8"),
        ("w4a4", 4, 4, "W4A4"),
        (" W3A16 ", 3, 16, "W3A16"),
        ("W4", 4, None, "W4"),
        ("WfloatA8", None, 8, "A8"),
        ("w4a32", 4, None, "W4"),
    ],
)
def test_shorthand(text: str, weights: int | None, activations: int | None, written: str) -> None:
    bits = Bits.parse(text)
    assert (bits.weights, bits.activations, str(bits)) == (weights, activations, written)


@pytest.mark.parametrize("text", ["", "8", "A8W8", "W8A", "W1A8", "W8A33", "int8"])
def test_wrong_shorthand(text: str) -> None:
    with pytest.raises(InputError):
        Bits.parse(text)


def test_overrides_name_a_pattern_and_bits() -> None:
    assert parse_override("classifier*=W8A8") == ("classifier*", Bits(8, 8))
    with pytest.raises(InputError, match="PATTERN=BITS"):
        parse_override("W8A8")


def test_a_scheme_survives_json() -> None:
    scheme = Scheme(bits=Bits(4, None), first_last=8, exclude=("a*",), overrides=(("b", Bits(3, 5)),))
    assert Scheme.from_json(json.loads(json.dumps(scheme.to_json()))) == scheme


def test_the_last_override_wins_and_first_last_follow_execution_order() -> None:
    scheme = Scheme(bits=Bits(4, 4), first_last=8, overrides=(("*", Bits(5, 5)), ("b", Bits(6, 6))))
    assert scheme.assign(["a", "b", "c"]) == {"a": Bits(5, 5), "b": Bits(6, 6), "c": Bits(5, 5)}
    assert Scheme(bits=Bits(4, 4), first_last=8).assign(["a", "b", "c"])["c"] == Bits(8, 8)
