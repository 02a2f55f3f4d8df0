"""Tables of what was run: the models (Table 5), incomplete runs, the order of the data, the grid of the tuning."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smlp.experiments.plan import spread_of
from smlp.experiments.report.results import MISSING, Results, RunResult
from smlp.experiments.report.table import EMPTY, MODEL_COLUMN, Cell, Column, Table, amount, label
from smlp.experiments.tuning import at_edge, is_ordered

#: cost of a training step in forward passes
FORWARD_AND_BACKWARD = 3
_MODELS = "experiment.json: models"
#: columns of Table 5 by key: head and configuration field
LAYOUT = {
    "embed_dim": ("embedding", "embed_dim"),
    "ffn_dim": ("hidden", "ffn_dim"),
    "sparse": ("sparse layers", "num_sparse_layers"),
    "dense": ("dense layers", "num_dense_layers"),
    "heads": ("heads", "num_heads"),
    "experts": ("experts", "num_experts"),
}
_FORWARD, _TRAINING = "forward_multiply_adds_millions_per_token", "training_multiply_adds_trillions"
_REASONS = {
    MISSING: "it was never started: its folder does not exist",
    "waiting": "it has not been started",
    "running": "it had not finished when the report was made, or was killed",
    "stopped": "it was stopped, and can be resumed",
    "unknown": "it has no run.json that can be read, so its state is unknown",
}


def training_flops(flops_per_token: float, tokens: float) -> float:
    """Return the multiply-adds of a training: three forward passes for each token."""
    return FORWARD_AND_BACKWARD * flops_per_token * tokens


def details_table(results: Results) -> Table:
    """Make Table 5 for these models."""
    columns = [
        MODEL_COLUMN,
        Column("arch", "preset", f"{_MODELS}.arch"),
        *(Column(key, head, f"{_MODELS}.config.{name}") for key, (head, name) in LAYOUT.items()),
        Column("parameters_millions", "parameters (M)", f"{_MODELS}.parameters.total"),
        Column(_FORWARD, "forward multiply-adds per token (M)", f"{_MODELS}.flops_per_token, by formula"),
        Column(_TRAINING, "multiply-adds of training (T)", "3 * flops_per_token * updates * tokens of an update"),
        Column("overrides", "changed from the preset", f"{_MODELS}.overrides"),
        Column("recipe", "options of training", f"{_MODELS}.recipe"),
    ]
    tuned = results.tuned or {}
    if tuned:
        columns.insert(-1, Column("tuned", f"tuned {tuned['option']}", "tuned.json: chosen"))
    rows = []
    for model, record in zip(results.models, results.settings["models"], strict=True):
        sizes = {key: getattr(model.config, name) for key, (_, name) in LAYOUT.items() if key != "experts"}
        layout = {key: amount(size, "d", f"{_MODELS}.config") for key, size in sizes.items()}
        flops = training_flops(model.flops_per_token, results.trained_tokens)
        rows.append(
            {
                "model": label(model.name),
                "arch": Cell(model.arch, f"`{model.arch}`", f"{_MODELS}.arch"),
                **layout,
                "experts": amount(model.num_experts, "d", f"{_MODELS}.config.num_experts"),
                "parameters_millions": amount(model.num_parameters / 1e6, ",.1f", f"{_MODELS}.parameters.total"),
                _FORWARD: amount(model.flops_per_token / 1e6, ",.3f", f"{_MODELS}.flops_per_token"),
                _TRAINING: amount(flops / 1e12, ",.3f", f"{_MODELS}.flops_per_token; updates; train.log: wpb"),
                "overrides": label(
                    ", ".join(f"{name}={value}" for name, value in (record.get("overrides") or {}).items()) or None,
                    f"{_MODELS}.overrides",
                ),
                **_tuned(tuned, model.name),
                "recipe": label(" ".join(record.get("recipe") or []) or None, f"{_MODELS}.recipe"),
            }
        )
    largest = results.settings.get("max_spread")
    allowed = "" if largest is None else f" ({largest:.2%} are allowed)"
    notes = [
        f"Nominal forward FLOPs per token differ by {spread_of(results.models):.2%}{allowed}. FLOPs in this report are "
        "multiply-adds, as in the paper; training counts as three forward passes per token. `--dry-run` counts "
        "floating-point operations, as data sheets do: two per multiply-add, and only the causal half of attention "
        "and spatial matrices.",
    ]
    return Table("details", "The models", columns, rows, notes)


def _tuned(tuned: Mapping[str, Any], name: str) -> dict[str, Cell]:
    """Return the cell of a tuned option's value, if there is one."""
    chosen = tuned.get("chosen", {}).get(name)
    return {"tuned": label(str(chosen), f"tuned.json: chosen.{name}")} if chosen is not None else {}


def incomplete(results: Results) -> list[tuple[RunResult, str]]:
    """Return the runs that did not finish or lack files, each with the reason."""
    found = []
    failed = {name for name, found in (results.tuned or {}).get("results", {}).items() if not any(found.values())}
    for run in results.runs:
        reasons = [*run.notes]
        if run.state == MISSING and run.model.name in failed:
            reasons.insert(0, "every run of its grid failed: the run.json of each, in tune/, has the reason")
        elif not run.is_done:
            reason = _REASONS.get(run.state, "run.json does not give the reason")
            if run.state == "waiting" and (run.record.get("trained") or run.last_update >= results.updates):
                reason = "it is trained, and waits for its scores"
            elif run.state == "waiting" and run.last_update:  # on a cluster, nothing else says that it runs
                reason = _REASONS["running"]
            reasons.insert(0, run.message or reason)
        elif run.message:  # what failed after the training
            reasons.insert(0, run.message)
        if reasons:
            found.append((run, "; ".join(reasons)))
    return found


def state_table(results: Results) -> Table | None:
    """Make the table of incomplete runs; None if all are complete."""
    columns = [
        Column("run", "run", "folder in runs/"),
        MODEL_COLUMN,
        Column("seed", "seed", "experiment.json: seeds"),
        Column("state", "state", "run.json: state"),
        Column("update", "updates", "largest of train.log: num_updates, and data_order.jsonl: update"),
        Column("reason", "why", "run.json: message; files of the run"),
    ]
    rows = [
        {
            "run": label(run.name, "folder in runs/"),
            "model": label(run.model.name),
            "seed": amount(run.seed, "d", "experiment.json: seeds"),
            "state": label(run.state, f"runs/{run.name}/run.json: state"),
            "update": amount(run.last_update, ",d", f"runs/{run.name}: train.log, data_order.jsonl"),
            "reason": label(reason, f"runs/{run.name}/run.json: message"),
        }
        for run, reason in incomplete(results)
    ]
    return Table("not-whole", "Runs that failed, are missing or are incomplete", columns, rows) if rows else None


@dataclass(frozen=True)
class SeedOrder:
    """The order in which the runs of a seed read the data, and whether it was the same."""

    seed: int
    runs: tuple[RunResult, ...]
    #: updates that all these runs reached
    num_updates: int
    #: by run, the SHA-256 of the lines "UPDATE DIGEST" for these updates
    digests: Mapping[str, str]
    #: the first update at which runs differ, and the run that differs from the first one there
    differs_at: int | None
    differs: RunResult | None

    @property
    def agrees(self) -> bool:
        return self.differs_at is None


def data_orders(results: Results) -> list[SeedOrder]:
    """Compare the data order of the runs of each seed; runs without a record are left out."""
    found = []
    for seed in results.seeds:
        runs = tuple(run for run in results.runs if run.seed == seed and run.order)
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


def order_table(results: Results) -> Table | None:
    """Make the table of the data order by seed; None if no run has a record of it."""
    columns = [
        Column("seed", "seed", "experiment.json: seeds"),
        Column("runs", "runs with a record", "data_order.jsonl"),
        Column("updates", "updates that all have", "data_order.jsonl: update"),
        Column("verdict", "same tokens in the same order", "data_order.jsonl: digest of each update compared"),
        Column("sha256", "sha256 of the digests", 'data_order.jsonl: sha256 of a line "update digest" for each update'),
    ]
    rows = []
    for one in data_orders(results):
        source = f"runs/*-s{one.seed}/data_order.jsonl"
        if one.agrees:
            verdict = "yes"
        else:
            verdict = f"**no**: {one.differs.name} differs from {one.runs[0].name} from update {one.differs_at} on"
        digest = next(iter(one.digests.values())) if one.agrees else None
        rows.append(
            {
                "seed": amount(one.seed, "d", source),
                "runs": amount(len(one.runs), "d", source),
                "updates": amount(one.num_updates, ",d", source),
                "verdict": label(verdict, source),
                "sha256": Cell(digest, f"`{digest[:16]}…`", source) if digest else EMPTY,
            }
        )
    return Table("data-order", "Data order", columns, rows) if rows else None


def tuning_table(results: Results) -> Table | None:
    """Make the table of the grid; None if there was none."""
    tuned = results.tuned
    if not tuned:
        return None
    values = [str(value) for value in (sorted(tuned["values"]) if is_ordered(tuned["values"]) else tuned["values"])]
    option = tuned["option"]
    columns = [
        MODEL_COLUMN,
        *(
            Column(
                value,
                f"{option} {value}",
                f"tuned.json: results, perplexity per token on {results.subsets[0]} with {option} {value}",
            )
            for value in values
        ),
        Column("chosen", "chosen", "tuned.json: chosen"),
    ]
    rows = []
    for model in results.models:
        by_value = tuned["results"].get(model.name)
        if by_value is None:
            continue
        row = {"model": label(model.name)}
        for value in values:
            source = f"tuned.json: results.{model.name}.{value}"
            if value in by_value:
                found = by_value[value]
                row[value] = label("failed", source) if found is None else amount(found, ",.2f", source)
        chosen = tuned["chosen"].get(model.name)
        row["chosen"] = label(None if chosen is None else str(chosen), f"tuned.json: chosen.{model.name}")
        rows.append(row)
    kept = []
    for name, value in tuned["chosen"].items():
        by_value = tuned["results"].get(name, {})
        own = by_value.get(str(value))
        if own is not None and any(found is not None and found < own for found in by_value.values()):
            kept.append(name)
    notes = [
        f"Perplexity per token on {results.subsets[0]} after {tuned['updates']:,} updates with seed {tuned['seed']}; "
        "the lowest value of each row was chosen."
    ]
    if kept:
        notes[0] = f"{notes[0][:-1]}, but not of {', '.join(kept)}, whose runs had begun when a better one came."
    edge = at_edge(tuned["values"], tuned["chosen"])
    if edge:
        notes.append(f"The choice is at the edge of the grid, and a value outside might be better: {', '.join(edge)}.")
    return Table("tuning", f"Tuning of {option}", columns, rows, notes)
