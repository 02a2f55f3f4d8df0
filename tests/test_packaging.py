"""The wheel: built from the source distribution, and used without a clone."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import REPOSITORY


def run(built: Path, cwd: Path, *words: object, **environment: str) -> str:
    """Run a command with the wheel's packages before all others; return what it printed."""
    own = {name: value for name, value in os.environ.items() if name != "SMLP_ROOT"}
    own |= {"PYTHONPATH": str(built / "site"), "OMP_NUM_THREADS": "1", **environment}
    own["PATH"] = f"{built / 'bin'}:{Path(sys.executable).parent}:{own['PATH']}"
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_the_wheel(built: Path):
    site, (metadata,) = built / "site", (built / "site").glob("*.dist-info/METADATA")
    assert metadata.parent.name.startswith("smlp_lm-")  # smlp on PyPI is another project
    text = metadata.read_text()
    assert all(f"\n{name}: " in text for name in ("Author", "Project-URL", "Classifier", "License-File"))
    assert (site / "smlp" / "py.typed").is_file() and list((site / "data_prep" / "sources").glob("*.toml"))
    for folder in ("examples", "scripts/slurm"):
        ours = {path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file()}
        ours = {path for path in ours if "__pycache__" not in path.parts}
        packed = site / "smlp" / "project"
        assert {path.relative_to(packed) for path in (packed / folder).rglob("*") if path.is_file()} == ours
    assert not list(site.glob("tests")) and not list(site.glob("examples"))
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"requirements/constraints.txt", "scripts/quickstart.sh", "docs/models.md", "CITATION.cff"} <= names


@pytest.mark.slow
def test_a_wheel_needs_no_clone(built: Path, tmp_path: Path):
    smlp = (sys.executable, "-m", "smlp")
    assert run(built, tmp_path, *smlp, "user-dir").strip() == str(built / "site" / "smlp")
    assert "smlp_tiny" in run(built, tmp_path, *smlp, "flops", "--arch", "smlp_tiny")
    run(built, tmp_path, *smlp, "examples", "mine")
    (built / "bin").mkdir(exist_ok=True)
    program = built / "bin" / "smlp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m smlp "$@"\n')
    program.chmod(0o755)
    recipe = ("bash", "mine/examples/smlp_tiny.sh", "DATA", "SAVED")
    assert f"--user-dir {built / 'site' / 'smlp'} " in run(built, tmp_path, *recipe, TRAIN_COMMAND="echo")
    (tmp_path / "mine" / "smlp").mkdir()  # a folder of that name, such as a clone's, is not the package
    assert f"--user-dir {built / 'site' / 'smlp'} " in run(built, tmp_path, *recipe, TRAIN_COMMAND="echo")
    where = "from smlp.experiments.slurm import scripts_folder; print(scripts_folder())"
    python = (sys.executable, "-c", where)
    assert run(built, tmp_path, *python).strip() == str(built / "site" / "smlp" / "project" / "scripts" / "slurm")
    mine = run(built, tmp_path, *python, SMLP_ROOT=str(tmp_path / "mine")).strip()
    assert mine == str(tmp_path / "mine" / "scripts" / "slurm")


@pytest.mark.slow
def test_a_wheel_submits_jobs(built: Path, tiny_data: Path, tmp_path: Path):
    """``where: slurm``, with a program that stands in for sbatch and notes what it is to run."""
    (built / "bin").mkdir(exist_ok=True)
    sbatch = built / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$SMLP_ROOT" "$@" >> {tmp_path}/jobs\necho 42\n')
    sbatch.chmod(0o755)
    (tmp_path / "one.yaml").write_text(
        f"data: {tiny_data}\ntokens: 1k\ntokens_per_sample: 16\nbatch_size: 4\nrecipe: {{lr: 0.001}}\n"
        "models:\n  a: {arch: gmlp_lm_tiny}\n  b: {arch: gmlp_lm_tiny, recipe: {lr: 0.002}}\n"
        "run: {where: slurm, nodes: 1, tasks_per_node: 2}\n"
    )
    said = run(built, tmp_path, sys.executable, "-m", "smlp", "compare", "run", "one.yaml", "--out", "out")
    assert "job 42: 2 runs, 2 ranks each; job 42 scores them afterwards" in said
    train, score = (tmp_path / "jobs").read_text().splitlines()
    root = built / "site" / "smlp" / "project"
    assert f" {root / 'scripts' / 'slurm'}/sweep.sbatch " in train and "--array=1-2" in train
    assert score.startswith(f"{root} ") and f" {root / 'scripts' / 'slurm'}/score.sbatch " in score


def test_examples_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from smlp.cli.main import main

    assert main(["examples", str(tmp_path / "mine")]) == 0
    changed = tmp_path / "mine" / "scripts" / "slurm" / "site.sh"
    changed.write_text("module load cuda\n")
    capsys.readouterr()
    assert main(["examples", str(tmp_path / "mine")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"kept {changed}: ") and lines[1].startswith("0 of ") and len(lines) == 2
    assert changed.read_text() == "module load cuda\n"
    folder = tmp_path / "mine" / "examples" / "smlp.sh"
    folder.unlink()
    folder.mkdir()
    assert main(["examples", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"kept {folder}: ")
    (tmp_path / "file").touch()
    assert main(["examples", str(tmp_path / "file")]) == 1
    assert "cannot make" in capsys.readouterr().err


def test_no_message_installs_another_project():
    """PyPI's ``smlp`` belongs to somebody else, so no text may offer ``pip install smlp`` or ``'smlp[...]'``."""
    offered = "pip install " + "smlp"
    for folder in ("smlp", "data_prep", "scripts", "docs", "examples"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh", ".ipynb"):
                text = path.read_text(encoding="utf-8").replace("'", "").replace('"', "")
                assert offered not in text.replace("smlp-lm", ""), path


#: modules of an extra: they import its packages at once, others in functions or under ``try``
OF_EXTRAS = {
    "smlp/evaluation/lm_eval/": "lm-eval",
    "smlp/hf/": "hf",
    "smlp/ops/triton_": "test",  # outside of tests, torch's CUDA builds bring Triton
    "smlp/serving/": "serve",
    "smlp/vision/": "vision",
    "smlp/wide_sparse/features.py": "vision",
}
NOT_IMPORTED = {
    "fairseq-fixed": "is fairseq where ve-fairseq has no wheel",
    "fairscale": "fairseq imports it for --zero-sharding and fully_sharded",
    "lxml-html-clean": "trafilatura imports it",
    **{name: "data_prep imports it by its name" for name in ("ftfy", "pyarrow", "requests", "urllib3", "zstandard")},
    "protobuf": "transformers imports it for tokenizers",
    "accelerate": "transformers imports it in its Trainer",
    "tensorboard": "fairseq imports it through torch",
    "wandb": "fairseq imports it",
    "onnx": "torch.onnx imports it",
    "onnxruntime": "users run ONNX files with it",
    "onnxscript": "torch.onnx imports it",
}


def test_what_is_imported_is_declared(built: Path):
    """What a module imports at once is a base requirement or one of its extra's; other imports are in any extra."""
    (metadata,) = (built / "site").glob("*.dist-info")
    required = {"": set()}
    for line in importlib.metadata.Distribution.at(metadata).requires:
        extra = re.search(r"extra == .([\w-]+)", line)
        required.setdefault(extra[1] if extra else "", set()).add(canonical(line))
    of_users = set().union(*(names for extra, names in required.items() if extra not in ("test", "docs", "bench")))
    providers = importlib.metadata.packages_distributions()
    unused = set(of_users)
    for path in [*(REPOSITORY / "smlp").rglob("*.py"), *(REPOSITORY / "data_prep").rglob("*.py")]:
        file = path.relative_to(REPOSITORY).as_posix()
        extra = next((extra for start, extra in OF_EXTRAS.items() if file.startswith(start)), "")
        for name, at_once in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if name not in (*sys.stdlib_module_names, "smlp", "data_prep"):
                packages = {canonical(provider) for provider in providers[name]}
                allowed = required[""] | required[extra] if at_once else of_users
                assert packages & allowed, f"{file} imports {name}, which is not declared for it"
                unused -= packages
    assert unused == NOT_IMPORTED.keys()


def imports(node: ast.AST, at_once: bool = True) -> Iterator[tuple[str, bool]]:
    """Yield each package that is imported, and whether that happens whenever the module is."""
    for child in ast.iter_child_nodes(node):
        names = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
        names += [child.module] if isinstance(child, ast.ImportFrom) and not child.level else []
        yield from ((name.partition(".")[0], at_once) for name in names)
        is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)
        is_later = is_later or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
        yield from imports(child, at_once and not is_later)


def canonical(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
