"""Compare image models at equal FLOPs: the same data, options and epochs for all, several seeds, one report.

A comparison is a YAML file:

    data: data/cifar10                  # folder of smlp vision data
    seeds: [1, 2, 3]
    options: --img-size 32 --epochs 15  # of smlp vision train, for all models
    models:                             # the others are compared with the first
      Mixer: --model smlp_mixer_tiny
      gMLP: --model smlp_gmlp_tiny
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import itertools
import math
import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from timm.data.readers.img_extensions import get_img_extensions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD
from torch.utils.flop_counter import FlopCounterMode

from data_prep.flow.streams import sha256_of
from smlp.errors import UserError
from smlp.experiments.folder import Folder
from smlp.experiments.json_files import Each, Maybe, read_json, write_json
from smlp.experiments.processes import Chain, Ended, Step, run_chains, stopped_by
from smlp.experiments.report.table import (
    VERDICT_COLUMN,
    Column,
    Estimate,
    Table,
    amount,
    difference_cells,
    label,
    mean_cell,
)
from smlp.experiments.spec import path_word
from smlp.experiments.yaml_file import Section, read_yaml, shown
from smlp.fairseq_compat.arguments import without_options
from smlp.files import check_no_other, read_text, write_whole
from smlp.launch.local import this_program
from smlp.launch.machine import num_cores
from smlp.vision.checkpoints import at_resolution, create_model, image_config, read_checkpoint
from smlp.vision.data import class_names, open_split, split_folder
from smlp.vision.setup import LAST, SUMMARY, checkpoints_in, schedule_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: FLOPs of an image may differ by this share from those of the first model
TOLERANCE = 0.03
_DONE = "done.json"
_REPORTED = ("eval_top1", "train_images_per_second")
_RECORDED = {
    "data": str,
    "options": [str],
    "models": Each([str]),
    "images": Maybe(Each(str)),
    "checkpoints": Maybe(Each(str)),
}
_MOST_READ = 1 << 30  # bytes of images whose contents are compared
_MOST_SEED = 2**31 - 1  # of smlp vision train
_MOST_NAME = 200  # bytes; -s SEED.log is added
#: what the runner decides itself
_OWN = ("--data-dir", "--seed", "--output", "--experiment", "--resume", "--nproc")
#: what models are compared at, which are options of all of them
FOR_ALL = dict.fromkeys(("--epochs", "--train-split", "--val-split"), "which must be the same for all")


@dataclass(frozen=True)
class Comparison:
    """The content of the file: options of ``smlp vision train`` as words."""

    data: str
    options: list[str]
    models: dict[str, list[str]]
    seeds: list[int]


def read_comparison(path: Path) -> Comparison:
    """Read the file of a comparison.

    Raises:
        UserError: an entry is missing, unknown or of another type, or an option is the runner's own.
    """
    section = Section("", read_yaml(path), path)
    data, options = section.text("data"), section.text("options", "")
    seeds = read_seeds(section)
    named = section.section("models")
    models = {name: option_words(named, name, words, also_own=FOR_ALL) for name, words in named.items().items()}
    check_names(named, models)
    section.end()
    if not data or len(models) < 2:
        raise UserError(f"{path}: data and at least two models are needed")
    return Comparison(data, option_words(section, "options", options), models, seeds)


def read_seeds(section: Section) -> list[int]:
    """Return the seeds of a file; 1, 2 and 3 by default."""
    seeds = [section.as_count("seeds", seed, least=0, most=_MOST_SEED) for seed in section.values("seeds", [1, 2, 3])]
    if not seeds:
        raise section.error("seeds", "is empty: name at least one")
    if len(set(seeds)) < len(seeds):
        raise section.error("seeds", f"has a seed twice: {seeds}")
    return seeds


def check_names(section: Section, names: Iterable[str]) -> None:
    """Raise ``UserError`` for a model whose name, to which the seed is added, is no name of a folder."""
    for name in names:
        is_word = name.isprintable() and name.strip(" .") and not name.startswith("-")
        if not is_word or "/" in name or len(os.fsencode(name)) > _MOST_NAME:
            raise section.error(
                shown(name),
                f"cannot name folders of runs: at most {_MOST_NAME} bytes, printable, without / and with no first -",
            )


def option_words(section: Section, name: str, text: Any, also_own: Mapping[str, str] | None = None) -> list[str]:
    """Return the options of ``smlp vision train`` in a text as words.

    Args:
        section, name: where the text stands, for messages.
        text: the value there.
        also_own: options that the caller decides beside those of the runner, each with the end of the sentence.

    Raises:
        UserError: it is no text, or sets an option of the runner.
    """
    if not isinstance(text, str):
        raise section.error(name, "must be options of smlp vision train")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise section.error(name, f"cannot be split into words: {error}") from None
    for own, what in {**dict.fromkeys(_OWN, "which the command sets"), **(also_own or {})}.items():
        if any(word == own or word.startswith(f"{own}=") for word in words):
            raise section.error(name, f"has {own}, {what}")
    return words


def options_of(comparison: Comparison, words: list[str], parse: Callable[[list[str]], Namespace]) -> Namespace:
    """Return what ``parse`` makes of a model's words, with the width of the larger network of --change-resolution."""
    args = parse([f"--data-dir={comparison.data}", *comparison.options, *words])
    if args.initial_checkpoint and args.change_resolution:
        at_resolution(read_checkpoint(args.initial_checkpoint), args.initial_checkpoint, args)
    return args


def costs(comparison: Comparison, parse: Callable[[list[str]], Namespace]) -> dict[str, dict[str, int]]:
    """Count the parameters, and the FLOPs of the forward pass of one image (2 for a multiply-add), of each model.

    Args:
        comparison: what to compare.
        parse: reads the words of ``smlp vision train``.

    Raises:
        UserError: they are trained for unlike numbers of epochs.
    """
    count = functools.cache(lambda split: len(class_names(open_split(comparison.data, split, None))))
    found, epochs = {}, {}
    for name, words in comparison.models.items():
        args = options_of(comparison, words, parse)
        if not args.num_classes:  # without data, all models get ImageNet's number
            args.num_classes = count(args.train_split) if Path(comparison.data).is_dir() else 1000
        model = create_model(args).eval()
        image = torch.zeros(1, *image_config(args, model)["input_size"])
        # in plain products: the counter has no formula for a CPU's own attention, and would take it for free
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(image)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        found[name] = {"flops": counter.get_total_flops(), "parameters": parameters}
        _, epochs[name] = schedule_of(args, SGD(model.parameters()))
    (first, number), *others = epochs.items()
    for name, other in others:
        if other != number:
            raise UserError(f"{name} is trained for {other} epochs and {first} for {number}: they must be the same")
    return found


def check_equal_flops(counted: dict[str, dict[str, int]]) -> None:
    """Compare the models' FLOPs.

    Raises:
        UserError: they differ by more than :data:`TOLERANCE`.
    """
    flops = {name: own["flops"] for name, own in counted.items()}
    fewest, most = min(flops, key=flops.__getitem__), max(flops, key=flops.__getitem__)
    if flops[most] / flops[fewest] - 1 > TOLERANCE:
        raise UserError(
            f"an image costs {flops[most]:,} FLOPs in {most} and {flops[fewest]:,} in {fewest}: they may differ by "
            f"{TOLERANCE:.0%}"
        )


class _RunChain(Chain):
    """One training; a stopped one is resumed after its last complete epoch."""

    def __init__(self, folder: Path, words: list[str], threads: int, failed: list[str]) -> None:
        self.folder, self.words, self.threads, self.failed = folder, words, threads, failed
        self.started = False

    def next_step(self, slot: int) -> Step | None:
        if self.started:
            return None
        self.started = True
        found = checkpoints_in(self.folder)
        words = [*this_program(), "vision", "train", *self.words]
        if found:  # timm removes the last one before it puts another in its place
            newest = found[0] if found[0].name == LAST else max(found, key=lambda path: path.stat().st_mtime)
            words = [*without_options(words, "--initial-checkpoint"), "--resume", path_word(newest)]
            words = [word for word in words if word != "--change-resolution"]
        else:  # it ended while the first one was written, after its row of the summary
            (self.folder / SUMMARY).unlink(missing_ok=True)
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        return Step(self.folder.name, words, self.folder.parent / f"{self.folder.name}.log", threads)

    def ended(self, result: Ended) -> None:
        if result.status == 0:
            used = {"seconds": result.seconds, "peak_memory_mib": result.peak_memory_mib}
            checkpoint = self.folder / LAST
            try:
                last = read_checkpoint(str(checkpoint), is_mapped=True).get("epoch") if checkpoint.exists() else None
                epochs = last + 1 if isinstance(last, int) else None
                _summary(self.folder / SUMMARY, epochs)
                write_json(self.folder / _DONE, {**used, "epochs": epochs})
            except UserError as error:
                self.failed.append(str(error))
                return
            print(f"{result.step.name}: done in {result.seconds:.0f} s", flush=True)
        elif not result.is_stopping:
            self.failed.append(f"{result.step.name} ended with status {result.status}: see {result.step.output}")


def compare_at_equal_flops(
    comparison: Comparison, out: Path, jobs: int, parse: Callable[[list[str]], Namespace], dry_run: bool = False
) -> int:
    """Train what is left, and write ``results.json``, ``results.md`` and, with matplotlib, ``curves.png``.

    Arguments, result and errors are those of :func:`train_all`, and :func:`check_equal_flops`.
    """
    counted = costs(comparison, parse)
    check_equal_flops(counted)
    status = train_all(comparison, counted, out, jobs, dry_run)
    if not dry_run:
        _write_results(comparison, counted, out)
    return status


def run_folder(out: Path, name: str, seed: int) -> Path:
    """Return the folder of a run."""
    return out / "runs" / f"{name}-s{seed}"


def train_all(
    comparison: Comparison,
    counted: dict[str, dict[str, int]],
    out: Path,
    jobs: int,
    dry_run: bool = False,
    started: Callable[[], None] | None = None,
    reports: Iterable[str] = (),
) -> int:
    """Train what is left of a comparison, each run in a process of its own.

    Args:
        comparison: what to compare.
        counted: of :func:`costs`.
        out: folder of runs and results; the same command resumes.
        jobs: trainings at a time.
        dry_run: print costs and commands instead.
        started: called before the first run, once ``out`` is known to be of this comparison.
        reports: further files that the caller writes to ``out``.

    Returns:
        The exit status: 0 all runs are done, 1 one failed, 75 stopped by a signal, 130 by SIGINT.

    Raises:
        UserError: ``out`` holds runs of other settings.
    """
    for name, cost in counted.items():
        print(
            f"{name}: {cost['parameters']:,} parameters, {cost['flops'] / 1e6:,.2f} million FLOPs an image", flush=True
        )
    runs = {
        run_folder(out, name, seed): [
            *(f"--data-dir={comparison.data}", *comparison.options, *words, "--seed", str(seed)),
            *(f"--output={out / 'runs'}", "--experiment", f"{name}-s{seed}"),  # names may begin with a dash
        ]
        for name, words in comparison.models.items()
        for seed in comparison.seeds
    }
    if dry_run:
        for words in runs.values():
            print(f"smlp vision train {shlex.join(words)}")
        return 0
    if not Path(comparison.data).is_dir():
        raise UserError(f"there is no folder {comparison.data} with images: smlp vision data makes one")
    failed: list[str] = []
    if not (out / "comparison.json").is_file():
        check_no_other(out, ("runs", "results.json", "results.md", "curves.png", *reports))
    with Folder(out).locked("comparison of image models"):
        _settle(comparison, out / "comparison.json")
        if started is not None:
            started()
        left = {folder: words for folder, words in runs.items() if not (folder / _DONE).is_file()}
        print(f"{len(left)} of {len(runs)} runs to do, {jobs} at a time", flush=True)
        threads = max(1, num_cores() // jobs)
        chains = [_RunChain(folder, words, threads, failed) for folder, words in left.items()]
        stopped = run_chains(chains, jobs, lambda: None)
    for message in failed:
        print(f"failed: {message}", flush=True)
    if stopped is not None:
        return stopped_by(stopped)
    return 1 if failed else 0


def _settle(comparison: Comparison, path: Path) -> None:
    """Record the settings of the runs; more models and seeds may be added later.

    Raises:
        UserError: the folder holds runs of something else.
    """
    planned = {"data": comparison.data, "options": comparison.options, "models": comparison.models}
    images = {split: _digest(split_folder(comparison.data, split)) for split in _splits(comparison)}
    checkpoints = {str(file): sha256_of(file) for file in _initial_checkpoints(comparison) if file.is_file()}
    is_begun = any((path.parent / "runs").glob("*/*.pth.tar"))
    older = read_json(path, _RECORDED) if path.is_file() else {**planned, "images": images}
    models = {name: words for name, words in older["models"].items() if name in comparison.models}
    before, first = older.get("images") or {}, (is_begun and older.get("checkpoints")) or {}
    for name, old, new in (
        *((name, older[name], planned[name]) for name in ("data", "options")),
        *((f"images.{split}", before.get(split, digest), digest) for split, digest in images.items()),
        *((f"the sha256 of {file}", first.get(file, digest), digest) for file, digest in checkpoints.items()),
        *((f"models.{name}", words, comparison.models[name]) for name, words in models.items()),
    ):
        if old != new:
            raise UserError(f"{path.parent} was made with {name} = {old}, not {new}: give another --out")
    files = {"images": {**before, **images}, "checkpoints": {**first, **checkpoints}}
    write_json(path, {**planned, **files, "models": {**older["models"], **comparison.models}})


def _splits(comparison: Comparison) -> set[str]:
    """Return the splits that the models are trained and validated on."""
    return _values_of(comparison, {"--train-split": "train", "--val-split": "validation"})


def _initial_checkpoints(comparison: Comparison) -> list[Path]:
    """Return the files that the models begin from."""
    return [Path(file) for file in _values_of(comparison, {"--initial-checkpoint": ""}) if file]


def _values_of(comparison: Comparison, options: Mapping[str, str]) -> set[str]:
    """Return the values of options, given with their defaults, over all models."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for option, default in options.items():
        parser.add_argument(option, default=default)
    found = (parser.parse_known_args([*comparison.options, *words])[0] for words in comparison.models.values())
    return {value for args in found for value in vars(args).values()}


def _digest(folder: Path) -> str:
    """Return a checksum of a split's images: of the contents, or of names and sizes if they are many bytes."""
    endings = get_img_extensions()
    images = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in endings and path.is_file())
    sizes = [(str(path.relative_to(folder)), path.stat().st_size) for path in images]
    rows: Iterable[tuple[str, Any]] = sizes
    if sum(size for _, size in sizes) <= _MOST_READ:
        rows = ((name, path.read_bytes()) for (name, _), path in zip(sizes, images, strict=True))
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()


def finished_runs(out: Path, names: Iterable[str], seeds: Iterable[int]) -> dict[str, dict[int, list[dict[str, str]]]]:
    """Return the rows of ``summary.csv``, one for each epoch, of all finished runs, by model and seed."""
    found: dict[str, dict[int, list[dict[str, str]]]] = {name: {} for name in names}
    for name, by_seed in found.items():
        for seed in seeds:
            folder = run_folder(out, name, seed)
            if (folder / _DONE).is_file():
                epochs = read_json(folder / _DONE, {"epochs": Maybe(int)}).get("epochs")  # of older runs unknown
                by_seed[seed] = _summary(folder / SUMMARY, epochs)
    return found


def _summary(path: Path, num_epochs: int | None) -> list[dict[str, str]]:
    """Return the rows of a run, one for each epoch, whose entries that reports read are checked to be numbers.

    Raises:
        UserError: the file is missing or damaged, or ends before or after the run.
    """
    remedy = f"remove {path.parent} to train this run again"
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
        epochs = [int(row["epoch"]) for row in rows]
        is_whole = bool(rows) and epochs == list(range(epochs[0], epochs[0] + len(rows)))
        is_whole = is_whole and all(math.isfinite(float(row[name])) for row in rows for name in _REPORTED)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {remedy}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error):
        is_whole = False
    if not is_whole:
        raise UserError(
            f"{path} is damaged: each epoch needs a row with finite numbers as {' and '.join(_REPORTED)}; {remedy}"
        )
    if num_epochs not in (None, epochs[-1] + 1):
        raise UserError(f"{path} ends with epoch {epochs[-1]}, and the run had {num_epochs} epochs: {remedy}")
    return rows


def _write_results(comparison: Comparison, counted: dict[str, dict[str, int]], out: Path) -> None:
    curves: dict[str, dict[int, list[float]]] = {}
    speeds: dict[str, dict[int, float]] = {}
    for name, by_seed in finished_runs(out, comparison.models, comparison.seeds).items():
        curves[name] = {seed: [float(row["eval_top1"]) for row in rows] for seed, rows in by_seed.items()}
        speeds[name] = {
            seed: median(float(row["train_images_per_second"]) for row in rows) for seed, rows in by_seed.items()
        }
    if not any(curves.values()):
        return  # nothing has been trained yet
    table = _table(comparison, counted, curves, speeds)
    write_json(out / "results.json", {**table.as_json(), "curves": curves})
    text = "\n\n".join([f"# {table.title}", table.markdown(), *table.notes]) + "\n"
    write_whole(out / "results.md", text.encode())
    print(text)
    from smlp.plots.drawing import can_draw, save

    if can_draw("curves.png"):
        save(_draw(curves), out / "curves.png")


def _table(
    comparison: Comparison,
    counted: dict[str, dict[str, int]],
    curves: dict[str, dict[int, list[float]]],
    speeds: dict[str, dict[int, float]],
) -> Table:
    """Make the table: accuracy after the last epoch, and paired differences from the first model."""
    baseline = next(iter(comparison.models))
    last = {name: {seed: curve[-1] for seed, curve in by_seed.items()} for name, by_seed in curves.items()}
    rows = []
    for name in comparison.models:
        source = f"runs/{name}-s*/{SUMMARY}: eval_top1"
        row = {
            "model": label(name, "comparison.json: models"),
            "parameters": amount(counted[name]["parameters"] / 1e6, ",.3f", "counted"),
            "mflops": amount(counted[name]["flops"] / 1e6, ",.2f", "counted"),
        }
        if last[name]:
            row["top1"] = mean_cell(Estimate(last[name]), ".2f", source)
            by_seed = ", ".join(f"{value:.2f}" for value in last[name].values())
            row["seeds"] = label(by_seed, source)
            row["speed"] = mean_cell(Estimate(speeds[name]), ",.0f", f"runs/{name}-s*/{SUMMARY}: images per second")
        if name != baseline:
            row |= difference_cells(last[name], last[baseline], source)
        rows.append(row)
    columns = [
        Column("model", "model", "comparison.json: models"),
        Column("parameters", "parameters (M)", "counted"),
        Column("mflops", "MFLOPs an image", "forward pass, 2 for a multiply-add"),
        Column("top1", "top-1 (%)", "of validation after the last epoch"),
        Column("seeds", "by seed", "of validation after the last epoch"),
        Column("difference", f"minus {baseline} (points)", "paired by seed"),
        VERDICT_COLUMN,
        Column("speed", "images/s in training", "median over epochs; with loading"),
    ]
    notes = [
        "Accuracy is that on validation after the last epoch; no epoch was chosen. Intervals are Student's t, 95 %, "
        "over seeds. A seed decides initial weights, order and augmentation; other images would give other "
        "accuracies, which these intervals do not cover. Runs that trained at the same time shared the machine, so "
        "speeds are rough."
    ]
    return Table("vision", "Image models at equal FLOPs", columns, rows, notes)


def _draw(curves: dict[str, dict[int, list[float]]]) -> Figure:
    """Draw accuracy by epoch: the mean over seeds and its interval."""
    from smlp.plots.drawing import OKABE_ITO, entry, legend, new_figure

    figure = new_figure(6.5, 4.2, "Validation accuracy by epoch")
    axes = figure.subplots()
    for (name, by_seed), colour in zip(curves.items(), itertools.cycle(OKABE_ITO.values()), strict=False):
        if not by_seed:
            continue
        epochs = range(1, min(map(len, by_seed.values())) + 1)
        found = [Estimate({seed: curve[epoch - 1] for seed, curve in by_seed.items()}) for epoch in epochs]
        axes.plot(epochs, [one.mean for one in found], label=entry(name), color=colour)
        if found[0].half is not None:
            lows, highs = [one.low for one in found], [one.high for one in found]
            axes.fill_between(epochs, lows, highs, color=colour, alpha=0.2, linewidth=0)  # type: ignore[arg-type]
    axes.set(xlabel="epochs", ylabel="top-1 (%)")
    axes.grid(alpha=0.3, linewidth=0.6)
    legend(axes, frameon=False)
    return figure
