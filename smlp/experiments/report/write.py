"""Write the report of an experiment: its tables, its figures, and a page that begins with the outcome."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.experiments.json_files import read_json
from smlp.experiments.plan import spread_of
from smlp.experiments.report import details, health, machine, paper, quality, speed, studies
from smlp.experiments.report.figures import FOLDER, Picture, write_figures
from smlp.experiments.report.results import Results
from smlp.experiments.report.table import EMPTY, Column, Table
from smlp.files import check_no_other, write_whole
from smlp.plots.drawing import FORMATS, check_matplotlib

TABLES = "tables"
#: tables without sources: derived from other tables, or only the paper's numbers
_NO_SOURCES = ("summary", "paper-table-4", "details-paper")
_QUALITY = ("per_token", "per_word", "bits_per_byte", "after_prefix")
_SPEEDS = (
    *("timed_words_per_second", "timed_tokens_per_second"),
    *("logged_words_per_second", "logged_tokens_per_second"),
)


def write_report(results: Results, to: Path | None = None, baselines: Sequence[str] = ()) -> Path:
    """Write report.md, report.json, tables/*.csv and figures/*.png and *.svg; the same folder gives the same files.

    Args:
        results: of an experiment; runs may be missing, half done or failed.
        to: a folder for the report, made if need be; by default ``report`` in the experiment's folder.
        baselines: names of the models that all others are compared with; by default the first dense Transformer and
            the first gMLP, or else the first model.

    Returns:
        the path of report.md.

    Raises:
        UserError: a baseline is not one of the models, matplotlib is missing, or a file cannot be written; or the
            folder has a report.md of something else.
    """
    check_matplotlib()
    tables = all_tables(results, baselines)
    is_own, to = to is None, to or results.folder / "report"
    before = _earlier(to / "report.json")
    is_other = before.get("experiment", results.settings.get("name")) != results.settings.get("name")
    if not is_own and (not before or is_other):
        check_no_other(to, ("report.md", "report.json", TABLES, FOLDER), "--to")
    try:
        (to / TABLES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make folder {to / TABLES}: {error.strerror}") from None
    if not (to / "report.json").exists():
        write_whole(to / "report.json", b'{"data_order": null}\n')  # an interrupted report is one of ours
    pictures = write_figures(results, to)
    for table in tables.values():
        if table.rows:
            write_whole(to / TABLES / f"{table.name}.csv", table.csv().encode())
    report = _as_json(results, tables, pictures)
    for path in _files_of(to, before) - _files_of(to, report):  # such as a table of runs that were missing
        path.unlink(missing_ok=True)
    write_whole(to / "report.json", (json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
    page = to / "report.md"
    write_whole(page, document(results, tables, pictures).encode())
    return page


def _earlier(path: Path) -> dict[str, Any]:
    """Return the ``report.json`` of an earlier report; empty if there is none, or the file is something else."""
    try:
        found = read_json(path, {})
    except (UserError, OSError):
        return {}
    is_whole = all(isinstance(found.get(name, {}), dict) for name in ("tables", "figures"))
    return found if "data_order" in found and is_whole else {}


def _files_of(to: Path, report: Mapping[str, Any]) -> set[Path]:
    """Return the paths of the tables and figures of a report."""
    names = [(TABLES, f"{name}.csv") for name in report.get("tables") or ()]
    names += [(FOLDER, f"{name}.{ending}") for name in report.get("figures") or () for ending in FORMATS]
    return {to / folder / name for folder, name in names if Path(name).name == name}


def all_tables(results: Results, baselines: Sequence[str] = ()) -> dict[str, Table]:
    """Make all tables that the results have data for, by name."""
    compared_with = quality.baselines(results, baselines)
    made = [
        *(quality.quality_table(results, subset, compared_with) for subset in results.subsets),
        paper.table_4(results),
        speed.speed_table(results),
        machine.split_table(results),
        studies.heads_table(results),
        studies.variants_table(results),
        studies.moe_table(results),
        studies.zeroshot_table(results),
        studies.masked_table(results),
        details.details_table(results),
        paper.paper_details_table(results),
        health.work_table(results),
        health.layers_table(results),
        details.state_table(results),
        details.order_table(results),
        details.tuning_table(results),
    ]
    tables = {table.name: table for table in made if table is not None}
    return {"summary": summary_table(results, tables), **tables}


def _as_json(results: Results, tables: dict[str, Table], pictures: dict[str, Picture]) -> dict[str, Any]:
    return {
        "experiment": results.settings.get("name"),
        "title": results.title,
        "runs": {run.name: {"state": run.state, "updates": run.last_update} for run in results.runs},
        "environment": {
            "runs": results.environment,
            "timing": (results.speed or {}).get("environment"),
            "source": "environment.json, speed.json",
        },
        "flops_spread": {"value": spread_of(results.models), "source": "experiment.json: models.flops_per_token"},
        "scale": [] if results.is_masked else paper.scale_sentences(results),
        "data_order": [
            {
                "seed": one.seed,
                "agrees": one.agrees,
                "updates": one.num_updates,
                "differs_at": one.differs_at,
                "sha256": dict(one.digests),
                "source": f"runs/*-s{one.seed}/data_order.jsonl",
            }
            for one in details.data_orders(results)
        ],
        "tables": {table.name: table.as_json() for table in tables.values() if table.rows},
        "figures": {
            picture.name: {"title": picture.title, "png": picture.path("png"), "source": picture.source}
            for picture in pictures.values()
        },
    }


def summary_table(results: Results, tables: Mapping[str, Table]) -> Table:
    """Combine the most important columns of the other tables, with one row for each model."""
    quality = tables[f"quality-{results.subsets[0]}"]
    speed = tables["speed"]
    shown = [column.key for column in speed.columns]
    seeds = () if all(run.is_done for run in results.runs) else ("seeds",)
    against = [column.key for column in quality.columns if column.key.startswith("against_")]
    wanted = [(quality, key) for key in ("model", *seeds, *_QUALITY, *against)]
    wanted += [(speed, key) for key in shown if key.startswith("training_time_")]
    wanted += [(speed, key) for key in _SPEEDS if key in shown][:1]
    wanted += [(tables["details"], key) for key in ("parameters_millions", "forward_multiply_adds_millions_per_token")]
    columns: list[Column] = []
    rows: list[dict] = [{} for _ in results.models]
    for table, key in wanted:
        column = next((column for column in table.columns if column.key == key), None)
        if column is None:
            continue
        columns.append(column)
        for row, cells in zip(rows, table.rows, strict=True):
            if key in cells:
                row[key] = cells[key]
    return Table("summary", "Summary", columns, rows, quality.notes)


def document(results: Results, tables: Mapping[str, Table], pictures: Mapping[str, Picture]) -> str:
    """Return the whole page as Markdown.

    Args:
        results: of an experiment.
        tables: by name.
        pictures: the figures that were drawn, by name.
    """
    page = _Page(tables, pictures)
    page.lines += [f"# {results.title}", "", *_about(results), ""]
    page.table("summary", level=2, before=_outcome(results, tables))
    page.picture("final")
    page.picture("perplexity-updates")
    if results.is_masked:
        page.table("gmlp-table-3", level=2)
    else:
        said = (f"- {sentence}" for sentence in paper.scale_sentences(results))
        page.lines += ["## The paper's figures", "", *said, ""]
        page.table("paper-table-4", level=3)
    page.lines += ["## Perplexity", ""]
    for subset in results.subsets:
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
    page.lines += _environment(results)
    page.lines += _sources(results, tables, pictures)
    return "\n".join(page.lines).rstrip() + "\n"


class _Page:
    """The lines of the page so far."""

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


def _outcome(results: Results, tables: Mapping[str, Table]) -> str:
    """List the models by perplexity, in a sentence."""
    key = "after_prefix" if results.has_prefix else "per_token"
    rows = [row for row in tables[f"quality-{results.subsets[0]}"].rows if row.get(key, EMPTY).value is not None]
    if len(rows) < 2:
        return ""
    rows.sort(key=lambda row: row[key].value)
    order = ", ".join(f"{row['model'].text} {row[key].value:,.2f}" for row in rows)
    where = " after the prefix" if results.has_prefix else ""
    seeds = {tuple(row[key].samples) for row in rows}
    caution = " These means are over different seeds: compare models seed by seed." if len(seeds) > 1 else ""
    each = "masked token" if results.is_masked else "token"
    return f"Perplexity per {each}{where}, lowest first: {order}.{caution}"


def _about(results: Results) -> list[str]:
    settings = results.settings
    done = sum(run.is_done for run in results.runs)
    seeds = ", ".join(map(str, results.seeds))
    smaller = "at most " if results.trained_tokens < 0.999 * results.updates * results.tokens_per_update else ""
    lines = [
        f"{len(results.models)} models, seeds {seeds}; each run has {results.updates:,} updates of {smaller}"
        f"{results.tokens_per_update:,} tokens ({results.trained_tokens:,.0f} in all) with "
        f"a context of {settings['tokens_per_sample']:,}. {done} of {len(results.runs)} runs are finished. "
        f"{machine.describe_machine(results)}",
    ]
    problems = details.incomplete(results)
    failed = [run.name for run, _ in problems if not run.is_done]
    if failed:
        lines += ["", f"**Left out, because they did not finish: {', '.join(failed)}** (reasons below)."]
    lacking = [run.name for run, _ in problems if run.is_done]
    if lacking:
        what = "Finished, but diverged, failed in a later step, or with files missing or damaged"
        lines += ["", f"**{what}: {', '.join(lacking)}** (below)."]
    for one in details.data_orders(results):
        if not one.agrees:
            lines += [
                "",
                f"**The data order differs**: with seed {one.seed}, {one.differs.name} and {one.runs[0].name} read "
                f"different tokens from update {one.differs_at} on.",
            ]
    notes = [*results.notes, *machine.differences(results)]
    lines += [part for note in notes for part in ("", f"**{note}.**")]
    return lines


def _revision(git: Mapping[str, Any]) -> str:
    return f"{git.get('revision')}{', with changes' if git.get('changed') else ''}"


def _environment(results: Results) -> list[str]:
    lines = ["### Versions and data", ""]
    for name, value in results.environment.items():
        if name == "git" and value:
            value = _revision(value)
        if value not in (None, [], "", {}):
            lines.append(f"- {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    timed = ((results.speed or {}).get("environment") or {}).get("git")
    if timed and timed != results.environment.get("git"):
        lines.append(f"- git, of the timing of updates: {_revision(timed)}")
    for split, record in results.data.get("splits", {}).items():
        tokens, words = ((record or {}).get(name) for name in ("tokens", "words"))
        lines.append(f"- {split}: {tokens or 0:,} tokens" + (f", {words:,} words" if words else ""))
    if results.data.get("vocab_size"):
        lines.append(f"- vocabulary: {results.data['vocab_size']:,}")
    own = ", environment.jsonl of the runs" if any(run.environments for run in results.runs) else ""
    return [*lines, "", f"Sources: environment.json{own}, data.json.", ""]


def _sources(results: Results, tables: Mapping[str, Table], pictures: Mapping[str, Picture]) -> list[str]:
    source = f"{paper.GMLP_SOURCE}, Table 3" if results.is_masked else f"{paper.SOURCE}, Tables 4 to 7"
    lines = [
        "## Where the numbers come from",
        "",
        "Files are in the experiment's folder; those of a run are in `runs/RUN/`. `report.json` has every number "
        "unrounded, with the files that it comes from and its seeds or rounds. The paper's numbers are from "
        f"{source}, and the models' names from experiment.json.",
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
