"""Compare the same models after different numbers of tokens: from when on is one ahead of another?

    python scripts/compare_budgets.py --baseline gMLP --to budgets runs/compare/experts_*

Each folder is of ``smlp compare run`` with the same models and another token budget. Writes ``budgets.csv`` and a
figure, and prints a table: how much higher the perplexity of each model is than the baseline's, seed by seed, after
each budget, and the learning rate, which has to be a good one for each. What a folder lacks is left out there.

``--subset test`` reads the scores on test instead of those on the first set that was scored. ``--predict TOKENS`` also
fits a line to the differences over the logarithm of the tokens, and reads it at TOKENS.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from smlp.cli.main import guarded
from smlp.errors import UserError
from smlp.experiments.report.draw_curves import styles
from smlp.experiments.report.quality import AFTER_PREFIX, difference, percent_text, perplexity
from smlp.experiments.report.results import Model, Results, read_results
from smlp.experiments.report.table import EMPTY, Cell, Estimate, markdown_line, t_quantile
from smlp.files import check_folder, check_no_other
from smlp.plots.drawing import FORMATS, legend, new_figure, save

#: models are drawn side by side, each at this many times the tokens of the one before, or intervals would overlap
_ASIDE = 1.02
TABLE = "budgets.csv"
COLUMNS = ("model", "tokens", "seeds", "perplexity", "pairs", "difference_percent", "low", "high", "lr", "folder")


def in_order(folders: Sequence[Path], subset: str | None) -> list[Results]:
    """Read the folders and order them by budget.

    Raises:
        UserError: one cannot be read, two have the same budget, they count different positions, or differ in the text
            that is scored, the vocabulary, or the size of a model.
    """
    experiments = sorted((read_results(folder) for folder in folders), key=tokens_of)
    known: dict[str, tuple[object, Path]] = {}
    for experiment in experiments:
        for what, value in _facts(experiment, subset).items():
            if value is None:
                continue
            first, folder = known.setdefault(what, (value, experiment.folder))
            if first != value:
                raise UserError(f"{folder} and {experiment.folder} cannot be compared: {what} is {first} and {value}")
    for one, other in itertools.pairwise(experiments):
        first, second = (max(model.config.prefix_tokens for model in some.models) for some in (one, other))
        if first != second:
            raise UserError(
                f"{one.folder} counts the positions after a prefix of {first} tokens, and {other.folder} those after "
                f"{second}, because a model with a prefix is in one of them only: give experiments with the same models"
            )
        if tokens_of(one) == tokens_of(other):
            raise UserError(f"{one.folder} and {other.folder} have the same budget, {tokens_of(one):,} tokens")
    return experiments


def _facts(experiment: Results, subset: str | None) -> dict[str, object]:
    """Return what must be the same in all experiments, if they have it."""
    scored = subset or experiment.subsets[0]
    text = (experiment.data.get("splits", {}).get(scored) or {}).get("sha256")
    sizes = {f"the number of parameters of {model.name}": int(model.num_parameters) for model in experiment.models}
    return {
        "the set that is scored": scored,
        "the size of the vocabulary": experiment.data.get("vocab_size"),
        f"the SHA-256 of {scored}": text,
        **sizes,
    }


def tokens_of(experiment: Results) -> int:
    """Return the tokens of each run."""
    return experiment.updates * experiment.tokens_per_update


def amount_of(tokens: int) -> str:
    """Return a number of tokens as in tables and figures."""
    return f"{tokens:,}" if tokens < 100_000 else f"{tokens / 1e6:.2f} M"


def find(experiment: Results, name: str) -> Model | None:
    """Return the model of a name; None if the experiment does not have it."""
    return next((model for model in experiment.models if model.name == name), None)


def rate_of(experiment: Results, name: str) -> str:
    """Return the learning rate that a model was trained with; empty if the runs do not tell."""
    rates = ((run.record.get("made_with") or {}).get("lr") for run in experiment.runs if run.model.name == name)
    return next((str(rate) for rate in rates if rate is not None), "")


def names_of(experiments: Sequence[Results], baseline: str) -> list[str]:
    """Return the names of all models, the baseline first.

    Raises:
        UserError: an experiment lacks the baseline.
    """
    for experiment in experiments:
        if find(experiment, baseline) is None:
            names = ", ".join(model.name for model in experiment.models)
            raise UserError(f"--baseline {baseline}: the models of {experiment.folder} are {names}")
    names = dict.fromkeys(model.name for experiment in experiments for model in experiment.models)
    return [baseline, *(name for name in names if name != baseline)]


def measured(experiment: Results, name: str, baseline: str, subset: str) -> tuple[Estimate | None, Cell | None]:
    """Return a model's perplexity per token, and how much higher it is than the baseline's, if a seed has both."""
    model, other = find(experiment, name), find(experiment, baseline)
    if model is None:
        return None, None
    found = perplexity(experiment, model, subset, AFTER_PREFIX)
    against = difference(experiment, model, other, subset)[1] if found and model is not other else EMPTY
    return found, None if against is EMPTY else against


def write_table(experiments: Sequence[Results], names: Sequence[str], baseline: str, subset: str, out: Path) -> str:
    """Write ``budgets.csv``; return it as Markdown, shortened."""
    heads = [f"{amount_of(tokens_of(experiment))} tokens" for experiment in experiments]
    lines = [f"| model | parameters (M) | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(heads)}"]
    with (out / TABLE).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for name in names:
            cells, parameters = [], 0.0
            for experiment in experiments:
                found, against = measured(experiment, name, baseline, subset)
                if found is None:
                    cells.append("–")
                    continue
                parameters = find(experiment, name).num_parameters
                values = (len(against.samples), against.value, against.low, against.high) if against else (None,) * 4
                origin = [rate_of(experiment, name), experiment.folder.name]
                table.writerow([name, tokens_of(experiment), found.count, found.mean, *values, *origin])
                cells.append(f"{found.mean:.2f}" + (f" ({against.text})" if against else ""))
            lines.append(markdown_line([name, f"{parameters / 1e6:.2f}", *cells]))
    rates = [dict.fromkeys(rate for name in names if (rate := rate_of(experiment, name))) for experiment in experiments]
    return "\n".join([*lines, f"| learning rate | | {' | '.join(', '.join(some) or '–' for some in rates)} |"])


def fitted(experiments: Sequence[Results], name: str, baseline: str, subset: str, tokens: float) -> str | None:
    """Fit how much higher a model's perplexity is than the baseline's, as a line over the logarithm of the tokens.

    Every seed of every budget is a point, and the line is that of least squares.

    Args:
        experiments: of at least two budgets.
        name, baseline: the models.
        subset: whose scores.
        tokens: where the line is read.

    Returns:
        a row of a Markdown table: model, points, change for ten times the tokens, and difference at ``tokens``, both in
        per cent with the 95 % interval of the line; None with fewer than three points or a single budget.
    """
    from scipy.stats import linregress

    points = []
    for experiment in experiments:
        model, other = find(experiment, name), find(experiment, baseline)
        logs = difference(experiment, model, other, subset)[0] if model else None
        points += [
            (math.log10(tokens_of(experiment) / tokens), value) for value in (logs.samples.values() if logs else ())
        ]
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return None
    line = linregress(*zip(*points, strict=True))
    cells = []
    for value, error in ((line.slope, line.stderr), (line.intercept, line.intercept_stderr)):
        error = 0.0 if math.isnan(error) else error  # the points lie on the line, but for rounding
        cells.append(percent_text(value, t_quantile(len(points) - 2) * error))
    return markdown_line([name, str(len(points)), *cells])


def draw(experiments: Sequence[Results], names: Sequence[str], baseline: str, subset: str, out: Path) -> None:
    """Write ``budgets.png`` and ``.svg``."""
    widest = max(experiments, key=lambda experiment: len(experiment.models))
    looks = styles(widest.models, by_family=False)
    figure = new_figure(7.5, 4.6, f"Perplexity against that of {baseline} after each budget: lower is better")
    axes = figure.subplots()
    axes.axhline(0, color="0.3", linewidth=1)
    axes.annotate(
        baseline,
        (tokens_of(experiments[-1]), 0),
        xytext=(0, -10),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        parse_math=False,
    )
    for number, name in enumerate(names[1:]):
        aside = _ASIDE ** (number - (len(names) - 2) / 2)
        points = []
        for experiment in experiments:
            _, against = measured(experiment, name, baseline, subset)
            if against is not None and against.value is not None:
                low = against.value if against.low is None else against.low
                high = against.value if against.high is None else against.high
                points.append((tokens_of(experiment) * aside, against.value, against.value - low, high - against.value))
        if points:
            tokens, values, below, above = zip(*points, strict=True)
            options = looks[name].line_options(len(points), size=6) if name in looks else {}
            axes.errorbar(tokens, values, yerr=(below, above), label=name, capsize=3, elinewidth=1, **options)
    axes.set_xscale("log")
    ticks = [tokens_of(experiment) for experiment in experiments]
    axes.set_xticks(ticks, [amount_of(tokens) for tokens in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens of training")
    axes.set_ylabel(f"perplexity on {subset} above that of {baseline} (%), 95 % intervals", parse_math=False)
    axes.grid(alpha=0.3, linewidth=0.6)
    legend(axes, fontsize=8)
    for ending in FORMATS:
        save(figure, out / f"budgets.{ending}")


def main() -> None:
    """Read, write, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUT", help="folder of smlp compare run")
    parser.add_argument("--baseline", required=True, metavar="MODEL", help="compare all models with this one")
    parser.add_argument("--to", required=True, type=Path, metavar="DIR", help="folder for tables and figure")
    parser.add_argument("--subset", metavar="NAME", help="whose scores (default: the first of each experiment)")
    parser.add_argument("--predict", type=float, metavar="TOKENS", help="also fit a line, and read it at TOKENS")
    args = parser.parse_args()
    if args.predict is not None and not 1 <= args.predict < math.inf:
        raise UserError(f"--predict must be a number of tokens, at least 1, got {args.predict}")
    check_folder(args.to, "--to", "tables and figure")
    if not (args.to / TABLE).is_file() or not (args.to / TABLE).read_bytes().startswith(",".join(COLUMNS).encode()):
        check_no_other(args.to, (TABLE, *(f"budgets.{ending}" for ending in FORMATS)), "--to")
    experiments = in_order(args.folders, args.subset)
    names, subset = names_of(experiments, args.baseline), args.subset or experiments[0].subsets[0]
    for experiment in experiments:
        if subset not in experiment.subsets:
            raise UserError(
                f"--subset {subset}: the runs of {experiment.folder} scored {', '.join(experiment.subsets)}"
            )
    if not any(measured(experiment, args.baseline, args.baseline, subset)[0] for experiment in experiments):
        folders = ", ".join(str(experiment.folder) for experiment in experiments)
        raise UserError(f"--baseline {args.baseline}: no run of it has finished in {folders}")
    args.to.mkdir(parents=True, exist_ok=True)
    table = write_table(experiments, names, args.baseline, subset, args.to)
    draw(experiments, names, args.baseline, subset, args.to)
    print(table)
    if args.predict is not None:
        rows = [row for name in names[1:] if (row := fitted(experiments, name, args.baseline, subset, args.predict))]
        if not rows:
            raise UserError("--predict needs runs of a model and the baseline after at least two budgets, three in all")
        head = f"| model | runs | for ten times the tokens | at {args.predict:.3g} tokens |"
        print("\n".join(["", head, "|---|---:|---:|---:|", *rows]))


if __name__ == "__main__":
    sys.exit(guarded(main))
