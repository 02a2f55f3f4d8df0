"""The architectures through fairseq's own tools: train, resume, evaluate, validate, generate, and bad input."""

import argparse
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from architectures import ENCODERS
from layouts import WITH_STATE
from running import USER_DIR, run_python

import smlp
from smlp.config.presets import PRESETS, from_training_options
from smlp.fairseq_compat.changed_settings import changed_settings, compare_optimizers
from smlp.models.fitting import check_fit

pytestmark = pytest.mark.long

NARROW = [
    *("--embed-dim", "16", "--ffn-dim", "16", "--num-dense-layers", "1", "--num-sparse-layers", "1"),
    *("--num-experts", "4", "--tokens-per-sample", "24"),
]
COMMON = [
    *(
        "--user-dir",
        USER_DIR,
        "--task",
        "language_modeling",
        "--optimizer",
        "adam",
        "--lr",
        "2e-3",
        "--num-workers",
        "0",
    ),
    *("--log-format", "simple", "--log-interval", "1", "--no-epoch-checkpoints", "--seed", "3"),
]


def train(data, save_dir, *more, arch="smlp_tiny", batch=("--batch-size", "4")):
    arguments = [data, *COMMON, "--arch", arch, *NARROW, "--save-dir", save_dir, *batch, *more]
    return {"tool": "train", "args": arguments}


def losses(log):
    return re.findall(r"num_updates=(\d+).*?", log), re.findall(r" loss=([\d.]+)", log)


VARIANTS = {
    "bfloat16": ["--bf16"],
    "memory-efficient bfloat16": ["--memory-efficient-bf16"],
    "recompute": ["--checkpoint-activations"],
    "accumulate": ["--update-freq", "3"],
    "complete lines": ["--sample-break-mode", "complete", "--skip-invalid-size-inputs-valid-test"],
    "a line a sample": ["--sample-break-mode", "eos"],
    "start symbol": ["--add-bos-token"],
    "clip": ["--clip-norm", "0.1"],
    "gMLP": [],
    "gMLP, 2 heads": ["--num-heads", "2"],
}


@pytest.fixture(scope="module")
def variants(tiny_data, tmp_path_factory, run_fairseq_many):
    """One short run for each variant."""
    folder = tmp_path_factory.mktemp("variants")
    cases = []
    for name, options in VARIANTS.items():
        arch = "gmlp_lm_tiny" if name.startswith("gMLP") else "smlp_tiny"
        options = [*options, "--num-sparse-layers", "0"] if name.startswith("gMLP") else options
        save_dir = folder / name.replace(" ", "_").replace(",", "")
        cases.append(train(tiny_data, save_dir, "--max-update", "6", *options, arch=arch))
    by_tokens = train(tiny_data, folder / "tokens", "--max-update", "6", batch=("--max-tokens", "100"))
    results = run_fairseq_many([*cases, by_tokens], timeout=240)
    return dict(zip([*VARIANTS, "by tokens"], results, strict=True))


@pytest.mark.parametrize("name", [*VARIANTS, "by tokens"])
def test_it_trains(variants, name):
    run = variants[name]
    assert run.rc == 0, run.stderr[-2000:]
    found = [float(loss) for loss in losses(run.stdout + run.stderr)[1]]
    assert len(found) >= 6 and all(math.isfinite(loss) for loss in found)
    assert found[-1] < found[0]
    assert "valid on 'valid' subset" in run.stdout + run.stderr


@pytest.fixture(scope="module")
def resumed(tiny_data, tmp_path_factory, run_fairseq_many):
    """20 updates at a stretch; 10 updates, then 10 more in a new process."""
    folder = tmp_path_factory.mktemp("resume")
    settings = ["--dropout", "0.2", "--save-interval-updates", "10", "--keep-interval-updates", "5"]
    straight, first = run_fairseq_many(
        [
            train(tiny_data, folder / "straight", "--max-update", "20", *settings),
            train(tiny_data, folder / "stopped", "--max-update", "10", *settings),
        ]
    )
    (second,) = run_fairseq_many([train(tiny_data, folder / "stopped", "--max-update", "20", *settings)])
    for run in (straight, first, second):
        assert run.rc == 0, run.stderr[-2000:]
    return folder, second


def test_resume_equals_never_stopped(resumed):
    folder, second = resumed
    assert "Loaded checkpoint" in second.stdout + second.stderr
    states = [torch.load(folder / name / "checkpoint_last.pt", weights_only=True) for name in ("straight", "stopped")]
    assert [state["optimizer_history"][-1]["num_updates"] for state in states] == [20, 20]
    assert states[0]["model"].keys() == states[1]["model"].keys()
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    moments = [state["last_optimizer_state"]["state"] for state in states]
    for index, moment in moments[0].items():
        for name, value in moment.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(moments[1][index][name])), (index, name)
    fresh = torch.load(folder / "stopped" / "checkpoint_1_10.pt", weights_only=True)["model"]
    assert any(not torch.equal(fresh[name], value) for name, value in states[0]["model"].items())


def test_what_routers_and_optimizers_keep_is_resumed(tiny_data, tmp_path, run_fairseq_many):
    """Offsets, and which phase of the training it is: the freeze and the end of the warm-up come after the stop."""
    settings = ["--max-update", "8", "--disable-validation", "--save-interval-updates", "3"]
    straight = {name: tmp_path / f"{name} straight" for name in WITH_STATE}
    resumed = {name: tmp_path / f"{name} resumed" for name in WITH_STATE}
    cases = [train(tiny_data, straight[name], *settings, *more) for name, more in WITH_STATE.items()]
    assert all(run.rc == 0 for run in run_fairseq_many(cases))
    cases = [
        train(tiny_data, resumed[name], *settings, *more, "--restore-file", straight[name] / "checkpoint_1_3.pt")
        for name, more in WITH_STATE.items()
    ]
    assert all(run.rc == 0 for run in run_fairseq_many(cases))
    for name in WITH_STATE:
        third, ours, theirs = (
            torch.load(path, weights_only=True)
            for path in (
                straight[name] / "checkpoint_1_3.pt",
                resumed[name] / "checkpoint_last.pt",
                straight[name] / "checkpoint_last.pt",
            )
        )
        moved = [key for key, value in third["model"].items() if not torch.equal(value, theirs["model"][key])]
        assert any("bias.value" in key or "offsets.value" in key for key in moved), "there is something to resume"
        for key, value in theirs["model"].items():
            assert torch.equal(value, ours["model"][key]), (name, key)
        for number, moments in theirs["last_optimizer_state"]["state"].items():
            for key, value in moments.items():
                mine = ours["last_optimizer_state"]["state"][number][key]
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(mine)), (name, number, key)


def test_a_finished_run_is_left_alone(resumed, tiny_data, run_fairseq_many):
    folder, _ = resumed
    path = folder / "straight" / "checkpoint_last.pt"
    before = path.read_bytes()
    settings = ["--dropout", "0.2", "--save-interval-updates", "10", "--keep-interval-updates", "5"]
    (run,) = run_fairseq_many([train(tiny_data, folder / "straight", "--max-update", "20", *settings)])
    assert run.rc == 0, run.stderr[-2000:]
    assert "the checkpoint has 20 updates and --max-update is 20: there is nothing to train" in run.stdout + run.stderr
    assert path.read_bytes() == before


@pytest.fixture(scope="module")
def old_checkpoint(resumed):
    """The checkpoint of an older version: its configuration has a setting that there is no longer."""
    folder, _ = resumed
    state = torch.load(folder / "straight" / "checkpoint_last.pt", weights_only=True)
    state["cfg"]["model"]["overlap_chunks"] = 2
    torch.save(state, folder / "old.pt")
    return folder / "old.pt"


def test_other_settings_of_a_checkpoint_are_said(resumed, old_checkpoint, tiny_data, run_fairseq_many):
    """Its parameters fit a model with other activations as well, so that fairseq itself says nothing."""
    (folder, second), checkpoint = resumed, old_checkpoint
    other = ["--restore-file", checkpoint, "--max-update", "21", "--activation", "relu", "--spatial-init-scale", "0.5"]
    other += ["--weight-decay", "0.7", "--adam-betas", "(0.5, 0.6)"]
    (run,) = run_fairseq_many([train(tiny_data, folder / "other", *other)])
    assert run.rc == 0, run.stderr[-2000:]
    said = [line for line in (run.stdout + run.stderr).splitlines() if "was trained with" in line]
    then, now = "dropout=0.2, activation=gelu", "dropout=0.1, activation=relu"
    assert len(said) == 1 and f"{checkpoint} was trained with {then}; this run continues with {now}" in said[0]
    assert "was trained with" not in second.stdout + second.stderr
    (said,) = [line for line in (run.stdout + run.stderr).splitlines() if "the optimizer continues with" in line]
    assert "weight_decay=0.0" in said and "not with betas=(0.5, 0.6), weight_decay=0.7 from this command" in said
    assert "the optimizer continues with" not in second.stdout + second.stderr


def test_what_an_optimizer_remembers_of_its_rate_is_no_setting(caplog):
    """NAG keeps the rate of its last update beside its settings."""
    group = {"lr": 0.2, "lr_old": 0.1, "momentum": 0.9}
    checkpoint = SimpleNamespace(optimizer_overrides="{}")
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(checkpoint=checkpoint),
        optimizer=SimpleNamespace(param_groups=[group]),
        is_data_parallel_master=True,
    )
    compare_optimizers("a.pt", trainer, {"lr_old": 0.3, "momentum": 0.9})
    assert not caplog.messages
    compare_optimizers("a.pt", trainer, {"lr_old": 0.3, "momentum": 0.8})
    assert "continues with momentum=0.9 from a.pt, not with momentum=0.8" in caplog.text


@pytest.mark.parametrize(
    ("arch", "then", "now", "said"),
    [
        ("switch_lm", {}, {"router": "gshard"}, "router=switch; this run continues with router=gshard"),
        ("smlp", {"dropout": 0.2}, {}, "dropout=0.2; this run continues with dropout=0.1"),
        ("smlp", {}, {"checkpoint_activations": True, "spatial_init_scale": 0.5}, None),
        ("smlp", {}, {"hash_seed": 7, "capacity_factor": 2.0, "prefix_fraction": 0.5}, None),
        ("hash_lm", {}, {"hash_seed": 7}, None),  # its table comes with the checkpoint
        ("gmlp_lm", {}, {"router": "gshard", "num_experts": 3}, None),
    ],
)
def test_which_settings_of_a_checkpoint_count(arch, then, now, said):
    small = {"embed_dim": 32, "ffn_dim": 64}
    then, now = (smlp.preset(arch, **small, **some) for some in (then, now))
    assert changed_settings(then, now) == said


ASKS = "64 tokens but --tokens-per-sample or --max-target-positions asks for a model of"


@pytest.mark.parametrize(
    ("arch", "now", "said"),
    [
        (
            "gmlp_lm_tiny",
            {"max_tokens": 65},
            rf"{ASKS} 65 \(--add-bos-token adds one\)",
        ),
        ("gmlp_lm_tiny", {"max_tokens": 80}, f"{ASKS} 80$"),
        ("smlp_partial_tiny", {"max_tokens": 80}, f"{ASKS} 80$"),
        (
            "smlp_partial_tiny",
            {"prefix_fraction": 0.5},
            "predicts 51 positions of a sample, but a context of 64 with --prefix-fraction 0.5 asks for 32 after a "
            "prefix of 32",
        ),
    ],
)
def test_another_context_is_refused_in_the_words_of_the_options(arch, now, said):
    small = {"embed_dim": 16, "ffn_dim": 16, "vocab_size": 20, "max_tokens": 64}
    then, now = (smlp.build(arch, **{**small, **changed}) for changed in ({}, now))
    shapes = {name: tensor.shape for name, tensor in now.state_dict().items()}
    with pytest.raises(smlp.UserError, match=said):
        check_fit(then.state_dict(), now.state_dict(), shapes, now.config)


@pytest.fixture(scope="module")
def tools(old_checkpoint, tiny_data, tmp_path_factory, run_fairseq_many):
    """fairseq's other tools on a trained checkpoint, and input that they must refuse."""
    path, turned = old_checkpoint, tmp_path_factory.mktemp("turned") / "data"
    shutil.copytree(tiny_data, turned)
    lines = (tiny_data / "dict.txt").read_text().splitlines()
    (turned / "dict.txt").write_text("\n".join(lines[::-1]) + "\n")
    common = [tiny_data, "--user-dir", USER_DIR, "--path", path]
    cases = {
        "eval-lm": ("eval_lm", [*common, "--gen-subset", "valid", "--tokens-per-sample", "24", "--batch-size", "4"]),
        "validate": (
            "validate",
            [*common, "--task", "language_modeling", "--tokens-per-sample", "24", "--batch-size", "7"],
        ),
        "generate": (
            "generate",
            [
                *(*common, "--task", "language_modeling", "--gen-subset", "test", "--sample-break-mode", "eos"),
                *("--tokens-per-sample", "24", "--batch-size", "8", "--skip-invalid-size-inputs-valid-test"),
                *("--beam", "3", "--max-len-b", "12", "--prefix-size", "2"),
            ],
        ),
        "context too long": (
            "eval_lm",
            [*common, "--gen-subset", "valid", "--tokens-per-sample", "48", "--max-target-positions", "48"],
        ),
        "other dictionary": (
            "eval_lm",
            [turned, *common[1:], "--gen-subset", "valid", "--tokens-per-sample", "24", "--batch-size", "4"],
        ),
    }
    results = run_fairseq_many([{"tool": tool, "args": args} for tool, args in cases.values()])
    return path, dict(zip(cases, results, strict=True))


def test_eval_lm_and_validate_agree_with_the_plain_model(tools, tiny_data):
    path, results = tools
    from smlp.text.binarized import read_fairseq_tokens

    model = smlp.load_pretrained(path)
    tokens = torch.from_numpy(read_fairseq_tokens(tiny_data / "valid").tokens)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens), 24):
            target = tokens[start : start + 24]
            before = tokens[start - 1 : start] if start else torch.tensor([model.vocabulary.eos])
            logits = model(torch.cat([before, target[:-1]]).unsqueeze(0)).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
    bits = total / len(tokens) / math.log(2)
    output = results["eval-lm"].stdout + results["eval-lm"].stderr
    assert results["eval-lm"].rc == 0, output[-2000:]
    assert float(re.search(r"Loss \(base 2\): ([\d.]+)", output)[1]) == pytest.approx(bits, abs=2e-4)
    assert f"Evaluated {len(tokens):,} tokens" in output
    output = results["validate"].stdout + results["validate"].stderr
    assert results["validate"].rc == 0, output[-2000:]
    assert float(re.search(r"valid on 'valid' subset \| loss ([\d.]+)", output)[1]) == pytest.approx(bits, abs=2e-3)


def test_generate_agrees_with_the_full_forward(tools):
    """fairseq's beam search reorders the state; its score of each hypothesis is that of the full forward."""
    path, results = tools
    output = results["generate"].stdout
    assert results["generate"].rc == 0, (output + results["generate"].stderr)[-2000:]
    model = smlp.load_pretrained(path)
    hypotheses = re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.M)
    positional = dict(re.findall(r"^P-(\d+)\t(.*)$", output, re.M))
    assert len(hypotheses) == 60
    checked = 0
    for number, text in hypotheses[:20]:
        ids = [model.vocabulary.index[symbol] for symbol in text.split()]
        scores = [float(score) for score in positional[number].split()]
        sequence = [model.vocabulary.eos, *ids, model.vocabulary.eos]
        with torch.no_grad():
            log_probs = model(torch.tensor([sequence[:-1]])).logits[0].log_softmax(-1)
        for position, score in enumerate(scores):
            if position >= 2:  # the first two are the prefix, which fairseq does not score in the same way
                expected = float(log_probs[position, sequence[position + 1]]) / math.log(2)
                assert score == pytest.approx(expected, abs=2e-3), (number, position)
                checked += 1
    assert checked > 20


@pytest.mark.slow
def test_interactive_continues_lines(tools, tiny_data):
    path, _ = tools
    arguments = [tiny_data, "--user-dir", USER_DIR, "--path", path, "--task", "language_modeling"]
    arguments += ["--beam", "1", "--max-len-b", "10", "--buffer-size", "2"]
    run = run_python("-m", "fairseq_cli.interactive", *arguments, stdin="the s1\nthe s2 v2\n", timeout=100)
    assert run.rc == 0, run.stderr[-2000:]
    hypotheses = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", run.stdout, re.M))
    assert hypotheses["0"].startswith("the s1") and hypotheses["1"].startswith("the s2 v2")


def test_a_longer_context_than_the_models_is_refused(tools):
    _, results = tools
    run = results["context too long"]
    assert run.rc == 1
    assert re.search(r"smlp: error: .*48.*24", run.stderr), run.stderr[-1500:]
    assert "Traceback" not in run.stderr


def test_data_of_another_dictionary_are_not_scored(tools):
    _, results = tools
    run = results["other dictionary"]
    assert run.rc == 1 and "Traceback" not in run.stderr
    (error,) = run.errors
    assert "old.pt was trained with" in error and error.endswith("(fairseq-preprocess --srcdict)"), error


def test_bad_settings_are_one_sentence(tiny_data, tools, tmp_path, run_fairseq_many):
    path, _ = tools
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train", "valid"):
        for kind in ("bin", "idx"):
            (other / f"{name}.{kind}").write_bytes((tiny_data / f"{name}.{kind}").read_bytes())
    lines = (tiny_data / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join([*lines, *(f"other{number} 1" for number in range(16))]) + "\n")
    wider = [*COMMON, "--arch", "smlp_tiny", *NARROW, "--batch-size", "4"]
    cases = {
        "experts": ([tiny_data, *wider, "--num-experts", "3"], ["num_experts=3", "embed_dim=16"]),
        "dictionary": ([other, *wider, "--restore-file", path], ["dict.txt"]),
        "context": ([tiny_data, *wider, "--restore-file", path, "--tokens-per-sample", "32"], ["24", "32"]),
        "width": ([tiny_data, *wider, "--restore-file", path, "--ffn-dim", "32"], ["(16,", "(32,"]),
        "progress": (
            [tiny_data, *wider, "--router-freeze", "0.5"],
            ["--router-freeze 0.5 is a share of the training run", "--max-update"],
        ),
    }
    # they run side by side, and a save-dir has one writer
    tried = [[*arguments, "--save-dir", tmp_path / name] for name, (arguments, _) in cases.items()]
    runs = run_fairseq_many([{"tool": "train", "args": arguments} for arguments in tried])
    for (name, (_, words)), run in zip(cases.items(), runs, strict=True):
        assert run.rc == 1, (name, run.rc)
        errors = [line for line in run.stderr.splitlines() if line.startswith("smlp: error: ")]
        assert len(errors) == 1 and all(word in errors[0] for word in words), (name, run.stderr[-1500:])
        assert "Traceback" not in run.stderr, name


def test_every_preset_is_an_architecture_with_its_settings():
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    import smlp.models

    for arch in PRESETS:
        name = "MLPEncoder" if arch in ENCODERS else "SparseMLPLanguageModel"
        assert ARCH_MODEL_REGISTRY[arch].__name__ == name
        args = argparse.Namespace(tokens_per_sample=1024)
        ARCH_CONFIG_REGISTRY[arch](args)
        config = from_training_options("", vars(args), 51200, 1)
        assert config == smlp.preset(arch, vocab_size=51200, max_tokens=1024)
        args.num_experts = 2
        ARCH_CONFIG_REGISTRY[arch](args)
        assert args.num_experts == 2, "an option that is given stays"
