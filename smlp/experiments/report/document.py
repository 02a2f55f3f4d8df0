"""The report as one Markdown page: first what came out and what differs from the paper, then the details."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smlp.experiments.report import paper
from smlp.experiments.report.claims import AGREES, DIFFERS, scale_sentences
from smlp.experiments.report.environments import differences, machine
from smlp.experiments.report.figures import Picture
from smlp.experiments.report.runs import Experiment
from smlp.experiments.report.state import data_orders, incomplete
from smlp.experiments.report.table import EMPTY, Column, Table

TABLES = "tables"
#: made of other tables, or the paper's alone
_NO_SOURCES = ("summary", "paper-table-4", "details-paper")
_QUALITY = ("per_token", "per_word", "after_prefix")
_SPEEDS = (
    *("timed_words_per_second", "timed_tokens_per_second"),
    *("logged_words_per_second", "logged_tokens_per_second"),
)


def summary_table(experiment: Experiment, tables: Mapping[str, Table]) -> Table:
    """The columns of other tables that say most, one row for each model."""
    quality = tables[f"quality-{experiment.subsets[0]}"]
    speed = tables["speed"]
    shown = [column.key for column in speed.columns]
    seeds = () if all(run.is_done for run in experiment.runs) else ("seeds",)
    against = [column.key for column in quality.columns if column.key.startswith("against_")]
    wanted = [(quality, key) for key in ("model", *seeds, *_QUALITY, *against)]
    wanted += [(speed, key) for key in shown if key.startswith("training_time_")]
    wanted += [(speed, key) for key in _SPEEDS if key in shown][:1]
    wanted += [(tables["details"], key) for key in ("parameters_millions", "forward_multiply_adds_millions_per_token")]
    columns: list[Column] = []
    rows: list[dict] = [{} for _ in experiment.models]
    for table, key in wanted:
        column = next((column for column in table.columns if column.key == key), None)
        if column is None:
            continue
        columns.append(column)
        for row, cells in zip(rows, table.rows, strict=True):
            if key in cells:
                row[key] = cells[key]
    return Table("summary", "Summary", columns, rows, quality.notes)


def document(experiment: Experiment, tables: Mapping[str, Table], pictures: Mapping[str, Picture]) -> str:
    """The whole page.

    Args:
        experiment: as read.
        tables: by name.
        pictures: those that were drawn, by name.
    """
    page = _Page(tables, pictures)
    page.lines += [f"# {experiment.title}", "", *_about(experiment), ""]
    page.table("summary", level=2, before=_outcome(experiment, tables))
    page.picture("final")
    page.picture("perplexity-updates")
    page.lines += ["## Beside the paper", "", *(f"- {sentence}" for sentence in scale_sentences(experiment)), ""]
    page.table("claims", level=3, before=_verdicts(tables))
    page.table("paper-table-4", level=3)
    page.lines += ["## Perplexity", ""]
    for subset in experiment.subsets:
        page.table(f"quality-{subset}", level=3)
    page.picture("perplexity-time")
    page.picture("perplexity-flops")
    page.lines += ["## Time", ""]
    page.table("speed", level=3)
    page.picture("quality-and-speed")
    page.table("time-split", level=3)
    studies = ("heads", "feature-routing", "gmlp-moe", "zeroshot")
    if any(name in tables for name in studies):
        page.lines += ["## The paper's other comparisons", ""]
    for name in studies:
        page.table(name, level=3)
        page.picture(name)
        page.picture(f"{name}-final")
    page.lines += ["## Models and cost", ""]
    for name in ("details", "details-paper", "work"):
        page.table(name, level=3)
    if tables["router-health"].rows:
        page.lines += ["## Routers", ""]
        page.picture("routing")
        page.table("router-health", level=3)
    page.lines += ["## How it was run", ""]
    for name in ("not-whole", "data-order", "tuning"):
        page.table(name, level=3)
    page.lines += _environment(experiment)
    page.lines += _sources(tables, pictures)
    return "\n".join(page.lines).rstrip() + "\n"


class _Page:
    """Lines so far."""

    def __init__(self, tables: Mapping[str, Table], pictures: Mapping[str, Picture]) -> None:
        self.tables, self.pictures, self.lines = tables, pictures, []

    def table(self, name: str, level: int, before: str = "") -> None:
        table = self.tables.get(name)
        if table is None or not table.rows:
            return
        self.lines += [f"{'#' * level} {table.title}", "", *([before, ""] if before else []), table.markdown(), ""]
        self.lines += [note + "\n" for note in table.notes]
        self.lines += [f"[CSV]({TABLES}/{name}.csv)", ""]

    def picture(self, name: str) -> None:
        picture = self.pictures.get(name)
        if picture is not None:
            svg = f"([SVG]({picture.path('svg')}))"
            self.lines += [f"![{picture.title}]({picture.path('png')})", "", f"{picture.caption} {svg}", ""]


def _outcome(experiment: Experiment, tables: Mapping[str, Table]) -> str:
    """The models in the order of their perplexity, in a sentence."""
    key = "after_prefix" if experiment.has_prefix else "per_token"
    rows = [row for row in tables[f"quality-{experiment.subsets[0]}"].rows if row.get(key, EMPTY).value is not None]
    if len(rows) < 2:
        return ""
    rows.sort(key=lambda row: row[key].value)
    order = ", ".join(f"{row['model'].text} {row[key].value:,.2f}" for row in rows)
    where = " after the prefix" if experiment.has_prefix else ""
    seeds = {tuple(row[key].by_seed) for row in rows}
    caution = " These are means over different seeds: compare seed with seed." if len(seeds) > 1 else ""
    return f"Perplexity per token{where}, lowest first: {order}.{caution}"


def _verdicts(tables: Mapping[str, Table]) -> str:
    """How many sentences of the paper were borne out."""
    verdicts = [row["verdict"].value for row in tables["claims"].rows] if "claims" in tables else []
    if not verdicts:
        return ""
    agree, differ = (sum(verdict.startswith(one) for verdict in verdicts) for one in (AGREES, DIFFERS))
    rest = len(verdicts) - agree - differ
    count = "1 sentence" if len(verdicts) == 1 else f"{len(verdicts)} sentences"
    return f"{count}: {agree} agree with what was measured, {differ} differ, {rest} open."


def _about(experiment: Experiment) -> list[str]:
    settings = experiment.settings
    done = sum(run.is_done for run in experiment.runs)
    seeds = ", ".join(map(str, experiment.seeds))
    smaller = (
        "at most " if experiment.trained_tokens < 0.999 * experiment.updates * experiment.tokens_per_update else ""
    )
    lines = [
        f"{len(experiment.models)} models, seeds {seeds}; each run {experiment.updates:,} updates of {smaller}"
        f"{experiment.tokens_per_update:,} tokens ({experiment.trained_tokens:,.0f} in all) with "
        f"a context of {settings['tokens_per_sample']:,}. {done} of {len(experiment.runs)} runs are finished. "
        f"{machine(experiment)}",
    ]
    problems = incomplete(experiment)
    failed = [run.name for run, _ in problems if not run.is_done]
    if failed:
        lines += ["", f"**Not in the numbers, because they did not finish: {', '.join(failed)}** (reasons below)."]
    lacking = [run.name for run, _ in problems if run.is_done]
    if lacking:
        lines += ["", f"**Finished, but diverged or with files missing or damaged: {', '.join(lacking)}** (below)."]
    for one in data_orders(experiment):
        if not one.agrees:
            lines += [
                "",
                f"**The data order differs**: with seed {one.seed}, {one.differs.name} read other tokens than "
                f"{one.runs[0].name} from update {one.differs_at} on.",
            ]
    notes = [*experiment.notes, *differences(experiment)]
    lines += [part for note in notes for part in ("", f"**{note}.**")]
    return lines


def _revision(git: Mapping[str, Any]) -> str:
    return f"{git.get('revision')}{', with changes' if git.get('changed') else ''}"


def _environment(experiment: Experiment) -> list[str]:
    lines = ["### Versions and data", ""]
    for name, value in experiment.environment.items():
        if name == "git" and value:
            value = _revision(value)
        if value not in (None, [], "", {}):
            lines.append(f"- {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    timed = (experiment.speed or {}).get("environment", {}).get("git")
    if timed and timed != experiment.environment.get("git"):
        lines.append(f"- git, of the timing of updates: {_revision(timed)}")
    for split, record in experiment.data.get("splits", {}).items():
        words = record.get("words")
        lines.append(f"- {split}: {record.get('tokens', 0):,} tokens" + (f", {words:,} words" if words else ""))
    if experiment.data.get("vocab_size"):
        lines.append(f"- vocabulary: {experiment.data['vocab_size']:,}")
    own = ", environment.jsonl of the runs" if any(run.environments for run in experiment.runs) else ""
    return [*lines, "", f"Sources: environment.json{own}, data.json.", ""]


def _sources(tables: Mapping[str, Table], pictures: Mapping[str, Picture]) -> list[str]:
    lines = [
        "## Where the numbers come from",
        "",
        "Files are in the experiment's folder; those of a run are in `runs/RUN/`. `report.json` has the files of every "
        "single number, unrounded, with its seeds or rounds. The paper's numbers are from "
        f"{paper.SOURCE}, Tables 4 to 7; names of models: experiment.json.",
        "",
    ]
    for table in tables.values():
        if table.rows and table.name not in _NO_SOURCES:
            lines += [f"**{table.title}**", ""]
            lines += [f"- {column.head}: {column.how}" for column in table.columns if column.key != "model"]
            lines.append("")
    lines += ["**Figures**", ""]
    lines += [f"- {picture.title}: {picture.source}" for picture in pictures.values()]
    return lines
