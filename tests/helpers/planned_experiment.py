"""A small experiment, planned but not run, and logs of runs, for the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import smlp
from smlp.experiments.folder import Folder, RunFolder
from smlp.experiments.plan import plan_models
from smlp.experiments.reading import read_experiment

FILE = """
data: data-bin
updates: 100
recipe: {optimizer: adam, lr: 1.0e-3, dropout: 0}
models:
  a: {arch: gmlp_lm_tiny}
  b: {arch: smlp_tiny}
tune: {lr: [1.0e-3, 2.0e-3], updates: 10}
"""


def reader(folder: Path) -> Callable[..., tuple[Any, list, Folder]]:
    """``read(text=FILE)`` gives an experiment with its models and folder."""

    def read(text: str = FILE) -> tuple[Any, list, Folder]:
        path = folder / "small.yaml"
        path.write_text(text)
        found = read_experiment(path)
        models = plan_models(found, 64, lambda words, _: smlp.preset(words[1], vocab_size=64, max_tokens=128))
        return found, models, Folder(folder / "out")

    return read


def log(folder: RunFolder, updates: int, valid: float | None = None, train: float | None = None) -> None:
    """What a run has written."""
    folder.path.mkdir(parents=True, exist_ok=True)
    lines = ["{'args': 1}", json.dumps({"update": 0.1, "num_updates": "1", "loss": "9.0"})]
    if train is not None:
        lines.append(json.dumps({"update": 0.5, "num_updates": str(updates), "loss": str(train)}))
    if valid is not None:
        lines.append(json.dumps({"valid_loss": str(valid), "valid_num_updates": str(updates)}))
    folder.log.write_text("\n".join(lines) + '\n{"update": 0.7, "num_up')
