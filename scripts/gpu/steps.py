"""Run checks, benchmarks or a comparison on a GPU in steps, each in a process of its own, and keep what came of them.

  bash scripts/gpu/check.sh [--device cpu] [--out DIR] [--minutes M] [--only STEP ...]
  bash scripts/gpu/benchmark.sh ...
  bash scripts/gpu/compare.sh ...

DIR gets WHAT.json with what each step came to, and a log of each. A step that passed is not done again by the same
code. No step begins that is likely to outlast M minutes (default: 9); the same command resumes.
``--device cpu`` rehearses everything that needs no GPU.

Exit status: 0 all steps passed, 1 one failed, 75 time is up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(ROOT), str(FOLDER)]

import checks  # noqa: E402
import torch  # noqa: E402

from smlp.cli.main import guarded  # noqa: E402
from smlp.errors import UserError, last_line  # noqa: E402
from smlp.files import write_whole  # noqa: E402
from smlp.launch.environment import environment  # noqa: E402
from smlp.launch.local import end_with_parent  # noqa: E402

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
TIME_IS_UP = 75
SECTIONS = ("spatial", "assignment", "experts", "updates", "masked", "decoding", "scoring", "memory", "images")
EXPERIMENT = ROOT / "examples" / "compare" / "one_gpu.yaml"


@dataclass(frozen=True)
class Step:
    """A command with its name and the most minutes that it may take."""

    name: str
    words: list[str]
    minutes: float
    #: status with which it says that its time was up, and that it resumes when called again
    goes_on: int | None = None


def steps_of(what: str, device: str, out: Path) -> list[Step]:
    """Return the steps of ``check``, ``benchmark`` or ``compare``."""
    own = [sys.executable, str(FOLDER / "checks.py")]
    if what == "check":
        return [Step(name, [*own, name, "--device", device, "--out", str(out)], 4) for name in checks.CHECKS]
    if what == "benchmark":
        script = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "--device", device]
        quick = ["--quick"] if device == "cpu" else []
        sections = [
            Step(name, [*script, *quick, "--only", name, "--json", str(out / f"rows-{name}.json")], 8)
            for name in SECTIONS
        ]
        own_figures = [Step(name, [*own, name, "--device", device, "--out", str(out)], 8) for name in checks.FIGURES]
        return [*sections, *own_figures]
    run = [sys.executable, "-m", "smlp", "compare", "run", str(EXPERIMENT), "--out", str(out / "runs")]
    if device == "cpu":
        return [Step("run", [*run, "--dry-run"], 3)]
    report = [sys.executable, "-m", "smlp", "compare", "report", str(out / "runs"), "--to", str(out / "report")]
    return [Step("run", run, 60, goes_on=TIME_IS_UP), Step("report", report, 3)]


def main(words: list[str] | None = None) -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "benchmark", "compare"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: outputs/gpu)")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="M", help="time for this call (default: 9)")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU here; --device cpu rehearses what needs none")
    out = (options.out or Path("outputs") / "gpu").absolute()
    out.mkdir(parents=True, exist_ok=True)
    steps = steps_of(options.what, options.device, out)
    unknown = set(options.only or ()) - {step.name for step in steps}
    if unknown:
        raise UserError(f"there is no step {min(unknown)}; there are {', '.join(step.name for step in steps)}")
    chosen = [step for step in steps if not options.only or step.name in options.only]
    return run_steps(chosen, out, f"{options.what}-{options.device}", time.monotonic() + 60 * options.minutes)


def run_steps(steps: list[Step], out: Path, name: str, end: float) -> int:
    """Run what has not passed yet, until ``end`` (of the monotonic clock); return the exit status."""
    record_file = out / f"{name}.json"
    about, code = environment(), _digest_of_code()
    records = json.loads(record_file.read_text())["steps"] if record_file.is_file() else {}
    is_up = False
    for step in steps:
        before = records.get(step.name)
        if before and before["status"] in (PASSED, SKIPPED) and before.get("code") == code:
            print(f"{step.name}: {before['status']} already")
            continue
        left = end - time.monotonic()
        expected = min(before["seconds"] if before else 30.0, 60 * step.minutes)
        if left < expected and step.goes_on is None:
            is_up = True
            continue
        record = _run(step, out, min(60 * step.minutes, left))
        records[step.name] = {**record, "code": code}
        write_whole(record_file, (json.dumps({"about": about, "steps": records}, indent=2) + "\n").encode())
        print(f"{step.name}: {record['status']} in {record['seconds']:.0f} s: {record['message']}", flush=True)
        if record["status"] == TIME_IS_UP:
            is_up = True
            break
    if is_up:
        print("time is up: the same command resumes")
        return TIME_IS_UP
    return 1 if any(records[step.name]["status"] == FAILED for step in steps) else 0


def _digest_of_code() -> str:
    """Return a checksum of everything that steps run; a copy without git has one as well."""
    parts = ("smlp", "data_prep", "scripts", "examples")
    files = sorted(path for part in parts for path in (ROOT / part).rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        if "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _run(step: Step, out: Path, seconds: float) -> dict[str, object]:
    """Run a step with a time limit; return its record."""
    log, start = out / f"{step.name}.log", time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            step.words, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, preexec_fn=end_with_parent()
        )
        try:
            status = process.wait(max(seconds, 1))
            late = ""
        except subprocess.TimeoutExpired:
            process.terminate()  # smlp compare stops after an update and can go on
            try:
                status = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            late = f"not done after {seconds:.0f} s; "
    last = last_line(log.read_text(errors="replace"))[:300]
    took = round(time.monotonic() - start, 1)
    if step.goes_on is not None and status == step.goes_on:
        return {"status": TIME_IS_UP, "seconds": took, "message": last}
    if status == checks.SKIPPED:
        return {"status": SKIPPED, "seconds": took, "message": last}
    if late and seconds < 60 * step.minutes:
        return {"status": TIME_IS_UP, "seconds": took, "message": late + last}
    is_fine = status == 0 and not late
    return {"status": PASSED if is_fine else FAILED, "seconds": took, "message": late + last}


if __name__ == "__main__":
    sys.exit(guarded(main))
