"""Read the file of an experiment, and check it as far as possible without data and models."""

from __future__ import annotations

import glob
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smlp.config.presets import PRESETS
from smlp.config.settings import DTYPES
from smlp.costs.match import FAMILIES
from smlp.costs.match import families as known_families
from smlp.errors import UserError
from smlp.experiments.spec import (
    EvaluationPlan,
    Experiment,
    Matching,
    ModelEntry,
    Resources,
    TextSource,
    Tuning,
    grid_folder,
    name_of,
)
from smlp.experiments.yaml_file import Section, number_in, read_yaml, shown
from smlp.fairseq_compat.limits import MOST_SEED
from smlp.files import plain_name

#: options of fairseq-train that `smlp compare` sets, and the setting of the file that determines each
RESERVED = {
    "seed": "seeds", "max_update": "tokens or updates", "max_epoch": "tokens or updates", "save_dir": "--out",
    "arch": "models", "task": "models", "tokens_per_sample": "tokens_per_sample",
    "max_target_positions": "tokens_per_sample",
    "batch_size": "batch_size", "update_freq": "update_freq", "max_tokens": "batch_size", "data": "data",
    "log_file": "nothing", "log_format": "nothing", "log_interval": "log_interval", "valid_subset": "evaluate.subsets",
    "validate_interval_updates": "evaluate.validations", "save_interval_updates": "evaluate.validations",
    "validate_interval": "evaluate.validations", "save_interval": "evaluate.validations", "cpu": "run.device",
    "data_order_file": "nothing", "update_times_file": "nothing", "environment_file": "nothing",
    "router_health_file": "nothing", "checkpoint_suffix": "nothing", "validate_after_updates": "nothing",
    "user_dir": "nothing", "nproc": "run.ranks",
    "train_subset": "data", "no_save": "nothing", "restore_file": "nothing", "distributed_world_size": "run.ranks",
    "no_epoch_checkpoints": "nothing", "keep_interval_updates": "nothing", "max_sentences": "batch_size",
    "required_batch_size_multiple": "nothing", "batch_size_valid": "nothing", "max_sentences_valid": "nothing",
    "max_tokens_valid": "nothing", "disable_validation": "nothing", "max_valid_steps": "nothing",
    "combine_valid_subsets": "evaluate.subsets",
    "no_last_checkpoints": "nothing", "no_save_optimizer_state": "nothing", "patience": "tokens or updates",
    "stop_time_hours": "tokens or updates", "stop_min_lr": "tokens or updates", "add_bos_token": "nothing",
    "sample_break_mode": "nothing", "reset_optimizer": "nothing", "reset_dataloader": "nothing",
    "reset_meters": "nothing", "reset_lr_scheduler": "nothing", "help": "nothing",
}  # fmt: skip
#: options of the task masked_lm that choose the tokens and those that are masked, in validation as well
_MASKING = frozenset((
    *("mask_prob", "leave_unmasked_prob", "random_token_prob", "freq_weighted_replacement", "mask_multiple_length"),
    *("mask_stdev", "mask_whole_words", "skip_masking"),
))  # fmt: skip
WHERE = ("local", "slurm")
TEXT_SOURCES = ("python",)
_MOST_NAME = 150  # most characters of a model's name, which becomes part of file names
_LEAST_VOCABULARY = 5  # fairseq's four special symbols and one more
_MOST_RUNS = 5000  # limit of models times the sum of seeds and grid values
_MOST_THREADS = 1024  # limit over all concurrent runs on one machine: OpenMP crashes with many more


def read_experiment(path: Path, is_quick: bool = False) -> Experiment:
    """Read the file.

    Args:
        path: of the file.
        is_quick: whether its section ``quick`` replaces settings of the same name.

    Raises:
        UserError: something in it is wrong; one sentence names the file, the value and what it may be.
    """
    experiment = _experiment(path, settings_of(path, is_quick))
    if not is_quick and read_yaml(path).get("quick"):
        try:  # finds mistakes before they are needed
            _experiment(path, settings_of(path, is_quick=True))
        except UserError as error:
            raise UserError(f"{error} (with the changes in its section quick)") from error
    return replace(experiment, is_quick=is_quick)


def settings_of(path: Path, is_quick: bool) -> dict[str, Any]:
    """Return the settings in a file, without its section ``quick``, which replaces some of them if ``is_quick``.

    A setting that is empty (null) in the section is then left out.

    Raises:
        UserError: as :func:`read_experiment`, or there is no such section.
    """
    settings = read_yaml(path)
    changes = Section("", settings, path).section("quick").items()
    if is_quick and not changes:
        raise UserError(f"{path}: --quick needs a section quick with the settings that it changes, such as seeds: [1]")
    settings.pop("quick", None)
    if is_quick:
        settings |= changes
        settings = {name: value for name, value in settings.items() if name not in changes or value is not None}
    return settings


def _experiment(path: Path, settings: dict[str, Any]) -> Experiment:
    top = Section("", settings, path)
    resources = _resources(top.section("run"))
    data, text = _data(top)
    tokens_per_sample, batch_size = top.count("tokens_per_sample", 128), top.count("batch_size", 8)
    update_freq = top.count("update_freq", 1)
    per_update = tokens_per_sample * batch_size * update_freq * resources.ranks
    updates = _updates(top, per_update)
    if updates is None:
        raise UserError(f"{path}: give tokens or updates, the budget of each model")
    recipe = _recipe(top.section("recipe"))
    if empty := [name for name, value in recipe.items() if value is None]:
        raise top.section("recipe").error(empty[0], "has no value; leave it out for the default of smlp train")
    experiment = Experiment(
        path=path,
        title=" ".join(top.text("title", name_of(path)).split()),
        data=data,
        text=text,
        vocab_size=top.count("vocab_size", least=_LEAST_VOCABULARY),
        tokens_per_sample=tokens_per_sample,
        batch_size=batch_size,
        update_freq=update_freq,
        updates=updates,
        seeds=_seeds(top),
        log_interval=top.count("log_interval", min(10, updates)),
        max_spread=top.number("max_spread", 0.01),
        recipe=recipe,
        matching=_matching(top),
        models=_models(top),
        evaluation=_evaluation(top.section("evaluate"), updates),
        tuning=_tuning(top.section("tune"), per_update) if "tune" in top else None,
        resources=resources,
    )
    if not experiment.models and not (experiment.matching and experiment.matching.families):
        raise UserError(f"{path}: there is nothing to compare: name models, or families under match")
    if experiment.log_interval > updates:
        raise top.error("log_interval", f"is {experiment.log_interval}, more than the {updates} updates of a run")
    _check_tasks(experiment)
    _check_numbers(experiment)
    _check_overlap(experiment)
    _check_warmup(experiment)
    _check_rates(experiment)
    top.take("tune")
    top.end()
    return experiment


def _check_tasks(experiment: Experiment) -> None:
    """Refuse masked language models beside models that predict next tokens, or with unlike masks."""
    encoders = [entry.name for entry in experiment.models if entry.is_encoder]
    others = [entry.name for entry in experiment.models if not entry.is_encoder]
    others += ["match"] if experiment.matching else []
    if encoders and others:
        raise UserError(
            f"{experiment.path}: {encoders[0]} is a masked language model and {others[0]} predicts next tokens: their "
            "losses are of different tasks and cannot be compared"
        )
    given = [{**experiment.recipe, **one.overrides, **one.recipe} for one in experiment.models]
    if experiment.matching:
        given.append(experiment.recipe)
    if tuning := experiment.tuning:
        given = [{**own, tuning.option: value} for own in given for value in tuning.values]
    unlike = [name for name in _MASKING if encoders and len({shown(own.get(name) or None) for own in given}) > 1]
    shortened = {_shortened(own, experiment.evaluation.subsets) for own in given}
    if others and shortened != {()}:
        raise UserError(
            f"{experiment.path}: shorten_method shortens what language models are validated on, but the scores are of "
            "whole texts: leave it out, or give shorten_data_split_list: train"
        )
    if len(shortened) > 1:
        methods = {shown(own.get("shorten_method") or "none") for own in given}
        unlike.append("shorten_method" if len(methods) > 1 else "shorten_data_split_list")
    if unlike:
        raise UserError(
            f"{experiment.path}: {min(unlike)} decides what is validated on: it must be the same for all runs, as in "
            "recipe"
        )


def _shortened(own: dict[str, Any], subsets: Sequence[str]) -> tuple[str, ...]:
    """Return how texts are shortened that a run is validated on, and of which splits."""
    method, splits = str(own.get("shorten_method") or "none"), str(own.get("shorten_data_split_list") or "")
    wanted = [subset for subset in subsets if not splits or subset in splits.split(",")]
    return (method, *wanted) if method != "none" and wanted else ()


def _check_numbers(experiment: Experiment) -> None:
    """Limit runs and threads: a typing mistake in a file must not take the machine down."""
    resources, tuning = experiment.resources, experiment.tuning
    num_models = len(experiment.models) + (len(experiment.matching.families) if experiment.matching else 0)
    num_runs = num_models * (len(experiment.seeds) + (len(tuning.values) if tuning else 0))
    if num_runs > _MOST_RUNS:
        raise UserError(
            f"{experiment.path}: {num_runs:,} runs of {num_models:,} models are too many: at most {_MOST_RUNS:,} are "
            "allowed"
        )
    threads = (resources.threads or 1) * (resources.jobs or 1) * resources.ranks
    if resources.where == "local" and threads > _MOST_THREADS:
        raise UserError(
            f"{experiment.path}: run.threads, run.jobs and run.ranks make {threads:,} threads at a time: at most "
            f"{_MOST_THREADS:,} are allowed"
        )


def _check_overlap(experiment: Experiment) -> None:
    """Refuse an option beside a model's settings that the recipe or the grid sets too, and thereby overrides."""
    grid = {experiment.tuning.option: experiment.tuning.values} if experiment.tuning else {}
    for model in experiment.models:
        for where, settings in (("recipe", experiment.recipe), ("its recipe", model.recipe), ("tune", grid)):
            for name in model.overrides.keys() & settings.keys():
                raise UserError(
                    f"{experiment.path}: models.{model.name}.{name} would have no effect, because {where} sets it too: "
                    + ("leave it out" if where == "tune" else f"put it into models.{model.name}.recipe")
                )


def _check_warmup(experiment: Experiment) -> None:
    """Check that runs are longer than their warm-up: fairseq's cosine schedule divides by the difference."""
    tuned = experiment.tuning
    budgets = [experiment.updates] + ([tuned.updates] if tuned else [])
    for model in (None, *experiment.models):
        named = {f"models.{model.name}.recipe": model.recipe, f"models.{model.name}": model.overrides} if model else {}
        place = next((place for place, settings in named.items() if "warmup_updates" in settings), "recipe")
        given = {**experiment.recipe, **(model.overrides if model else {}), **(model.recipe if model else {})}
        tried = {name: [given.get(name)] for name in ("warmup_updates", "lr_scheduler")}
        tried |= {tuned.option: tuned.values} if tuned else {}
        section = Section(place, given, experiment.path)
        warmup = max(section.as_count("warmup_updates", value or 0, least=0) for value in tried["warmup_updates"])
        if "cosine" in tried["lr_scheduler"] and warmup >= min(budgets):
            raise UserError(
                f"{experiment.path}: {place}.warmup_updates is {warmup}, and a run has {min(budgets)} updates"
                f"{' (tune)' if tuned and tuned.updates == min(budgets) else ''}: "
                "the cosine schedule needs more updates than its warm-up"
            )


def _check_rates(experiment: Experiment) -> None:
    """Check that learning rates are positive: with 0 nothing is learnt, but everything looks as if it were."""
    named = [("recipe", experiment.recipe), *((f"models.{one.name}.recipe", one.recipe) for one in experiment.models)]
    named += [(f"models.{one.name}", one.overrides) for one in experiment.models]
    if experiment.tuning:
        named.append(("tune", {experiment.tuning.option: list(experiment.tuning.values)}))
    for name, settings in named:
        section = Section(name, settings, experiment.path)
        for value in section.values("lr"):
            section.as_number("lr", value)


def _updates(section: Section, tokens_per_update: int) -> int | None:
    """Read the budget in updates, given as tokens or as updates."""
    tokens, updates = section.count("tokens"), section.count("updates")
    if tokens is not None and updates is not None:
        raise section.error("tokens", f"and {section.full('updates')} set the same thing: give one of the two")
    if tokens is None:
        return updates
    if tokens < tokens_per_update:
        raise section.error("tokens", f"is {tokens}, less than an update's {tokens_per_update} tokens")
    return tokens // tokens_per_update


def _data(top: Section) -> tuple[str | None, TextSource | None]:
    """Read which data exist, or which text they are made from; paths are relative to the current folder."""
    data, section = _folders(top), top.section("text")
    source, files = section.text("source"), [str(name) for name in section.values("files")]
    vocab_size = section.count("vocab_size", 4096, least=_LEAST_VOCABULARY)
    section.end()
    if source is None and not files:
        if data is None:
            raise UserError(f"{top.path}: give data (a folder of binary data) or text (to make them from)")
        return data, None
    if data is not None:
        raise UserError(f"{top.path}: data and text are both given: give one of the two")
    if source is not None and files:
        raise section.error("source", "and text.files are both given: give one of the two")
    if source is not None and source not in TEXT_SOURCES:
        raise section.error("source", f"must be one of {', '.join(TEXT_SOURCES)}, got {source!r}")
    return None, TextSource(source, tuple(Path(name) for name in files), vocab_size)


def _folders(top: Section) -> str | None:
    """Read DATA1:DATA2 from a name, a pattern or a list of them."""
    found: list[str] = []
    for value in top.values("data"):
        if not isinstance(value, str):
            raise top.error("data", f"must be a folder, a pattern or a list of them, got {shown(value)}")
        found += (sorted(glob.glob(value)) if glob.has_magic(value) else []) or [value]
    return ":".join(found) or None


def _recipe(section: Section) -> dict[str, Any]:
    """Read options of training; an empty value of a model takes back an option of the shared recipe."""
    recipe = section.settings()
    for name in recipe:
        if name in RESERVED:
            raise section.error(name, f"is set by smlp compare; use instead: {RESERVED[name]}")
    return recipe


def _models(top: Section) -> tuple[ModelEntry, ...]:
    section = top.section("models")
    entries = []
    for name, content in section.items().items():
        own = Section(f"models.{name}", content, top.path)
        arch = own.text("arch", name)
        if arch not in PRESETS:
            raise own.error("arch", f"is unknown: {arch!r} (known: {', '.join(sorted(PRESETS))})")
        recipe = _recipe(own.section("recipe"))
        overrides = own.settings()
        for setting, value in overrides.items():
            if setting in RESERVED:
                raise own.error(setting, f"is the same for all models; use instead: {RESERVED[setting]}")
            if value is None:
                raise own.error(setting, f"has no value; leave it out to keep that of {arch}")
        entries.append(ModelEntry(name, arch, overrides, recipe))
    check_names(top.path, entries)
    return tuple(entries)


def check_names(path: Path, entries: list[ModelEntry]) -> None:
    """Refuse two models that would share a folder."""
    seen: dict[str, str] = {}
    names = Counter(entry.name for entry in entries)
    for entry in entries:
        if not entry.name.strip():
            raise UserError(f"{path}: models: the name {entry.name!r} is empty")
        if any(unicodedata.category(letter) == "Cc" for letter in entry.name):
            raise UserError(f"{path}: models: the name {entry.name!r} has a control character, such as a line end")
        other = seen.setdefault(entry.folder, entry.name)
        if other != entry.name or names[entry.name] > 1:
            raise UserError(f"{path}: models {other!r} and {entry.name!r} would share the folder {entry.folder!r}")
        if len(entry.folder) > _MOST_NAME:
            raise UserError(
                f"{path}: models: a name of {len(entry.folder)} characters becomes a folder: at most {_MOST_NAME}"
            )


def _matching(top: Section) -> Matching | None:
    if "match" not in top:
        top.take("match")
        return None
    section = top.section("match")
    families = tuple(str(name) for name in section.values("families", FAMILIES))
    for name in families:
        if name not in (known := known_families()):
            raise section.error("families", f"has {name!r}, which is not one of {', '.join(known)}")
    like, flops = section.text("like"), section.number("flops_per_token")
    if (like is None) == (flops is None):
        raise UserError(f"{top.path}: match needs either like (an architecture) or flops_per_token")
    vary = section.text("vary", "layers", ("layers", "ffn"))
    sizes = {name: section.as_count(name, value) for name, value in section.settings().items()}
    return Matching(families, like, flops, vary, sizes)


def _evaluation(section: Section, updates: int) -> EvaluationPlan:
    zeroshot = section.section("zeroshot")
    folder, has_tasks = zeroshot.text("data"), "tasks" in zeroshot
    tasks = tuple(str(task) for task in zeroshot.values("tasks", ["all"]))
    options = zeroshot.settings()
    if not folder and (has_tasks or options):
        given = ", ".join([*(["tasks"] if has_tasks else []), *options])
        raise zeroshot.error("data", f"(the folder of the tasks) is missing, but {given} is given")
    named_by = f"{section.path}: {section.full('subsets')}"
    subsets = [plain_name(str(name), named_by) for name in section.values("subsets", ["valid"])]
    if not subsets or len(set(subsets)) < len(subsets):
        raise section.error("subsets", f"must be different names, got {shown(subsets)}")
    if "train" in subsets:  # fairseq's averages over an epoch have the names that its validation would have
        raise section.error("subsets", f"has train, whose validations look like training in the log: {shown(subsets)}")
    if "valid" in subsets[1:]:
        raise section.error("subsets", f"must begin with valid, which is watched and tuned on, got {shown(subsets)}")
    found = EvaluationPlan(
        validations=section.count("validations", min(8, updates)),
        subsets=tuple(subsets),
        targets=tuple(section.as_number("targets", value) for value in section.values("targets")),
        zeroshot_data=Path(folder) if folder else None,
        zeroshot_tasks=tasks,
        zeroshot_options=options,
        speed_rounds=section.count("speed_rounds", 9, least=0),
        dtype=section.text("dtype", "fp32", choices=DTYPES),
    )
    section.end()
    if found.validations > updates:
        raise section.error("validations", f"is {found.validations}, more than the {updates} updates of a run")
    return found


def _tuning(section: Section, tokens_per_update: int) -> Tuning:
    updates, seed = _updates(section, tokens_per_update), _seed(section, "seed", section.count("seed", 1))
    grid = section.settings()
    if len(grid) != 1 or updates is None:
        raise UserError(
            f"{section.path}: tune needs one option of training with a list of values, such as lr: [1.0e-3, 2.0e-3], "
            f"and tokens or updates; it has {', '.join(grid) or 'no option'}"
        )
    ((option, values),) = grid.items()
    if option in RESERVED:
        raise section.error(option, "is set by smlp compare and cannot be tuned")
    if isinstance(values, list):
        values = [number_in(value) for value in values]
        if None in values:
            raise section.error(option, f"has an empty value, got {shown(values)}")
    if (
        not isinstance(values, list)
        or len(values) < 2
        or len({grid_folder("", value) for value in values}) < len(values)
        or any(value in values[:place] for place, value in enumerate(values))  # 1 and 1.0
    ):
        raise section.error(option, f"needs at least two different values in a list, got {shown(values)}")
    return Tuning(option, tuple(values), updates, seed)


def _resources(section: Section) -> Resources:
    where = section.text("where", "local", WHERE)
    for name in ("nodes", "gpus_per_node", "tasks_per_node", "sbatch"):
        if where == "local" and name in section:
            raise section.error(name, "is for where: slurm, and run.where is local")
    nodes, gpus, tasks = section.count("nodes", 1), section.count("gpus_per_node"), section.count("tasks_per_node")
    ranks = section.count("ranks")
    if where == "slurm":
        if (gpus is None) == (tasks is None):
            raise UserError(f"{section.path}: run needs gpus_per_node or, on CPUs, tasks_per_node for Slurm")
        if ranks is not None:
            raise section.error("ranks", "follows from run.nodes and run.gpus_per_node with Slurm: leave it out")
        ranks = nodes * (gpus or tasks)
    resources = Resources(
        where=where,
        device=section.text("device", None) if where == "local" else None,
        jobs=section.count("jobs", 1 if where == "local" else None),
        threads=section.count("threads"),
        ranks=ranks or 1,
        nodes=nodes,
        gpus_per_node=gpus,
        tasks_per_node=tasks,
        sbatch=tuple(str(option) for option in section.values("sbatch")),
        tflops=section.number("tflops"),
        mfu=section.number("mfu"),
    )
    for option in resources.sbatch:
        name = option.partition("=")[0]  # which sbatch accepts shortened, too
        if option[:2] in ("-a", "-o") or (len(name) > 3 and name in ("--array"[: len(name)], "--output"[: len(name)])):
            raise section.error("sbatch", f"has {option}, which smlp compare sets itself: leave it out")
    if resources.device not in (None, "cpu", "gpu"):
        raise section.error("device", f"must be cpu or gpu, got {resources.device!r}")
    if resources.mfu is not None and resources.mfu > 1:
        raise section.error("mfu", f"is a share of the device's peak, at most 1, got {resources.mfu}")
    section.end()
    return resources


def _seeds(section: Section) -> tuple[int, ...]:
    seeds = tuple(section.as_count("seeds", seed) for seed in section.values("seeds", [1]))
    if len(set(seeds)) < len(seeds) or not seeds:
        raise section.error("seeds", f"must be different numbers, got {shown(list(seeds))}")
    return tuple(_seed(section, "seeds", seed) for seed in seeds)


def _seed(section: Section, key: str, seed: int) -> int:
    if seed > MOST_SEED:
        raise section.error(key, f"has {seed}; training accepts at most {MOST_SEED}")
    return seed
