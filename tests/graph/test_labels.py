"""Equalities of labels against a union-find in plain Python, and labels with and without their repetitions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptq.graph import ChannelGraph
from ptq.graph.labels import ANY, FIXED, Equalities, compressed, core, core_of_both

LABELS = 12
label = st.integers(ANY, LABELS)  # ANY, FIXED and the fresh ones


class UnionFind:
    """The definition: what is equated has one root, and what meets FIXED is fixed."""

    def __init__(self) -> None:
        self.parent = list(range(LABELS + 1))

    def root(self, a: int) -> int:
        while self.parent[a] != a:
            a = self.parent[a]
        return a

    def union(self, a: int, b: int) -> None:
        if ANY not in (a, b):
            self.parent[self.root(a)] = self.root(b)

    def is_fixed(self, a: int) -> bool:
        return self.root(a) == self.root(FIXED)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@settings(max_examples=200, deadline=None)
@given(
    equations=st.lists(st.lists(st.tuples(label, label), min_size=1, max_size=4), max_size=6),
    fixes=st.lists(st.lists(label, max_size=3), max_size=3),
)
def test_classes_are_those_of_a_union_find(equations: list[list[tuple[int, int]]], fixes: list[list[int]]) -> None:
    equalities, reference = Equalities(), UnionFind()
    assert equalities.fresh(LABELS).tolist() == list(range(1, LABELS + 1))
    for number, pairs in enumerate(equations):
        a, b = (ints(*side) for side in zip(*pairs, strict=True))
        result = equalities.equate(a, b, f"equation {number}")
        assert result.tolist() == [y if x == ANY else x for x, y in pairs]
        for pair in pairs:
            reference.union(*pair)
    for number, labels in enumerate(fixes):
        equalities.fix(ints(*labels), f"fix {number}")
        for one in labels:
            reference.union(one, FIXED)
    said = {x for pairs in equations for x, y in pairs if ANY not in (x, y) and x != y}
    said |= {y for pairs in equations for x, y in pairs if ANY not in (x, y) and x != y} | {x for f in fixes for x in f}
    assert set(equalities.met().nonzero().flatten().tolist()) == said - {ANY, FIXED}
    classes, reasons = equalities.classes()
    assert len(classes) == LABELS + 1 and classes[FIXED] == 0
    for a in range(1, LABELS + 1):
        assert (classes[a] == 0) == reference.is_fixed(a) == (a in reasons)
        for b in range(1, LABELS + 1):
            assert (classes[a] == classes[b]) == (
                reference.root(a) == reference.root(b) or (reference.is_fixed(a) and reference.is_fixed(b))
            )
    scalable = sorted({int(c) for c in classes if c > 0})
    assert scalable == list(range(1, len(scalable) + 1))  # no gaps: factors are kept in an array
    assert all(reason.split()[0] in ("equation", "fix") for name, reason in reasons.items() if name != FIXED)


def test_the_first_reason_is_told_to_the_whole_class() -> None:
    equalities = Equalities()
    a, b, c, d = equalities.fresh(4)
    equalities.equate(a, b, "never told: both could be scaled")
    equalities.fix(b, "read by tanh")
    equalities.fix(a, "returned")
    equalities.equate(c, torch.tensor(FIXED, dtype=torch.int32), "added to the input")
    classes, reasons = equalities.classes()
    assert [reasons[int(x)] for x in (a, b, c)] == ["read by tanh", "read by tanh", "added to the input"]
    assert classes[d] > 0 and int(d) not in reasons


def test_equating_broadcasts() -> None:
    equalities = Equalities()
    channels, positions = equalities.fresh(3).view(3, 1), equalities.fresh(2)
    result = equalities.equate(channels, positions, "")
    assert result.shape == (3, 2)
    classes, _ = equalities.classes()
    assert len(set(classes[1:].tolist())) == 1  # each channel meets each position


@st.composite
def repeated(draw: st.DrawFn) -> Tensor:
    """Labels of up to four axes, some of them repetitions: as strides of 0, or written out."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    varies = [draw(st.booleans()) for _ in shape]
    small = [size if varying else 1 for size, varying in zip(shape, varies, strict=True)]
    values = draw(st.lists(label, min_size=(n := int(torch.tensor(small).prod())), max_size=n))
    labels = ints(*values).view(small).expand(shape)
    return labels.contiguous() if draw(st.booleans()) else labels


@settings(max_examples=200, deadline=None)
@given(repeated())
def test_compressing_changes_no_label(labels: Tensor) -> None:
    small = compressed(labels)
    assert small.shape == labels.shape and torch.equal(small, labels)
    for dim in range(labels.dim()):  # what repeats is known to repeat
        repeats = torch.equal(labels, labels.narrow(dim, 0, 1).expand(labels.shape))
        if repeats and labels.shape[dim] > 1:
            assert small.stride(dim) == 0
    assert torch.equal(core(small).expand(labels.shape), labels)
    assert all(size == 1 for size, stride in zip(core(small).shape, small.stride(), strict=True) if stride == 0)
    assert torch.equal(compressed(small), small) and compressed(small).stride() == small.stride()


def test_the_core_of_both_keeps_what_one_of_them_needs() -> None:
    a, b = ints(1, 2, 3).view(3, 1).expand(3, 4), ints(1, 2, 3, 4).expand(3, 4)
    assert core_of_both(a, b)[0].shape == (3, 4)
    assert core_of_both(a, a)[0].shape == (3, 1)


@settings(max_examples=200, deadline=None)
@given(repeated(), st.data())
def test_constant_along_is_that_of_a_union_find(labels: Tensor, data: st.DataObject) -> None:
    dims = data.draw(st.sets(st.integers(0, labels.dim() - 1)))
    equalities, reference = Equalities(), UnionFind()
    equalities.fresh(LABELS)
    one = equalities.constant_along(labels, sorted(dims), "mixed")
    assert list(one.shape) == [1 if dim in dims else size for dim, size in enumerate(labels.shape)]
    for index in torch.cartesian_prod(*(torch.arange(n) for n in labels.shape)).view(-1, labels.dim()).tolist():
        first = [0 if dim in dims else i for dim, i in enumerate(index)]
        line = labels[tuple(slice(None) if dim in dims else i for dim, i in enumerate(index))]
        met = [x for x in line.flatten().tolist() if x != ANY]
        for a in met:  # the definition: one factor for all that lie on this line
            reference.union(a, met[0])
        assert int(one[tuple(first)]) in (met or [ANY])
    classes, _ = equalities.classes()
    for a in range(LABELS + 1):
        for b in range(LABELS + 1):
            assert (classes[a] == classes[b]) == (reference.root(a) == reference.root(b))


def test_constant_along_is_the_same_for_repetitions_written_out() -> None:
    found = []
    for write_out in (False, True):
        equalities = Equalities()
        labels = equalities.fresh(6).view(2, 3, 1).expand(2, 3, 4)
        one = equalities.constant_along(labels.contiguous() if write_out else labels, [0, 2], "mixed")
        assert one.shape == (1, 3, 1)
        found.append(equalities.classes()[0].tolist())
    assert found[0] == found[1]
    assert found[0][1:4] == found[0][4:7] and len(set(found[0][1:4])) == 3  # over axis 0, channel by channel


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3), max_size=7))
def test_groups_are_what_classes_connect(classes: list[list[int]]) -> None:
    readers = {f"layer{number}": torch.tensor(ids) for number, ids in enumerate(classes)}
    met = {name: set(ids.tolist()) for name, ids in readers.items()}
    expected: list[list[str]] = []
    for name in readers:
        if any(name in group for group in expected):
            continue
        group = {name}
        for _ in readers:  # grows by at least one each time, as long as it grows
            group = {other for other in readers if any(met[other] & met[member] for member in group)}
        expected.append([other for other in readers if other in group])
    assert ChannelGraph(readers=readers).groups() == expected


def test_a_layer_with_a_channel_that_cannot_be_scaled_is_in_no_group() -> None:
    graph = ChannelGraph(readers={"a": torch.tensor([1, 2]), "b": torch.tensor([0, 2]), "c": torch.tensor([2, 2])})
    assert graph.groups() == [["a", "c"]]
    assert graph.foldable("a") and not graph.foldable("b") and not graph.foldable("elsewhere")
