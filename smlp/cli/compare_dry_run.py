"""``smlp compare run --dry-run``: what would be done, and what it would cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from smlp.cli.compare_models import check_zeroshot, not_done, num_gpus, plan, print_models
from smlp.experiments.cost import Cost, estimate
from smlp.experiments.data import argument, check_subsets, check_text, dictionary_size, find_data, held_out_tokens
from smlp.experiments.experiment import Experiment
from smlp.experiments.folder import Folder
from smlp.experiments.local import Machine
from smlp.experiments.plan import PlannedModel, Run, main_runs, training_words, tuning_runs
from smlp.experiments.progress import duration
from smlp.experiments.reading import read_experiment


def dry_run(path: Path, out: Path) -> int:
    """Prints what would be done, and what it would cost; makes nothing.

    Raises:
        UserError: something in the file is wrong, or there are no data and it does not say for how many pieces.
    """
    experiment, folder = read_experiment(path), Folder(out)
    check_zeroshot(experiment, wants_files=False)
    found = find_data(experiment, folder)
    vocab_size = dictionary_size(experiment, found)
    if found is not None:
        check_subsets(experiment, found)
    else:
        if experiment.text is not None:
            check_text(experiment.text)
        print(f"no data yet: {vocab_size:,} pieces are assumed, and validations are not in the time")
    data = argument(experiment, folder)
    tasks = experiment.evaluation.zeroshot_data
    if tasks is not None and not tasks.is_dir():
        print(f"no tasks yet: there is no folder {tasks} (evaluate.zeroshot.data), and the run will need it")
    models = plan(experiment, data, vocab_size)
    place, gpus = experiment.place, num_gpus()
    is_here = place.where == "local" and (place.device != "gpu" or gpus > 0)
    machine = Machine.of(experiment, gpus) if is_here else None
    runs = _all_runs(experiment, models)
    print_models(experiment, models)
    todo = not_done(folder, runs)
    if len(todo) < len(runs):
        print(f"{len(runs) - len(todo)} of {len(runs)} runs are done already")
    held_out = held_out_tokens(found, experiment.evaluation.subsets) if found else 0
    _print_cost(experiment, todo, estimate(experiment, models, todo, machine.threads if machine else None, held_out))
    if machine and machine.runs_on_a_gpu > 1:
        print(f"  (up to {machine.runs_on_a_gpu} runs share a GPU here, and take longer than that)")
    first = next(run for run in runs if not run.tuning)
    words = training_words(experiment, first, data, folder.run(first.folder).path)
    print(f"the first run of the comparison:\n  smlp train {shlex.join(words)}")
    return 0


def _all_runs(experiment: Experiment, models: Sequence[PlannedModel]) -> list[Run]:
    tuning = experiment.tuning
    expected = {model.name: tuning.values[0] for model in models} if tuning else {}
    return [*tuning_runs(experiment, models), *main_runs(experiment, models, expected)]


def _print_cost(experiment: Experiment, runs: Sequence[Run], cost: Cost) -> None:
    for name, seconds in cost.seconds_per_update.items():
        print(f"  {name}: {seconds:.3g} s for an update")
    digits = 1 if cost.device_hours >= 1 else 2
    devices = "GPU hours" if experiment.place.is_on_gpus else "hours of all runs one after the other"
    exponent = math.floor(math.log10(max(1.0, cost.flops)))
    print(
        f"{len(runs)} runs: about {duration(cost.seconds)} with {experiment.place.at_a_time(len(runs))} at a time, "
        f"{cost.device_hours:.{digits}f} {devices}, {cost.flops / 10**exponent:.2f}e{exponent} floating-point "
        f"operations (a multiply-add is two), {cost.disk_bytes / 1e9:.1f} GB of checkpoints, "
        f"{cost.most_disk_bytes / 1e9:.1f} GB at most while it runs\n  ({cost.how})"
    )
