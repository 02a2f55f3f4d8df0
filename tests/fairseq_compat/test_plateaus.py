"""A run that resumes counts validations without an improvement as if it had never stopped."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim.lr_scheduler.polynomial_decay_schedule import PolynomialDecayLRSchedule
from fairseq.optim.sgd import SGD
from running import TINY_LM, Finished

from smlp.fairseq_compat import plateaus

REPOSITORY = Path(__file__).parents[2]
# validation after each update, none of which is better than the first
PATIENT = ["--lr", "1e-12", "--patience", "3", "--validate-interval-updates", "1"]
# no epoch counts as better than the first; the second bad one, the third epoch, halves the rate
BY_PLATEAU = [
    *("--lr-scheduler", "reduce_lr_on_plateau", "--lr-shrink", "0.5", "--lr-patience", "1", "--lr-threshold", "0.9"),
    *("--batch-size", "64"),
]


EPOCH = 2  # updates of BY_PLATEAU
# epochs of five updates, of which the second begins with the rate at the end of the first
ANNEALED = [
    *("--lr-scheduler", "polynomial_decay", "--force-anneal", "2", "--total-num-update", "20"),
    *("--batch-size", "24"),
]
ENDED = {
    "patient_ended": ("has not improved in 3 validations and --patience is 3: there is nothing to train", 4),
    "time_ended": ("has trained for longer than --stop-time-hours 1e-09: there is nothing to train", 4 * EPOCH),
}


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory: pytest.TempPathFactory, run_fairseq_many) -> dict[str, tuple[Path, Finished]]:
    root = tmp_path_factory.mktemp("plateaus")

    def train(**calls: tuple[str, list[str]]) -> dict[str, tuple[Path, Finished]]:
        common = [tiny_data, "--user-dir", REPOSITORY / "smlp", *TINY_LM]
        cases = [
            {"tool": "train", "args": [*common, *options, "--save-dir", root / folder]}
            for folder, options in calls.values()
        ]
        found = dict(zip(calls, run_fairseq_many(cases, timeout=200), strict=True))
        return {name: (root / calls[name][0] / "checkpoint_last.pt", run) for name, run in found.items()}

    found = train(
        patient=("patient", [*PATIENT, "--max-update", "3"]),
        rate=("rate", [*BY_PLATEAU, "--max-epoch", "3"]),
        rate_whole=("whole", [*BY_PLATEAU, "--max-epoch", "4"]),
        annealed=("annealed", [*ANNEALED, "--max-update", "7"]),  # within the second epoch
        annealed_whole=("annealed_whole", [*ANNEALED, "--max-update", "18"]),
    )
    found |= train(
        patient_again=("patient", [*PATIENT, "--max-update", "8"]),
        rate_again=("rate", [*BY_PLATEAU, "--max-epoch", "4"]),
        annealed_again=("annealed", [*ANNEALED, "--max-epoch", "2"]),
    )
    return found | train(
        patient_ended=("patient", [*PATIENT, "--max-update", "8"]),
        time_ended=("whole", [*BY_PLATEAU, "--max-epoch", "5", "--stop-time-hours", "1e-9"]),
        annealed_last=("annealed", [*ANNEALED, "--max-update", "18"]),
    )


@pytest.mark.parametrize(
    ("changes", "counts", "bad_epochs", "steps"),
    [
        ({}, 2, 1, [(1, 3.5)]),
        ({"metric": "ppl"}, 0, 0, []),
        ({"patience": -1}, 0, 1, [(1, 3.5)]),
        ({"resets_count": True}, 0, 1, [(1, 3.5)]),
        ({"overrides": {"lr": 0.1}}, 2, 1, [(1, 3.5), 0.1]),
        ({"resets_schedule": True}, 2, 0, []),
        ({"val_loss": None}, 2, 1, []),
    ],
)
def test_only_what_still_holds_is_restored(monkeypatch, changes, counts, bad_epochs, steps) -> None:
    def trainer(metric: str, patience: int) -> SimpleNamespace:
        checkpoint = SimpleNamespace(
            best_checkpoint_metric=metric, maximize_best_checkpoint_metric=False, patience=patience
        )
        cfg = SimpleNamespace(checkpoint=checkpoint, dataset=SimpleNamespace(valid_subset="valid,test"))
        optimizer = SimpleNamespace(set_lr=taken.append)
        return SimpleNamespace(
            cfg=cfg, lr_step=lambda *step: taken.append(step), get_lr=lambda: 0.1, optimizer=optimizer
        )

    def stopping() -> None: ...

    taken: list[tuple] = []
    schedule = SimpleNamespace(num_bad_epochs=1)
    monkeypatch.setattr(plateaus, "_stopping", lambda: stopping)
    monkeypatch.setattr(plateaus, "_schedule", lambda _: schedule)
    monkeypatch.setattr(plateaus, "_annealing", lambda _: None)
    stopping.best, stopping.num_runs = 3.0, 2
    state = {
        "smlp_plateau": plateaus.plateau_of(trainer("loss", 3)),
        "train_iterator": {"epoch": 2, "iterations_in_epoch": 0},
        "val_loss": changes.get("val_loss", 3.5),
    }
    stopping.best, stopping.num_runs, schedule.num_bad_epochs = 9.0, 0, 0
    resumed = trainer(changes.get("metric", "loss"), changes.get("patience", 3))
    resets = (changes.get(name, False) for name in ("resets_count", "resets_schedule"))
    plateaus.restore_plateau(resumed, state, *resets, changes.get("overrides"))
    found = (plateaus.validations_in_vain(), schedule.num_bad_epochs, taken)
    assert found == (counts, bad_epochs, steps)
    plateaus.restore_plateau(resumed, {}, False, False, None)  # of an older revision
    assert found == (plateaus.validations_in_vain(), schedule.num_bad_epochs, taken)


def rates(run: Finished) -> dict[str, str]:
    """The learning rate of each update as it was logged, by epoch and number of the batch."""
    return dict(re.findall(r"train_inner \| epoch (\d+: +\d+) / .*? lr=([\d.e-]+)", run.stdout))


def test_patience_counts_validations_before_a_restart(runs) -> None:
    _, again = runs["patient_again"]
    assert again.rc == 0, again.stderr
    assert "early stop since valid performance hasn't improved for last 3 runs" in again.stdout
    assert re.findall(r"train_inner .* num_updates=(\d+)", again.stdout) == ["4"]


@pytest.mark.parametrize("name", ENDED)
def test_a_run_that_has_ended_does_not_train_on(runs, name: str) -> None:
    path, ended = runs[name]
    message, num_updates = ENDED[name]
    assert ended.rc == 0, ended.stderr
    assert message in ended.stdout and "train_inner" not in ended.stdout
    assert torch.load(path)["optimizer_history"][-1]["num_updates"] == num_updates


def test_the_rate_falls_in_the_same_epoch_after_a_restart(runs) -> None:
    whole, first, again = (rates(runs[name][1]) for name in ("rate_whole", "rate", "rate_again"))
    assert set(whole.values()) == {"0.001", "0.0005"}
    assert first | again == whole and not first.keys() & again.keys()


def test_annealing_goes_on_after_a_restart_within_an_epoch_and_between_two(runs) -> None:
    whole, *parts = (rates(runs[name][1]) for name in ("annealed_whole", "annealed", "annealed_again", "annealed_last"))
    assert parts[0] | parts[1] | parts[2] == whole and len(whole) == sum(map(len, parts)) == 18
    first, second, third = (next(name for name in whole if int(name.split(":")[0]) == epoch) for epoch in (1, 2, 3))
    assert float(whole[first]) > float(whole[second]) > float(whole[third])


@pytest.mark.parametrize(
    ("rate", "epochs", "expected"),
    [
        (0.1, (3, 4), [0.04, 0.02]),  # the rest of the third epoch, and then from where the optimizer is
        (0.1, (1, 3), [0.1, 0.02]),  # with --reset-dataloader
        (0.2, (3,), [0.02]),  # with another --lr than that of the checkpoint
    ],
)
def test_from_which_rate_an_epoch_goes_on(rate: float, epochs: tuple[int, ...], expected: list[float]) -> None:
    given = Namespace(lr=[rate], momentum=0.0, weight_decay=0.0, force_anneal=2, warmup_updates=0)
    vars(given).update(total_num_update=20, power=1.0, end_learning_rate=0.0)
    optimizer = SGD(given, [torch.nn.Parameter(torch.zeros(1))])
    schedule = PolynomialDecayLRSchedule(given, optimizer)
    resumed = SimpleNamespace(lr_scheduler=schedule, lr_step_update=lambda: None)
    found = {"from": 0.04, "lr": [0.1]}
    plateaus._anneal_on(resumed, found, {"epoch": 3, "iterations_in_epoch": 2})
    optimizer.set_lr(0.02)
    begun = []
    for epoch in epochs:
        schedule.step_begin_epoch(epoch)
        begun.append(schedule.lr)
        optimizer.set_lr(0.02)
    assert begun == expected
