"""The command files in examples/: one for each architecture, with the recipes of the paper's tables."""

import json
import os
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
from architectures import ENCODERS, LANGUAGE_MODELS
from running import REPOSITORY, run_python

from smlp.config.presets import preset

EXAMPLES = REPOSITORY / "examples"
PRINT_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"
PARSE = """
import json, sys
from fairseq import options

parse = lambda arguments: vars(options.parse_args_and_arch(options.get_training_parser(), arguments))
json.dump([parse(arguments) for arguments in json.load(sys.stdin)], sys.stdout, default=str)
"""


def shell(name, *arguments, **environment):
    return subprocess.run(
        ["bash", str(EXAMPLES / f"{name}.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """What each file would hand to fairseq-train on the paper's 32 GPUs, parsed by fairseq itself."""
    script = tmp_path_factory.mktemp("train") / "print.py"
    script.write_text(PRINT_ARGUMENTS)
    lines = []
    for arch in (*LANGUAGE_MODELS, *ENCODERS):
        gpus = "1" if arch.endswith("_tiny") else "32"
        words = ["masked_lm", arch] if arch in ENCODERS else [arch]
        done = shell(*words, "DATA", "SAVE", "--seed", "7", TRAIN_COMMAND=f"{sys.executable} {script}", GPUS=gpus)
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.strip())
    parsed = run_python("-c", PARSE, stdin=f"[{', '.join(lines)}]")
    assert parsed.rc == 0, parsed.stderr
    archs = [*LANGUAGE_MODELS, *ENCODERS]
    return dict(zip(archs, (SimpleNamespace(**args) for args in json.loads(parsed.stdout)), strict=True))


def test_every_architecture_has_a_command_and_no_other():
    names = {path.stem for path in EXAMPLES.glob("*.sh")} - {"recipe", "masked_lm"}
    assert names == set(LANGUAGE_MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("arch", LANGUAGE_MODELS)
def test_the_command_trains_its_architecture(commands, arch):
    args = commands[arch]
    assert (args.arch, args.data, args.save_dir, args.seed) == (arch, "DATA", "SAVE", 7)
    assert args.tokens_per_sample == preset(arch).max_tokens
    assert args.num_dense_layers == preset(arch).num_dense_layers
    assert args.adam_betas == "(0.9, 0.98)" and args.weight_decay == 0.1 and args.ddp_backend == "legacy_ddp"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ENCODERS)
def test_masked_language_models_have_the_recipe_of_their_paper(commands, arch):
    args, tiny, full = commands[arch], arch.endswith("_tiny"), preset(arch).max_tokens == 512
    assert (args.arch, args.task, args.criterion, args.tokens_per_sample) == (
        arch, "masked_lm", "masked_lm", preset(arch).max_tokens
    )  # fmt: skip
    assert (args.lr, args.max_update) == (([3e-3], 4000) if tiny else ([1e-4], 1000000) if full else ([7e-4], 125000))
    sequences = args.batch_size * args.update_freq[0] * (1 if tiny else 32)
    assert sequences == (32 if tiny else 256 if full else 2048)
    assert (args.adam_betas, args.adam_eps, args.weight_decay, args.dropout) == ("(0.9, 0.999)", 1e-6, 0.01, 0.0)
    assert args.lr_scheduler == "polynomial_decay" and args.total_num_update == args.max_update


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in LANGUAGE_MODELS if not arch.endswith("_tiny")])
def test_the_recipe_is_the_papers(commands, arch):
    args = commands[arch]
    large = arch.endswith(("_large", "_enlarged"))
    assert args.lr == [1e-3 if large else 5e-4] and args.dropout == 0.1
    assert (args.lr_scheduler, args.warmup_updates, args.warmup_init_lr) == ("inverse_sqrt", 4000, 1e-7)
    # Tables 10, 9 and 8: sequences of a batch and batches of an update, on each of 32 GPUs
    dense = preset(arch).num_sparse_layers == 0
    assert (args.batch_size, args.update_freq) == ((2, [8]) if large else (2, [4]) if dense else (4, [4]))


@pytest.mark.parametrize(("gpus", "accumulate"), [("1", 128), ("8", 16), ("64", 2)])
def test_fewer_gpus_accumulate_more(gpus, accumulate):
    done = shell("smlp", "D", "S", TRAIN_COMMAND="echo", GPUS=gpus)
    assert f"--update-freq {accumulate} " in done.stdout


def test_mistakes_are_named():
    assert "GPUS=3 does not divide the 128 batches" in shell("smlp", "D", "S", GPUS="3").stderr
    missing = shell("smlp", "D")
    assert missing.returncode == 2 and "usage: bash examples/smlp.sh DATA SAVE_DIR" in missing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data/estimate.py", "plan.json", "--link", "0"], "--link must be above 0, got 0.0"),
        (["data/estimate.py", "plan.json", "--part", "cc-news=abc"], "--part cc-news=abc is not SOURCE=F"),
        (["data/estimate.py", "plan.json", "--part", "cc-news"], "--part cc-news is not SOURCE=F"),
        (["data/estimate.py", "damaged.json"], "damaged.json is damaged, or of something else"),
        (["wide_sparse/shallow.py", "images", "--epochs", "0"], "--epochs must be at least 1, got 0"),
    ],
)
def test_bad_options_of_scripts_are_one_sentence(words, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "plan.json").write_text('{"sources": []}')
    (tmp_path / "damaged.json").write_text('{"sources": ')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / words[0]), run_name="__main__")
    assert stop.value.code == 2 and capsys.readouterr().err.endswith(f"{message}\n")
