"""scripts/slurm/ without Slurm: programs that stand in for its commands note what they are asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import REPOSITORY, Finished
from slurm_jobs import programs_first

pytestmark = pytest.mark.timeout(60)

SCRIPTS = REPOSITORY / "scripts" / "slurm"
SUBMIT, TRAIN, SWEEP = (SCRIPTS / name for name in ("submit.sh", "train.sbatch", "sweep.sbatch"))
NOTE = '{ printf "%s\\0" "$(basename "$0")" "$@"; echo; } >> "$NOTES"\n'
PROGRAMS = {
    "sbatch": 'echo "${SBATCH_SAYS:-42}"',
    "scontrol": 'exit "${SCONTROL_STATUS:-0}"',
    "squeue": '[ -z "${QUEUE_FAILS:-}" ] || exit 1; [ -n "${SQUEUE_STATES:-}" ] || echo "${JOB_STATE:-RUNNING}"',
    "smlp": 'eval "${SMLP_DOES:-}"',
    # one task after the other; srun's status is the highest of theirs
    "srun": 'worst=0; while [[ "$1" == -* ]]; do shift; done\n'
    'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; status=$?; [ $status -le $worst ] || worst=$status; done\n'
    "exit $worst",
}


@pytest.fixture
def user(tmp_path):
    """A folder with data/ in it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").touch()
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{NOTE}{body}\n")
        (programs / name).chmod(0o755)
    return tmp_path


def run(user: Path, *words: object, **variables: str) -> Finished:
    """Runs a script there; a second one after it would append to the notes."""
    environment = {**programs_first(dict(os.environ), user / "programs"), "NOTES": str(user / "notes"), **variables}
    done = subprocess.run(
        ["bash", *map(str, words)], cwd=user, env=environment, capture_output=True, text=True, timeout=30
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def noted(user: Path, program: str) -> list[list[str]]:
    """The arguments of each call of a program."""
    notes = user / "notes"
    calls = [line.split("\0")[:-1] for line in notes.read_text().splitlines()] if notes.exists() else []
    return [words for name, *words in calls if name == program]


def job(user: Path, script: Path, *words: object, **variables: str) -> Finished:
    """Runs a batch script as Slurm would: from a copy, with variables."""
    copy = user / "slurm_script"
    copy.write_text(script.read_text())
    own = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(user)}
    return run(user, copy, *words, **{**own, "SMLP_ROOT": str(REPOSITORY), **variables})


def error(done: Finished) -> str:
    """The sentence on standard error."""
    assert done.rc == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("smlp: error: ")
    return line.removeprefix("smlp: error: ")


def test_bash_reads_every_script() -> None:
    scripts = [
        *SCRIPTS.glob("*.sh"),
        *SCRIPTS.glob("*.sbatch"),
        REPOSITORY / "tests" / "helpers" / "slurm" / "install.sh",
    ]
    assert len(scripts) >= 7
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, ""), script
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", "-x", *scripts], capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stdout


def test_both_kinds_of_jobs_are_warned_and_go_back_to_the_queue() -> None:
    for script in (TRAIN, SWEEP):
        lines = script.read_text().splitlines()
        assert {"#SBATCH --signal=USR1@120", "#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)


# --- submit.sh


@pytest.mark.parametrize(("nodes", "gpus", "accumulate"), [(4, 8, "4"), (8, 4, "4"), (2, 8, "8")])
def test_the_papers_batches_on_any_number_of_gpus(user, nodes, gpus, accumulate) -> None:
    command = ["--", REPOSITORY / "examples" / "smlp.sh", "data", "runs/a", "--seed", 3]
    done = run(user, SUBMIT, "--nodes", nodes, "--gpus-per-node", gpus, "--time=1:00:00", *command)
    assert done.rc == 0, done.stderr
    assert done.stdout.startswith(f"job 42: {nodes * gpus} ranks on {nodes} nodes\n")
    (words,) = noted(user, "sbatch")
    options, arguments = words[: words.index(str(TRAIN))], words[words.index(str(TRAIN)) + 1 :]
    size = [f"--nodes={nodes}", f"--ntasks-per-node={gpus}", f"--gres=gpu:{gpus}", "--time=1:00:00"]
    assert set(size) < set(options) and "--dependency=singleton" in options
    assert arguments[0] == "data" and arguments[-2:] == ["--seed", "3"]
    assert arguments[arguments.index("--update-freq") + 1] == accumulate
    assert arguments[arguments.index("--adam-betas") + 1] == "(0.9, 0.98)"
    (checked,) = noted(user, "smlp")
    assert checked == ["train", "--dry-run", "--nodes", str(nodes), "--gpus-per-node", str(gpus), *arguments]


def test_the_number_of_the_job_among_what_sbatch_says(user) -> None:
    given = [SUBMIT, "--nodes", 2, "--tasks-per-node", 3, "--", "data", "--arch", "smlp", "--save-dir=runs/a"]
    done = run(user, *given, SBATCH_SAYS="2024: a notice\n43;far \nbye")
    assert done.rc == 0 and done.stdout.startswith("job 43;far: 6 ranks on 2 nodes\n")
    assert "/43.out\n" in done.stdout and "scancel --clusters=far 43\n" in done.stdout
    said = run(user, *given, SBATCH_SAYS="Submitted batch job 44").stdout
    assert said.startswith("job 44: ") and "scancel 44\n" in said
    assert run(user, *given, SBATCH_SAYS="Submitted batch job 45 on cluster far").stdout.startswith("job 45;far: ")
    assert run(user, *given, SBATCH_SAYS="46;").stdout.startswith("job 46: ")
    said = error(run(user, *given, SBATCH_SAYS="accepted\nbye"))
    assert said == "sbatch took the job, but its number is not in: accepted bye"


def test_arguments_of_smlp_train_on_cpus(user) -> None:
    given = ["data", "--arch", "smlp", "--save-dir=runs/a b"]
    done = run(user, SUBMIT, "--nodes", 2, "--tasks-per-node", 3, "--cpus-per-task=2", "--", *given)
    assert done.rc == 0, done.stderr
    (words,) = noted(user, "sbatch")
    assert words[words.index(str(TRAIN)) + 1 :] == [*given, "--cpu"]
    assert {"--ntasks-per-node=3", "--gres=none", "--cpus-per-task=2"} < set(words)
    assert "--cpus-per-task=1" not in words


def test_other_names_of_gpus(user) -> None:
    run(user, SUBMIT, "--nodes", 1, "--gpus-per-node", 4, "--gres=gpu:a100:4", "--", "data", "--save-dir", "a")
    (words,) = noted(user, "sbatch")
    assert {"--gres=gpu:a100:4", "--ntasks-per-node=4"} < set(words) and "--gres=gpu:4" not in words


def test_jobs_have_one_name_if_they_have_one_save_dir(user) -> None:
    (user / "runs").mkdir()
    (user / "runs" / "link").symlink_to("a")
    for save_dir in ("runs/a", "runs/../runs/a", "runs/link", "other/a"):
        run(user, SUBMIT, "--nodes", 1, "--gpus-per-node", 1, "--", "data", "--save-dir", save_dir)
    one, *same, other = (next(w for w in words if "--job-name" in w) for words in noted(user, "sbatch"))
    assert same == [one, one] != [other, other] and one.startswith("--job-name=smlp-a-")
    for save_dir in ("-a", "-b"):  # names like options
        run(user, SUBMIT, "--nodes", 1, "--gpus-per-node", 1, "--logs=-l", "--", "data", f"--save-dir={save_dir}")
    *_, one, other = (next(w for w in words if "--job-name" in w) for words in noted(user, "sbatch"))
    assert one != other and one.startswith("--job-name=smlp--a-")


def test_a_dry_run_submits_nothing(user) -> None:
    """With the real ``smlp``: the paper's 32 ranks."""
    (user / "programs" / "smlp").write_text(f'#!/bin/bash\nexec {sys.executable} -m smlp "$@"\n')
    command = ["--", REPOSITORY / "examples" / "smlp.sh", "data", "runs/a", "--bf16"]
    more = ["--partition", "gpu", "--ntasks=32"]
    done = run(user, SUBMIT, "--dry-run", "--nodes", 8, "--gpus-per-node", 4, *more, *command)
    assert done.rc == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[32].split() == ["31", "node7", "cuda:3", "31"]
    assert "32 ranks; 32 experts in each sparse layer, 1 on a rank" in lines[33]
    assert "each rank runs: fairseq-train data" in lines[34] and lines[34].endswith("--bf16")
    assert lines[-1].startswith("sbatch --nodes=8 --ntasks-per-node=4") and " --partition=gpu " in lines[-1]
    assert not noted(user, "sbatch") and not (user / "slurm-logs").exists()


SIZE = ["--nodes", "1", "--gpus-per-node", "8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SIZE], "there is nothing to train: write it after --"),
        (["--gpus-per-node", "8", "--", "data"], "--nodes, the number of machines, is missing"),
        (["--nodes", "2", "--", "data"], "--gpus-per-node is missing (to train on CPUs: --tasks-per-node)"),
        (["--nodes", "two", "--gpus-per-node", "8", "--", "data"], "--nodes needs a number of at least 1, not 'two'"),
        (["--nodes", "1", "--gpus-per-node", "0", "--", "data"], "--gpus-per-node needs a number of at least 1"),
        (["--nodes", "--", "data"], "--nodes needs a value"),
        ([*SIZE, "--tasks-per-node", "2", "--", "data"], "8 ranks on each node, and --tasks-per-node says 2"),
        ([*SIZE, "-p", "gpu", "--", "data"], "unknown option '-p': write options of sbatch as --OPTION=VALUE"),
        ([*SIZE, "--arra=1-3", "--", "data"], "unknown option '--arra': write --array out"),
        ([*SIZE, "--depend=afterok:5", "--", "data"], "unknown option '--depend': write --dependency out"),
        ([*SIZE, "--", "nowhere", "--arch", "smlp"], "there is no dict.txt in 'nowhere'"),
        ([*SIZE, "--", "data:nowhere", "--arch", "smlp"], "there is no folder 'nowhere' with data"),
        ([*SIZE, "--", "data", "--arch", "smlp", "--dry-run"], "with --dry-run, smlp train trains nothing"),
        ([*SIZE, "--export=NONE", "--", "data"], "with --export=NONE, the job does not get variables that it needs"),
        ([*SIZE, "--logs", "50%", "--", "data"], "/50% has a % or \\ in its name, which sbatch does not take"),
        ([*SIZE, "--logs", "a\\b", "--", "data"], "/a\\b has a % or \\ in its name"),
        ([*SIZE, "--", "no.sh", "data", "runs"], "there is no command file no.sh"),
        ([*SIZE, "--", SUBMIT, "data", "runs"], "submit.sh does not use examples/recipe.sh"),
        ([*SIZE, "--", "data", "--restore-file", "x.pt"], "--restore-file would apply again at every restart"),
        ([*SIZE, "--", "data", "--no-save"], "with --no-save, no checkpoint is saved and every restart"),
        ([*SIZE, "--", "data", "--no-last-checkpoints"], "with --no-last-checkpoints, no checkpoint is saved"),
        (
            ["--nodes", "3", "--gpus-per-node", "1", "--", REPOSITORY / "examples/smlp.sh", "data", "runs"],
            "GPUS=3 does not divide the 128 batches of an update",
        ),
        ([*SIZE, "--array=1-5", "--", "data"], "--array would start the same run several times"),
        ([*SIZE, "--sweep", "no.txt", "--", "data", "runs"], "there is no list of runs no.txt"),
        ([*SIZE, "--sweep", "no.txt", "--", "data"], "a sweep needs DATA and the folder for all its runs"),
    ],
)
def test_mistakes_in_submitting(user, words, message) -> None:
    assert message in error(run(user, SUBMIT, *words))
    assert not noted(user, "sbatch")


def test_a_site_that_hands_on_no_variables(user) -> None:
    site = {"SBATCH_EXPORT": "NONE"}
    assert "give --export=ALL" in error(run(user, SUBMIT, *SIZE, "--", "data", **site))
    assert run(user, SUBMIT, *SIZE, "--export=ALL,A=1", "--", "data", **site).rc == 0 and noted(user, "sbatch")
    assert job(user, TRAIN, "data", SLURM_EXPORT_ENV="NONE", SMLP_DOES='[ -z "${SLURM_EXPORT_ENV+x}" ]').rc == 0


def test_data_of_sentences_have_a_dictionary_for_each_input(user) -> None:
    (user / "sentences" / "input0").mkdir(parents=True)
    (user / "sentences" / "input0" / "dict.txt").touch()
    done = run(user, SUBMIT, *SIZE, "--", "sentences", "--no-save", SMLP_MAX_RESTARTS="0")
    assert done.rc == 0 and noted(user, "sbatch"), done.stderr


@pytest.mark.parametrize("given", ["--gpus-per-node", "--tasks-per-node"])
def test_a_number_of_ranks_that_is_refused_is_named_as_it_was_given(user, given) -> None:
    (user / "programs" / "smlp").write_text(f'#!/bin/bash\nexec {sys.executable} -m smlp "$@"\n')
    for number, said in (
        (70000, "--nodes 1 with {} 70000 are 70,000 ranks: at most 65,536"),
        (10**20, "{} needs a nu"),
    ):
        done = run(user, SUBMIT, "--nodes", 1, given, number, "--", "data", "--save-dir=runs/--gpus-per-node")
        assert error(done).startswith(said.format(given)) and not noted(user, "sbatch")


def test_what_smlp_train_refuses_is_not_submitted(user) -> None:
    does = "echo 'smlp: error: --expert-parallel-size 5 does not divide 8' >&2; exit 1"
    assert "divide 8" in error(run(user, SUBMIT, *SIZE, "--", "data", SMLP_DOES=does))
    said = error(run(user, SUBMIT, *SIZE, "--", "data", SMLP_MAX_RESTARTS="often"))
    assert "SMLP_MAX_RESTARTS is 'often', not a number" in said and not noted(user, "sbatch")
    done = run(user, SUBMIT, *SIZE, "--", "data", "--no-save", SMLP_MAX_RESTARTS="0")
    assert done.rc == 0 and noted(user, "sbatch"), done.stderr


def test_without_a_cluster_or_an_environment(user) -> None:
    (user / "programs" / "sbatch").unlink()
    bare = {"PATH": f"{user}/programs:/bin:/usr/bin"} if not shutil.which("sbatch", path="/bin:/usr/bin") else {}
    if bare:
        assert "there is no command sbatch here" in error(run(user, SUBMIT, *SIZE, "--", "data", **bare))
    done = run(user, SUBMIT, *SIZE, "--", "data", SMLP_VENV=str(user / "venv"))
    assert f"no virtual environment at {user}/venv" in error(done)


# --- in a job: stopped, failed, done


def test_a_job_trains_on_all_its_tasks(user) -> None:
    done = job(user, TRAIN, "data", "--arch", "smlp", SLURM_CPUS_PER_TASK="6")
    assert done.rc == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("| 7 | training has ended")
    (words,) = noted(user, "srun")
    assert "--kill-on-bad-exit=1" in words and f"--output={user}/slurm-logs/7/rank-%t.log" in words
    assert noted(user, "smlp") == [["train", "data", "--arch", "smlp"]] * 2
    assert not noted(user, "scontrol")


def test_a_command_file_gets_the_number_of_tasks(user) -> None:
    done = job(user, TRAIN, REPOSITORY / "examples" / "smlp.sh", "data", "runs/a")
    assert done.rc == 0, done.stderr
    words = noted(user, "smlp")[0]
    assert words[:2] == ["train", "data"] and words[words.index("--update-freq") + 1] == "32"
    assert words[words.index("--save-dir") + 1] == "runs/a"


@pytest.mark.parametrize("does", ["exit 75", "kill -TERM $$", "kill -USR1 $$"])
def test_a_stopped_job_goes_back_to_the_queue(user, does) -> None:
    """After saving, or ended by the signal before the first update."""
    done = job(user, TRAIN, "data", SMLP_DOES=does)
    assert done.rc == 0 and "training stopped; the job returns to the queue" in done.stdout, done.stderr
    assert noted(user, "scontrol") == [["requeue", "7"]]


def test_what_the_user_sees_of_the_queue_does_not_matter(user) -> None:
    assert job(user, TRAIN, "data", SMLP_DOES="exit 75", SQUEUE_STATES="PENDING").rc == 0
    assert noted(user, "scontrol") == [["requeue", "7"]]
    again = job(user, TRAIN, "data", SLURM_RESTART_COUNT="1")
    assert again.rc == 0 and "start 2: 4 ranks" in again.stdout and "training stopped" not in again.stdout
    assert len(noted(user, "scontrol")) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JOB_STATE": "COMPLETING"}, "the job is COMPLETING, so this script does not requeue it"),
        ({"QUEUE_FAILS": "1"}, "the job is of unknown state (squeue failed twice), so this script does not"),
        ({"SLURM_RESTART_COUNT": "100"}, "the job has restarted 100 times and SMLP_MAX_RESTARTS allows no more"),
        ({"SLURM_RESTART_COUNT": "2", "SMLP_MAX_RESTARTS": "2"}, "has restarted 2 times"),
        ({"SMLP_MAX_RESTARTS": "0"}, "has restarted 0 times"),
    ],
)
def test_a_stopped_job_that_stays_away(user, variables, message) -> None:
    done = job(user, TRAIN, "data", SMLP_DOES="exit 75", **variables)
    assert done.rc == 75 and message in done.stdout
    assert not noted(user, "scontrol")


def test_a_stop_that_cannot_be_noted_is_no_end_of_the_training(user) -> None:
    (user / "slurm-logs" / "7" / "stopped").mkdir(parents=True)  # in the place of the note
    done = job(user, TRAIN, "data", SMLP_DOES="exit 75")
    assert done.rc == 75 and "training failed with exit status 75" in done.stdout
    assert not noted(user, "scontrol")


def test_slurm_does_not_requeue(user) -> None:
    done = job(user, TRAIN, "data", SMLP_DOES="exit 75", SCONTROL_STATUS="1")
    assert done.rc == 75 and "scontrol could not requeue the job: submit it again to resume" in done.stdout


@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("exit 3", 3),
        ("kill -KILL $$", 137),
        # what the signal does that srun sends to the others
        ("[ $SLURM_PROCID = 0 ] && kill -TERM $$; exit 1", 1),
        ("[ $SLURM_PROCID = 0 ] && exit 75; exit 1", 1),
    ],
)
def test_a_failed_job_fails(user, does, status) -> None:
    done = job(user, TRAIN, "data", SMLP_DOES=does)
    assert done.rc == status and f"failed with exit status {status}" in done.stdout
    assert not noted(user, "scontrol")


def test_a_restart_runs_what_the_first_start_ran(user) -> None:
    shutil.copytree(REPOSITORY / "examples", user / "examples")
    (user / "smlp").mkdir()  # the package of a clone, which the recipe names as --user-dir
    (user / "smlp" / "__init__.py").touch()
    file = user / "examples" / "smlp.sh"
    job(user, TRAIN, file, "data", "runs/a", SMLP_DOES="exit 75")
    file.unlink()
    job(user, TRAIN, file, "data", "runs/a", SLURM_RESTART_COUNT="1")
    # a later job that happens to get the same number
    job(user, TRAIN, "data", "--arch", "smlp")
    calls = noted(user, "smlp")[::2]
    assert len(calls) == 3 and calls[0] == calls[1] and "(0.9, 0.98)" in calls[1]
    assert calls[2] == ["train", "data", "--arch", "smlp"]


def test_arguments_that_cannot_be_written_whole_are_not_kept(user) -> None:
    """Of a full disk, the first 4,096 bytes would be kept, and a restart would run without the rest."""
    copy = user / "slurm_script"
    copy.write_text(TRAIN.read_text().replace("run_ranks", "ulimit -f 1; trap '' XFSZ; run_ranks"))
    own = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(user)}
    done = run(user, copy, "data", "--user-dir", "x" * 5000, **own, SMLP_ROOT=str(REPOSITORY))
    assert done.rc == 1 and "slurm-logs/7/arguments, from which a restart would run" in done.stderr
    assert not noted(user, "srun") and not (user / "slurm-logs" / "7" / "arguments").exists()


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ([], {}, "nothing to train"),
        (["data"], {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set: this script is for a Slurm job"),
        (["data"], {"SLURM_NTASKS": ""}, "the number of ranks is unknown"),
        (["data"], {"SMLP_ROOT": "/nowhere"}, "/nowhere is not a clone of smlp: submit the job from a clone's folder"),
        (["data"], {"SMLP_MAX_RESTARTS": "often"}, "SMLP_MAX_RESTARTS is 'often', not a number"),
        (["data"], {"SMLP_MAX_RESTARTS": "9" * 19}, f"is '{'9' * 19}', not a number of at most 18 digits"),
        (["data"], {"SLURM_RESTART_COUNT": "x"}, "SLURM_RESTART_COUNT is 'x', not a number"),
        (["data"], {"SLURM_RESTART_COUNT": "08"}, "SLURM_RESTART_COUNT is '08', not a number"),
        (["data", "--reset-optimizer"], {}, "--reset-optimizer would apply again at every restart"),
        (["no.sh", "data", "runs"], {}, "there is no command file no.sh"),
    ],
)
def test_mistakes_in_a_job(user, words, variables, message) -> None:
    assert message in error(job(user, TRAIN, *words, **variables))
    assert not noted(user, "smlp")


def test_a_job_without_slurm_names_the_folder_that_it_is_in(user) -> None:
    said = error(job(user, TRAIN, "data", SMLP_ROOT="", SLURM_SUBMIT_DIR="", SLURM_JOB_ID=""))
    assert said.startswith(f"{user.resolve()} is not a clone of smlp")


# --- sweeps

RUNS = """# comment
  # another

fast  examples/smlp.sh --lr 1e-3
plain --arch smlp_tiny --adam-betas '(0.9, 0.98)'\r
last  --arch gmlp_lm"""


def task(user: Path, number: object, *words: object, **variables: str) -> Finished:
    own = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": str(number)}
    return job(user, SWEEP, "list.txt", "data", "runs", *words, **{**own, **variables})


def test_each_task_is_one_run(user) -> None:
    (user / "list.txt").write_text(RUNS)
    for number in (1, 2, 3):
        done = task(user, number, "--seed", 5)
        assert done.rc == 0, done.stderr
    assert "| 6_3 | run 3 of list.txt: last" in done.stdout and (user / "slurm-logs" / "6_3").is_dir()
    recipe, plain, last = noted(user, "smlp")[::2]
    assert recipe[:2] == ["train", "data"] and recipe[recipe.index("--save-dir") + 1] == "runs/fast"
    assert recipe[-4:] == ["--lr", "1e-3", "--seed", "5"]
    betas = ["--adam-betas", "(0.9, 0.98)"]
    assert plain == ["train", "data", "--save-dir", "runs/plain", "--arch", "smlp_tiny", *betas, "--seed", "5"]
    assert last == ["train", "data", "--save-dir", "runs/last", "--arch", "gmlp_lm", "--seed", "5"]


def test_a_run_of_a_sweep_restarts_on_its_own(user) -> None:
    (user / "list.txt").write_text(RUNS)
    done = task(user, 2, SMLP_DOES="exit 75")
    assert done.rc == 0 and noted(user, "scontrol") == [["requeue", "6_2"]], "not the array, whose number 7 may be"
    assert "--jobs=6_2" in noted(user, "squeue")[0]
    (user / "list.txt").write_text("other --arch hash_lm\n")
    assert task(user, 2, SLURM_RESTART_COUNT="1").rc == 0
    calls = noted(user, "smlp")
    assert calls[0] == calls[2] and "runs/plain" in calls[2]


@pytest.mark.parametrize(
    ("text", "number", "message"),
    [
        (RUNS, 4, "there is no run 4 in list.txt: its runs are numbered from 1 to 3"),
        (RUNS, 0, "there is no run 0 in list.txt: its runs"),
        (RUNS, "x", "there is no run x in list.txt: its runs"),
        (RUNS, "", "a sweep is a job array, so give sbatch --array=1-N for the N runs in list.txt"),
        ("# nothing\n", 1, "there are no runs in list.txt"),
        ("a/b --lr 1\n", 1, "list.txt, line 1: 'a/b' cannot be the name of a run"),
        ("\n--lr 1\n", 1, "list.txt, line 2: '--lr' cannot be the name of a run"),
        ("a --lr 1\nb\n", 1, "list.txt, line 2: nothing follows the name 'b'"),
        ("a --lr 1\n\na --lr 2\n", 1, "list.txt, line 3: line 1 has the name 'a' already"),
        (f"a --w {'x' * 100_000}\n", 1, "list.txt, line 1: 100004 characters are too many for a command"),
        ("a --lr '1\n", 1, "list.txt, line 1: a quotation mark is not closed"),
        ("a no.sh --lr 1\n", 1, f"there is no command file {REPOSITORY}/no.sh"),
        ("a --lr 1 --save-dir b\n", 1, "run a of the sweep is saved in runs/a: leave --save-dir b out"),
        ("a examples/smlp.sh --save-dir=b\n", 1, "run a of the sweep is saved in runs/a: leave --save-dir b out"),
    ],
)
def test_mistakes_in_a_list(user, text, number, message) -> None:
    (user / "list.txt").write_text(text)
    assert message in error(task(user, number))
    assert not noted(user, "smlp")


def test_a_sweep_is_submitted_with_a_copy_of_its_list(user) -> None:
    (user / "list.txt").write_text(RUNS)
    sizes = ["--nodes", 1, "--gpus-per-node", 4, "--sweep", "list.txt"]
    assert run(user, SUBMIT, *sizes, "--", "data", "runs", "--bf16").rc == 0
    assert run(user, SUBMIT, *sizes, "--array=2,3%1", "--", "data", "runs").rc == 0
    whole, part = noted(user, "sbatch")
    assert "--array=1-3" in whole and "--array=2,3%1" in part and "--array=1-3" not in part
    copy, *rest = whole[whole.index(str(SWEEP)) + 1 :]
    assert rest == ["data", "runs", "--bf16"]
    assert copy.startswith("slurm-logs/") and (user / copy).read_bytes() == RUNS.encode()
    assert part[part.index(str(SWEEP)) + 1] != copy
    assert [words[:2] for words in noted(user, "smlp")] == [["train", "--dry-run"]] * 6
    planned = run(user, SUBMIT, "--dry-run", *sizes, "--", "data", "runs")
    assert planned.rc == 0 and len(noted(user, "smlp")) == 9
    quick = run(user, SUBMIT, *sizes, "--unchecked", "--array=1-4:2", "--", "data", "runs")  # tasks 1 and 3
    assert quick.rc == 0 and quick.stdout.startswith("job 42") and len(noted(user, "smlp")) == 9
    assert "--array=1-4:2" in noted(user, "sbatch")[-1]
    assert [line for line in planned.stdout.splitlines() if line.startswith("run ")][1] == "run 2, plain:"
    (user / "-list.txt").write_text(RUNS)
    odd = ["--nodes", 1, "--gpus-per-node", 4, "--sweep=-list.txt", "--logs=-l", "--unchecked", "--", "data", "runs"]
    assert run(user, SUBMIT, *odd).rc == 0
    assert any(word.startswith("./-l/sweep-") for word in noted(user, "sbatch")[-1])


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (["4", "0", "2-4", "1-3,7%2", "0-2:2", "1-5:2", "008"], "list.txt are numbered from 1 to 3"),
        (["one", "1-", ",", "", "-3", "1:3", "1%%2", "3-1", "1-3:0", "1" * 20], "is no list of runs, such as 3,7 or"),
    ],
)
def test_an_array_has_runs_for_all_its_tasks(user, arrays, said) -> None:
    (user / "list.txt").write_text(RUNS)
    for array in arrays:
        done = run(user, SUBMIT, *SIZE, "--sweep", "list.txt", f"--array={array}", "--", "data", "runs")
        assert said in error(done) and not noted(user, "sbatch"), array


def test_a_run_that_would_fail_is_not_submitted(user) -> None:
    (user / "list.txt").write_text(RUNS)
    done = run(user, SUBMIT, *SIZE, "--sweep", "list.txt", "--", "data", "runs", SMLP_DOES="exit 1")
    assert done.rc == 1 and done.stdout == "run 1, fast:\n" and not noted(user, "sbatch")


def test_the_example_of_a_list_is_one(user) -> None:
    done = run(user, SUBMIT, "--dry-run", *SIZE, "--sweep", SCRIPTS / "sweep.txt", "--", "data", "runs")
    assert done.rc == 0, done.stderr
    assert len(noted(user, "smlp")) == 10


# --- scripts/test.sh --slurm


@pytest.mark.parametrize(
    ("install", "status", "output"),
    [
        ("echo 'no apt-get'; exit 3", 0, "slurm tests skipped: no apt-get\n"),
        ("exit 1", 1, ""),
        ("true", 1, "pytest -m slurm tests/launch/test_slurm.py -x"),
    ],
)
def test_the_tests_on_a_real_slurm(tmp_path, install, status, output) -> None:
    """With an installation and a pytest that only say what they do."""
    for folder in ("scripts", "tests/helpers/slurm", "venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts" / "test.sh").write_text((REPOSITORY / "scripts" / "test.sh").read_text())
    (tmp_path / "scripts" / "environment.sh").write_text(
        f'ROOT="{tmp_path}"; VENV="{tmp_path}/venv"; make_environment() {{ :; }}\nfail() {{ echo "$1" >&2; exit 1; }}\n'
    )
    (tmp_path / "tests" / "helpers" / "slurm" / "install.sh").write_text(install)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text('#!/bin/bash\necho "$@"\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / "test.sh", "--slurm", "-x"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == status, done.stderr
    words = [word for word in done.stdout.split() if not word.startswith("--junit-xml")]
    assert output.strip() in done.stdout or output.split() == words[1:]
