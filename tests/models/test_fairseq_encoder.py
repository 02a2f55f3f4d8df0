"""Masked language models through fairseq's own tools: train, resume, spread, validate, load, export, and bad input."""

import math
import re

import pytest
import torch
from running import USER_DIR

import smlp
from smlp.checkpoint.opened import open_checkpoint
from smlp.cli.main import main
from smlp.evaluation.masked import masked_nll
from smlp.inference.masked import MaskedLanguageModel
from smlp.models.encoder import CoreEncoder, MLPEncoder

pytestmark = pytest.mark.long

NARROW = ["--embed-dim", "16", "--ffn-dim", "24", "--num-dense-layers", "2", "--tokens-per-sample", "24"]
COMMON = [
    *("--user-dir", USER_DIR, "--task", "masked_lm", "--optimizer", "adam", "--lr", "1e-2", "--num-workers", "0"),
    *("--log-format", "simple", "--log-interval", "1", "--no-epoch-checkpoints", "--seed", "3"),
]
ARCHS = {
    "gmlp_mlm_tiny": [],
    "gmlp_mlm_additive_tiny": ["--spatial-weights", "full"],
    "amlp_mlm_tiny": ["--gmlp-attention-dim", "4"],
    "amlp_mlm_base": ["--gmlp-attention-dim", "4", "--bf16"],
    "bert_mlm_tiny": ["--num-heads", "2", "--layer-norm", "after", "--attention-dropout", "0.1"],
    "bert_mlm_rel_tiny": ["--num-heads", "2", "--checkpoint-activations"],
    "bert_mlm_rel_attn_tiny": ["--num-heads", "2", "--sample-break-mode", "eos"],
    "gmlp_mlm_linear_tiny": [],
    "gmlp_mlm_multiplicative_tiny": [],
    "mixer_mlm_tiny": ["--mixer-token-dim", "8", "--sample-break-mode", "complete"],
}
#: those that differ most in code; trained again from the middle, and on two ranks
KEPT_EQUAL = ["gmlp_mlm_tiny", "amlp_mlm_tiny", "bert_mlm_tiny", "bert_mlm_rel_tiny", "mixer_mlm_tiny"]


def train(data, save_dir, *more, arch="gmlp_mlm_tiny", batch=8):
    arguments = [data, *COMMON, "--arch", arch, *NARROW, "--save-dir", save_dir, "--batch-size", batch, *more]
    return {"tool": "train", "args": arguments}


@pytest.fixture(scope="module")
def trained(tiny_data, tmp_path_factory, run_fairseq_many):
    """A short run of each system; some again from their middle, and on one and on two ranks; one with another seed."""
    folder = tmp_path_factory.mktemp("encoders")
    settings = ["--max-update", "8", "--dropout", "0.1", "--save-interval-updates", "4"]
    cases = {arch: train(tiny_data, folder / arch, *settings, *own, arch=arch) for arch, own in ARCHS.items()}
    for arch in KEPT_EQUAL:
        exact = [*ARCHS[arch], "--attention-dropout", "0", "--max-update", "4"]
        for ranks in (1, 2):
            more = [*exact, "--update-freq", 2 // ranks]
            own = train(tiny_data, folder / f"{arch}-{ranks}", *more, arch=arch, batch=4)
            cases[f"{arch}-{ranks}"] = {**own, "ranks": ranks}
    results = dict(zip(cases, run_fairseq_many(list(cases.values()), timeout=300), strict=True))
    later = {}
    for arch in KEPT_EQUAL:
        (middle,) = (folder / arch).glob("checkpoint_*_4.pt")
        own = folder / f"{arch}-resumed"
        own.mkdir()
        middle.rename(own / "checkpoint_last.pt")
        later[own.name] = train(tiny_data, own, *settings, *ARCHS[arch], arch=arch)
    later["same weights"] = train(
        tiny_data, folder / "same", "--max-update", "1", "--seed", "5", "--lr", "1e-20",
        "--finetune-from-model", folder / "gmlp_mlm_tiny" / "checkpoint_last.pt",
    )  # fmt: skip
    return folder, results | dict(zip(later, run_fairseq_many(list(later.values()), timeout=300), strict=True))


def said(run):
    return run.stdout + run.stderr


def valid_loss(run):
    return float(re.findall(r"valid on 'valid' subset.*? loss ([\d.]+)", said(run))[-1])


@pytest.mark.parametrize("arch", ARCHS)
def test_every_system_trains(trained, arch):
    run = trained[1][arch]
    assert run.rc == 0, run.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r" loss=([\d.]+)", said(run))]
    assert len(losses) == 8 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert "mfu=" in said(run)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_loaded_is_what_was_validated(trained, tiny_data, arch):
    folder, results = trained
    path = folder / arch / "checkpoint_last.pt"
    model = smlp.load_pretrained(path)
    assert isinstance(model, MaskedLanguageModel) and model.vocabulary.symbols[-1] == "<mask>"
    nll, count = masked_nll(model, open_checkpoint(path).state["cfg"]["task"], str(tiny_data), "valid")
    tolerance = 0.02 if "--bf16" in ARCHS[arch] else 2e-3
    assert nll / math.log(2) == pytest.approx(valid_loss(results[arch]), abs=tolerance)
    assert count > 50


def test_a_checkpoint_from_before_the_norm_of_the_embedding(trained, tmp_path):
    """Its settings do not name the norm, which its architecture has now."""
    path = trained[0] / "gmlp_mlm_tiny" / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    for part in ("weight", "bias"):
        del state["model"][f"encoder.core.embedding_norm.{part}"]
    del state["cfg"]["model"]["embedding_norm"], state["last_optimizer_state"], state["optimizer_history"]
    torch.save(state, tmp_path / "old.pt")
    model = smlp.load_pretrained(tmp_path / "old.pt").core
    assert model.config.embedding_norm == "none" and model.embedding_norm is None


def weights(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


@pytest.mark.parametrize("arch", KEPT_EQUAL)
def test_resume_equals_never_stopped(trained, arch):
    folder, results = trained
    assert "checkpoint_last.pt (epoch" in said(results[f"{arch}-resumed"])
    assert " @ 4 updates" in said(results[f"{arch}-resumed"])
    straight, resumed = weights(folder / arch), weights(folder / f"{arch}-resumed")
    for name, value in straight.items():
        assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize("arch", KEPT_EQUAL)
def test_two_ranks_train_as_one(trained, arch):
    folder, results = trained
    assert results[f"{arch}-2"].rc == 0, results[f"{arch}-2"]
    one, two = (weights(folder / f"{arch}-{ranks}") for ranks in (1, 2))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [24, 12])
@pytest.mark.parametrize("arch", ["amlp_mlm_tiny", "bert_mlm_tiny", "mixer_mlm_tiny", "bert_mlm_rel_tiny"])
def test_the_log_says_that_a_longer_context_is_cut(caplog, arch, max_tokens):
    """BERT with T5's biases has no weights over positions, and equal contexts nothing to cut."""
    sizes = {"vocab_size": 20, "embed_dim": 8, "ffn_dim": 8, "num_dense_layers": 1}
    long, short = (MLPEncoder(CoreEncoder(None, smlp.build(arch, max_tokens=T, **sizes))) for T in (24, max_tokens))
    with caplog.at_level("INFO", logger="smlp.models.encoder"):
        short.load_state_dict(long.state_dict())
    said = (
        "the checkpoint's context is cut to this run's 12 tokens: Toeplitz weights keep their central 23 numbers, all "
        "other weights over positions those of the first 12"
    )
    assert caplog.messages == [said] * (max_tokens == 12 and arch != "bert_mlm_rel_tiny")


def test_the_log_says_that_a_head_of_other_classes_begins_anew(caplog):
    sizes = {"vocab_size": 20, "embed_dim": 8, "ffn_dim": 8, "num_dense_layers": 1, "max_tokens": 12}
    two, three = (MLPEncoder(CoreEncoder(None, smlp.build("gmlp_mlm_tiny", **sizes))) for _ in range(2))
    two.register_classification_head("topic", 2)
    three.register_classification_head("topic", 3)
    with caplog.at_level("INFO", logger="smlp.models.encoder"):
        three.load_state_dict(two.state_dict())
    names = ", ".join(f"encoder.core.sentence_heads.topic.proj.{name}" for name in ("weight", "bias"))
    assert caplog.messages == [f"this run leaves out {names}", f"this run begins with new weights in {names}"]


def test_held_out_text_is_masked_alike_with_every_seed(trained):
    _, results = trained
    assert results["same weights"].rc == 0, results["same weights"].stderr[-2000:]
    assert valid_loss(results["same weights"]) == pytest.approx(valid_loss(results["gmlp_mlm_tiny"]), abs=1e-3)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_exports(trained, tmp_path, ending):
    folder, _ = trained
    path, export = folder / "amlp_mlm_tiny" / "checkpoint_last.pt", tmp_path / f"amlp.{ending}"
    assert main(["checkpoint", "merge", str(path), "--export", "-o", str(export)]) == 0
    whole, exported = smlp.load_pretrained(path), smlp.load_pretrained(export)
    tokens = whole.batch(["the <mask> sees", "a cat"])
    assert torch.equal(whole(tokens), exported(tokens))
    assert exported.encoder.config == whole.encoder.config


def test_masks_are_filled(trained):
    folder, _ = trained
    model = smlp.load_pretrained(folder / "bert_mlm_tiny" / "checkpoint_last.pt")
    (choices,) = model.fill("the <mask> sees", num_choices=3)
    assert len(choices) == 3 and choices[0].probability >= choices[1].probability
    logits = model(model.batch(["the <mask> sees"]))[0, 2]
    assert choices[0].token == int(logits.argmax()) and choices[0].text == model.detokenize([choices[0].token])
    assert model.tokenize("a", "b") == [*model.tokenize("a"), *model.tokenize("b")[1:]], "a pair is <s> a </s> b </s>"
    for number in (0, -1, 1.5):
        with pytest.raises(smlp.UserError, match=f"num_choices must be a whole number of at least 1, got {number}"):
            model.fill("the <mask> sees", num_choices=number)
    with pytest.raises(smlp.UserError, match="texts must be a list of texts, got 3"):
        model.batch(3)
    with pytest.raises(smlp.UserError, match="there is no <mask> in the text 'a cat'"):
        model.fill("a cat")
    with pytest.raises(smlp.UserError, match="a text must be a string, got None"):
        model.fill(None)
    with pytest.raises(smlp.UserError, match="texts must be a list of texts, got 'a cat'"):
        model.features("a cat")
    with pytest.raises(smlp.UserError, match=r"texts must be a list of texts, got \[\]"):
        model.features([])
    with pytest.raises(smlp.UserError, match="a text of 32 tokens is longer than the model's context of 24"):
        model.features(["a " * 30])


def test_validate_and_bad_input(trained, tiny_data, tmp_path, run_fairseq_many):
    folder, results = trained
    path = folder / "gmlp_mlm_tiny" / "checkpoint_last.pt"
    common = [tiny_data, "--user-dir", USER_DIR, "--path", path]
    small = ["--max-update", "1", "--no-save", "--batch-size", "4", "--optimizer", "adam", "--lr", "1e-3"]
    plain = [tiny_data, "--user-dir", USER_DIR, *NARROW, *small]
    cases = {
        None: {"tool": "validate", "args": [*common, "--task", "masked_lm", "--batch-size", "5"]},
        "it does not work with --task language_modeling": {
            "tool": "train", "args": [*plain, "--arch", "gmlp_mlm_tiny", "--task", "language_modeling"]},
        "--arch gmlp_lm_tiny is a language model": {
            "tool": "train", "args": [*plain, "--arch", "gmlp_lm_tiny", "--task", "masked_lm"]},
        "--criterion moe_cross_entropy is for language models": {
            "tool": "train",
            "args": [*plain, "--arch", "gmlp_mlm_tiny", "--task", "masked_lm", "--criterion", "moe_cross_entropy"]},
        "has a context of 24 tokens": {
            "tool": "train",
            "args": [*plain, "--arch", "gmlp_mlm_tiny", "--task", "masked_lm", "--tokens-per-sample", "32",
                     "--restore-file", path]},
        "has no dict.txt": {
            "tool": "train", "args": [tmp_path, *plain[1:], "--arch", "gmlp_mlm_tiny", "--task", "masked_lm"]},
    }  # fmt: skip
    found = dict(zip(cases, run_fairseq_many(list(cases.values()), timeout=200), strict=True))
    validated = found.pop(None)
    assert validated.rc == 0, validated.stderr[-2000:]
    loss = float(re.findall(r"\| loss ([\d.]+)", said(validated))[-1])
    assert loss == pytest.approx(valid_loss(results["gmlp_mlm_tiny"]), abs=2e-3)
    for sentence, run in found.items():
        assert run.rc != 0 and sentence in run.stderr and "Traceback" not in run.stderr, (sentence, run.stderr[-2000:])


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--path", "{path}", "--prompt", "a"],
        ["eval-lm", "{data}", "--path", "{path}"],
        ["leak-test", "--path", "{path}"],
        ["zeroshot", "--path", "{path}", "--data-dir", "{data}", "--tasks", "copa"],
    ],
)
def test_commands_of_language_models_refuse_an_encoder(trained, tiny_data, capsys, words):
    from smlp.cli.main import main

    folder, _ = trained
    path = folder / "gmlp_mlm_tiny" / "checkpoint_last.pt"
    assert main([word.format(path=path, data=tiny_data) for word in words]) == 1
    error = capsys.readouterr().err.strip()
    assert error.endswith(f"is an encoder, which does not predict next tokens: smlp {words[0]} needs a language model")


def test_an_encoder_is_not_upcycled(trained, tmp_path, capsys):
    from smlp.cli.main import main

    path = trained[0] / "gmlp_mlm_tiny" / "checkpoint_last.pt"
    assert main(["checkpoint", "upcycle", str(path), "-o", str(tmp_path / "x.pt"), "--arch", "smlp_tiny"]) == 1
    assert "is an encoder, and there are no sparse encoders" in capsys.readouterr().err
