"""Who reads which tensor: learnt by watching a real forward pass, so that no tracer has to understand the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ptq.channels import layers_of
from ptq.hooks import attached


@dataclass
class _Output:
    """A tensor that a layer returned, and who read it."""

    layer: str
    reads: int = 0
    batchnorm: str | None = None


class BatchNormSearch(TorchFunctionMode):
    """Finds the BatchNorms that read a layer's output which nothing else reads: those fold into the layer.

    ``with search.watching(): output = model(x)``, then ``search.result(output)``. Outputs are held weakly, so
    watching costs no memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._outputs: list[_Output] = []
        self._by_tensor = WeakIdKeyDictionary()
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with attached(self._register()), self:
            yield

    def result(self, returned: Any) -> dict[str, str]:
        """Layer → the BatchNorm that alone reads it; ``returned`` is what the model returned."""
        self._read(returned)
        return {
            output.layer: output.batchnorm
            for output in self._outputs
            if output.batchnorm is not None
            and output.reads == self._calls[output.layer] == self._calls[output.batchnorm] == 1
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(value, Tensor) for value in tree_leaves(result)):  # asking for a shape is no read
            self._read((args, kwargs))
        return result

    def _read(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value in self._by_tensor:
                self._by_tensor[value].reads += 1

    def _register(self) -> Iterable[RemovableHandle]:
        for name, layer in layers_of(self._model):
            yield layer.register_forward_hook(self._on_layer(name))
        for name, module in self._model.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                yield module.register_forward_pre_hook(self._on_batchnorm(name))

    def _on_layer(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, output: Tensor) -> None:
            self._calls[name] += 1
            self._outputs.append(_Output(name))
            self._by_tensor[output] = self._outputs[-1]

        return hook

    def _on_batchnorm(self, name: str) -> Callable[..., None]:
        def hook(batchnorm: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._calls[name] += 1
            if args[0] in self._by_tensor:
                self._by_tensor[args[0]].batchnorm = name

        return hook
