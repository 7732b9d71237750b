"""The commands: parse, call, print. Heavy imports happen inside them, so that ``--help`` need not wait for torch."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ptq.cli import Screen, command
from ptq.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from ptq.mixed import Allocation
    from ptq.racing import Race
    from ptq.run import Run

DEFAULT_SWEEP = "W8A8,W4A4,W3A4"
DEFAULT_ALPHAS = "0.05:0.95:0.05"


@command
def calibrate(
    run: "Run",
    screen: Screen,
    batches: Annotated[int, typer.Option(help="How many batches to stream, fewer where the data ends.")] = 200,
    observer: Annotated[str, typer.Option(help="How ranges are chosen: max, percentile, entropy or mse.")] = "max",
) -> None:
    """Stream per-channel statistics of what every Conv and Linear reads."""
    calibration = run.calibrate(observer, batches)
    from ptq.report.tables import calibration_table

    layers = {
        name: {
            "kind": layer.kind,
            "channels": layer.channels,
            "activation_absmax_median": float(layer.activation_absmax.median()),
            "activation_absmax_max": float(layer.activation_absmax.max()),
            "weight_absmax_max": float(layer.weight_absmax.max()),
        }
        for name, layer in calibration.layers.items()
    }
    result = {
        "batches": calibration.batches,
        "samples": calibration.samples,
        "observer": calibration.observer,
        "layers": layers,
        "never_ran": calibration.never_ran,
    }
    screen.show([calibration_table(calibration)], [run.calibration_file], result)


@command
def smooth(
    run: "Run",
    screen: Screen,
    alpha: Annotated[
        str,
        typer.Option(
            help="How much moves to the weights, 0 to 1; auto: by layer; equalize: weights of one size across layers."
        ),
    ] = "0.5",
    bits: Annotated[str | None, typer.Option(help="The bits that --alpha auto is searched for.")] = None,
    clip: Annotated[bool, typer.Option("--clip", help="Search clipped ranges, too (--alpha auto).")] = False,
    explicit: Annotated[
        str, typer.Option(help="Where folding is impossible: allow a division at run time, or never.")
    ] = "allow",
    form: Annotated[str, typer.Option(help="fold, or hook: a division in front of every layer.")] = "fold",
) -> None:
    """Even out the channels by moving their spread into the weights; proves that the function is unchanged."""
    from ptq.quantization import Bits

    if bits and alpha != "auto":
        raise InputError(f"--bits {bits}: only the search needs them: use --alpha auto, or leave them to ptq quantize")
    smoothed = run.smooth(
        alpha if alpha in ("auto", "equalize") else parse_alpha(alpha),  # type: ignore[arg-type]
        form=form,  # type: ignore[arg-type]
        explicit=explicit,  # type: ignore[arg-type]
        bits=Bits.parse(bits or "W8A8"),
        clip=clip,
    )
    from ptq.report import channel_plots, plots
    from ptq.report.tables import ledger_table
    from ptq.storage import read_json

    before, after, name = run.calibration(), smoothed.calibration, f"{run.task.name}, {smoothed.title}"
    pictures = {
        run.folder / "channels.png": channel_plots.channel_magnitudes(before, after, name),
        run.folder / "channels_layers.png": channel_plots.all_layers_heatmap(before, after, name),
    }
    for path, figure in pictures.items():
        plots.save(figure, path)
    files = [run.smoothed_file, run.ledger_file, *pictures]
    screen.show([ledger_table(smoothed)], files, read_json(run.ledger_file))


@command
def quantize(
    run: "Run",
    screen: Screen,
    bits_or_file: str | None,
    bits: Annotated[str | None, typer.Option(help="Shorthand: W8A8, w4a4, W4 (weights alone).")] = None,
    activations: Annotated[str | None, typer.Option(help="Bits of the activations, 2 to 16, or float.")] = None,
    first_last: Annotated[int | None, typer.Option(help="Bits of the first and the last layer.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Only layers that match, e.g. 'features.*'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Not the layers that match.")] = None,
    override: Annotated[list[str] | None, typer.Option(help="PATTERN=BITS, e.g. 'classifier*=W8A8'.")] = None,
    observer: Annotated[str | None, typer.Option(help="Another observer than the calibration's.")] = None,
    weight_format: Annotated[str | None, typer.Option(help="A number format for the weights; see ptq formats.")] = None,
    activation_format: Annotated[
        str | None, typer.Option(help="A number format for the activations; its ranges come from each batch.")
    ] = None,
    refine: Annotated[
        str,
        typer.Option(
            help="none: rounded to nearest; fast: α by layer unless ptq smooth was run, then layer by layer, small "
            "networks learned in the end, a minute or so; best: blocks and network learned, minutes. Or steps alone, "
            "of alpha,image,ranges,weights,rounding,bias,blocks,network."
        ),
    ] = "fast",
    budget: Annotated[
        float | None, typer.Option(help="Mixed precision: so many bits a weight on average, 2 to 8; by layer.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Mixed precision: the fewest bits that change at most so many % of answers.")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Symmetric activations, zero-point 0.")] = False,
    symmetric_weights: Annotated[
        bool, typer.Option("--symmetric-weights", help="No zero-points for refined weights in fewer than 8 bits.")
    ] = False,
    keep_batchnorm: Annotated[bool, typer.Option("--keep-batchnorm", help="Don't fold BatchNorm first.")] = False,
    diffuse: Annotated[
        bool, typer.Option("--diffuse/--no-diffuse", help="Spread the rounding errors of an image in few bits.")
    ] = True,
    use_smoothed: Annotated[bool, typer.Option("--smooth/--no-smooth", help="Use a smoothed model.")] = True,
) -> None:
    """Quantize: --weights 8 --activations 8, or --bits W8A8."""
    from ptq.quantization import Bits, Scheme
    from ptq.quantization.scheme import parse_bits, parse_override

    if bits and (bits_or_file or activations):
        raise InputError(f"--bits {bits} and --weights/--activations say the same thing: give one of them")
    width = Bits.parse(bits) if bits else Bits(parse_bits(bits_or_file or "8"), parse_bits(activations or "8"))
    scheme = Scheme(
        bits=replace(width, weight_format=weight_format, activation_format=activation_format),
        first_last=first_last,
        include=tuple(include or ["*"]),
        exclude=tuple(exclude or []),
        overrides=tuple(parse_override(text) for text in override or []),
        symmetric_activations=symmetric,
        symmetric_weights=symmetric_weights,
        fold_batchnorm=not keep_batchnorm,
        diffuse_image=diffuse,
    )
    how = {"use_smoothed": use_smoothed, "observer": observer, "refine": refine}
    allocation: Allocation | None = None
    if budget is not None or max_drop is not None:
        from ptq.mixed import with_bits

        allocation = run.choose_bits(scheme, budget=budget, max_drop=max_drop, **how)  # type: ignore[arg-type]
        scheme = with_bits(scheme, allocation)
    quantized = run.quantize(scheme, **how)  # type: ignore[arg-type]
    if allocation is None:
        run.mixed_file.unlink(missing_ok=True)  # it told about an earlier network
    from ptq.report.tables import quantized_table

    result = {
        "scheme": scheme.to_json(),
        "bits": {name: str(layer_bits) for name, layer_bits in quantized.bits.items()},
        "observer": quantized.observer,
        "refine": refine,
        "diffused": list(quantized.diffused),
        "peak_memory": getattr(quantized, "peak_memory", None),
        **({"mixed": allocation.to_json()} if allocation else {}),
    }
    tables = [quantized_table(quantized, run.calibration()), *([mixed_table(allocation)] if allocation else [])]
    screen.show(tables, [run.quantized_file, *([run.mixed_file] if allocation else [])], result)


def mixed_table(allocation: "Allocation") -> "Table":
    """What was chosen for each layer, and what the widths around it would have cost."""
    from ptq.report.tables import plain_table

    changed = "" if allocation.changed is None else f"; {allocation.changed:.2f} % of the answers change"
    widths = sorted({width for choice in allocation.layers.values() for width in choice.errors})
    table = plain_table(
        f"mixed precision: {allocation.average:.2f} bits a weight on average{changed}",
        "layer", "weights", "bits", *(f"error at {width}" for width in widths),
        caption="relative squared error of the network's output with this layer's weights alone at so many bits",
    )  # fmt: skip
    for name, choice in allocation.layers.items():
        errors = (f"{choice.errors[width]:.2g}" if width in choice.errors else "" for width in widths)
        table.add_row(name, str(choice.elements), str(choice.bits), *errors)
    return table


@command
def evaluate(
    run: "Run",
    screen: Screen,
    images: Annotated[int | None, typer.Option(help="Only the first so many images.")] = None,
    error_batches: Annotated[int, typer.Option(help="Batches for the per-layer errors.")] = 8,
    placement: Annotated[
        str, typer.Option(help="layers: quantizers in front of layers; deploy: also where an exported file has them.")
    ] = "layers",
) -> None:
    """Measure float, quantized, and smoothed and quantized, on the same images and layer by layer."""
    if placement not in ("layers", "deploy"):
        raise InputError(f"--placement {placement!r}: choose layers or deploy")
    rows, result = run.evaluate(images=images, error_batches=error_batches, deploy=placement == "deploy")
    from ptq.report.tables import accuracy_table, layer_error_table

    smoothed = run.smoothed() if result["alpha"] is not None else None
    errors = layer_error_table(rows, run.calibration(), smoothed.calibration if smoothed else None)
    screen.show([errors, accuracy_table(rows)], [run.evaluation_file], result)


@command
def sweep(
    run: "Run",
    screen: Screen,
    alphas: Annotated[str, typer.Option(help="START:STOP:STEP, or a list such as 0.25,0.5.")] = DEFAULT_ALPHAS,
    bits: Annotated[str, typer.Option(help="One or several widths.")] = DEFAULT_SWEEP,
    auto: Annotated[bool, typer.Option(help="Also α by layer, without and with clipped ranges.")] = True,
    form: Annotated[str, typer.Option(help="fold, or hook: a division in front of every layer.")] = "fold",
    images: Annotated[int | None, typer.Option(help="Only the first so many images.")] = None,
    race: Annotated[
        bool, typer.Option("--race", help="Find the best α for a third of the cost: the worse ones drop out early.")
    ] = False,
    calibration_batches: Annotated[
        str | None, typer.Option(help="Sweep the amount of calibration data instead, as 50,200,1500, at one α.")
    ] = None,
) -> None:
    """Sweep α and draw accuracy and per-layer error against it; goes on where an interrupted sweep was."""
    if calibration_batches:
        sweep_calibration(run, screen, calibration_batches, alphas, bits, images)
        return
    values = parse_alphas(alphas)
    widths = [part for part in bits.split(",") if part]
    result = run.sweep(values, widths, auto=auto, form=form, images=images, race=race)  # type: ignore[arg-type]
    from ptq.report import plots
    from ptq.report.tables import sweep_table

    if race:  # there is no curve to draw
        from ptq.quantization import Bits

        races = [race_table(width, result.races[width]) for width in map(str, map(Bits.parse, widths))]
        screen.show([*races, sweep_table(result)], [run.sweep_file], result.to_json())
        return
    pictures = {
        run.folder / "alpha_sweep.png": plots.alpha_sweep(result, f"{run.task.name}: accuracy against α"),
        run.folder / "alpha_sweep_layers.png": plots.alpha_sweep_layers(
            result, f"{run.task.name}: layer error against α"
        ),
    }
    for path, figure in pictures.items():
        plots.save(figure, path)
    screen.show([sweep_table(result)], [run.sweep_file, *pictures], result.to_json())


def race_table(bits: str, race: "Race") -> "Table":
    """Who dropped out when, and how sure that is."""
    from ptq.report.tables import plain_table

    rest = "the best" if race.margin() == 0 else f"no other is better by more than {race.margin():.2f} points"
    table = plain_table(
        f"race at {bits}: α = {race.winner:g}, {rest}, with {race.confidence:.0%} confidence",
        "α", "images", "right, %", "beaten by", "confidence",
        caption=f"{race.cost:.0%} of the evaluations of a full sweep; who isn't beaten may be as good",
    )  # fmt: skip
    for alpha, answers in race.answers.items():
        dropped = race.dropped.get(alpha)
        why = (f"{dropped.by:g}", f"{dropped.confidence:.2%}") if dropped else ("", "")
        right = f"{100 * answers.mean():.2f}" if len(answers) else ""
        table.add_row(f"{alpha:g}", str(len(answers)), right, *why)
    return table


def sweep_calibration(run: "Run", screen: Screen, sizes: str, alphas: str, bits: str, images: int | None) -> None:
    """Accuracy and range drift against the number of calibration batches."""
    values = [0.5] if alphas == DEFAULT_ALPHAS else parse_alphas(alphas)
    if len(values) != 1:
        raise InputError(f"--alphas {alphas}: with --calibration-batches give one α")
    study = run.calibration_sizes(
        parse_sizes(sizes), [part for part in bits.split(",") if part], *values, images=images
    )
    from ptq.report import plots, size_plots

    picture = run.folder / "calibration_sizes.png"
    plots.save(size_plots.calibration_sizes(study, f"{run.task.name}: how much calibration data is enough"), picture)
    screen.show([size_plots.sizes_table(study)], [run.sizes_file, picture], study.to_json())


@command
def export(
    run: "Run",
    screen: Screen,
    target: Annotated[str, typer.Option("--for", help="onnxruntime or tensorrt.")] = "onnxruntime",
    variant: Annotated[
        str | None, typer.Option(help="How integers are stored; measured and chosen if not said.")
    ] = None,
    opset: Annotated[int | None, typer.Option(help="Of the ONNX file.")] = None,
    pack_weights: Annotated[bool, typer.Option("--pack-weights", help="4-bit weights as int4.")] = False,
    images: Annotated[int | None, typer.Option(help="Measure on the first so many images only.")] = None,
) -> None:
    """Write an int8 ONNX file of the quantized network, then measure accuracy, parity and speed on that file."""
    exported = run.export(target=target, variant=variant, opset=opset, pack_weights=pack_weights, images=images)
    from ptq.export import summary
    from ptq.report.tables import pairs_table

    screen.show([pairs_table(summary(exported))], sorted(run.export_folder.iterdir()), exported.to_json())


def parse_sizes(text: str) -> list[int]:
    """``50,200,1500``."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InputError(f"--calibration-batches {text!r}: write whole numbers, as 50,200,1500") from error


def parse_alpha(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"--alpha {text!r}: give a number from 0 to 1, auto or equalize") from error


def parse_alphas(text: str) -> list[float]:
    """``0.05:0.95:0.05`` (the last included) or ``0.25,0.5``."""
    try:
        if ":" not in text:
            return [float(part) for part in text.split(",") if part.strip()]
        start, stop, step = (float(part) for part in text.split(":"))
        if not step > 0:
            raise ValueError
        return [round(start + i * step, 10) for i in range(int((stop - start) / step + 1e-9) + 1)]
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"--alphas {text!r}: write START:STOP:STEP, as 0.05:0.95:0.05, or a list, as 0.25,0.5"
        ) from error
