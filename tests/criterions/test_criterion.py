"""The criterion ``moe_cross_entropy``: what counts, what is added, what is logged, and who gets it."""

import argparse
import json
import logging
import math
import types

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.logging import metrics
from layouts import saved
from running import USER_DIR

from smlp.config.presets import preset
from smlp.criterions.choice import settle_criterion
from smlp.criterions.moe_cross_entropy import MoECrossEntropyCriterion
from smlp.errors import UserError
from smlp.models.language_model import LanguageModelDecoder, SparseMLPLanguageModel
from smlp.nn.decoder import Decoder
from smlp.ops.tolerances import SHARE, largest_share

B, T, PREFIX = 3, 20, 4
NARROW = {
    **{"max_tokens": T, "embed_dim": 16, "ffn_dim": 16, "num_heads": 2, "num_experts": 4},
    **{"num_dense_layers": 1, "num_sparse_layers": 1, "dropout": 0.0},
}


def dictionary():
    words = Dictionary()
    for word in range(36):
        words.add_symbol(f"w{word}")
    return words


def model(arch, **overrides):
    torch.manual_seed(1)
    words = dictionary()
    settings = {**NARROW, "vocab_size": len(words), "padding_idx": words.pad(), **overrides}
    return SparseMLPLanguageModel(LanguageModelDecoder(words, Decoder(preset(f"{arch}_tiny", **settings))))


def sample(num_padded=0, num_tokens=T, seed=0):
    ids = torch.randint(4, 40, (B, num_tokens + 1), generator=torch.Generator().manual_seed(seed))
    ids[-1, num_tokens + 1 - num_padded :] = 1
    inputs, target = ids[:, :-1].clone(), ids[:, 1:].contiguous()
    inputs[target == 1] = 1
    net_input = {"src_tokens": inputs, "src_lengths": (inputs != 1).sum(1)}
    return {"net_input": net_input, "target": target, "ntokens": int((target != 1).sum())}


def criterion(kind=MoECrossEntropyCriterion, sentence_avg=False, log_interval=1000):
    task = types.SimpleNamespace(target_dictionary=dictionary())
    if kind is CrossEntropyCriterion:
        return kind(task, sentence_avg)
    return kind(task, sentence_avg, None, log_interval, save_dir="unused", no_save=True)


def logged(kind, logging_outputs):
    with metrics.aggregate(new_root=True) as meters:
        for outputs in logging_outputs:
            kind.reduce_metrics(outputs)
        return dict(meters.get_smoothed_values())


def numbers(output):
    return {name: float(value) for name, value in output.items()}


@pytest.mark.parametrize("arch", ["smlp", "gmlp_lm", "base_lm"])
@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_without_aux_losses_it_is_cross_entropy(arch, sentence_avg, training):
    more = {"num_sparse_layers": 0} if arch == "gmlp_lm" else {}
    outcomes = []
    for kind in (CrossEntropyCriterion, MoECrossEntropyCriterion):
        net = model(arch, **more).train(training)
        judge = criterion(kind, sentence_avg).train(training)
        loss, size, output = judge(net, sample(num_padded=5))
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
        outcomes.append((loss, size, output, gradients, logged(kind, [[output], [output]])))
    (loss, size, output, gradients, log), ours = outcomes[0], outcomes[1]
    torch.testing.assert_close(ours[0], loss)
    assert size == ours[1]
    assert numbers(ours[2]) == pytest.approx(numbers(output), rel=1e-6)
    for name, gradient in gradients.items():
        assert (gradient is None) == (ours[3][name] is None), name
        assert gradient is None or largest_share(ours[3][name], gradient) <= SHARE[torch.float32], name
    assert ours[4] == pytest.approx(log, rel=1e-6)


def test_aux_losses_are_added_in_training_only_and_logged_apart():
    net, judge, batch = model("gshard_lm", router_z_weight=0.1), criterion(), sample(num_padded=5)
    torch.manual_seed(5)
    loss, size, output = judge.train()(net.train(), batch)
    torch.manual_seed(5)
    logits, extra = net(**batch["net_input"])
    aux_losses = {name: aux.item() for name, aux in extra["aux_losses"].items()}
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["target"].flatten(), ignore_index=1, reduction="sum"
    ).item()
    assert aux_losses.keys() == {"load_balance", "router_z"} and min(aux_losses.values()) > 0.005
    assert size == B * T - 5
    assert loss.item() == pytest.approx(nll + size * sum(aux_losses.values()))
    log = logged(MoECrossEntropyCriterion, [[output, output]])
    assert log["nll_loss"] == pytest.approx(nll / size / math.log(2), abs=6e-4)
    assert log["loss"] == pytest.approx(loss.item() / size / math.log(2), abs=6e-4)
    assert log["ppl"] == pytest.approx(math.exp(nll / size), abs=0.006), "of the likelihood alone"
    for name, value in aux_losses.items():
        assert log[name] == pytest.approx(value, abs=6e-6)

    plain = criterion(CrossEntropyCriterion).eval()(net.eval(), batch)
    with torch.no_grad():
        judge.eval()
        validation = judge(net, batch)
        torch.testing.assert_close(validation[0], plain[0].detach())
        assert numbers(validation[2]) == pytest.approx(numbers(plain[2]), rel=1e-6)
        in_training_mode = judge(net.train(), batch)[2]
    assert in_training_mode.keys() == plain[2].keys(), "whatever the model gives, validation adds nothing"


def test_aux_losses_are_averaged_by_sample_size():
    outputs = [
        {"loss": 10.0, "nll_loss": 8.0, "ntokens": n, "sample_size": n, "aux_load_balance": n * value}
        for n, value in ((10, 0.5), (30, 0.1))
    ]
    assert logged(MoECrossEntropyCriterion, [outputs])["load_balance"] == pytest.approx(0.2)


@pytest.mark.parametrize("arch", ["smlp_partial", "smlp_leaky"])
@pytest.mark.parametrize("training", [True, False])
def test_the_prefix_does_not_count(arch, training, caplog):
    net, judge = model(arch).train(training), criterion().train(training)
    assert net.decoder.core.config.prefix_tokens == PREFIX
    batch = sample(num_padded=T - 1)  # the last sequence ends before the prefix does
    with caplog.at_level(logging.INFO):
        loss, size, output = judge(net, batch)
        judge(net, batch)
    log_probs = net(**batch["net_input"])[0].log_softmax(-1)
    expected, count = 0.0, 0
    for row in range(B):
        for position in range(T):
            target = batch["target"][row, position].item()
            if position >= PREFIX and target != 1:
                expected -= log_probs[row, position, target].item()
                count += 1
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert size == output["ntokens"] == output["sample_size"] == count == (B - 1) * (T - PREFIX)
    assert output["nsentences"] == B
    assert caplog.messages == ["counting positions 4 to 19 of 20: the first 4 choose experts"], "once"
    per_sentence = criterion(sentence_avg=True).train(training)(net, batch)
    assert per_sentence[1] == B - 1 and per_sentence[2]["ntokens"] == count
    of_single_tokens = judge(net, batch, reduce=False)[0]
    assert of_single_tokens.shape == (B * (T - PREFIX),)
    torch.testing.assert_close(of_single_tokens.sum(), loss)


def test_nothing_that_counts_is_zero_and_not_nan():
    net, judge = model("smlp_partial").eval(), criterion().eval()
    with torch.no_grad():
        loss, size, nothing = judge(net, sample(num_tokens=PREFIX))
        whole = judge(net, sample())[2]
    assert (loss.item(), size, nothing["ntokens"]) == (0, 0, 0)
    assert logged(MoECrossEntropyCriterion, [[nothing]]) == {"loss": 0, "ppl": 1}
    alone = logged(MoECrossEntropyCriterion, [[whole]])
    for order in ([[nothing], [whole]], [[whole], [nothing]], [[whole, nothing]]):
        assert logged(MoECrossEntropyCriterion, order) == alone
    per_sentence = criterion(sentence_avg=True).eval()
    outputs = [per_sentence(net, batch)[2] for batch in (sample(num_tokens=PREFIX), sample())]
    log = logged(MoECrossEntropyCriterion, [[output] for output in outputs])
    assert log["ppl"] == alone["ppl"] and log["nll_loss"] == alone["loss"]


def options(**given):
    return argparse.Namespace(tokens_per_sample=T, **given)


def test_our_archs_get_our_criterion():
    args = options(criterion="cross_entropy")
    settle_criterion(args, "switch_lm_tiny")
    assert args.criterion == "moe_cross_entropy"
    for args, arch in (
        (options(criterion="label_smoothed_cross_entropy"), "gmlp_lm_tiny"),
        (options(criterion="label_smoothed_cross_entropy", load_balance_weight=0.0), "switch_lm_tiny"),
        (options(criterion="label_smoothed_cross_entropy"), "base_lm_tiny"),
        (options(criterion="moe_cross_entropy"), "gshard_lm_tiny"),
        (options(), "gshard_lm_tiny"),
    ):
        before = dict(vars(args))
        settle_criterion(args, arch)
        assert vars(args) == before


def test_an_encoder_gets_the_criterion_of_its_task():
    for task, criterion in (("masked_lm", "masked_lm"), ("squad", "span"), ("sentence_prediction",) * 2):
        args = options(criterion="cross_entropy", task=task)
        settle_criterion(args, "gmlp_mlm_tiny")
        assert args.criterion == criterion
        settle_criterion(args, "gmlp_mlm_tiny")  # as if it had been given
        for other in {"masked_lm", "span", "sentence_prediction", "label_smoothed_cross_entropy", "ctc"} - {criterion}:
            with pytest.raises(UserError, match=f"--criterion {other} does not fit --task {task}"):
                settle_criterion(options(criterion=other, task=task), "gmlp_mlm_tiny")
    assert args.regression_target is False and args.classification_head_name == "sentence_classification_head"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"arch": "switch_lm_tiny"}, ["load_balance_weight=0.01", "--arch switch_lm_tiny"]),
        ({"arch": "gshard_lm_tiny", "load_balance_weight": 0.0, "router_z_weight": 0.5}, ["router_z_weight=0.5"]),
        ({"arch": "smlp_partial_tiny", "tokens_per_sample": 64}, ["first 13 of 64 positions"]),
    ],
)
def test_other_criteria_are_refused_where_they_would_be_wrong(given, words):
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = argparse.Namespace(criterion="adaptive_loss", **{"tokens_per_sample": T, **given})
    with pytest.raises(UserError) as refusal:
        ARCH_CONFIG_REGISTRY[args.arch](args)
    for word in ("--criterion adaptive_loss", *words):
        assert word in str(refusal.value)


def test_hydra_is_refused_what_would_be_wrong(tiny_data, tmp_path, run_fairseq_many):
    """``fairseq-hydra-train`` reads no command line that could put our criterion in."""
    always = f"""common.user_dir={USER_DIR} task=language_modeling task.data={tiny_data} task.tokens_per_sample={T}
        +model._name=smlp +model.embed_dim=8 +model.num_heads=2 +model.num_dense_layers=0 +model.num_sparse_layers=1
        +model.num_experts=2 +model.router=switch +model.load_balance_weight=0.01 optimizer=adam optimization.lr=[0.01]
        optimization.max_update=1 dataset.batch_size=4 dataset.num_workers=0 checkpoint.no_save=true
        dataset.disable_validation=true"""
    cases = [
        {"tool": "hydra_train", "args": [*always.split(), f"criterion._name={name}"], "folder": str(tmp_path)}
        for name in ("cross_entropy", "moe_cross_entropy")
    ]
    fairseqs, ours = run_fairseq_many(cases)
    assert fairseqs.rc == 1 and "the criterion cross_entropy cannot train this model" in fairseqs.stderr
    assert "load_balance_weight=0.01; give criterion._name=moe_cross_entropy" in fairseqs.stderr
    assert ours.rc == 0, str(ours)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """Text in which every line is the same, so that every micro-batch is."""
    from fairseq import options
    from fairseq_cli import preprocess

    folder = tmp_path_factory.mktemp("repeated")
    (folder / "text").write_text(" ".join(f"w{i * i % 23}" for i in range(T - 1)) + "\n")
    (folder / "text").write_text((folder / "text").read_text() * 64)
    arguments = ["--only-source", *(f"--{split}pref={folder / 'text'}" for split in ("train", "valid"))]
    preprocess.main(options.get_preprocessing_parser().parse_args([*arguments, "--destdir", str(folder / "bin")]))
    return folder / "bin"


NETWORK = [*("--embed-dim", 16, "--ffn-dim", 16, "--num-heads", 2, "--num-experts", 4, "--num-dense-layers", 1)]
TRAIN = [
    *("--user-dir", USER_DIR, "--task", "language_modeling", "--tokens-per-sample", T, "--sample-break-mode", "eos"),
    *("--optimizer", "sgd", "--lr", "0.5", "--num-workers", "0", "--batch-size", "2", "--max-update", "3"),
    *("--log-interval", "1", "--log-format", "json", "--no-epoch-checkpoints", "--disable-validation"),
    *(*NETWORK, "--num-sparse-layers", 1, "--dropout", 0, "--arch", "switch_lm_tiny"),
]


@pytest.fixture(scope="module")
def layouts(repeated, tmp_path_factory, run_fairseq_many):
    """The same micro-batch once, twice or four times in an update, on one rank or two: final parameters, folder."""
    folder = tmp_path_factory.mktemp("layouts")
    strong = ["--load-balance-weight", "0.5"]
    cases = {
        "1": {"args": strong},
        "2": {"args": [*strong, "--update-freq", "2"]},
        "4": {"args": [*strong, "--update-freq", "4"]},
        "2 ranks": {"args": strong, "ranks": 2},
        "2 ranks, legacy": {"args": [*strong, "--ddp-backend", "legacy_ddp"], "ranks": 2},
        "no aux": {"args": ["--load-balance-weight", "0"]},
    }
    for name, case in cases.items():
        case |= {"tool": "train", "args": [repeated, *TRAIN, *case["args"], "--save-dir", folder / name]}
    for run in run_fairseq_many(list(cases.values())):
        assert run.rc == 0, str(run)
    return folder, {name: saved(folder / name) for name in cases}


@pytest.mark.parametrize("layout", ["2", "4", "2 ranks", "2 ranks, legacy"])
def test_the_aux_gradient_depends_on_neither_update_freq_nor_ranks(layouts, layout):
    _, weights = layouts
    gate = "decoder.core.blocks.1.token_moe.router.weight"
    effect = (weights["1"][gate] - weights["no aux"][gate]).abs().max().item()
    assert effect > 1e-3, "the auxiliary loss does something"
    for name, weight in weights["1"].items():
        torch.testing.assert_close(weights[layout][name], weight, rtol=1e-5, atol=1e-3 * effect)


def test_ranks_and_micro_batches_are_summed_in_the_record(layouts):
    folder, _ = layouts
    single, twice, *ranks = (
        [json.loads(line) for line in (folder / name / "router_health.jsonl").read_text().splitlines()]
        for name in ("1", "2", "2 ranks", "2 ranks, legacy")
    )
    for others in ranks:
        for one, record, other in zip(single, twice, others, strict=True):
            assert (one["tokens"], record["tokens"], other["tokens"]) == (2 * T, 4 * T, 4 * T)
            assert record["work"] == pytest.approx(other["work"])
            assert record["pooled"] == pytest.approx(other["pooled"], rel=1e-5)
            assert record["pooled"]["load_max"] == 2 * one["pooled"]["load_max"]
