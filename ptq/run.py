"""A run folder: the steps of the main road, each reading what the ones before it wrote there.

Every step that lacks what it builds on makes that first, with defaults. ``run.json`` keeps how the task was
described, so that later commands on the folder need not be told again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ptq.batches import limited
from ptq.calibration import Calibration, calibrate
from ptq.capture import input_and_gradient
from ptq.channels import layers_of
from ptq.errors import InputError, MismatchError
from ptq.evaluation import Row, evaluate, layer_errors, layers_json, networks_json
from ptq.folder import RunFolder, TaskOptions
from ptq.interruption import units
from ptq.mixed import Allocation, check_wish, choose_bits
from ptq.packing import PackedCheckpoint, pack
from ptq.quantization import Bits, Quantized, Scheme
from ptq.quantization.apply import quantize_by
from ptq.racing import check_race
from ptq.refinement import SAMPLES as REFINED_ON
from ptq.refinement import SMOOTHING, Refined, smooths_first, steps_of
from ptq.refinement import refine as refine_network
from ptq.sizing import SizeStudy, calibration_sizes
from ptq.smoothing import Alpha, Explicit, Form, Smoothed, check_smoothing, smooth
from ptq.storage import read_json, write_json
from ptq.sweeping import Sweep, check_plan, sweep
from ptq.tasks import Task, resolve

if TYPE_CHECKING:
    from ptq.export import Exported

DEFAULT_BATCHES = 200


class Run(RunFolder):
    """The files of one run folder and the steps that make them."""

    def __init__(
        self,
        options: TaskOptions,
        folder: Path | None = None,
        *,
        device: str = "auto",
        download: bool = False,
        say: Callable[[str], None] = lambda message: None,
        progress: bool = False,
    ) -> None:
        super().__init__(folder or options.folder)
        self.options = options.completed_by(self.description())
        self._device = _device(device)
        self._download = download
        self.say = say
        self.progress = progress

    @cached_property
    def task(self) -> Task:
        options = self.options
        torch.manual_seed(options.seed or 0)
        task = resolve(
            options.task,
            model=options.model,
            weights=options.weights,
            data=options.data,
            batch_size=options.batch_size,
            image_size=options.image_size,
            download=self._download,
            seed=options.seed or 0,
            progress=self.progress,
        )
        for note in task.notes:
            self.say(note)
        task.model.to(self._device)
        return task

    # The steps --------------------------------------------------------------------------------------------------

    def calibrate(self, observer: str = "max", batches: int = DEFAULT_BATCHES) -> Calibration:
        task = self.task
        calibration = calibrate(task.model, task.calibration, observer, batches, progress=self.progress)
        calibration.save(self.calibration_file)
        self.describe(self.options)
        return calibration

    def calibration(self) -> Calibration:
        """The calibration of this folder, made first if it isn't there."""
        if not self.calibration_file.exists():
            self.say(f"{self.calibration_file} isn't there yet: calibrating first")
            return self.calibrate()
        calibration = Calibration.load(self.calibration_file)
        calibration.check(self.task.model)
        return calibration

    def smooth(
        self,
        alpha: Alpha = 0.5,
        *,
        form: Form = "fold",
        explicit: Explicit = "allow",
        bits: Bits | None = None,
        clip: bool = False,
        by: str = "smooth",  # the command that wants it; quantize's own is nobody else's
    ) -> Smoothed:
        check_smoothing(alpha, form, explicit, clip=clip)  # before any work is done
        calibration = self.calibration()
        bits = bits or Bits()
        smoothed = smooth(
            self.task.model,
            calibration,
            alpha,
            form=form,
            explicit=explicit,
            weights=bits.weights,
            activations=bits.activations,
            clip=clip,
            batches=self.task.calibration,
        )
        assert smoothed.proof is not None
        smoothed.calibration.save(self.smoothed_calibration_file)
        smoothed.save(self.smoothed_file)
        ledger = {
            "kind": "ledger",
            "schema": 2,
            "alpha": alpha,
            "bits": str(bits) if alpha == "auto" else None,
            "clip": clip,
            "form": form,
            "explicit": explicit,
            "by": by,
            "proof": asdict(smoothed.proof),
            "layers": [asdict(entry) for entry in smoothed.ledger],
        }
        write_json(self.ledger_file, ledger)
        return smoothed

    def smoothed(self) -> Smoothed | None:
        """The smoothed model of this folder, if there is one."""
        if not self.smoothed_file.exists():
            return None
        of_smoothed, original = Calibration.load(self.smoothed_calibration_file), self.calibration()
        if (of_smoothed.data_fingerprint, of_smoothed.observer) != (original.data_fingerprint, original.observer):
            command = "quantize" if self._smoothed_by_quantize() else "smooth"
            raise MismatchError(f"{self.smoothed_file}: made from another calibration: run `ptq {command}` again")
        return Smoothed.load(self.smoothed_file, self.task.model, of_smoothed)

    def quantize(
        self, scheme: Scheme, *, use_smoothed: bool = True, observer: str | None = None, refine: str = "fast"
    ) -> Quantized:
        steps_of(refine)  # before any work is done
        model, calibration, smoothed = self._to_quantize(scheme, refine, use_smoothed=use_smoothed)
        if smoothed is None:
            self.say("quantizing the model as it is")
        else:
            self.say(f"quantizing the smoothed model ({smoothed.title}); --no-smooth takes the plain one")
        quantized = self._quantized_by(scheme, model, calibration, observer, refine)
        if isinstance(quantized, Refined):
            for reason in sorted(set(quantized.skipped.values())):
                layers = [layer for layer, why in quantized.skipped.items() if why == reason]
                self.say(f"not refined: {', '.join(layers[:3])}{' …' * (len(layers) > 3)} ({len(layers)}): {reason}")
        quantized.save(self.quantized_file)
        return quantized

    def choose_bits(
        self,
        scheme: Scheme,
        *,
        budget: float | None = None,
        max_drop: float | None = None,
        use_smoothed: bool = True,
        observer: str | None = None,
        refine: str = "fast",
    ) -> Allocation:
        """Bits for the weights of each layer, by a budget of bits or by the largest drop."""
        steps_of(refine)
        check_wish(budget, max_drop)
        model, calibration, _ = self._to_quantize(scheme, refine, use_smoothed=use_smoothed)
        allocation = choose_bits(
            model,
            calibration,
            scheme,
            self.task.calibration,
            lambda mixed: self._quantized_by(mixed, model, calibration, observer, refine).model,
            budget=budget,
            max_drop=max_drop,
            compensated=refine != "none",
            refined_on=0 if refine == "none" else REFINED_ON,
            seed=self.options.seed or 0,
        )
        write_json(self.mixed_file, allocation.to_json())
        return allocation

    def _to_quantize(
        self, scheme: Scheme, refine: str, *, use_smoothed: bool
    ) -> tuple[nn.Module, Calibration, Smoothed | None]:
        """The network that ``ptq smooth`` made in this folder; else one smoothed for this scheme, if that is a step.

        What an earlier ``ptq quantize`` smoothed was for its own bits, and isn't taken.
        """
        scheme.assign(list(self.calibration().layers))  # before any work is done
        smoothed = self.smoothed() if use_smoothed and not self._smoothed_by_quantize() else None
        if smoothed is None and use_smoothed and smooths_first(refine, scheme):
            self.say("smoothing first, with α and clips by layer")
            smoothed = self.smooth(**SMOOTHING, bits=scheme.bits, by="quantize")
        if smoothed is None:
            return self.task.model, self.calibration(), None
        return smoothed.model, smoothed.calibration, smoothed

    def _smoothed_by_quantize(self) -> bool:
        return self.ledger_file.exists() and read_json(self.ledger_file).get("by") == "quantize"

    def _quantized_by(
        self, scheme: Scheme, model: nn.Module, calibration: Calibration, observer: str | None, refine: str
    ) -> Quantized:
        if refine == "none":
            return quantize_by(scheme, model, calibration, observer)
        seed = self.options.seed or 0
        return refine_network(model, calibration, scheme, self.task.calibration, refine, seed=seed, observer=observer)

    def quantized(self) -> tuple[Quantized, Smoothed | None]:
        """The quantized network of this folder, made first if it isn't there, and the smoothing it was made from."""
        if not self.quantized_file.exists():
            self.say(f"{self.quantized_file} isn't there yet: quantizing first")
            self.quantize(Scheme())
        calibration, smoothed = self.calibration(), self.smoothed()
        if smoothed is not None:
            try:
                return Quantized.load(self.quantized_file, smoothed.model, smoothed.calibration), smoothed
            except MismatchError:
                pass  # quantized with --no-smooth
        return Quantized.load(self.quantized_file, self.task.model, calibration), None

    def export(
        self,
        *,
        target: str = "onnxruntime",
        variant: str | None = None,
        opset: int | None = None,
        pack_weights: bool = False,
        images: int | None = None,
    ) -> Exported:
        """Write the int8 ONNX file of the quantized network, and measure that file."""
        from ptq.export import DEFAULT_OPSET, export_task

        quantized, _ = self.quantized()
        return export_task(
            quantized,
            self.export_folder,
            self.task,
            images=images,
            target=target,
            variant=variant,
            opset=DEFAULT_OPSET if opset is None else opset,
            pack_weights=pack_weights,
            progress=self.progress,
        )

    def pack(self, rules: Mapping[str, str]) -> tuple[PackedCheckpoint, int]:
        """Pack the float checkpoint by the rules of its kinds of weights; returns it and the size of the file."""
        checkpoint = pack(self.task.model.state_dict(), rules, model=self.task.model)
        return checkpoint, checkpoint.save(self.packed_file)

    def captured(self, layer: str | None) -> tuple[str, Tensor, Tensor]:
        """A layer's input and the gradient there, on one labelled batch; the layer in the middle if none is named."""
        names = [name for name, _ in layers_of(self.task.model)]
        name = layer or names[len(names) // 2]
        if name not in names:
            raise InputError(f"layer {name!r}: the model has none of that name, but {', '.join(names[:6])} …")
        return name, *input_and_gradient(self.task.model, next(iter(self.task.calibration)), name)

    def evaluate(
        self, *, images: int | None = None, error_batches: int = 8, deploy: bool = False
    ) -> tuple[list[Row], dict[str, Any]]:
        """Float, quantized, and smoothed and quantized, on the same images; returns the rows and what was written.

        ``deploy`` adds the network with its quantizers where the exported file has them.
        """
        labelled = limited(self.task.evaluation, images)
        task, calibration = self.task, self.calibration()
        quantized, smoothed = self.quantized()
        bits = str(quantized.scheme.bits)
        plain = quantize_by(quantized.scheme, task.model, calibration, quantized.observer)
        networks = {"float": task.model, bits: plain.model}
        name = bits
        if smoothed:
            name += f", smoothed {smoothed.title.replace(' = ', '=')}"
        if quantized.refine != "none":
            name += ", refined"
        networks[name] = quantized.model  # of the plain one, if it is no more than that
        rows = []
        for name, model in networks.items():
            answers = evaluate(model, labelled, metric=task.metric, progress=name if self.progress else None)
            is_float = model is task.model
            errors = None if is_float else layer_errors(task.model, model, task.calibration, max_batches=error_batches)
            rows.append(Row(name, answers, errors))
        if deploy:
            from ptq.export import deployed

            model = deployed(quantized, next(iter(task.calibration)), task.calibration)
            rows.append(Row(f"{rows[-1].name}, as deployed", evaluate(model, labelled, metric=task.metric), {}))
        result = {
            "kind": "evaluation",
            "schema": 1,
            "task": task.name,
            "scheme": quantized.scheme.to_json(),
            "alpha": smoothed.alpha if smoothed else None,
            "refine": quantized.refine,
            "networks": networks_json(rows),
            "layers": layers_json(rows, calibration, smoothed),
        }
        write_json(self.evaluation_file, result)
        return rows, result

    def sweep(
        self,
        alphas: Sequence[float],
        bits: Sequence[str],
        *,
        auto: bool = True,
        form: Form = "fold",
        images: int | None = None,
        race: bool = False,
    ) -> Sweep:
        check_plan(alphas, bits, images)  # before any work is done
        if race:
            check_race(alphas, self.task.metric)
        resume = Sweep.from_json(read_json(self.sweep_file)) if self.sweep_file.exists() else None
        with units("point") as point_finished:

            def keep(so_far: Sweep) -> None:
                write_json(self.sweep_file, so_far.to_json())
                point_finished()

            return sweep(
                self.task.model,
                self.calibration(),
                self.task.calibration,
                self.task.evaluation,
                alphas,
                bits=bits,
                auto=auto,
                form=form,
                metric=self.task.metric,
                images=images,
                race=race,
                resume=resume,
                on_point=keep,
                progress=self.progress,
            )

    def calibration_sizes(
        self, sizes: Sequence[int], bits: Sequence[str], alpha: float, *, images: int | None = None
    ) -> SizeStudy:
        study = calibration_sizes(
            self.task.model,
            self.task.calibration,
            self.task.evaluation,
            sizes,
            bits,
            alpha,
            metric=self.task.metric,
            images=images,
            progress=self.progress,
        )
        write_json(self.sizes_file, study.to_json())
        return study


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name}: not usable here ({reason}): try --device auto") from error
    return device
