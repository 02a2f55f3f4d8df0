"""Tables of what happened: runs that are not whole, data order, the grid of the tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from smlp.experiments.report.runs import MISSING, Experiment, Run
from smlp.experiments.report.table import EMPTY, Cell, Column, Table, number, text
from smlp.experiments.tuning import at_edge, is_ordered

_MODEL = Column("model", "model", "experiment.json: models.name")


def incomplete(experiment: Experiment) -> list[tuple[Run, str]]:
    """Runs that did not finish, or whose files are not all there, with the reason."""
    found = []
    for run in experiment.runs:
        reasons = [*run.notes]
        if not run.is_done:
            reasons.insert(0, run.message or _REASONS.get(run.state, "run.json does not say why"))
        if reasons:
            found.append((run, "; ".join(reasons)))
    return found


_REASONS = {
    MISSING: "there is no such folder: it was never started",
    "waiting": "it has not been started",
    "running": "it had not finished when the report was made, or was killed",
    "stopped": "it was stopped, and can go on",
    "unknown": "there is no run.json that says what became of it",
}


def state_table(experiment: Experiment) -> Table | None:
    """Runs that are not whole; None if all are."""
    columns = [
        Column("run", "run", "folder in runs/"),
        _MODEL,
        Column("seed", "seed", "experiment.json: seeds"),
        Column("state", "state", "run.json: state"),
        Column("update", "updates", "largest of train.log: num_updates, and data_order.jsonl: update"),
        Column("reason", "why", "run.json: message; files of the run"),
    ]
    rows = [
        {
            "run": text(run.name, "folder in runs/"),
            "model": text(run.model.name),
            "seed": number(run.seed, "d", "experiment.json: seeds"),
            "state": text(run.state, f"runs/{run.name}/run.json: state"),
            "update": number(run.last_update, ",d", f"runs/{run.name}: train.log, data_order.jsonl"),
            "reason": text(reason, f"runs/{run.name}/run.json: message"),
        }
        for run, reason in incomplete(experiment)
    ]
    return Table("not-whole", "Runs that failed, are missing or not whole", columns, rows) if rows else None


@dataclass(frozen=True)
class SeedOrder:
    """Whether the runs of a seed read the same data."""

    seed: int
    runs: tuple[Run, ...]
    #: updates that all of them have
    num_updates: int
    #: sha256 over "update digest" of those, a line each, by run
    digests: Mapping[str, str]
    #: the first update at which they differ, and the run that differs from the first run there
    differs_at: int | None
    differs: Run | None

    @property
    def agrees(self) -> bool:
        return self.differs_at is None


def data_orders(experiment: Experiment) -> list[SeedOrder]:
    """For each seed; runs without a record are left out."""
    found = []
    for seed in experiment.seeds:
        runs = tuple(run for run in experiment.runs if run.seed == seed and run.order)
        if not runs:
            continue
        common = sorted(set.intersection(*(set(run.order) for run in runs)))
        digests = {run.name: _digest(run.order, common) for run in runs}
        differing = [
            (update, run) for run in runs[1:] for update in common if run.order[update] != runs[0].order[update]
        ]
        at, run = min(differing, key=lambda pair: pair[0], default=(None, None))
        found.append(SeedOrder(seed, runs, len(common), digests, at, run))
    return found


def _digest(order: Mapping[int, int], updates: list[int]) -> str:
    return hashlib.sha256("".join(f"{update} {order[update]}\n" for update in updates).encode()).hexdigest()


def order_table(experiment: Experiment) -> Table | None:
    """Data order by seed; None where no run has a record of it."""
    columns = [
        Column("seed", "seed", "experiment.json: seeds"),
        Column("runs", "runs with a record", "data_order.jsonl"),
        Column("updates", "updates that all have", "data_order.jsonl: update"),
        Column("verdict", "same tokens in the same order", "data_order.jsonl: digest of each update compared"),
        Column("sha256", "sha256 of the digests", 'data_order.jsonl: sha256 of a line "update digest" for each update'),
    ]
    rows = []
    for one in data_orders(experiment):
        source = f"runs/*-s{one.seed}/data_order.jsonl"
        if one.agrees:
            verdict = "yes"
        else:
            verdict = f"**no**: {one.differs.name} differs from {one.runs[0].name} from update {one.differs_at} on"
        digest = next(iter(one.digests.values())) if one.agrees else None
        rows.append(
            {
                "seed": number(one.seed, "d", source),
                "runs": number(len(one.runs), "d", source),
                "updates": number(one.num_updates, ",d", source),
                "verdict": text(verdict, source),
                "sha256": Cell(digest, f"`{digest[:16]}…`", source) if digest else EMPTY,
            }
        )
    return Table("data-order", "Data order", columns, rows) if rows else None


def tuning_table(experiment: Experiment) -> Table | None:
    """The grid; None without one."""
    tuned = experiment.tuned
    if not tuned:
        return None
    values = [str(value) for value in (sorted(tuned["values"]) if is_ordered(tuned["values"]) else tuned["values"])]
    option = tuned["option"]
    columns = [
        _MODEL,
        *(
            Column(
                value,
                f"{option} {value}",
                f"tuned.json: results, validation perplexity per token with {option} {value}",
            )
            for value in values
        ),
        Column("chosen", "chosen", "tuned.json: chosen"),
    ]
    rows = []
    for model in experiment.models:
        results = tuned["results"].get(model.name)
        if results is None:
            continue
        row = {"model": text(model.name)}
        for value in values:
            source = f"tuned.json: results.{model.name}.{value}"
            if value in results:
                found = results[value]
                row[value] = text("failed", source) if found is None else number(found, ",.2f", source)
        chosen = tuned["chosen"].get(model.name)
        row["chosen"] = text(None if chosen is None else str(chosen), f"tuned.json: chosen.{model.name}")
        rows.append(row)
    notes = [
        f"Perplexity per token after {tuned['updates']:,} updates with seed {tuned['seed']}; the lowest of a row was "
        "chosen."
    ]
    edge = at_edge(tuned["values"], tuned["chosen"])
    if edge:
        notes.append(f"At the edge of the grid, so that a value outside might do better: {', '.join(edge)}.")
    return Table("tuning", f"Tuning of {option}", columns, rows, notes)
