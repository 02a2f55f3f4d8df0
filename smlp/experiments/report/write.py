"""From an experiment's folder to the report's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.experiments.report import claims, details, health, quality, speed, state, studies, time_split
from smlp.experiments.report.document import TABLES, document, summary_table
from smlp.experiments.report.figures import Picture, write_figures
from smlp.experiments.report.runs import Experiment, read_experiment
from smlp.experiments.report.table import Table
from smlp.files import write_whole
from smlp.plots.drawing import check_matplotlib


def write_report(out: Path, to: Path | None = None, baselines: Sequence[str] = ()) -> Path:
    """Writes report.md, report.json, tables/*.csv and figures/*.png and *.svg; the same folder gives the same files.

    Args:
        out: an experiment's folder (docs/compare.md); runs may be missing, half done or failed.
        to: a folder for the report, made if need be; ``out/report`` by default.
        baselines: names of the models that all others are held against; by default the first dense Transformer and
            the first gMLP, or else the first model.

    Returns:
        the path of report.md.

    Raises:
        UserError: ``out`` is no experiment, a baseline is none of its models, there is no matplotlib, or a file cannot
            be written.
    """
    check_matplotlib()
    experiment = read_experiment(Path(out))
    tables = all_tables(experiment, baselines)
    to = Path(out) / "report" if to is None else Path(to)
    try:
        (to / TABLES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make folder {to / TABLES}: {error.strerror}") from None
    pictures = write_figures(experiment, to)
    for table in tables.values():
        if table.rows:
            _write(to / TABLES / f"{table.name}.csv", table.csv())
    _write(to / "report.json", json.dumps(_as_json(experiment, tables, pictures), indent=1, allow_nan=False) + "\n")
    page = to / "report.md"
    _write(page, document(experiment, tables, pictures))
    return page


def all_tables(experiment: Experiment, baselines: Sequence[str] = ()) -> dict[str, Table]:
    """Those that the experiment has data for, by name."""
    held_against = quality.baselines(experiment, baselines)
    made = [
        *(quality.quality_table(experiment, subset, held_against) for subset in experiment.subsets),
        claims.claims_table(experiment),
        claims.table_4(experiment),
        speed.speed_table(experiment),
        time_split.split_table(experiment),
        studies.heads_table(experiment),
        studies.variants_table(experiment),
        studies.moe_table(experiment),
        studies.zeroshot_table(experiment),
        details.details_table(experiment),
        details.paper_details_table(experiment),
        health.work_table(experiment),
        health.layers_table(experiment),
        state.state_table(experiment),
        state.order_table(experiment),
        state.tuning_table(experiment),
    ]
    tables = {table.name: table for table in made if table is not None}
    return {"summary": summary_table(experiment, tables), **tables}


def _as_json(experiment: Experiment, tables: dict[str, Table], pictures: dict[str, Picture]) -> dict[str, Any]:
    return {
        "experiment": experiment.settings.get("name"),
        "title": experiment.title,
        "runs": {run.name: {"state": run.state, "updates": run.last_update} for run in experiment.runs},
        "environment": {
            "runs": experiment.environment,
            "timing": (experiment.speed or {}).get("environment"),
            "source": "environment.json, speed.json",
        },
        "flops_spread": {"value": details.spread(experiment), "source": "experiment.json: models.flops_per_token"},
        "scale": claims.scale_sentences(experiment),
        "data_order": [
            {
                "seed": one.seed,
                "agrees": one.agrees,
                "updates": one.num_updates,
                "differs_at": one.differs_at,
                "sha256": dict(one.digests),
                "source": f"runs/*-s{one.seed}/data_order.jsonl",
            }
            for one in state.data_orders(experiment)
        ],
        "tables": {table.name: table.as_json() for table in tables.values() if table.rows},
        "figures": {
            picture.name: {"title": picture.title, "png": picture.path("png"), "source": picture.source}
            for picture in pictures.values()
        },
    }


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))
