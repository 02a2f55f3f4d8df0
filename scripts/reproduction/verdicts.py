"""Compare what the paper says about pairs of models with what was measured, and judge each sentence.

    python scripts/reproduction/verdicts.py runs/compare/ten_families

Reads the folder of ``smlp compare run`` and prints the table. With ``--to DIR`` it also writes ``verdicts.md``,
``claims.csv`` and ``claims.json``, which names the files and fields that each number comes from.

If several models of a family were run, the one closest to the paper's is compared. A verdict needs an interval that
does not hold zero: otherwise, or with a single seed, nothing is decided.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smlp.cli.main import guarded
from smlp.experiments.report import paper
from smlp.experiments.report.paper import closest_to_paper, is_of_the_paper
from smlp.experiments.report.quality import by_seed, difference, percent_cell
from smlp.experiments.report.results import Model, Results, RunResult, read_results
from smlp.experiments.report.speed import (
    SPARSE_TRANSFORMERS,
    TIMES_FIELD,
    TIMES_FILE,
    logged_tokens_per_second,
    seconds_by_round,
    training_seconds,
)
from smlp.experiments.report.studies import mean_accuracies, moe_models, task_names
from smlp.experiments.report.table import EMPTY, Cell, Column, Estimate, Table, label, log_ratios
from smlp.files import check_no_other

PERPLEXITY, SPEED, ACCURACY = "perplexity", "words per second", "zero-shot accuracy"
SAME_TIME = "perplexity at equal training time"
AGREES, DIFFERS, OPEN = "agrees", "differs", "not decided"
NOT_MEASURED = "not measured"
_TIMER = "the interval is the timer's noise alone"
#: None and an empty cell if the models have nothing in common
Measured = tuple[Estimate | None, Cell]


@dataclass(frozen=True)
class Statement:
    """``first`` has a lower (or higher) figure than ``second``; both are keys of :data:`paper.NAMES`."""

    figure: str
    first: str
    second: str
    is_lower: bool
    where: str
    #: the paper's first number over its second, less one, in per cent; None if it prints no numbers
    printed: float | None = None


def statements(size: str) -> list[Statement]:
    """Return what the paper says about sMLP.

    Args:
        size: of the models, ``small`` or ``large``: which half of Table 4 has the printed numbers.
    """
    return [
        *_table_4(size, PERPLEXITY, "perplexity", is_lower=True),
        *(Statement(PERPLEXITY, "smlp", dense, True, "Figure 4") for dense in ("dense_lm", "gmlp_lm")),
        *(Statement(PERPLEXITY, "smlp_partial", rival, True, "Figure 5, top") for rival in SPARSE_TRANSFORMERS),
        *(Statement(SAME_TIME, "smlp", rival, True, "Figure 5, bottom") for rival in SPARSE_TRANSFORMERS),
        *_table_4(size, SPEED, "words_per_second", is_lower=False),
        *(_accuracy_statement(rival) for rival in SPARSE_TRANSFORMERS),
        Statement(PERPLEXITY, "smlp_leaky", "smlp", True, "Figure 7"),
    ]


def moe_statement(experts: int, second: str, second_experts: int) -> Statement:
    """Return what the paper says about gMLP-MoE: worse than gMLP, and the more so the more experts.

    Args:
        experts: of the gMLP-MoE.
        second: ``gmlp_lm``, or ``gmlp_moe`` with fewer experts.
        second_experts: of the second; 0 for gMLP.
    """
    numbers = [paper.TABLE_7.get(count) for count in (experts, second_experts)]
    printed = None if None in numbers else _percent(*numbers)
    return Statement(PERPLEXITY, "gmlp_moe", second, False, "Table 7", printed)


def _table_4(size: str, figure: str, field: str, is_lower: bool) -> list[Statement]:
    rows = {name: getattr(row, field) for name, row in paper.TABLE_4[size].items()}
    own = rows.pop("smlp")
    where = paper.SCALES[size].table
    return [Statement(figure, "smlp", name, is_lower, where, _percent(own, value)) for name, value in rows.items()]


def _accuracy_statement(rival: str) -> Statement:
    printed = _percent(paper.TABLE_6["smlp"]["average"], paper.TABLE_6[rival]["average"])
    return Statement(ACCURACY, "smlp", rival, False, "Table 6, average", printed)


def _percent(first: float, second: float) -> float:
    return 100 * (first / second - 1)


def _perplexity(results: Results, one: Model, other: Model) -> Measured:
    return difference(results, one, other, results.subsets[0])


def _accuracy(results: Results, one: Model, other: Model) -> Measured:
    logs = log_ratios(*(mean_accuracies(results, model) for model in (one, other)))
    return by_seed(logs, results, (one, other), "zeroshot.json", "mean of tasks.*.accuracy")


def _speed(results: Results, one: Model, other: Model) -> Measured:
    """Compare by speed.json if it has both models, else by the logs."""
    rounds = [seconds_by_round(results, model) for model in (other, one)]
    timed = log_ratios(*rounds)
    if timed is not None:
        source = f"speed.json: seconds_per_update of {one.name} and {other.name}, each round's ratio; over rounds"
        return timed, percent_cell(timed, source, kind="round")
    logged = [logged_tokens_per_second(results, model) for model in (one, other)]
    logs = log_ratios(*(found.samples for found in logged)) if all(logged) else None
    return by_seed(logs, results, (one, other), TIMES_FILE, TIMES_FIELD)


def _same_time(results: Results, one: Model, other: Model) -> Measured:
    """Compare at the time when the faster of two runs with a seed ends."""
    runs = [
        {run.seed: run for run in results.done(model) if run.curve.valid and training_seconds(run)}
        for model in (one, other)
    ]
    ends = {seed: min(training_seconds(each[seed]) for each in runs) for seed in runs[0] if seed in runs[1]}
    logs = log_ratios(*({seed: _perplexity_at(each[seed], ends[seed]) for seed in ends} for each in runs))
    field = "valid_loss, where the faster of two runs with the same seed ends by its training time"
    return by_seed(logs, results, (one, other), "train.log", field)


def _perplexity_at(run: RunResult, seconds: float) -> float | None:
    """Return the perplexity at a time; None before the first validation.

    Between two validations the loss falls in proportion to the updates.
    """
    updates, update = [point.num_updates for point in run.curve.valid], run.timeline.update_at(seconds)
    if update < updates[0]:
        return None
    return float(2 ** np.interp(update, updates, [point.bits for point in run.curve.valid]))


#: functions that measure by how much a figure of one model is higher than the other's, by seed or by round
_MEASURES: Mapping[str, Callable[[Results, Model, Model], Measured]] = {
    PERPLEXITY: _perplexity,
    SAME_TIME: _same_time,
    SPEED: _speed,
    ACCURACY: _accuracy,
}


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what was measured."""

    statement: Statement
    first: Model
    second: Model
    #: differences of logarithms, by seed or by round of a timer; None if the models have none in common
    logs: Estimate | None
    cell: Cell

    @property
    def verdict(self) -> str:
        if self.logs is None:
            return NOT_MEASURED
        verdict = AGREES if (self.logs.mean < 0) == self.statement.is_lower else DIFFERS
        if self.logs.half is None:
            return f"{OPEN} ({verdict} with one {self.cell.kind})"
        remarks = [_TIMER] if self.cell.kind == "round" else []
        if self.logs.low <= 0 <= self.logs.high:
            verdict, remarks = OPEN, ["interval holds 0", *remarks]
        return f"{verdict} ({'; '.join(remarks)})" if remarks else verdict

    @property
    def sentence(self) -> str:
        """Return what the paper says, with the names of the models here."""
        said = self.statement
        return f"{self.first.name} has {'lower' if said.is_lower else 'higher'} {said.figure} than {self.second.name}"


def claims(results: Results) -> list[Claim]:
    """Return the claims whose models are part of this experiment."""
    is_large = any(model.arch.endswith("_large") for model in results.models)
    said = [
        (one, closest_to_paper(results, one.first), closest_to_paper(results, one.second))
        for one in statements("large" if is_large else "small")
        if one.figure != ACCURACY or task_names(results)
    ]
    said += _moe_pairs(results)
    return [_claim(results, *one) for one in said if None not in one]


def _claim(results: Results, statement: Statement, one: Model, other: Model) -> Claim:
    """Measure a statement, unless a model is not what the paper means by its name."""
    if not (is_of_the_paper(one) and is_of_the_paper(other)):
        return Claim(statement, one, other, None, EMPTY)
    return Claim(statement, one, other, *_MEASURES[statement.figure](results, one, other))


def _moe_pairs(results: Results) -> list[tuple[Statement, Model, Model]]:
    """Pair each gMLP-MoE with gMLP, and with the gMLP-MoE that has the next fewer experts."""
    found = moe_models(results)
    dense = [model for model in found if model.family == "gmlp_lm"]
    sparse = [model for model in found if model.family == "gmlp_moe"]
    pairs = [(model, gmlp) for gmlp in dense for model in sparse]
    pairs += [pair for pair in zip(sparse[1:], sparse, strict=False) if pair[0].num_experts > pair[1].num_experts]
    return [(moe_statement(one.num_experts, other.family, other.num_experts), one, other) for one, other in pairs]


def claims_table(results: Results) -> Table | None:
    """Make the table of claims; None if the experiment has the models of none."""
    columns = [
        Column("claim", "the paper says", "this report's reading of the paper"),
        Column("where", "where", paper.SOURCE),
        Column("printed", "by the paper's numbers", "the first model's number over the second's, less one, per cent"),
        Column(
            "measured", "here", "the same ratio, see the column's cells in claims.json for the files; 95 % interval"
        ),
        Column("verdict", "verdict", "agrees or differs if the interval does not hold 0, else not decided"),
    ]
    found = claims(results)
    rows = []
    for claim in found:
        printed, where = claim.statement.printed, claim.statement.where
        source = f"{paper.SOURCE}, {where}"
        rows.append(
            {
                "claim": label(claim.sentence, source),
                "where": label(where, source),
                "printed": label("no numbers", source)
                if printed is None
                else Cell(printed, f"{printed:+.1f} %", source),
                "measured": claim.cell,
                "verdict": label(claim.verdict, "computed from the columns before"),
            }
        )
    title = "What the paper says, and what was measured"
    shared = (results.environment.get("jobs") or 1) > 1
    return Table("claims", title, columns, rows, _notes(found, shared)) if rows else None


def _notes(found: list[Claim], shared: bool) -> list[str]:
    figures = {claim.statement.figure for claim in found if claim.logs}
    notes = [
        "Perplexities are compared on the positions that every model here predicts, seed with seed. One interval in "
        "twenty misses the truth by chance."
    ]
    if any(claim.cell.kind == "round" for claim in found):
        notes.append(
            "Words per second are those of speed.json, paired by round of its timer: their interval is the timer's "
            "noise alone, in one process, and says nothing of other seeds, days or machines."
        )
    elif SPEED in figures:
        notes.append("Words per second are those of the logs.")
    if SAME_TIME in figures:
        notes.append(
            "Equal training time is where the faster of two runs with the same seed ends; the slower one is then in "
            "the midst of its schedule. Times are those of the logs"
            + (", of runs that shared the machine." if shared else ".")
        )
    if any(claim.verdict == NOT_MEASURED for claim in found):
        notes.append(
            "Not measured: the models have no seed in common, or one of them is not what the paper calls by the name "
            "(it has a single expert, or `linear` ones)."
        )
    return notes


def page(results: Results) -> tuple[str, Table | None]:
    """Return the verdicts as Markdown, and their table; None where no sentence of the paper has its models here."""
    table = claims_table(results)
    scale = [f"- {sentence}" for sentence in paper.scale_sentences(results)]
    found = ["The experiment has the models of none of them."]
    if table is not None:
        found = [summary(table), "", table.markdown(), "", *table.notes]
    return "\n".join([f"# {results.title}: the paper's sentences", "", *scale, "", *found]) + "\n", table


def summary(table: Table) -> str:
    """Say how many sentences of the paper agree with what was measured."""
    verdicts = [row["verdict"].value for row in table.rows]
    agree, differ = (sum(verdict.startswith(one) for verdict in verdicts) for one in (AGREES, DIFFERS))
    rest = len(verdicts) - agree - differ
    count = "1 sentence" if len(verdicts) == 1 else f"{len(verdicts)} sentences"
    return f"{count}: {agree} agree with what was measured, {differ} differ, {rest} open."


def main() -> None:
    """Read the folder, print the page, and write the files that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of smlp compare run")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder for the page and the tables")
    args = parser.parse_args()
    shown, table = page(read_results(args.out))
    print(shown, end="")
    if args.to is not None:
        older = args.to / "verdicts.md"
        if not older.is_file() or older.read_bytes().partition(b"\n")[0] != shown.encode().partition(b"\n")[0]:
            check_no_other(args.to, ("verdicts.md", "claims.csv", "claims.json"), "--to")
        args.to.mkdir(parents=True, exist_ok=True)
        (args.to / "verdicts.md").write_text(shown, encoding="utf-8")
        for name in ("claims.csv", "claims.json"):
            (args.to / name).unlink(missing_ok=True)
        if table is not None:
            (args.to / "claims.csv").write_text(table.csv(), encoding="utf-8")
            (args.to / "claims.json").write_text(json.dumps(table.as_json(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(guarded(main))
