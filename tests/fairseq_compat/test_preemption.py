"""A signal stops training after an update, on all ranks alike; the same command goes on as if nothing had happened."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from launched import make_plugin
from running import TINY_LM, Finished

from smlp.fairseq_compat.stopping import how_to_resume
from smlp.launch.stop_signals import EXIT_STOPPED

pytestmark = pytest.mark.timeout(240)

LAST_UPDATE = 8
AT_THIRD = 'before(Trainer, "train_step", lambda self: {when} and self.get_num_updates() == 2, {action})\n'
USR1 = "lambda: os.kill(os.getpid(), signal.SIGUSR1)"
# rank 0, which alone writes, takes its time
SLOW_SAVE = """
import atexit, time, torch
save = torch.save
if RANK == 0:
    torch.save = lambda *args: (time.sleep(1.0), save(*args))

def at_exit():
    saved = os.path.exists(os.path.join(sys.argv[sys.argv.index("--save-dir") + 1], "checkpoint_last.pt"))
    print("at exit: connected", torch.distributed.is_initialized(), "saved", saved)

atexit.register(at_exit)
"""
# as Slurm does it: a process of its own sends SIGTERM to all of the step, those that load data too; then again when
# another rank has left, if srun has --kill-on-bad-exit
BY_SLURM = """
import subprocess, time
from smlp.launch.stop_signals import StopSignals
os.setpgid(0, 0)

def terminate():
    subprocess.run(["sh", "-c", f"kill -TERM -{os.getpgid(0)}"], process_group=0)
    time.sleep(0.5)

leave = StopSignals.leave
StopSignals.leave = lambda self: (leave(self), terminate())
"""
# Plug-ins that make a run send signals to itself; the rest of the case.
STOPPED: dict[str, tuple[str, list[str]]] = {
    # only one of the ranks gets it
    "two ranks": (SLOW_SAVE + AT_THIRD.format(when="RANK == 1", action=USR1), []),
    # of the first epoch; without a buffer, or they have ended by then
    "workers": (
        BY_SLURM + AT_THIRD.format(when="True", action="terminate"),
        ["--num-workers", "2", "--data-buffer-size", "0"],
    ),
    # in the middle of writing the file, twice
    "saving": (
        "import torch\nsave = torch.save\n"
        "def torn(state, file):\n"
        "    file.write(b''); os.kill(os.getpid(), signal.SIGTERM); save(state, file)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "torch.save = torn\n",
        ["--save-interval-updates", "3", "--disable-validation"],
    ),
    # the first batch of the validation after the third update, on the second rank
    "validation on two ranks": (
        'calls = []\nbefore(Trainer, "valid_step", lambda self: calls.append(1) or RANK == 1 == len(calls), '
        + USR1
        + ")\n",
        ["--validate-interval-updates", "3"],
    ),
}
# The run is over anyway.
LAST = f'before(Trainer, "train_step", lambda self: self.get_num_updates() == {LAST_UPDATE} - 1, {USR1})\n'
LAST += """
from fairseq.distributed import utils
call_main = utils.call_main
utils.call_main = lambda *args: (call_main(*args), print("afterwards", signal.getsignal(signal.SIGTERM).name))
"""
EARLY = 'before(Trainer, "__init__", lambda self: True, lambda: os.kill(os.getpid(), signal.SIGTERM))\n'


def case(data: Path, folder: Path, body: str, options: list[str], ranks: int) -> dict:
    plugin = make_plugin(folder / f"plugin_{folder.name.replace(' ', '_')}_{ranks}", body)
    args = [data, "--user-dir", plugin, *TINY_LM, "--max-update", LAST_UPDATE, *options]
    return {
        "tool": "train",
        "args": [*args, "--save-dir", folder / "checkpoints"],
        "ranks": ranks,
    }


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory: pytest.TempPathFactory, run_fairseq_many) -> dict[str, tuple[Path, Finished]]:
    """Every stopped run, ``NAME again``, the run that goes on from it, and the runs that are never stopped."""
    root = tmp_path_factory.mktemp("preemption")
    ranks = {name: 2 if "two ranks" in name else 1 for name in STOPPED}
    first = {name: case(tiny_data, root / name, *STOPPED[name], ranks[name]) for name in STOPPED}
    first |= {f"never {n}": case(tiny_data, root / f"never {n}", "", [], n) for n in (1, 2)}
    first |= {
        "last": case(tiny_data, root / "last", LAST, [], 1),
        "early": case(tiny_data, root / "early", EARLY, [], 1),
    }
    found = dict(zip(first, run_fairseq_many(list(first.values()), timeout=200), strict=True))
    again = {}
    for name in STOPPED:
        plugin = make_plugin(root / name / f"again_{name.replace(' ', '_')}", "")
        args = [plugin if argument == first[name]["args"][2] else argument for argument in first[name]["args"]]
        again[f"{name} again"] = {**first[name], "args": args}
    found |= dict(zip(again, run_fairseq_many(list(again.values()), timeout=200), strict=True))
    return {name: (root / name.removesuffix(" again") / "checkpoints", run) for name, run in found.items()}


def losses(*finished: Finished) -> dict[str, str]:
    """The loss of each update as it was logged, by epoch and number of the batch."""
    lines = "\n".join(run.stdout for run in finished)
    found = re.findall(r"train_inner \| epoch (\d+): +(\d+) / \d+ loss=([\d.]+)", lines)
    assert len({pair[:2] for pair in found}) == len(found), "an update was done twice"
    return {f"{epoch}.{number}": loss for epoch, number, loss in found}


@pytest.mark.parametrize("name", STOPPED)
def test_a_signal_stops_the_run_after_its_update(runs, name: str) -> None:
    _, run = runs[name]
    assert run.rc == EXIT_STOPPED, run.stderr
    assert "Traceback" not in run.stderr
    lines = [line for line in run.stdout.splitlines() if "stopped by" in line]
    assert len(lines) == 1
    # during the save after the third update, the fourth is the next that it can end after
    assert f"after update {4 if name == 'saving' else 3}:" in lines[0]
    assert "checkpoint_last.pt" in lines[0]
    # no more validation than there would have been without the signal, and none to its end
    assert "valid on 'valid' subset" not in run.stdout


@pytest.mark.parametrize("name", STOPPED)
def test_it_goes_on_as_if_never_stopped(runs, name: str) -> None:
    folder, stopped = runs[name]
    _, again = runs[f"{name} again"]
    whole_folder, whole = runs["never 2" if "two ranks" in name else "never 1"]
    assert again.rc == whole.rc == 0, again.stderr
    assert losses(stopped, again) == losses(whole)
    assert len(losses(whole)) == LAST_UPDATE
    ours, theirs = (torch.load(path / "checkpoint_last.pt") for path in (folder, whole_folder))
    assert ours["model"].keys() == theirs["model"].keys()
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])
    moments = [state["last_optimizer_state"]["state"] for state in (ours, theirs)]
    assert all(torch.equal(moments[0][i]["exp_avg_sq"], moments[1][i]["exp_avg_sq"]) for i in moments[1])


def test_no_rank_leaves_before_all_is_saved(runs) -> None:
    """A launcher may end the others as soon as one has left."""
    run = runs["two ranks"][1]
    assert run.stdout.count("at exit: connected False saved True") == 2


def test_a_finished_run_ends_as_it_would_have(runs) -> None:
    """With its validation and status 0: fairseq would train one update too many from a checkpoint of the last one."""
    folder, run = runs["last"]
    assert run.rc == 0, run.stderr
    assert "valid on 'valid' subset" in run.stdout and "stopped by" not in run.stdout
    assert torch.load(folder / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == LAST_UPDATE
    assert run.stdout.endswith("afterwards SIG_DFL\n")


def test_before_the_first_update_a_signal_ends_the_process(runs) -> None:
    folder, run = runs["early"]
    assert run.rc == -15, run.stderr
    assert not list(folder.glob("*.pt"))


@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        (
            {"no_save_optimizer_state": True},
            "checkpoint_last.pt",
            "the same command resumes from it, with updates counted from 0, for it has no optimizer state",
        ),
        ({}, "checkpoint_1_6.pt", "the same command resumes from it"),
        ({"finetune_from_model": "a.pt"}, "checkpoint_last.pt", "the same command resumes from it"),
        ({"restore_file": "{}/checkpoint_last.pt"}, "checkpoint_1_6.pt", "the same command resumes from it"),
        (
            {"restore_file": "a.pt", "reset_optimizer": True},
            "checkpoint_last.pt",
            "the same command without --reset-optimizer, --restore-file resumes from it",
        ),
        (
            {"no_last_checkpoints": True},
            "checkpoint_1_6.pt",
            "the same command with --restore-file {}/checkpoint_1_6.pt resumes from it",
        ),
        (
            {"no_last_checkpoints": True, "checkpoint_suffix": "_a"},
            "checkpoint_1_6_a.pt",
            "the same command with --restore-file {}/checkpoint_1_6.pt resumes from it",  # fairseq adds it again
        ),
        (
            {"no_last_checkpoints": True, "finetune_from_model": "a.pt"},
            "checkpoint1.pt",
            "the same command with --restore-file {}/checkpoint1.pt without --finetune-from-model resumes from it",
        ),
    ],
)
def test_the_last_line_says_with_which_command_training_resumes(tmp_path: Path, options, name: str, said: str) -> None:
    config = Namespace(
        save_dir=str(tmp_path),
        restore_file="checkpoint_last.pt",
        finetune_from_model=None,
        no_last_checkpoints=False,
        no_save_optimizer_state=False,
        **dict.fromkeys(("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader"), False),
    )
    for option, value in options.items():
        setattr(config, option, value.format(tmp_path) if isinstance(value, str) else value)
    assert how_to_resume(config, str(tmp_path / name), options.get("checkpoint_suffix", "")) == said.format(tmp_path)
