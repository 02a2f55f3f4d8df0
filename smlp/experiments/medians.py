"""Results of ``smlp finetune``: medians over seeds with their intervals, the best point of a grid, a page.

The interval is between order statistics, and needs no assumption about the distribution: of n independent runs, the
median of all possible ones lies between the k-th smallest and the k-th largest with probability 1 - 2 P(B < k), where B
is the number of heads in n tosses of a coin. Five runs cannot give more than 93.75 %, from the least to the largest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smlp.experiments.finetuning import METRICS, Finetuning, scores_of
from smlp.experiments.folder import DONE, Folder
from smlp.experiments.json_files import write_json
from smlp.experiments.report.paper import GMLP_FINETUNED
from smlp.experiments.tuning import at_edge
from smlp.files import write_whole

#: the narrowest interval with at least this probability is given, or else the widest
LEAST_CONFIDENCE = 0.9


@dataclass(frozen=True)
class Median:
    """A median of runs, and an interval for the median of all possible ones."""

    value: float
    low: float
    high: float
    #: with which the interval covers it; 0 for one run
    confidence: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """Compute it from the values of n runs, at least one."""
        ordered, n = sorted(values), len(values)
        confidences = {k: 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(1, n // 2 + 1)}
        k = max((k for k, share in confidences.items() if share >= LEAST_CONFIDENCE), default=1)
        return cls(statistics.median(ordered), ordered[k - 1], ordered[-k], confidences.get(k, 0.0))


def results_of(plan: Finetuning, folder: Folder) -> dict[str, Any]:
    """Return what ``results.json`` holds: every run, the medians of every point, and which point is best.

    Only points of which all runs are done can be chosen; of equals, the first one.
    """
    data, points = plan.data, []
    for lr, batch_size in plan.grid:
        runs = [run for run in plan.runs() if (run.lr, run.batch_size) == (lr, batch_size)]
        states = {run.seed: folder.run(run.folder).state() for run in runs}
        scores = {
            run.seed: scores_of(folder.run(run.folder), data, run.updates)
            for run in runs
            if states[run.seed]["state"] == DONE
        }
        medians = {
            subset: {
                name: vars(Median.of([own[subset][name] for own in scores.values()])) for name in METRICS[data.metric]
            }
            for subset in data.subsets
            if scores
        }
        records = {
            seed: {"state": state["state"], "message": state["message"], "scores": scores.get(seed)}
            for seed, state in states.items()
        }
        points.append({"lr": lr, "batch_size": batch_size, "medians": medians, "runs": records})
    whole = [point for point in points if all(run["scores"] for run in point["runs"].values())]
    best = max(whole, key=lambda point: point["medians"][data.subsets[0]][data.metric]["value"], default=None)
    encoder = {name: str(getattr(plan.encoder, name)) for name in ("path", "arch", "sha256")}
    return {
        "encoder": {**encoder, "num_updates": plan.encoder.num_updates, "overrides": plan.encoder.overrides},
        "data": {"path": str(data.path), "task": data.task, "metric": data.metric, "rows": dict(data.rows)},
        "recipe": plan.made_with(plan.runs()[0]),
        "points": points,
        "best": best and {name: best[name] for name in ("lr", "batch_size", "medians")},
        "at_edge": bool(best and at_edge(plan.lrs, {"lr": best["lr"]})),
        "paper": _paper(plan),
    }


def _paper(plan: Finetuning) -> dict[str, float] | None:
    """Return the paper's numbers for this architecture and task, by split; None if it has none."""
    row = {} if plan.encoder.overrides else GMLP_FINETUNED.get(plan.encoder.arch, {})
    return dict(zip(plan.data.subsets, row[plan.data.task], strict=False)) if plan.data.task in row else None


def page(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    data, best, paper = results["data"], results["best"], results["paper"]
    subsets = {subset: None for point in results["points"] for subset in point["medians"]}
    columns = [(subset, name) for subset in subsets for name in METRICS[data["metric"]]]
    rows = [["learning rate", "batch size", "runs", *(f"{subset} {name}" for subset, name in columns)], ["---:"] * 3]
    rows[1] += ["---"] * len(columns)
    for point in results["points"]:
        done = [run["scores"] for run in point["runs"].values() if run["scores"]]
        cells = [f"{point['lr']:g}", str(point["batch_size"]), f"{len(done)} of {len(point['runs'])}"]
        for subset, name in columns if done else ():
            values = ", ".join(f"{scores[subset][name]:g}" for scores in done)
            cells.append(f"{_shown(point['medians'][subset][name])}: {values}")
        cells += ["–"] * (len(rows[0]) - len(cells))
        is_best = best is not None and (point["lr"], point["batch_size"]) == (best["lr"], best["batch_size"])
        rows.append([f"**{cell}**" if is_best else cell for cell in cells])
    if paper is not None:
        printed = [
            f"{paper[subset]:g}" if name == data["metric"] and subset in paper else "–" for subset, name in columns
        ]
        rows.append(["gMLP paper", "–", "5", *printed])
    notes = [
        "Medians over seeds [interval]: the single runs, each validated after its last update. "
        f"{_interval_note(results)}The interval is about seeds: it leaves out that another sample of "
        f"{data['rows'][next(iter(subsets), 'train')]:,} rows would give other scores.",
    ]
    if len(results["points"]) > 1:
        notes.append(
            "The best point is bold. It was chosen by the same validation that it is reported on, so its median is "
            "somewhat too high."
        )
    if results["at_edge"]:
        notes.append("The best learning rate is at the edge of the grid: a wider one could be better.")
    if paper is not None:
        notes.append(
            "The paper's row is of Table 4 or 6 of Liu et al., 2021, where each entry is a median of five runs."
        )
    failed = [
        f"- learning rate {point['lr']:g}, batch size {point['batch_size']}, seed {seed}: "
        f"{run['message'] or run['state']}"
        for point in results["points"]
        for seed, run in point["runs"].items()
        if not run["scores"]
    ]
    head = f"# {results['encoder']['arch']} on {data['task'] or data['path']}"
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    missing = [f"Not done, so that their points cannot be chosen:\n\n{chr(10).join(failed)}"] if failed else []
    return "\n\n".join([head, table, *notes, *missing]) + "\n"


def _shown(median: dict[str, float]) -> str:
    interval = f" [{median['low']:g}, {median['high']:g}]" if median["confidence"] else ""
    return f"{median['value']:.4g}{interval}"


def _interval_note(results: dict[str, Any]) -> str:
    found = sorted({
        (len([run for run in point["runs"].values() if run["scores"]]), median["confidence"])
        for point in results["points"]
        for medians in point["medians"].values()
        for median in medians.values()
    })  # fmt: skip
    said = [f"{confidence:.2%} with {count} runs" if confidence else "none with 1 run" for count, confidence in found]
    return (
        f"Intervals are between order statistics, without assumptions; their confidence is {', '.join(said)}. "
        * bool(said)
    )


def write_results(plan: Finetuning, folder: Folder) -> dict[str, Any]:
    """Write ``results.json`` and ``results.md``; return what the first holds."""
    results = results_of(plan, folder)
    write_json(folder.path / "results.json", results)
    write_whole(folder.path / "results.md", page(results).encode())
    return results
