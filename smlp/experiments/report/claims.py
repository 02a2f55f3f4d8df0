"""What the paper says of two models beside what was measured, and a verdict on each.

Of several models of a kind the one that is most like the paper's speaks. A verdict needs an interval: where that holds
zero, or there is one seed, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smlp.experiments.report import paper
from smlp.experiments.report.environments import gpus
from smlp.experiments.report.measures import measure
from smlp.experiments.report.runs import Experiment, Model
from smlp.experiments.report.speakers import is_of_the_paper, speaker
from smlp.experiments.report.statements import ACCURACY, SAME_TIME, SPEED, Statement, moe_statement, statements
from smlp.experiments.report.statistics import Estimate
from smlp.experiments.report.studies import moe_models, task_names
from smlp.experiments.report.table import EMPTY, Cell, Column, Table, text

AGREES, DIFFERS, OPEN = "agrees", "differs", "not decided"
NOT_MEASURED = "not measured"
_TIMER = "the interval is the timer's noise alone"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what was measured."""

    statement: Statement
    first: Model
    second: Model
    #: differences of logarithms, by seed or by round of a timer; None where the models have none in common
    logs: Estimate | None
    cell: Cell

    @property
    def verdict(self) -> str:
        if self.logs is None:
            return NOT_MEASURED
        verdict = AGREES if (self.logs.mean < 0) == self.statement.is_lower else DIFFERS
        if self.logs.half is None:
            return f"{OPEN} ({verdict} with one {'round' if self.cell.by_round else 'seed'})"
        remarks = [_TIMER] if self.cell.by_round else []
        if self.logs.low <= 0 <= self.logs.high:
            verdict, remarks = OPEN, ["interval holds 0", *remarks]
        return f"{verdict} ({'; '.join(remarks)})" if remarks else verdict

    @property
    def sentence(self) -> str:
        """What the paper says, of the models here."""
        said = self.statement
        return f"{self.first.name} has {'lower' if said.is_lower else 'higher'} {said.figure} than {self.second.name}"


def claims(experiment: Experiment) -> list[Claim]:
    """Those whose models are here."""
    said = [(one, *(speaker(experiment, name) for name in (one.first, one.second))) for one in _sayings(experiment)]
    said += _moe_pairs(experiment)
    return [_claim(experiment, *one) for one in said if None not in one]


def _sayings(experiment: Experiment) -> Iterator[Statement]:
    """Of the size that the experiment's models have; those of tasks only where there are scores."""
    is_large = any(model.arch.endswith("_large") for model in experiment.models)
    for statement in statements("large" if is_large else "small"):
        if statement.figure != ACCURACY or task_names(experiment):
            yield statement


def _claim(experiment: Experiment, statement: Statement, one: Model, other: Model) -> Claim:
    """Nothing is measured of a model that the paper's name does not mean."""
    if not (is_of_the_paper(one) and is_of_the_paper(other)):
        return Claim(statement, one, other, None, EMPTY)
    return Claim(statement, one, other, *measure(statement.figure, experiment, one, other))


def _moe_pairs(experiment: Experiment) -> list[tuple[Statement, Model, Model]]:
    """Each gMLP-MoE with gMLP, and with the gMLP-MoE of the next fewer experts."""
    found = moe_models(experiment)
    dense = [model for model in found if model.family == "gmlp_lm"]
    sparse = [model for model in found if model.family == "gmlp_moe"]
    pairs = [(model, gmlp) for gmlp in dense for model in sparse]
    pairs += [pair for pair in zip(sparse[1:], sparse, strict=False) if pair[0].num_experts > pair[1].num_experts]
    return [(moe_statement(one.num_experts, other.family, other.num_experts), one, other) for one, other in pairs]


def claims_table(experiment: Experiment) -> Table | None:
    """None where no claim has its models here."""
    columns = [
        Column("claim", "the paper says", "this report's reading of the paper"),
        Column("where", "where", paper.SOURCE),
        Column("printed", "by the paper's numbers", "the first model's number over the second's, less one, per cent"),
        Column(
            "measured", "here", "the same ratio, see the column's cells in report.json for the files; 95 % interval"
        ),
        Column("verdict", "verdict", "agrees or differs if the interval does not hold 0, else not decided"),
    ]
    found = claims(experiment)
    rows = []
    for claim in found:
        printed, where = claim.statement.printed, claim.statement.where
        source = f"{paper.SOURCE}, {where}"
        rows.append(
            {
                "claim": text(claim.sentence, source),
                "where": text(where, source),
                "printed": text("no numbers", source)
                if printed is None
                else Cell(printed, f"{printed:+.1f} %", source),
                "measured": claim.cell,
                "verdict": text(claim.verdict, "computed from the columns before"),
            }
        )
    title = "What the paper says, and what was measured"
    shared = (experiment.environment.get("jobs") or 1) > 1
    return Table("claims", title, columns, rows, _notes(found, shared)) if rows else None


def _notes(found: list[Claim], shared: bool) -> list[str]:
    figures = {claim.statement.figure for claim in found if claim.logs}
    notes = [
        "Perplexities are compared on the positions that every model here predicts, seed with seed. One interval in "
        "twenty misses the truth by chance."
    ]
    if any(claim.cell.by_round for claim in found):
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


def table_4(experiment: Experiment) -> Table | None:
    """The paper's Table 4 for the families that are here; None without one."""
    columns = [Column("model", "paper's model", "Table 4")]
    for size in ("small", "large"):
        columns += [
            Column(f"{size}_parameters", f"{size}: parameters (B)", "Table 4, Model Size"),
            Column(f"{size}_perplexity", "perplexity", f"Table 4, after {paper.SCALES[size].updates:,} updates"),
            Column(f"{size}_hours", "hours", "Table 4, Time to Quality"),
            Column(f"{size}_words", "words/s", "Table 4, Speed"),
        ]
    rows = []
    for family in paper.TABLE_4["large"]:
        if not any(family == model.paper_name for model in experiment.models):
            continue
        row = {"model": text(paper.NAMES[family], paper.SOURCE)}
        for size, table in paper.TABLE_4.items():
            source = f"{paper.SOURCE}, {paper.SCALES[size].table}"
            if family in table:
                one = table[family]
                row[f"{size}_parameters"] = Cell(one.parameters, f"{one.parameters / 1e9:.2f}", source)
                row[f"{size}_perplexity"] = Cell(one.perplexity, f"{one.perplexity:g}", source)
                row[f"{size}_hours"] = Cell(one.hours, f"{one.hours:g}", source)
                row[f"{size}_words"] = Cell(one.words_per_second, f"{one.words_per_second:,.0f}", source)
        rows.append(row)
    notes = [
        f"The small models' hours are those of all {paper.SMALL.updates:,} updates: "
        f"{paper.SMALL.tokens / 1e9:.1f} billion tokens (32 GPUs x 4 x 4 x 1024 an update, Table 8) at the printed "
        'words per second take 2 to 7 % less. So those words are tokens, as fairseq counts them, and "time to quality" '
        "is the time to each model's own final perplexity. Times to one given perplexity, below, are a fairer measure.",
    ]
    if any(model.paper_name == "base_lm" for model in experiment.models):
        notes.append("The paper remarks that its large BASE model diverged.")
    return Table("paper-table-4", "The paper's Table 4", columns, rows, notes) if rows else None


def scale_sentences(experiment: Experiment) -> list[str]:
    """How far this experiment is from the paper's."""
    tokens = experiment.trained_tokens
    flops = max(model.flops_per_token for model in experiment.models)
    parameters = max(model.num_parameters for model in experiment.models)
    where = gpus(experiment)
    own = (
        f"Here: models of up to {_quantity(parameters)} parameters and {_quantity(flops)} forward multiply-adds per "
        f"token, {_quantity(tokens)} tokens ({experiment.updates:,} updates of {experiment.tokens_per_update:,}), "
        f"context {experiment.settings['tokens_per_sample']:,}, {where}."
    )
    sentences = [own]
    for scale in (paper.SMALL, paper.LARGE):
        sentences.append(
            f"The paper, {scale.name}: {_quantity(scale.parameters)} parameters (sMLP), "
            f"{_quantity(scale.flops_per_token)} forward multiply-adds per token, {_quantity(scale.tokens)} tokens "
            f"({scale.updates:,} updates of {scale.tokens_per_update:,}), context 1,024, {scale.gpus} {scale.gpu}: "
            f"{_times(scale.flops_per_token / flops)} the multiply-adds per token and {_times(scale.tokens / tokens)} "
            "the tokens of this experiment."
        )
    sentences.append(
        "So absolute numbers cannot be compared with the paper's, nor perplexities on other texts and vocabularies; "
        "ratios and orders can be held against each other, with that difference of scale in mind."
    )
    return sentences


def _quantity(value: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"
