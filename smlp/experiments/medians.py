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

from data_prep.finetuning.glue_tasks import TASKS
from smlp.experiments.finetuning import METRICS, PAGE, RESULTS, Finetuning, scores_of
from smlp.experiments.folder import DONE, Folder
from smlp.experiments.json_files import write_json
from smlp.experiments.report.paper import DEVLIN_IN_TABLE_6, GMLP_TABLE_4, GMLP_TABLE_6
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
    #: probability with which the interval covers that median; 0 for one run
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

    Only points with all runs done can be chosen; among equals, the first one.
    """
    data, points = plan.data, []
    for lr, batch_size in plan.grid:
        runs = {}
        for run in plan.runs():
            if (run.lr, run.batch_size) == (lr, batch_size):
                own = folder.run(run.folder)
                state = own.state()
                scores = scores_of(own, data, run.updates) if state["state"] == DONE else None
                runs[run.seed] = {"state": state["state"], "message": state["message"], "scores": scores}
        done = [run["scores"] for run in runs.values() if run["scores"]]
        medians = {
            subset: {name: vars(Median.of([own[subset][name] for own in done])) for name in METRICS[data.metric]}
            for subset in data.subsets
            if done
        }
        points.append({"lr": lr, "batch_size": batch_size, "medians": medians, "runs": runs})
    whole = [point for point in points if all(run["scores"] for run in point["runs"].values())]
    best = max(whole, key=lambda point: point["medians"][data.subsets[0]][data.metric]["value"], default=None)
    planned, made = {run.name for run in plan.runs()}, (folder.path / "runs").glob("*/run.json")
    encoder = {"path": str(plan.encoder.path), "arch": plan.encoder.arch, "overrides": plan.encoder.overrides}
    return {
        "encoder": {**encoder, "num_updates": plan.encoder.num_updates},
        "data": {"path": str(data.path), "task": data.task, "metric": data.metric, "rows": dict(data.rows)},
        "made_with": plan.made_with(plan.runs()[0]),
        "points": points,
        "left_out": sorted({path.parent.name for path in made} - planned),
        "best": best and {name: best[name] for name in ("lr", "batch_size", "medians")},
        "at_edge": bool(best and at_edge(plan.lrs, {"lr": best["lr"]})),
        "paper": _paper(plan),
    }


def _paper(plan: Finetuning) -> dict[str, Any] | None:
    """Return the paper's numbers for this architecture and task, by split, with their table; None if it has none.

    ``devlin`` has those of BERT's own authors, which the paper's table repeats; it is empty for other architectures.
    """
    arch, task, subsets = plan.encoder.arch, plan.data.task, plan.data.subsets
    if task in TASKS and plan.data.metric != TASKS[task].metric:
        return None
    for name, table in (("Table 4", GMLP_TABLE_4), ("Table 6", GMLP_TABLE_6)):
        if task in table.get(arch, {}) and not plan.encoder.overrides:
            rows = {"scores": table[arch], "devlin": DEVLIN_IN_TABLE_6.get(arch, {task: ()})}
            return {"table": name} | {key: dict(zip(subsets, row[task], strict=False)) for key, row in rows.items()}
    return None


def page(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    data, best = results["data"], results["best"]
    medians = [median for point in results["points"] for own in point["medians"].values() for median in own.values()]
    paper = results["paper"] if medians else None
    subsets = dict.fromkeys(subset for point in results["points"] for subset in point["medians"])
    columns = [(subset, name) for subset in subsets for name in METRICS[data["metric"]]]
    rows = [
        ["learning rate", "batch size", "runs", *(f"{subset} {name}" for subset, name in columns)],
        [*["---:"] * 3, *["---"] * len(columns)],
    ]
    for point in results["points"]:
        done = [run["scores"] for run in point["runs"].values() if run["scores"]]
        cells = [f"{point['lr']}", f"{point['batch_size']}", f"{len(done)} of {len(point['runs'])}"]
        for subset, name in columns:
            values = ", ".join(f"{scores[subset][name]:g}" for scores in done)
            cells.append(f"{_shown(point['medians'][subset][name])}: {values}" if done else "–")
        is_best = best is not None and (point["lr"], point["batch_size"]) == (best["lr"], best["batch_size"])
        rows.append([f"**{cell}**" if is_best else cell for cell in cells])
    for key, whose in (("scores", "gMLP paper"), ("devlin", "Devlin et al., in the gMLP paper")):
        if paper is not None and paper[key]:
            printed = [paper[key].get(subset, "–") if name == data["metric"] else "–" for subset, name in columns]
            rows.append([f"{whose}, {paper['table']}", "–", "–", *map(str, printed)])
    notes = ["\n".join(f"| {' | '.join(row)} |" for row in rows)]
    if medians:
        confidences = sorted({f"{median['confidence']:.2%}" for median in medians if median["confidence"]})
        notes.append("Medians over seeds [interval]: the single runs, each validated after its last update.")
        if confidences:
            notes[-1] += (
                f" Intervals are between order statistics, with a confidence of {' or '.join(confidences)}. They are "
                "about seeds; other validation data would give other scores, which they do not cover."
            )
    if results["left_out"]:
        notes.append(
            f"The folder has {len(results['left_out'])} more runs, such as {results['left_out'][0]}: the table has the "
            "points and seeds of the last command alone, so name all of them to see all."
        )
    if best is not None and len(results["points"]) > 1:
        notes.append("The best point (bold) is chosen by these scores, so its median is somewhat too high.")
    if results["at_edge"]:
        notes.append("The best learning rate is at the edge of the grid; one outside it could be better.")
    if paper is not None:
        of = (
            "each a median of five runs"
            if paper["table"] == "Table 6"
            else "for which the paper gives no number of runs"
        )
        notes.append(f"The paper's scores are those of Liu et al., 2021, {of}.")
        if paper["devlin"]:
            notes[-1] += (
                " Those of Devlin et al., 2018, which its table repeats, are of another training of BERT; it gives no "
                "number of runs for them."
            )
    missing = [
        f"- lr {point['lr']}, batch size {point['batch_size']}, seed {seed}: {run['message'] or _state_of(run)}"
        for point in results["points"]
        for seed, run in point["runs"].items()
        if not run["scores"]
    ]
    if missing:
        notes.append("\n".join(["The following runs are not done, so their points cannot be chosen:", "", *missing]))
    return "\n\n".join([f"# {results['encoder']['arch']} on {data['task'] or data['path']}", *notes]) + "\n"


def _state_of(run: dict[str, Any]) -> str:
    """Return the state of a run without scores."""
    return "its log has no finite scores of its last update" if run["state"] == DONE else run["state"]


def _shown(median: dict[str, float]) -> str:
    interval = f" [{median['low']:g}, {median['high']:g}]" if median["confidence"] else ""
    return f"{median['value']:.4g}{interval}"


def write_results(plan: Finetuning, folder: Folder) -> dict[str, Any]:
    """Write ``results.json`` and ``results.md``; return what the first holds."""
    results = results_of(plan, folder)
    write_json(folder.path / RESULTS, results)
    write_whole(folder.path / PAGE, page(results).encode())
    return results
