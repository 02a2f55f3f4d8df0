"""What the file of an experiment says (:mod:`smlp.experiments.reading` reads it)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelEntry:
    """A model as the file names it: an architecture with settings, and what is different in its training."""

    name: str
    arch: str
    overrides: dict[str, Any]
    recipe: dict[str, Any]

    @property
    def folder(self) -> str:
        """The name as part of a path."""
        return re.sub(r"[^A-Za-z0-9.-]+", "_", self.name).strip("._-") or "model"


@dataclass(frozen=True)
class Matching:
    """Families whose settings are to be found so that they cost the same (``smlp match``)."""

    families: tuple[str, ...]
    like: str | None
    flops_per_token: float | None
    vary: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class Text:
    """Text that data are to be made of."""

    source: str | None
    files: tuple[Path, ...]
    vocab_size: int


@dataclass(frozen=True)
class Evaluation:
    """What is measured beside the training."""

    validations: int
    subsets: tuple[str, ...]
    targets: tuple[float, ...]
    zeroshot_data: Path | None
    zeroshot_tasks: tuple[str, ...]
    #: of `smlp zeroshot`
    zeroshot_options: dict[str, Any]
    speed_rounds: int


@dataclass(frozen=True)
class Tuning:
    """A grid over one option, the same for every model, before the comparison."""

    option: str
    values: tuple[Any, ...]
    updates: int
    seed: int


@dataclass(frozen=True)
class Place:
    """Where the runs are trained."""

    where: str
    device: str | None
    #: runs at a time; None, on a cluster, as many as it starts
    jobs: int | None
    threads: int | None
    ranks: int
    nodes: int
    gpus_per_node: int | None
    tasks_per_node: int | None
    sbatch: tuple[str, ...]
    tflops: float | None
    mfu: float | None

    @property
    def is_on_gpus(self) -> bool:
        """Whether the file asks for GPUs."""
        return bool(self.gpus_per_node) or self.device == "gpu"

    def at_a_time(self, num_runs: int) -> int:
        """How many of so many runs go on side by side."""
        return max(1, num_runs) if self.jobs is None else self.jobs


@dataclass(frozen=True)
class Experiment:
    """A comparison: which models, on which tokens, how they are trained, what is measured, and where."""

    path: Path
    title: str
    #: folders with colons between them, or None
    data: str | None
    text: Text | None
    #: symbols of the dictionary, for a dry run without data
    vocab_size: int | None
    tokens_per_sample: int
    batch_size: int
    update_freq: int
    updates: int
    seeds: tuple[int, ...]
    log_interval: int
    max_spread: float
    recipe: dict[str, Any]
    models: tuple[ModelEntry, ...]
    matching: Matching | None
    evaluation: Evaluation
    tuning: Tuning | None
    place: Place

    @property
    def name(self) -> str:
        """The file's, without its ending; of the copy in a folder of runs, the folder's."""
        return name_of(self.path)

    @property
    def tokens_per_update(self) -> int:
        """Over all ranks."""
        return self.tokens_per_sample * self.batch_size * self.update_freq * self.place.ranks

    @property
    def tokens(self) -> int:
        """That each model is trained on."""
        return self.updates * self.tokens_per_update


def name_of(path: Path) -> str:
    """Of an experiment: the file's; of the copy in a folder of runs the folder's."""
    return path.resolve().parent.name if path.name == "experiment.yaml" else path.stem


def option_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as options of a command line: true is a flag, a list several words, false or nothing leaves it out."""
    words: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, list) else [str(value)]
    return words


def zeroshot_words(wanted: Evaluation) -> list[str]:
    """Tasks and options of ``smlp zeroshot``."""
    return ["--tasks", ",".join(wanted.zeroshot_tasks), *option_words(wanted.zeroshot_options)]
