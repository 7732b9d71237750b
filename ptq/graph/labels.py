"""Which elements of which tensors have to carry the same factor.

A tensor's labels are an integer tensor of its shape. Elements with the same label carry the same factor; an operation
that needs two factors to be equal says so, and in the end connected labels form one class. Moving data (views,
permutations, concatenation, channel shuffles) is the same operation on labels, so no rule has to understand axes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

FIXED = 0  # an element that can't be scaled
ANY = -1  # an element that is zero whatever its factor is


class Equalities:
    """Collects what has to be equal and what has to stay 1; ``classes`` solves it."""

    def __init__(self) -> None:
        self._count = 1  # FIXED is a label too
        self._edges: list[Tensor] = []  # [n, 2] each
        self._fixed: list[tuple[Tensor, str]] = []

    def fresh(self, count: int) -> Tensor:
        """So many new labels."""
        start = self._count
        self._count += count
        return torch.arange(start, start + count, dtype=torch.int32)

    def fix(self, labels: Tensor, reason: str) -> None:
        """These elements can't be scaled."""
        self._fixed.append((core(labels).flatten().clone(), reason))

    def equate(self, a: Tensor, b: Tensor, reason: str) -> Tensor:
        """The labels of elements that have to carry the factors of a and of b both, ``a + b`` for instance.

        Where one of them can't be scaled, ``reason`` says why the other can't be either.
        """
        wide_a, wide_b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        a, b = core_of_both(wide_a, wide_b)
        differ = (a != b) & (a != ANY) & (b != ANY)
        if bool(differ.any()):
            pairs = torch.stack([a[differ], b[differ]], 1)
            one_fixed = (pairs == FIXED).any(1)
            if bool(one_fixed.any()):
                self._fixed.append((pairs[one_fixed].amax(1), reason))
            self._edges.append(pairs[~one_fixed])
        return torch.where(a == ANY, b, a).expand(wide_a.shape)

    def constant_along(self, labels: Tensor, dims: Iterable[int], reason: str) -> Tensor:
        """All elements along these axes have to carry one factor: labels with these axes of size 1."""
        for dim in dims:
            if labels.stride(dim) == 0 or labels.shape[dim] == 1:
                labels = labels.narrow(dim, 0, 1)
                continue
            one = core(labels).amax(dim, keepdim=True)  # ANY, the least, gives way
            self.equate(labels, one, reason)
            labels = one.expand([1 if i == dim else size for i, size in enumerate(labels.shape)])
        return labels

    def met(self) -> Tensor:
        """For every label, whether anything was said about it."""
        met = torch.zeros(self._count, dtype=torch.bool)
        for labels in (*self._edges, *(labels for labels, _ in self._fixed)):
            met[labels[labels > FIXED].long()] = True
        return met

    def classes(self) -> tuple[Tensor, dict[int, str]]:
        """The class of every label (0: can't be scaled), and for the labels that can't the reason."""
        edges = torch.cat(self._edges).numpy() if self._edges else np.empty((0, 2), np.int32)
        ones = np.ones(len(edges), bool)
        matrix = coo_array((ones, (edges[:, 0], edges[:, 1])), shape=(self._count, self._count))
        count, component = connected_components(matrix, directed=False)
        reasons = ["reads something that can't be scaled", *(reason for _, reason in self._fixed)]
        why = np.full(count, len(reasons))  # component → its first reason
        for i, (labels, _) in reversed(list(enumerate(self._fixed, 1))):
            why[component[labels[labels > FIXED].numpy()]] = i
        why[component[FIXED]] = 0
        free = why == len(reasons)
        class_of = np.where(free, np.cumsum(free), 0)[component]
        fixed = np.flatnonzero(class_of == 0)
        told = [reasons[i] for i in why[component[fixed]]]
        return torch.from_numpy(class_of), dict(zip(fixed.tolist(), told, strict=True))


def core(labels: Tensor) -> Tensor:
    """Labels without their repetitions: axes of stride 0 have size 1."""
    return core_of_both(labels, labels)[0]


def core_of_both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of one shape without the repetitions that they have in common."""
    for dim in range(a.dim()):
        if a.stride(dim) == 0 and b.stride(dim) == 0 and a.shape[dim] > 1:
            a, b = a.narrow(dim, 0, 1), b.narrow(dim, 0, 1)
    return a, b


def compressed(labels: Tensor) -> Tensor:
    """The same labels, repetitions along an axis expressed by a stride of 0."""
    small = core(labels)
    for dim in range(small.dim()):
        first = small.narrow(dim, 0, 1) if small.shape[dim] > 1 else small
        if small.shape[dim] > 1 and bool((small == first).all()):
            small = first
    return small.expand(labels.shape)
