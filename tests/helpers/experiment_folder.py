"""A made-up experiment's folder, as ``smlp compare run`` leaves one: every number is known beforehand.

Four models, three seeds, 40 updates, validations at 10, 20, 30 and 40. A validation's loss is
``8 - update / 10 + offset of the model + 0.01 * seed`` bits; an update takes ``pace`` seconds of training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import smlp
from smlp.config import flatten
from smlp.costs.formula import flops_per_token, parameters
from smlp.experiments.report.results import read_results
from smlp.experiments.report.table import Cell, Table
from smlp.experiments.report.write import all_tables

UPDATES, INTERVAL, LOG_INTERVAL, TOKENS = 40, 10, 5, 1024
SEEDS = (1, 2, 3)
WORDS_PER_TOKEN = 0.75
VALID_TOKENS = 2000
PREFIX = 26
#: name: (family, preset, overrides, offset in bits, seconds of an update)
MODELS: dict[str, tuple[str, str, dict[str, Any], float, float]] = {
    "gMLP": ("gmlp_lm", "gmlp_lm_tiny", {}, 0.0, 0.5),
    "sMLP": ("smlp", "smlp_tiny", {}, -0.2, 0.8),
    "sMLP-partial": ("smlp_partial", "smlp_partial_tiny", {}, 0.1, 1.0),
    "Switch": ("switch_lm", "switch_lm_tiny", {}, -0.1, 0.6),
}


def bits(model: str, seed: int, update: int) -> float:
    """Validation loss."""
    return 8 - update / 10 + MODELS[model][3] + 0.01 * seed


def run_folder(out: Path, model: str, seed: int) -> Path:
    return out / "runs" / f"{model}-s{seed}"


def training_line(model: str, seed: int, update: int, **more: str) -> dict[str, str]:
    """As fairseq writes it: numbers as rounded text. ``train_wall`` is of LOG_INTERVAL updates, in whole seconds."""
    pace = MODELS[model][4]
    rounded = {"train_wall": f"{pace * LOG_INTERVAL:.0f}", "wpb": str(TOKENS)}
    loss = f"{bits(model, seed, update) + 0.1:.3f}"
    return {"epoch": 1, "update": 0.1, "loss": loss, "num_updates": str(update), **rounded, **more}


def log_lines(model: str, seed: int, last: int = UPDATES) -> Iterator[str]:
    """Of a run that was never stopped, up to an update."""
    yield "{'_name': None, 'common': {}}"
    for update in range(LOG_INTERVAL, last + 1, LOG_INTERVAL):
        line = json.dumps(training_line(model, seed, update, mfu="50.0", mem_gb="1.5", data_wait="0"))
        is_repeated = update % INTERVAL == LOG_INTERVAL and update > INTERVAL  # as fairseq repeats lines
        yield from (line, line) if is_repeated else (line,)
        if update % INTERVAL == 0:
            loss = f"{bits(model, seed, update):.3f}"
            yield json.dumps({"epoch": 1, "valid_loss": loss, "valid_ppl": "9", "valid_num_updates": str(update)})


def write_experiment(out: Path, models: dict | None = None, **settings: Any) -> Path:
    """Writes the folder, all runs done; ``settings`` replace fields of experiment.json."""
    models = MODELS if models is None else models
    records = []
    for name, (family, arch, overrides, _, _) in models.items():
        config = smlp.preset(arch, vocab_size=512, **overrides)
        counts = parameters(config)
        total = counts.total
        records.append(
            {
                **{"name": name, "folder": name, "family": family, "arch": arch, "overrides": overrides},
                **{"recipe": ["--lr", "2e-3"], "config": flatten(config), "flops_per_token": flops_per_token(config)},
                "parameters": {"expert_per_rank": 0, "other": total, "total": total},
            }
        )
    experiment = {
        **{"name": "made-up", "title": "A made-up experiment", "seeds": list(SEEDS), "updates": UPDATES},
        **{
            "tokens_per_update": TOKENS,
            "tokens": UPDATES * TOKENS,
            "tokens_per_sample": 128,
            "log_interval": LOG_INTERVAL,
        },
        **{"max_spread": 0.01, "evaluation_subsets": ["valid"], "targets": [], "models": records},
    }
    _write(out / "experiment.json", {**experiment, **settings})
    (out / "experiment.yaml").write_text("title: A made-up experiment\n")
    git = {"revision": "0123abc", "changed": False}
    _write(
        out / "environment.json",
        {"smlp": "0.1.0", "torch": "2", "python": "3.11", "cores": 2, "gpus": [], "git": git}
        | {"where": "local", "jobs": 2, "threads": 1, "world_size": 1},
    )
    words = int(VALID_TOKENS * WORDS_PER_TOKEN)
    valid = {"tokens": VALID_TOKENS, "words": words, "words_per_token": WORDS_PER_TOKEN, "bytes": 4 * VALID_TOKENS}
    _write(out / "data.json", {"vocab_size": 512, "splits": {"train": {"tokens": 90000}, "valid": valid}})
    configs = [smlp.preset(arch, vocab_size=512, **overrides) for _, arch, overrides, _, _ in models.values()]
    prefix = max((config.prefix_tokens for config in configs), default=0)
    for name in models:
        for seed in experiment["seeds"]:
            write_run(out, name, seed, prefix)
    return out


def write_run(out: Path, model: str, seed: int, prefix: int = PREFIX) -> Path:
    """A finished run's files."""
    folder = run_folder(out, model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.log").write_text("\n".join(log_lines(model, seed)) + "\n")
    attempts = [{"step": "train", "seconds": MODELS[model][4] * UPDATES + 7.0, "status": 0}]
    attempts.append({"step": "score", "seconds": 3.0, "status": 0})
    record = {"model": model, "seed": seed, "state": "done", "message": None, "attempts": attempts}
    record["made_with"] = {"lr": 0.002}
    _write(folder / "run.json", {**record, "peak_memory_mib": 100.0 + seed})
    nats = bits(model, seed, UPDATES) * math.log(2)
    has_prefix = MODELS[model][0] == "smlp_partial"
    valid = {"nll_all": None if has_prefix else nats, "nll_after_prefix": nats - 0.05}
    valid |= {"tokens": VALID_TOKENS, "words": int(VALID_TOKENS * WORDS_PER_TOKEN)}
    scores = {"subsets": {"valid": valid}, "prefix": prefix, "checkpoint": "checkpoint_last.pt", "num_updates": UPDATES}
    _write(folder / "scores.json", scores)
    order = [json.dumps({"update": update, "digest": 1000 * seed + update}) for update in range(1, UPDATES + 1)]
    (folder / "data_order.jsonl").write_text("\n".join(order) + "\n")
    times = [{"update": update, "tokens": TOKENS, "seconds": MODELS[model][4]} for update in range(1, UPDATES + 1)]
    (folder / "update_times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    if MODELS[model][0] != "gmlp_lm":
        (folder / "router_health.jsonl").write_text("".join(health_lines(model)))
    return folder


def health_lines(model: str) -> Iterator[str]:
    """Switch drops 40, 30, 20, 10 % in its layer 1; the others drop nothing."""
    for update in range(INTERVAL, UPDATES + 1, INTERVAL):
        layer = {"router": "base", "items": "tokens", "num_experts": 8, "load_cv": 0.0, "gate_entropy": math.log(8) / 2}
        ratio = 1.0
        if model == "Switch":
            drop = 0.5 - update / 100
            layer |= {"router": "switch", "drop_share": drop, "drop_share_capacity": drop}
            ratio = 1 - drop / 4
        pooled = {name: value for name, value in layer.items() if isinstance(value, float)}
        work = {"nominal_flops": 2e9, "realised_flops": 2e9 * ratio, "ratio": ratio}
        record = {"update": update, "tokens": TOKENS, "work": work, "pooled": pooled}
        yield json.dumps({**record, "layers": {"layer 1 (tMoE)": layer}}) + "\n"


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def tables(out: Path, *baselines: str) -> dict[str, Table]:
    """Of the report, by name."""
    return all_tables(read_results(out), baselines)


def cell(table: Table, model: str, key: str) -> Cell:
    """Of a model's row."""
    row = next(row for row in table.rows if row["model"].value == model)
    return row[key]


def rewrite(path: Path, **fields: Any) -> None:
    """Replaces fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
