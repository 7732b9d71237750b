"""Read a network's graph by watching one forward pass, so that no tracer has to understand the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ptq import channels
from ptq.batches import Call
from ptq.graph.channelgraph import ChannelGraph
from ptq.graph.labels import FIXED, Equalities
from ptq.graph.rules import RULES, Op
from ptq.hooks import attached, evaluating, one_thread

# Operations that hand a value to Python, which may then decide by it what to do next.
_SHOWS_VALUES = {"_local_scalar_dense", "is_nonzero", "equal", "allclose", "item"}
_CHANGES_NOTHING = {"dropout_", "detach_", "requires_grad_"}


def read_graph(model: nn.Module, call: Call) -> ChannelGraph:
    """Run the model once, on one sample, and say which channels share a factor with which.

    Operations are seen as the dispatcher sees them, so ``x.relu_()``, ``F.relu(x)`` and ``nn.ReLU()`` are one and the
    same. What no rule knows can't be scaled: an unknown operation costs a fold, never a wrong answer.
    """
    # Outside of inference mode the dispatcher shows operations in pieces; other threads would only wait for Python.
    with torch.inference_mode(), evaluating(model), one_thread():
        try:
            return _watch(model, call.first(1))
        except Exception:  # a model that takes whole batches only, or that can't be watched
            try:
                return _watch(model, call)
            except Exception as error:
                reason = (
                    f"the forward pass can't be watched ({str(error).splitlines()[0][:100] if str(error) else error!r})"
                )
                return ChannelGraph(reasons={name: reason for name, _ in channels.layers_of(model)})


def _watch(model: nn.Module, call: Call) -> ChannelGraph:
    watch = Watch(model)
    with watch.watching():
        returned = call.run(model)
    return watch.result(returned)


class Value:
    """What is known about one tensor."""

    def __init__(self, labels: Tensor | None, origin: str, same_memory: WeakSet[Value] | None = None) -> None:
        self.labels = labels  # of the tensor's shape; None: can't be scaled
        self.origin = origin  # who made it
        self.layer: str | None = None  # that returned it
        self.batchnorm: str | None = None  # that reads it
        self.reads = 0
        self.same_memory: WeakSet[Value] = WeakSet() if same_memory is None else same_memory
        self.same_memory.add(self)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives labels to tensors while a model runs; ``RULES`` say how each operation hands them on.

    Tensors are held weakly, so watching needs no more memory than running.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = dict(model.named_modules())
        self.layers = dict(channels.layers_of(model))
        self.equalities = Equalities()
        self.inputs: dict[str, Tensor] = {}  # layer → labels of the channels it reads
        self.outputs: dict[str, Tensor] = {}  # layer → labels of the channels it returns
        self.clamps: dict[str, tuple[int, Tensor]] = {}  # module → channel axis, labels
        self.reads: dict[str, list[Value]] = {}  # layer → what it reads, call by call
        self.origins: dict[str, str] = {}  # layer that reads what can't be scaled → who made that
        self._layer_of = {id(layer.weight): name for name, layer in self.layers.items()}
        self._owners = owners = channels.weight_owners(model)
        self._why_fixed = {name: channels.why_fixed(name, layer, owners) for name, layer in self.layers.items()}
        self._parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._of_layers = {id(parameter) for layer in self.layers.values() for parameter in layer.parameters()}
        self._parameters: dict[str, Tensor] = {}  # parameter → labels of its elements
        self._used_otherwise: dict[str, str] = {}  # parameter → who reads it in a way that no rule knows
        self._values = WeakIdKeyDictionary()
        self._returned: list[Value] = []  # by layers
        self._calls: Counter[str] = Counter()
        self._active = [""]  # modules, innermost last
        self._why_opaque: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        with attached(self._register()), self:
            yield

    def _register(self) -> Iterable[RemovableHandle]:
        def enter(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self._active.append(name)
                self._calls[name] += 1

            return hook

        def leave(*_: Any) -> None:
            self._active.pop()

        for name, module in self.modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                yield module.register_forward_pre_hook(enter(name))
                yield module.register_forward_hook(leave)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(Op(func, args, kwargs or {}, result))
        return result

    # What rules ask for

    @property
    def active(self) -> str:
        """The innermost module that is running."""
        return self._active[-1]

    @property
    def place(self) -> str:
        """Where we are, for messages."""
        return f" ({self.active}, {type(self.modules[self.active]).__name__})" if self.active else ""

    def value(self, x: Any) -> Value | None:
        return self._values.get(x) if isinstance(x, Tensor) else None  # type: ignore[no-untyped-call]

    def labels(self, x: Any) -> Tensor | None:
        value = self.value(x)
        return value.labels if value else None

    def labels_of_any(self, x: Any) -> Tensor | None:
        """The labels of a tensor or of a parameter."""
        return self.labels(x) if self.value(x) is not None else self.parameter(x)

    def running_layer(self, weight: Tensor) -> str | None:
        """The layer that is running, if this is its weight and its alone."""
        name = self._layer_of.get(id(weight))
        return name if name is not None and name == self.active and not self._why_fixed[name] else None

    def why_bias_fixed(self, name: str) -> str | None:
        """Why this layer's bias, and with it what the layer returns, can't be scaled."""
        layer = self.layers[name]
        if layer.bias is None:
            return None
        if "bias" not in layer._parameters:
            return f"{name}.bias is computed by a parametrization"
        others = [owner for owner in self._owners[id(layer.bias)] if owner != name]
        return f"{name}.bias is shared with {others[0]}" if others else None

    def parameter(self, x: Any) -> Tensor | None:
        """The labels of a parameter, of which every element can be scaled by itself; those of layers are theirs."""
        name = self._parameter_names.get(id(x))
        if name is None or id(x) in self._of_layers or x.numel() < 2:
            return None
        if name not in self._parameters:
            self._parameters[name] = self.equalities.fresh(x.numel()).view(x.shape)
        return self._parameters[name]

    def stop(self, tensors: Iterable[Any], reason: str) -> None:
        """These can't be scaled."""
        for x in tensors:
            labels = self.labels(x)
            if labels is not None:
                self.equalities.fix(labels, reason)
            elif id(x) in self._parameter_names:
                self._used_otherwise.setdefault(self._parameter_names[id(x)], reason)

    # What happens at each operation

    def _note(self, op: Op) -> None:
        if op.name in _SHOWS_VALUES:
            if any(x.is_floating_point() for x in op.tensors):
                self._why_opaque = f"Python looks at values ({op.name}{self.place}): what runs may depend on them"
            return
        if not any(isinstance(output, Tensor) for output in op.outputs):
            return
        for x in op.read:
            if (value := self.value(x)) is not None:
                value.reads += 1
        rule = RULES.get(op.kind)
        labels = rule(self, op) if rule and "out" not in op.kwargs else None
        origin = f"{op.kind}{self.place}"
        if labels is None:
            self.stop(op.read, f"{origin} reads it")
        if op.name not in _CHANGES_NOTHING:
            for written in op.written:
                self._settle_shared_memory(written, labels, origin)
        per_output = labels if isinstance(labels, list) else [labels] * len(op.outputs)
        for output, labels_of_output in zip(op.outputs, per_output, strict=True):
            if isinstance(output, Tensor):
                self._keep(output, labels_of_output, origin, op)

    def _keep(self, output: Tensor, labels: Tensor | None, origin: str, op: Op) -> None:
        storage = output.untyped_storage()._cdata
        same = [x for x in op.tensors if x.untyped_storage()._cdata == storage and id(x) not in self._parameter_names]
        for x in same:
            if self.value(x) is None:
                self._values[x] = Value(None, "an input of the model")
        base = self.value(same[0]) if same else None
        if (before := self.value(output)) is not None:
            before.same_memory.discard(before)  # overwritten: one tensor has one value
        value = self._values[output] = Value(labels, origin, base.same_memory if base else None)
        if op.layer:
            value.layer = op.layer
            self._returned.append(value)

    def _settle_shared_memory(self, written: Tensor, labels: Any, origin: str) -> None:
        """Memory that several tensors see was written through one of them: none of them can be scaled."""
        value = self.value(written)
        others = [other for other in value.same_memory if other is not value] if value else []
        if others:
            for labelled in (labels, *(other.labels for other in others)):
                if isinstance(labelled, Tensor):
                    self.equalities.fix(labelled, f"{origin} writes into memory that other tensors share")

    # What was found

    def result(self, returned: Any) -> ChannelGraph:
        leaves = [x for x in tree_leaves(returned) if isinstance(x, Tensor)]
        self.stop(leaves, "the model returns it")
        for value in filter(None, map(self.value, leaves)):
            value.reads += 1
        for name, reason in self._used_otherwise.items():
            module = name.rpartition(".")[0]
            for labels in (self._parameters.get(name), self.outputs.get(module), self.inputs.get(module)):
                if labels is not None:
                    self.equalities.fix(labels, f"{name} is used elsewhere, too: {reason}")
        self._settle_parts_of_parameters()
        class_of, why = self.equalities.classes()
        if self._why_opaque:
            class_of.fill_(0)

        def classes(labels: Tensor) -> Tensor:
            return torch.where(labels > FIXED, class_of[labels.long().clamp(min=FIXED)], 0).flatten()

        readers = {name: classes(labels) for name, labels in self.inputs.items()}
        is_read = torch.zeros(len(class_of) + 1, dtype=torch.bool)
        for ids in readers.values():
            is_read[ids] = True

        def that_are_read(table: dict[str, Tensor]) -> dict[str, Tensor]:
            found = {name: classes(labels) for name, labels in table.items()}
            found = {name: torch.where(is_read[ids], ids, 0) for name, ids in found.items()}
            return {name: ids for name, ids in found.items() if bool((ids > 0).any())}

        fixed = {name: text for name in self.layers if (text := self._why_weight_fixed(name))}
        clamps = that_are_read({name: labels for name, (_, labels) in self.clamps.items()})
        return ChannelGraph(
            readers=readers,
            siblings=self._siblings(),
            producers=that_are_read(self.outputs),
            parameters=that_are_read(self._parameters),
            clamps=clamps,
            clamp_axes={name: self.clamps[name][0] for name in clamps},
            reasons={name: text for name in self.layers if (text := self._reason(name, readers.get(name), why))},
            batchnorms={
                value.layer: value.batchnorm
                for value in self._returned
                if value.layer and value.batchnorm and value.reads == 1 and value.layer not in fixed
                if self._calls[value.layer] == self._calls[value.batchnorm] == 1
            },
            fixed=fixed,
        )

    def _settle_parts_of_parameters(self) -> None:
        """Of a table that is cut to the length of the input, another input may use more: none of it can be scaled."""
        met = self.equalities.met()
        for labels in self.inputs.values():
            met[labels[labels > FIXED].long()] = True
        for name, labels in self._parameters.items():
            if not bool(met[labels.long()].all()):
                self.equalities.fix(labels, f"{name} was used in part: other inputs may use more of it")

    def _why_weight_fixed(self, name: str) -> str | None:
        """Why nothing may change a layer's weight, not even together with its input."""
        reader = self._used_otherwise.get(f"{name}.weight")
        if reader is not None and name in self.inputs:
            return f"its weight is used elsewhere, too: {reader}"
        if name in self.inputs or not self._calls[name]:
            return None
        return self._why_fixed[name] or "its weight isn't used as it is"

    def _siblings(self) -> list[list[str]]:
        """Layers of one kind of input that read one and the same tensor, where there are several."""
        by_value: dict[tuple[Any, ...], list[str]] = {}
        for name, values in self.reads.items():
            layer = self.layers[name]
            key = (*map(id, values), channels.channel_axis(layer), channels.input_channels(layer))
            by_value.setdefault(key, []).append(name)
        return [names for names in by_value.values() if len(names) > 1]

    def _reason(self, name: str, classes: Tensor | None, why: dict[int, str]) -> str | None:
        """Why a layer's input can't be scaled by what produces it."""
        if classes is None:
            return self._why_weight_fixed(name) or "it isn't called"
        if bool((classes > 0).all()):
            return None
        if self._why_opaque:
            return self._why_opaque
        labels = self.inputs[name][classes == 0].tolist()
        told = next((why[label] for label in labels if label > FIXED and label in why), None)
        return told or self.origins.get(name) or "a part of its input is always zero"
