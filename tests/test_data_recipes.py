"""``examples/data``: both recipes from their sources to shards, here and as job arrays."""

import json
import os
import shutil
import subprocess

import pytest
from running import REPOSITORY, as_user

RECIPES = REPOSITORY / "examples" / "data"
# Runs each job at once, one task after the other, and prints its number: what 'sbatch --parsable' prints.
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
if [ "$tasks" = none ]; then bash -euc "$wrap" >>"$JOBS.out" 2>&1; else
    for task in $(seq 0 "$tasks"); do SLURM_ARRAY_TASK_ID="$task" bash -euc "$wrap" >>"$JOBS.out" 2>&1; done
fi
wc -l <"$JOBS"
"""


def recipe(name, *words, **environment):
    return subprocess.run(
        ["bash", RECIPES / f"{name}.sh", *map(str, words)],
        env={**as_user(), **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few pages of English."""
    folder = tmp_path_factory.mktemp("source") / "pages"
    folder.mkdir()
    for name in ("data", "models", "parallel", "slurm", "generation", "zeroshot", "performance", "launching"):
        shutil.copy(REPOSITORY / "docs" / f"{name}.md", folder / f"{name}.txt")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta_tenth", "roberta_cc100"])
def test_a_dry_run_estimates_and_rehearses_all_steps(name, text, tmp_path):
    done = recipe(name, tmp_path / "out", "--dry-run", "--source", text, "--workers", "2", BUDGET="50B")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all steps work" in done.stdout and "core hours" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_job_arrays_write_the_same_shards(text, tmp_path):
    here = recipe("roberta_tenth", tmp_path / "here", "--source", text, "--workers", "1", REHEARSAL="1")
    assert here.returncode == 0, here.stdout + here.stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    jobs = tmp_path / "jobs"
    arrays = recipe(
        "roberta_tenth",
        *(tmp_path / "arrays", "--source", text, "--workers", "1", "--tasks", "2", "--", "--mem", "4G"),
        PATH=f"{tmp_path / 'bin'}:{as_user()['PATH']}",
        JOBS=str(jobs),
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
