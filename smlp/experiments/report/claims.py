"""What the paper says of two models beside what was measured, and a verdict on each.

For each family its first model in the experiment speaks. A verdict needs an interval: where that holds zero, or there
is one seed, nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smlp.experiments.report import paper
from smlp.experiments.report.quality import difference, percent_cell
from smlp.experiments.report.runs import Experiment, Model
from smlp.experiments.report.speed import logged_tokens_per_second, seconds_by_round
from smlp.experiments.report.statistics import Estimate, relative_difference
from smlp.experiments.report.studies import mean_accuracies, moe_models, num_experts
from smlp.experiments.report.table import EMPTY, Cell, Column, Table, files, text

AGREES, DIFFERS, OPEN = "agrees", "differs", "not decided"
_SPARSE_RIVALS = ("gshard_lm", "switch_lm", "base_lm", "hash_lm")


@dataclass(frozen=True)
class Claim:
    """``first`` has a lower (or higher) figure than ``second``, the paper says."""

    #: such as "perplexity"
    figure: str
    first: Model
    second: Model
    is_lower: bool
    where: str
    #: the paper's first over second, less one, per cent; None where it prints no numbers
    printed: float | None
    #: differences of logarithms by seed; None where the models have no common seed
    logs: Estimate | None
    cell: Cell

    @property
    def verdict(self) -> str:
        if self.logs is None:
            return "not measured"
        agrees = (self.logs.mean < 0) == self.is_lower
        if self.logs.half is None:
            return f"{OPEN} ({AGREES if agrees else DIFFERS} with one seed)"
        if self.logs.low <= 0 <= self.logs.high:
            return f"{OPEN} (interval holds 0)"
        return AGREES if agrees else DIFFERS

    @property
    def sentence(self) -> str:
        """What the paper says."""
        return f"{self.first.name} has {'lower' if self.is_lower else 'higher'} {self.figure} than {self.second.name}"


def claims(experiment: Experiment) -> list[Claim]:
    """Those whose models are here."""
    first = {model.family: model for model in reversed(experiment.models)}
    smlp, found = first.get("smlp"), []

    def add(figure: str, one: Model, other: Model | None, is_lower: bool, where: str, printed: float | None) -> None:
        if other is None:
            return
        logs, cell = _MEASURES[figure](experiment, one, other)
        found.append(Claim(figure, one, other, is_lower, where, printed, logs, cell))

    if smlp is not None:
        own = paper.TABLE_4["small"]["smlp"]
        for family in _SPARSE_RIVALS:
            row = paper.TABLE_4["small"][family]
            printed = _percent(own.perplexity, row.perplexity)
            add("perplexity", smlp, first.get(family), True, "Table 4, top", printed)
        for family in ("dense_lm", "gmlp_lm"):
            add("perplexity", smlp, first.get(family), True, "Figure 4", None)
        for family in _SPARSE_RIVALS:
            row = paper.TABLE_4["small"][family]
            printed = _percent(own.words_per_second, row.words_per_second)
            add("words per second", smlp, first.get(family), False, "Table 4, top", printed)
        for family in _SPARSE_RIVALS if any(run.zeroshot for run in experiment.runs) else ():
            printed = _percent(paper.TABLE_6["smlp"]["average"], paper.TABLE_6[family]["average"])
            add("zero-shot accuracy", smlp, first.get(family), False, "Table 6, average", printed)
        if "smlp_leaky" in first:
            add("perplexity", first["smlp_leaky"], smlp, True, "Figure 7", None)
    for one, other in _moe_pairs(experiment):
        printed = [paper.TABLE_7.get(num_experts(model)) for model in (one, other)]
        add("perplexity", one, other, False, "Table 7", None if None in printed else _percent(*printed))
    return found


def _moe_pairs(experiment: Experiment) -> list[tuple[Model, Model]]:
    """Each gMLP-MoE with gMLP, and with the gMLP-MoE of the next fewer experts."""
    found = moe_models(experiment)
    sparse = [model for model in found if model.family == "gmlp_moe"]
    pairs = [(model, found[0]) for model in sparse if found[0] not in sparse]
    return pairs + [
        pair for pair in zip(sparse[1:], sparse, strict=False) if num_experts(pair[0]) > num_experts(pair[1])
    ]


def _perplexity(experiment: Experiment, one: Model, other: Model) -> tuple[Estimate | None, Cell]:
    return difference(experiment, one, other, experiment.subsets[0])


def _accuracy(experiment: Experiment, one: Model, other: Model) -> tuple[Estimate | None, Cell]:
    pair = relative_difference(*(mean_accuracies(experiment, model) for model in (one, other)))
    if pair is None:
        return None, EMPTY
    runs = experiment.done(one) + experiment.done(other)
    return pair[0], percent_cell(pair[0], files(runs, "zeroshot.json", "mean of tasks.*.accuracy"))


def _speed(experiment: Experiment, one: Model, other: Model) -> tuple[Estimate | None, Cell]:
    """By speed.json where it has both, else by the logs."""
    rounds = [seconds_by_round(experiment, model) for model in (other, one)]
    timed = relative_difference(*rounds)
    if timed is not None:
        source = (
            f"speed.json: seconds_per_update of {one.name} and {other.name}, each round's ratio; interval over rounds"
        )
        return timed[0], percent_cell(timed[0], source)
    logged = [logged_tokens_per_second(experiment, model) for model in (one, other)]
    pair = relative_difference(*(found.by_seed for found in logged)) if all(logged) else None
    if pair is None:
        return None, EMPTY
    runs = experiment.done(one) + experiment.done(other)
    return pair[0], percent_cell(pair[0], files(runs, "train.log", "train_wall, wps"))


_MEASURES: dict[str, Callable[[Experiment, Model, Model], tuple[Estimate | None, Cell]]] = {
    "perplexity": _perplexity,
    "words per second": _speed,
    "zero-shot accuracy": _accuracy,
}


def _percent(first: float, second: float) -> float:
    return 100 * (first / second - 1)


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
    rows = []
    for claim in claims(experiment):
        printed = claim.printed
        source = f"{paper.SOURCE}, {claim.where}"
        rows.append(
            {
                "claim": text(claim.sentence, source),
                "where": text(claim.where, source),
                "printed": text("no numbers", source)
                if printed is None
                else Cell(printed, f"{printed:+.1f} %", source),
                "measured": claim.cell,
                "verdict": text(claim.verdict, "computed from the columns before"),
            }
        )
    notes = [
        "Perplexities are compared on the positions that every model here predicts, seed with seed. "
        + "One interval in twenty misses the truth by chance. "
        + (
            "Words per second are those of speed.json, paired by round."
            if experiment.speed
            else "Words per second are those of the logs."
        )
    ]
    return Table("claims", "What the paper says, and what was measured", columns, rows, notes) if rows else None


def table_4(experiment: Experiment) -> Table | None:
    """The paper's Table 4 for the families that are here; None without one."""
    columns = [Column("model", "paper's model", "Table 4")]
    for size in ("small", "large"):
        columns += [
            Column(f"{size}_parameters", f"{size}: parameters (B)", "Table 4, Model Size"),
            Column(f"{size}_perplexity", "perplexity", f"Table 4, after {_SCALES[size].updates:,} updates"),
            Column(f"{size}_hours", "hours", "Table 4, Time to Quality"),
            Column(f"{size}_words", "words/s", "Table 4, Speed"),
        ]
    rows = []
    for family in paper.TABLE_4["large"]:
        if not any(family == model.paper_name for model in experiment.models):
            continue
        row = {"model": text(paper.NAMES[family], paper.SOURCE)}
        for size, table in paper.TABLE_4.items():
            source = f"{paper.SOURCE}, {_SCALES[size].table}"
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


_SCALES = {"small": paper.SMALL, "large": paper.LARGE}


def scale_sentences(experiment: Experiment) -> list[str]:
    """How far this experiment is from the paper's."""
    tokens = experiment.updates * experiment.tokens_per_update
    flops = max(model.flops_per_token for model in experiment.models)
    parameters = max(model.num_parameters for model in experiment.models)
    gpus = experiment.environment.get("gpus")
    where = f"{len(gpus)} GPUs ({', '.join(dict.fromkeys(gpus))})" if gpus else "no GPU"
    own = (
        f"Here: models of up to {_quantity(parameters)} parameters and {_quantity(flops)} forward FLOPs per token, "
        f"{_quantity(tokens)} tokens ({experiment.updates:,} updates of {experiment.tokens_per_update:,}), "
        f"context {experiment.settings['tokens_per_sample']:,}, {where}."
    )
    sentences = [own]
    for scale in (paper.SMALL, paper.LARGE):
        sentences.append(
            f"The paper, {scale.name}: {_quantity(scale.parameters)} parameters (sMLP), "
            f"{_quantity(scale.flops_per_token)} forward FLOPs per token, {_quantity(scale.tokens)} tokens "
            f"({scale.updates:,} updates of {scale.tokens_per_update:,}), context 1,024, {scale.gpus} {scale.gpu}: "
            f"{_times(scale.flops_per_token / flops)} the FLOPs per token and {_times(scale.tokens / tokens)} the "
            "tokens of this experiment."
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
