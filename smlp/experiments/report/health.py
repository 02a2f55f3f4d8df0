"""Tables of routing: realised and nominal work, and the health of each router by layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from smlp.experiments.report.results import Model, Results, RunResult
from smlp.experiments.report.speed import mean_over
from smlp.experiments.report.table import MODEL_COLUMN, Cell, Column, Table, amount, estimate, label, mean_cell, origin

_FILE = "router_health.jsonl"
_NOMINAL, _REALISED = "nominal_multiply_adds_millions_per_token", "realised_multiply_adds_millions_per_token"


def work_table(results: Results) -> Table:
    """Make the table of realised and nominal multiply-adds of the logged updates, and of what was dropped."""
    columns = [
        MODEL_COLUMN,
        Column(
            _NOMINAL, "nominal multiply-adds per token (M)", f"{_FILE}: mean of work.nominal_flops / tokens, forward"
        ),
        Column(
            _REALISED, "realised multiply-adds per token (M)", f"{_FILE}: mean of work.realised_flops / tokens, forward"
        ),
        Column("ratio", "realised / nominal", f"{_FILE}: mean of work.ratio over the logged updates"),
        Column("drop_percent", "dropped, mean (%)", f"{_FILE}: mean of pooled.drop_share over the logged updates"),
        Column("drop_percent_last", "dropped, last (%)", f"{_FILE}: pooled.drop_share of the last line"),
        Column("drop_percent_capacity", "expert was full, mean (%)", f"{_FILE}: mean of pooled.drop_share_capacity"),
    ]
    rows, lost = [], []
    for model in results.models:
        runs = [run for run in results.done(model) if run.health]
        if not runs:
            continue
        lost += [run.name for run in results.done(model) if not run.health]

        def mean(pattern: str, what: str, read: Callable, scale: float = 1.0, runs: list[RunResult] = runs) -> Cell:
            return mean_over(runs, pattern, _FILE, what, lambda one: _mean(read, one.health, scale))

        rows.append(
            {
                "model": label(model.name),
                _NOMINAL: mean(",.3f", "work.nominal_flops", _per_token("nominal_flops")),
                _REALISED: mean(",.3f", "work.realised_flops", _per_token("realised_flops")),
                "ratio": mean(".3f", "work.ratio", lambda line: (line.get("work") or {}).get("ratio")),
                "drop_percent": mean(".1f", "pooled.drop_share", _pooled("drop_share"), 100),
                "drop_percent_capacity": mean(".1f", "pooled.drop_share_capacity", _pooled("drop_share_capacity"), 100),
                "drop_percent_last": mean_over(runs, ".1f", _FILE, "last line, pooled.drop_share", _last_drop),
            }
        )
    notes = [
        "The numbers are from the logged updates in training. Dropped are choices beyond an expert's capacity (Switch, "
        "GShard; for GShard also second experts that its policy gives up). Evaluation drops nothing.",
        "If all of a model's routing is balanced or fixed, nothing can be dropped, and the columns are empty.",
    ]
    if lost:
        notes.append(f"{', '.join(lost)}: {_FILE} has no records, so the means are over the other seeds.")
    return Table("work", "Realised and nominal multiply-adds", columns, rows, notes)


_FIGURES = (
    ("drop_share", "dropped (%)", 100, ".1f"),
    ("dead_experts", "dead experts", 1, ".1f"),
    ("max_over_mean", "largest load / mean", 1, ".2f"),
    ("load_cv", "CV of loads", 1, ".2f"),
    ("gate_entropy", "gate entropy / ln E", 1, ".2f"),
    ("margin", "margin", 1, ".3f"),
    ("churn", "churn (%)", 100, ".1f"),
)


def layers_table(results: Results) -> Table:
    """Make the table of each routed layer's last record, with its drops over the whole training."""
    columns = [
        MODEL_COLUMN,
        Column("layer", "layer", f"{_FILE}: layers"),
        Column("router", "router", f"{_FILE}: layers.router"),
        Column("experts", "experts", f"{_FILE}: layers.num_experts"),
        Column("drop_percent_mean", "dropped, mean (%)", f"{_FILE}: mean of layers.drop_share over the logged updates"),
        *(
            Column(
                _last(key),
                f"{head}, last",
                f"{_FILE}: layers.{key} of the last line" + _BY_LN * (key == "gate_entropy"),
            )
            for key, head, _, _ in _FIGURES
        ),
    ]
    rows = [row for model in results.models for row in _layer_rows(results, model)]
    notes = [
        'The numbers are means over seeds; "last" is the last logged update. docs/router_health.md explains what each '
        "figure means and which values are healthy. Figures that do not apply to a router are left out."
    ]
    return Table("router-health", "Router health by layer", columns, rows, notes)


def _last(key: str) -> str:
    return f"{key}_last"


_BY_LN = ", divided by the logarithm of the number of experts"


def _layer_rows(results: Results, model: Model) -> list[dict[str, Cell]]:
    runs = [run for run in results.done(model) if run.health]
    if not runs:
        return []
    rows = []
    for name, first in (runs[0].health[-1].get("layers") or {}).items():
        same = [run for run in runs if name in (run.health[-1].get("layers") or {})]
        row = {
            "model": label(model.name),
            "layer": label(name, f"{_FILE}: layers"),
            "router": label(first.get("router"), f"{_FILE}: layers.router"),
            "experts": amount(first.get("num_experts"), "d", f"{_FILE}: layers.num_experts"),
            "drop_percent_mean": _estimated(
                {run.seed: _mean(_of_layer(name, "drop_share"), run.health, 100) for run in same},
                ".1f",
                origin(same, _FILE, f"layers.{name}.drop_share, mean over lines"),
            ),
        }
        for key, _, scale, pattern in _FIGURES:
            values = {}
            for run in same:
                read = _of_layer(name, key)(run.health[-1])
                if read is not None and key == "gate_entropy":
                    read /= math.log(first["num_experts"])
                values[run.seed] = None if read is None else scale * read
            row[_last(key)] = _estimated(values, pattern, origin(same, _FILE, f"last line, layers.{name}.{key}"))
        rows.append(row)
    return rows


def _estimated(values: Mapping[int, float | None], pattern: str, source: str) -> Cell:
    """Return a cell that shows the mean alone: intervals would crowd so many figures. CSV and JSON have them."""
    found = estimate(values)
    cell = mean_cell(found, pattern, source)
    return cell if found is None else replace(cell, text=format(found.mean, pattern))


def _per_token(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    def read(line: Mapping[str, Any]) -> float | None:
        work, tokens = line.get("work") or {}, line.get("tokens")
        return work[key] / tokens / 1e6 if tokens and work.get(key) is not None else None

    return read


def _last_drop(run: RunResult) -> float | None:
    return _mean(_pooled("drop_share"), run.health[-1:], 100)


def _pooled(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda line: (line.get("pooled") or {}).get(key)


def _of_layer(name: str, key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda line: ((line.get("layers") or {}).get(name) or {}).get(key)


def _mean(read: Callable, lines: Sequence[Mapping[str, Any]], scale: float = 1.0) -> float | None:
    values = [value for value in map(read, lines) if value is not None]
    return scale * statistics.fmean(values) if values else None


def pooled_curve(results: Results, model: Model, key: str) -> list[tuple[int, float]]:
    """Return a pooled figure by update, as the mean over the runs that have it at that update."""
    by_update: dict[int, list[float]] = {}
    for run in results.drawn(model):
        for line in run.health:
            value = _pooled(key)(line)
            if value is not None:
                by_update.setdefault(int(line["update"]), []).append(value)
    return [(update, statistics.fmean(values)) for update, values in sorted(by_update.items())]
