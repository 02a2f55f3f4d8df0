"""Train image models along an axis, such as the effective width at fixed connections, and report (section 5).

A sweep is a YAML file of series of models; each point of a series is a model:

    title: Error and effective width
    paper: "Figure 5: the error falls as the width grows"
    data: data/cifar10                  # folder of smlp vision data
    seeds: [1, 2, 3]
    x: width                            # of the figure: width, channels, tokens, layers or density
    connections: 32768                  # that every point must have in a layer; leave it out where they differ
    similarity: Mixer                   # series of one point that the others' features are compared with, if wanted
    options: --img-size 32 --epochs 15  # of smlp vision train, for all models
    series:
      S-Mixer:
        options: --model smlp_s_mixer
        settings: {num_layers: 4}       # of all points
        points:
          - {embed_dim: 4, mixed_tokens: 126}
          - {embed_dim: 32, mixed_tokens: 32}
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.experiments.json_files import Each, Maybe, read_json, write_json
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
from smlp.experiments.yaml_file import Section, read_yaml
from smlp.files import write_whole
from smlp.nn.build import without_weights
from smlp.vision.checkpoints import create_model
from smlp.vision.compare import (
    FOR_ALL,
    Comparison,
    check_names,
    costs,
    finished_runs,
    option_words,
    options_of,
    read_seeds,
    run_folder,
    train_all,
)
from smlp.vision.data import open_split
from smlp.vision.model import ImageModel
from smlp.vision.presets import ImageConfig
from smlp.vision.setup import LAST
from smlp.wide_sparse.counts import layer_connections
from smlp.wide_sparse.features import branches, compare_checkpoints

_OF_POINTS = {"--model-kwargs": "whose values belong in settings and points"}
#: source of differences of errors
_ERRORS = "runs/*/summary.csv: eval_top1, paired by seed"
#: axes, with what they are called
AXES = {
    "width": "effective width m",
    "channels": "channels C",
    "tokens": "tokens S",
    "layers": "blocks L",
    "density": "density p",
}
#: what tells models apart that are at the same place of an axis
_SHAPE = ("channels", "tokens", "layers")
#: connections may differ by this share from those of the file: S and C are whole numbers
TOLERANCE = 0.05
_RECORD = "sweep.json"
_REPORTS = (_RECORD, "report.md", "report.json", "report.png")
_RECORDED = {
    **{"title": str, "paper": str, "x": str, "similarity": Maybe(str), "series": Each([str]), "seeds": [int]},
    **{"data": str, "split": Maybe(str), "facts": Each(dict)},
}
#: batches of images for CKA
_BATCH, _BATCHES, _FEWEST = 128, 8, 4


@dataclass(frozen=True)
class Sweep:
    """The content of the file; ``series`` has the names of the models of each series, in order."""

    title: str
    paper: str
    x: str
    connections: int | None
    similarity: str | None
    comparison: Comparison
    series: dict[str, list[str]]


def read_sweep(path: Path) -> Sweep:
    """Read the file of a sweep.

    Raises:
        UserError: an entry is missing, unknown or of another type, or two points are the same.
    """
    section = Section("", read_yaml(path), path)
    title, paper = section.text("title") or path.stem, section.text("paper") or ""
    data, x, seeds = section.text("data"), section.text("x", "width", AXES) or "", read_seeds(section)
    connections, similarity = section.count("connections"), section.text("similarity")
    options = option_words(section, "options", section.text("options", ""), _OF_POINTS)
    series: dict[str, list[str]] = {}
    models: dict[str, list[str]] = {}
    named = section.section("series")
    by_name = named.items()
    check_names(named, by_name)
    for name, content in by_name.items():
        one = Section(f"series.{name}", content, path)
        own = {**_OF_POINTS, **FOR_ALL}
        words = option_words(one, "options", one.text("options", ""), own)
        common = one.section("settings").settings()
        points = [Section(f"series.{name}.points", point, path).settings() for point in one.values("points")]
        one.end()
        if not points:
            raise one.error("points", "needs at least one point")
        series[name] = []
        for point in points:
            settings = {**common, **point}
            full = " ".join([name, *(f"{key}={value}" for key, value in point.items())])
            if full in models:
                raise one.error("points", f"has {full!r} twice")
            series[name].append(full)
            models[full] = [*words, "--model-kwargs", *(f"{key}={value}" for key, value in settings.items())]
    section.end()
    check_names(named, models)
    if not data or len(models) < 2:
        raise UserError(f"{path}: data and at least two points are needed")
    if similarity is not None and len(series.get(similarity, ())) != 1:
        raise section.error("similarity", f"must name a series with exactly one point, got {similarity!r}")
    return Sweep(title, paper, x, connections, similarity, Comparison(data, options, models, seeds), series)


def run_sweep(
    sweep: Sweep, out: Path, jobs: int, parse: Callable[[list[str]], Namespace], dry_run: bool = False
) -> int:
    """Train what is left of a sweep with the runner of ``smlp vision compare``, and report.

    Args:
        sweep: what to train.
        out: folder of runs and report; the same command resumes.
        jobs: trainings at a time.
        parse: reads the words of ``smlp vision train``.
        dry_run: print costs and commands instead.

    Returns:
        The exit status, as :func:`smlp.vision.compare.train_all`.

    Raises:
        UserError: a model has no place on the axis, its connections differ, or ``out`` holds other runs.
    """
    counted, facts, num_branches = costs(sweep.comparison, parse), {}, {}
    for name, words in sweep.comparison.models.items():
        args = options_of(sweep.comparison, words, parse)
        with without_weights():
            model = create_model(args)
        if not isinstance(model, ImageModel):
            raise UserError(f"{name}: --model {args.model} is timm's, but a sweep needs smlp_* models")
        facts[name], num_branches[name] = {**counted[name], **_facts(model.config)}, len(branches(model))
        if facts[name][sweep.x] is None:
            raise UserError(f"{name} has no place on the axis x={sweep.x}: its features are not divided into tokens")
        found, wanted = facts[name]["connections"], sweep.connections
        if wanted is not None and abs(found / wanted - 1) > TOLERANCE:
            raise UserError(
                f"{name} has {found:,.0f} connections in a layer, {found / wanted - 1:+.1%} from the {wanted:,} of the "
                f"sweep: they may differ by {TOLERANCE:.0%}"
            )
    if sweep.similarity is not None and len(set(num_branches.values())) > 1:
        raise UserError(f"similarity needs models with equally many branches, got {num_branches}")
    if sweep.similarity is not None and Path(sweep.comparison.data).is_dir():
        _num_images(sweep.comparison.data, args.val_split)
    given = {name: getattr(sweep, name) for name in ("title", "paper", "x", "similarity", "series")}
    more = {"data": sweep.comparison.data, "split": args.val_split, "seeds": sweep.comparison.seeds, "facts": facts}
    status = train_all(
        sweep.comparison, counted, out, jobs, dry_run, lambda: write_json(out / _RECORD, {**given, **more}), _REPORTS
    )
    if not dry_run and any(finished_runs(out, facts, sweep.comparison.seeds).values()):
        write_report(out)
    return status


def _facts(config: ImageConfig) -> dict[str, float | None]:
    """Return where a model stands on each axis, and its connections; None where it has no place."""
    is_flat = config.block == "sparse_mlp"
    tokens, channels = config.tokens_of_layers()[-1][1], config.embed_dim
    return {
        "width": config.width,
        "channels": None if is_flat else channels,
        "tokens": None if is_flat else tokens,
        "layers": config.num_layers,
        "density": config.mask_density if is_flat else (1 / tokens + 1 / channels) / 2,
        "connections": layer_connections(config),
    }


def write_report(out: Path) -> None:
    """Write and print ``report.md`` and ``report.json``, and ``report.png`` if matplotlib is there, from finished runs.

    Raises:
        UserError: the folder is not that of a sweep, or none of its runs has ended.
    """
    if not (out / _RECORD).is_file():
        raise UserError(f"{out} holds no sweep of smlp wide-sparse run: there is no {_RECORD}")
    record = read_json(out / _RECORD, _RECORDED)
    errors = {
        name: {seed: 100 - float(rows[-1]["eval_top1"]) for seed, rows in by_seed.items()}
        for name, by_seed in finished_runs(out, record["facts"], record["seeds"]).items()
    }
    if not any(errors.values()):
        raise UserError(f"{out}: no run has ended yet")
    tables = [_points_table(record, errors, *_similarities(out, record, errors)), *_series_tables(record, errors)]
    parts = [f"# {record['title']}"]
    if record["paper"]:
        parts.append(f"The paper: {record['paper']}.")
    for table in tables:
        parts += [table.markdown(), *table.notes]
    text = "\n\n".join(parts) + "\n"
    write_whole(out / "report.md", text.encode())
    write_json(out / "report.json", [table.as_json() for table in tables])
    print(text)
    from smlp.plots.drawing import can_draw

    if can_draw("report.png"):
        _draw(record, errors, out / "report.png")


def _points_table(
    record: dict[str, Any],
    errors: dict[str, dict[int, float]],
    similarities: dict[str, dict[int, float]],
    without: Sequence[str] = (),
) -> Table:
    """Make the table of all models: errors, and differences from the widest of each series, or its first.

    ``without`` are sentences about similarities that are missing.
    """
    rows, facts, source = [], record["facts"], "sweep.json: facts"
    differ = any(len({facts[name]["width"] for name in names}) > 1 for names in record["series"].values())
    for series, names in record["series"].items():
        widest = max(names, key=lambda name: facts[name]["width"])
        for name in names:
            own = facts[name]
            row = {
                "series": label(series),
                **{axis: amount(own[axis], ",.4g" if axis == "density" else ",d", source) for axis in AXES},
                "connections": amount(own["connections"], ",.0f", source),
                "mflops": amount(own["flops"] / 1e6, ",.2f", "counted"),
                "parameters": amount(own["parameters"] / 1e6, ",.3f", "counted"),
            }
            if errors[name]:
                row["error"] = mean_cell(Estimate(errors[name]), ".2f", f"runs/{name}-s*/summary.csv: eval_top1")
            if similarities.get(name):
                row["cka"] = mean_cell(Estimate(similarities[name]), ".3f", "last.pth.tar of both")
            rows.append(row if name == widest else {**row, **difference_cells(errors[name], errors[widest], _ERRORS)})
    columns = [
        Column("series", "series", "sweep.json: series"),
        *(Column(axis, head.split()[-1], head) for axis, head in AXES.items()),
        Column("connections", "connections", "mean of the layers of the last block"),
        Column("mflops", "MFLOPs an image", "forward pass, 2 for a multiply-add"),
        Column("parameters", "parameters (M)", "counted, with masked weights"),
        Column("error", "error (%)", "of validation after the last epoch"),
        Column("difference", f"minus the {'widest' if differ else 'first'} (points)", "paired by seed"),
        VERDICT_COLUMN,
        Column("cka", f"CKA with {record['similarity']}", "mean over branches of the same number"),
    ]
    notes = [
        "m is the effective width, C channels, S tokens, L blocks, p the density. The error is top-1 on validation "
        f"after the last epoch; no epoch was chosen. {_num_seeds(errors)}; intervals are Student's t, 95 %, "
        "over seeds, and differences are paired by seed. A difference is called seen if its interval excludes 0.",
        *without,
    ]
    return Table("points", record["title"], columns, rows, notes)


def _num_seeds(errors: dict[str, dict[int, float]]) -> str:
    counts = [len(of_seed) for of_seed in errors.values()]
    fewest, most = min(counts), max(counts)
    return f"{fewest} to {most} seeds" if fewest < most else f"{most} seed{'s' * (most != 1)}"


def _series_tables(record: dict[str, Any], errors: dict[str, dict[int, float]]) -> list[Table]:
    """Make the table of differences between the first series and the others, where they share points of the axis."""
    facts, x = record["facts"], record["x"]
    (first, own), *others = record["series"].items()
    rows = []
    for series, names in others:
        for name in names:
            partner = _at_the_place_of(name, names, own, facts, x)
            if partner is not None and (cells := difference_cells(errors[name], errors[partner], _ERRORS)):
                place = amount(facts[name][x], ",.4g" if x == "density" else ",d", "sweep.json: facts")
                rows.append({"series": label(f"{series} minus {first}"), "x": place, **cells})
    columns = [
        Column("series", "series", "sweep.json: series"),
        Column("x", AXES[x], "sweep.json: facts"),
        Column("difference", "difference of errors (points)", "paired by seed"),
        VERDICT_COLUMN,
    ]
    return [Table("series", "Between series", columns, rows)] if rows else []


def _at_the_place_of(
    name: str, series: Sequence[str], others: Sequence[str], facts: dict[str, dict[str, Any]], x: str
) -> str | None:
    """Return the model of another series at the same place of the axis: of several there, the one of the same shape."""
    here, there = ([one for one in names if facts[one][x] == facts[name][x]] for names in (series, others))
    if len(here) > 1 or len(there) > 1:
        there = [one for one in there if all(facts[one][axis] == facts[name][axis] for axis in _SHAPE)]
    return there[0] if there else None


def _num_images(data: str, split: str) -> int:
    """Return the number of images that models are compared on.

    Raises:
        UserError: there are too few.
    """
    found = len(open_split(data, split, None))
    if found < _FEWEST:
        raise UserError(f"{data} has {found} images in {split}, and similarity needs at least {_FEWEST}")
    return found


def _similarities(
    out: Path, record: dict[str, Any], errors: dict[str, dict[int, float]]
) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Return the mean CKA of branches of the same number with the model of ``similarity``, by model and seed.

    The list has a sentence for each run that has none, such as one whose checkpoint is gone.
    """
    if record["similarity"] is None:
        return {}, []
    (reference,) = record["series"][record["similarity"]]
    split = record.get("split") or "validation"  # older ones do not say
    try:
        batch = min(_BATCH, _num_images(record["data"], split))
    except UserError as error:  # the images have moved; all else is known
        return {}, [f"There is no CKA: {error}."]
    found: dict[str, dict[int, float]] = {}
    without = []
    for name in record["facts"]:
        for seed in errors[name] if name != reference else ():
            if seed in errors[reference]:
                pair = [str(run_folder(out, one, seed) / LAST) for one in (reference, name)]
                try:
                    cka = compare_checkpoints(*pair, record["data"], split, batch, _BATCHES)["cka"]
                except UserError as error:
                    without.append(f"{name} has no CKA with seed {seed}: {error}.")
                    continue
                found.setdefault(name, {})[seed] = sum(row[i] for i, row in enumerate(cka)) / len(cka)
    return found, without


def _draw(record: dict[str, Any], errors: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the error along the axis: the mean over seeds and its interval."""
    from smlp.plots.drawing import OKABE_ITO, entry, legend, new_figure, save

    figure = new_figure(6.5, 4.2, record["title"])
    axes = figure.subplots()
    places: list[float] = []
    colours = itertools.cycle(OKABE_ITO.values())
    for (series, names), colour in zip(record["series"].items(), colours, strict=False):
        found = ((record["facts"][name][record["x"]], Estimate(errors[name])) for name in names if errors[name])
        points = sorted(found, key=lambda point: point[0])
        if points:
            xs, ys = [x for x, _ in points], [one.mean for _, one in points]
            halves = [one.half or 0.0 for _, one in points]
            axes.errorbar(xs, ys, yerr=halves, marker="o", capsize=3, label=entry(series), color=colour)
            places += xs
    if max(places) > 8 * min(places):
        axes.set_xscale("log")
    axes.set(xlabel=AXES[record["x"]], ylabel="validation error (%)")
    axes.grid(alpha=0.3, linewidth=0.6)
    legend(axes, frameon=False)
    save(figure, path)
