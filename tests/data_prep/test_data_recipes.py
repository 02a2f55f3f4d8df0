"""``examples/data``: both recipes from their sources to shards, here and as job arrays."""

import json
import os
import shutil
import subprocess

import pytest
from running import REPOSITORY, as_user

pytestmark = pytest.mark.long

RECIPES = REPOSITORY / "examples" / "data"
# Runs each job at once, all tasks of an array together, and prints its number, as the sbatch of some site.
SBATCH = """#!/usr/bin/env bash
set -eu
tasks=none wrap=""
echo "$*" >>"$JOBS"
while [ "$#" -gt 0 ]; do
    case "$1" in
    --array=0-*) tasks="${1#--array=0-}" ;;
    --wrap) wrap="$2"; shift ;;
    esac
    shift
done
if [ "$tasks" = none ]; then sh -euc "$wrap" >>"$JOBS.out" 2>&1; else
    started=""
    for task in $(seq 0 "$tasks"); do
        SLURM_ARRAY_TASK_ID="$task" sh -euc "$wrap" >>"$JOBS.out" 2>&1 &
        started="$started $!"
    done
    failed=0
    for process in $started; do wait "$process" || failed=1; done
    [ "$failed" = 0 ]
fi
echo "A notice of the site."
echo "${SAYS-Submitted batch job }$(wc -l <"$JOBS")"
"""


def recipe(name, *words, recipes=RECIPES, **environment):
    return subprocess.run(
        ["bash", recipes / f"{name}.sh", *map(str, words)],
        env={**as_user(), **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def slurm(folder, jobs):
    """The environment in which sbatch is the one above."""
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text(SBATCH)
    (folder / "bin" / "sbatch").chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{as_user()['PATH']}", "JOBS": str(jobs)}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few pages of English, in a folder whose name is not that of the folder that fetch makes for it."""
    folder = tmp_path_factory.mktemp("source") / "some pages"
    folder.mkdir()
    for name in ("data", "models", "parallel", "slurm", "generation", "zeroshot", "performance", "launching"):
        shutil.copy(REPOSITORY / "docs" / f"{name}.md", folder / f"{name}.txt")
    return folder


# Does only what is no work: says what there is to fetch, and that a step is done.
ONLY_PLANS = """#!/usr/bin/env bash
case " $* " in *" --dry-run "* | " user-dir ") exec smlp "$@" ;; esac
echo "$2" >>"$STEPS"
"""


@pytest.mark.slow
def test_a_dry_run_estimates_and_rehearses_all_steps(text, tmp_path):
    done = recipe("roberta_cc100", tmp_path / "out", "--dry-run", "--source", text, "--workers", "2", BUDGET="50B")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all steps work" in done.stdout and "core hours" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_dry_run_of_the_other_recipe(text, tmp_path):
    """Its estimate, and which steps it rehearses, without a clone; that they work is tested with the job arrays."""
    recipes = shutil.copytree(RECIPES, tmp_path / "examples" / "data")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "smlp").write_text(ONLY_PLANS)
    (tmp_path / "smlp").chmod(0o755)
    steps = {"SMLP": str(tmp_path / "smlp"), "STEPS": str(tmp_path / "steps"), "TMPDIR": str(temporary)}
    words = (tmp_path / "out", "--dry-run", "--workers", "2")
    done = recipe("roberta_tenth", *words, "--source", text, recipes=recipes, **steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all steps work" in done.stdout and "core hours" in done.stdout
    assert not (tmp_path / "out").exists()
    steps = (tmp_path / "steps").read_text().split()
    assert steps == ["fetch", "sample", "clean", "dedup", "sample", "tokenizer", "binarize", "inspect"]
    done = recipe("roberta_tenth", *words, "--source", "nope", recipes=recipes, TMPDIR=str(temporary))
    assert done.returncode == 1 and "there is no source, file or folder 'nope'" in done.stderr.splitlines()[-1]
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_job_arrays_write_the_same_shards(text, tmp_path):
    here = recipe("roberta_tenth", tmp_path / "here", "--source", text, "--workers", "1", REHEARSAL="1")
    assert here.returncode == 0, here.stdout + here.stderr
    jobs = tmp_path / "jobs"
    arrays = recipe(
        "roberta_tenth",
        *(tmp_path / "arrays", "--source", text, "--workers", "1", "--tasks", "2", "--", "--mem", "4G"),
        **slurm(tmp_path, jobs),
        REHEARSAL="1",
    )
    assert arrays.returncode == 0, arrays.stdout + arrays.stderr + jobs.with_suffix(".out").read_text()
    lines = jobs.read_text().splitlines()
    assert all("--mem 4G" in line for line in lines)
    assert all(f"--dependency=afterok:{number}" in line for number, line in enumerate(lines[1:], start=1))
    files = [
        {path.relative_to(tmp_path / run): path.read_bytes() for path in (tmp_path / run / "bin").rglob("*.bin")}
        for run in ("here", "arrays")
    ]
    assert len(files[0]) >= 4 and files[0] == files[1]
    assert json.loads((tmp_path / "arrays" / "bin" / "report.json").read_text())


def test_folders_are_those_that_fetch_writes(tmp_path):
    """Names change where they hold what a folder's should not, and those of files lose their suffixes."""
    (tmp_path / "some pages").mkdir()
    (tmp_path / "a.b.jsonl.gz").touch()
    (tmp_path / "some pages" / "a.txt").write_text("Some text.")
    done = subprocess.run(
        [
            *("bash", "-c", 'source "$0"; begin "$1"; shift; folders; folders "$@"; printf "%s\\n" "${found[@]}"'),
            *(RECIPES / "steps.sh", "my out", "some pages", "wikipedia", "a.b.jsonl.gz", "hf:owner/name:en"),
        ],
        cwd=tmp_path,
        env=as_user(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    names = ["some-pages", "wikipedia", "a.b", "owner--name--en"]
    assert done.stdout.splitlines() == [f"my out/fetched/{name}" for name in names]


def test_jobs_are_lines_that_any_shell_reads(tmp_path):
    """Words are those of the command in every task: spaces, quotes and other letters than ASCII in them too."""
    # in one piece: the tasks of an array run at the same time
    script = ["#!/bin/sh", "all=", 'for word in "$@"; do all="$all<$word>"; done', 'printf "%s\\n" "$all"']
    (tmp_path / "smlp").write_text("\n".join(script) + "\n")
    (tmp_path / "smlp").chmod(0o755)
    out, cluster = "it's a \u00fc\n$HOME \\ `id`", slurm(tmp_path, tmp_path / "jobs")
    done = subprocess.run(
        [
            "bash",
            "-c",
            'source "$0"; begin "$1" --tasks 2 --workers 3; step clean --out "$out"',
            RECIPES / "steps.sh",
            out,
        ],
        env={**as_user(), **cluster, "SMLP": str(tmp_path / "smlp"), "LC_ALL": "C"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lost = subprocess.run(
        ["bash", "-c", 'source "$0"; begin out --tasks 1; step clean', RECIPES / "steps.sh"],
        env={**as_user(), **cluster, "JOBS": str(tmp_path / "lost"), "SMLP": "true", "SAYS": "job "},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert lost.returncode == 1 and "its number is not in: A notice of the site. job 1" in lost.stderr
    command = f"<data><clean><--out><{out}><--workers><3>"
    found = (tmp_path / "jobs.out").read_text(encoding="utf-8")
    assert sorted(found.split("<data>")[1:]) == sorted(
        f"{command}{share}\n".removeprefix("<data>") for share in ("", "<--share><0/2>", "<--share><1/2>")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "bash examples/data/RECIPE.sh OUT"),
        (["out", "--workers", "0"], "--workers 0 is not a number of at least 1"),
    ],
)
def test_mistakes(words, message):
    done = recipe("roberta_tenth", *words)
    assert done.returncode != 0 and message in done.stderr


def test_the_estimate_follows_its_formulas(tmp_path):
    """1 GB of Wikipedia: 0.6 MB/s to convert, a tenth of it cleaned at 2.5 MB/s, and so on."""
    rows = [{"name": "wikipedia", "text_bytes": 1e9, "download_bytes": 2e9}]
    (tmp_path / "plan.json").write_text(json.dumps({"sources": rows}))
    done = subprocess.run(
        ["python3", RECIPES / "estimate.py", tmp_path / "plan.json", "--workers", "2", "--fraction", "0.1"],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    fetch, clean, rest = 1e9 / 0.6e6 / 3600, 1e8 / 2.5e6 / 3600, 0.8e8 * (1 / 2.5 + 1 / 8 + 1 / 2.5 + 1 / 40) / 3.6e9
    assert f"fetch {fetch:.1f}, clean {clean:.1f}" in done.stdout
    total = fetch + clean + rest + 0.5
    assert f"together {total:,.0f} core hours: {total / 2:,.1f} hours with 2 workers" in done.stdout
