"""Every architecture of the comparison through fairseq's own tools: train, evaluate, validate, write."""

import itertools
import json
import math
import re

import pytest
import torch
from running import USER_DIR

import smlp
from smlp.evaluation.scoring import block_log_probs
from smlp.moe.routers.hashed import balanced_table
from smlp.text.binarized import count_tokens, read_fairseq_tokens

pytestmark = pytest.mark.long

TOKENS = 24
NARROW = [
    *("--embed-dim", "16", "--ffn-dim", "16", "--num-dense-layers", "1", "--num-sparse-layers", "1"),
    *("--num-experts", "4", "--tokens-per-sample", str(TOKENS), "--batch-size", "4", "--dropout", "0"),
]
COMMON = [
    *("--user-dir", USER_DIR, "--task", "language_modeling", "--optimizer", "adam", "--lr", "2e-3"),
    *("--num-workers", "0", "--log-format", "json", "--log-interval", "2", "--no-epoch-checkpoints", "--seed", "3"),
]
ARCHS = {
    "dense_lm_tiny": ["--num-sparse-layers", "0"],
    "gmlp_lm_tiny": ["--num-sparse-layers", "0"],
    "smlp_tiny": [],
    "smlp_partial_tiny": [],
    "smlp_leaky_tiny": [],
    "gmlp_moe_tiny": [],
    "gshard_lm_tiny": [],
    "switch_lm_tiny": ["--router-z-weight", "1e-3", "--router-jitter", "0.01"],
    "base_lm_tiny": ["--base-shuffle"],
    "hash_lm_tiny": ["--hash-kind", "balanced"],
}


@pytest.fixture(scope="module")
def trained(tiny_data, tmp_path_factory, run_fairseq_many):
    """A few updates of each architecture, then eval-lm of its last checkpoint: save-dir, training, evaluation."""
    folder = tmp_path_factory.mktemp("archs")
    cases = [
        {
            "tool": "train",
            "args": [
                tiny_data,
                *COMMON,
                "--arch",
                arch,
                *NARROW,
                *more,
                "--max-update",
                6,
                "--save-dir",
                folder / arch,
            ],
        }
        for arch, more in ARCHS.items()
    ]
    training = run_fairseq_many(cases, timeout=240)
    cases = [
        {
            "tool": "eval_lm",
            "args": [
                *(tiny_data, "--user-dir", USER_DIR, "--path", folder / arch / "checkpoint_last.pt", "--batch-size", 4),
                *("--gen-subset", "valid", "--tokens-per-sample", TOKENS),
            ],
        }
        for arch in ARCHS
    ]
    evaluation = run_fairseq_many(cases, timeout=240)
    return {arch: (folder / arch, train, test) for arch, train, test in zip(ARCHS, training, evaluation, strict=True)}


def records(run, key):
    """The records of fairseq's log that have a key."""
    found = [json.loads(line[line.index("{") :]) for line in (run.stdout + run.stderr).splitlines() if '{"' in line]
    return [record for record in found if key in record]


@pytest.mark.parametrize("arch", ARCHS)
def test_it_trains_and_validates(trained, arch):
    _, train, _ = trained[arch]
    assert train.rc == 0, train.stderr[-2000:]
    assert len(records(train, "loss")) >= 3
    assert all(math.isfinite(float(record["loss"])) for record in records(train, "loss"))
    assert math.isfinite(float(records(train, "valid_loss")[-1]["valid_loss"]))


@pytest.mark.filterwarnings("ignore:feature_routing=leaky")
@pytest.mark.parametrize("arch", ARCHS)
def test_evaluation_agrees_with_validation_and_with_the_core(trained, tiny_data, arch):
    folder, train, test = trained[arch]
    assert test.rc == 0, test.stderr[-2000:]
    bits = float(re.search(r"Loss \(base 2\): ([\d.]+)", test.stdout + test.stderr).group(1))
    assert bits == pytest.approx(float(records(train, "valid_loss")[-1]["valid_loss"]), abs=2e-3)

    model = smlp.load_pretrained(folder / "checkpoint_last.pt")
    tokens = torch.from_numpy(read_fairseq_tokens(tiny_data / "valid").tokens)
    prefix = model.decoder.config.prefix_tokens
    counted = torch.arange(len(tokens)) % TOKENS >= prefix
    log_probs = block_log_probs(model.decoder, tokens, batch_size=4)[counted]
    assert -float(log_probs.double().mean()) / math.log(2) == pytest.approx(bits, abs=2e-3)
    reported = re.search(r"Evaluated ([\d,]+) tokens", test.stdout + test.stderr).group(1)
    assert int(reported.replace(",", "")) == int(counted.sum())
    assert (prefix > 0) == ("partial" in arch or "leaky" in arch)


@pytest.fixture(scope="module")
def odd_runs(trained, tiny_data, tmp_path_factory, run_fairseq_many):
    """Runs that must be refused, and some that are odd but right."""
    folder = tmp_path_factory.mktemp("odd")

    save_dirs = (folder / f"new{number}" for number in itertools.count())

    def train(arch, *more, data=tiny_data, save_dir=None):
        save_dir = save_dir or next(save_dirs)  # one at a time may train in a folder
        arguments = [data, *COMMON, "--arch", arch, *NARROW, *more, "--max-update", 8, "--save-dir", save_dir]
        return {"tool": "train", "args": arguments}

    last = {arch: trained[arch][0] / "checkpoint_last.pt" for arch in ARCHS}
    gmlp, averages = ARCHS["gmlp_lm_tiny"], ("--store-ema", "--ema-decay", 0.0)
    cases = {
        "no effect": train(
            "dense_lm_tiny", "--num-sparse-layers", "0", "--router", "switch", save_dir=folder / "dense"
        ),
        "counted elsewhere": train(
            "hash_lm_tiny", "--hash-kind", "balanced", "--train-subset", "valid", save_dir=folder / "hash"
        ),
        "another router": train("switch_lm_tiny", "--restore-file", last["base_lm_tiny"]),
        "another routing of features": train(
            "smlp_tiny", "--feature-routing", "partial", "--restore-file", last["smlp_tiny"]
        ),
        "other experts": train("switch_lm_tiny", "--num-experts", "8", "--restore-file", last["switch_lm_tiny"]),
        "other experts of features": train("smlp_tiny", "--num-experts", "8", "--restore-file", last["smlp_tiny"]),
        "other heads": train("gmlp_lm_tiny", *gmlp, "--num-heads", "4", "--restore-file", last["gmlp_lm_tiny"]),
        "other prefix": train(
            "smlp_partial_tiny", "--prefix-fraction", "0.6", "--restore-file", last["smlp_partial_tiny"]
        ),
        "another table": train(
            "hash_lm_tiny", "--hash-seed", "7", "--restore-file", last["hash_lm_tiny"], save_dir=folder / "table"
        ),
        "averaged": train("hash_lm_tiny", "--store-ema", "--ema-fp32", save_dir=folder / "averaged"),
        "averaged from here": train(
            *("hash_lm_tiny", "--finetune-from-model", last["hash_lm_tiny"], "--store-ema", "--ema-fp32"),
            *("--ema-decay", 1.0),
            save_dir=folder / "from_here",
        ),
        "averaged offsets": train("base_lm_tiny", "--router", "loss_free", *averages, save_dir=folder / "offsets"),
        "another optimizer": train("smlp_tiny", "--optimizer", "sgd", "--restore-file", last["smlp_tiny"]),
        "another precision": train("smlp_tiny", "--bf16", "--restore-file", last["smlp_tiny"]),
    }
    return folder, dict(zip(cases, run_fairseq_many(list(cases.values()), timeout=240), strict=True))


@pytest.mark.slow
def test_tables_of_ids_have_no_average(odd_runs):
    folder, runs = odd_runs
    assert runs["averaged"].rc == 0, runs["averaged"].stderr
    state = torch.load(folder / "averaged" / "checkpoint_last.pt", weights_only=False)
    model, average = state["model"], state["extra_state"]["ema"]
    tables = [name for name in model if name.endswith("router.table")]
    assert tables and all(torch.equal(model[name], average[name]) for name in tables)
    assert any(not torch.equal(model[name], average[name]) for name in average if name not in tables)


def test_averages_begin_with_the_weights_of_a_checkpoint_without_any(odd_runs, trained):
    """All of it stays, as the decay is 1."""
    folder, runs = odd_runs
    run, before = runs["averaged from here"], trained["hash_lm_tiny"][0] / "checkpoint_last.pt"
    assert run.rc == 0, run.stderr
    assert f"{before} has no averages: those of --store-ema begin with its weights" in run.stdout + run.stderr
    weights = torch.load(before, weights_only=False)["model"]
    state = torch.load(folder / "from_here" / "checkpoint_last.pt", weights_only=False)
    assert weights and all(torch.equal(state["extra_state"]["ema"][name], weights[name]) for name in weights)
    assert any(not torch.equal(state["model"][name], weights[name]) for name in weights)


def test_averages_take_the_offsets_that_follow_an_update(odd_runs):
    """A decay of 0 keeps nothing of the averages before."""
    folder, runs = odd_runs
    assert runs["averaged offsets"].rc == 0, runs["averaged offsets"].stderr
    state = torch.load(folder / "offsets" / "checkpoint_last.pt", weights_only=False)
    model, average = state["model"], state["extra_state"]["ema"]
    assert any(name.endswith(".value") and value.any() for name, value in model.items())
    assert all(torch.equal(model[name], average[name]) for name in average)


@pytest.mark.slow
def test_averages_that_move_every_second_update_do_so_after_a_resume_too(tiny_data, tmp_path, run_fairseq_many):
    averages = ("--store-ema", "--ema-decay", "0.5", "--ema-update-freq", "2", "--save-dir")
    first = [tiny_data, *COMMON, "--arch", "gmlp_lm_tiny", *NARROW, *ARCHS["gmlp_lm_tiny"], *averages]
    cases = [[*first, tmp_path / "whole", "--max-update", 4], [*first, tmp_path / "resumed", "--max-update", 3]]
    for args in (cases, [[*first, tmp_path / "resumed", "--max-update", 4]]):
        assert all(run.rc == 0 for run in run_fairseq_many([{"tool": "train", "args": one} for one in args]))
    states = [torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False) for name in ("whole", "resumed")]
    whole, resumed = (state["extra_state"]["ema"] for state in states)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_settings_without_effect_are_said(odd_runs):
    _, runs = odd_runs
    assert runs["no effect"].rc == 0
    assert (
        "--router has no effect: the model has no sparse layers" in runs["no effect"].stdout + runs["no effect"].stderr
    )


def test_a_balanced_hash_counts_the_split_it_trains_on(odd_runs, tiny_data):
    folder, runs = odd_runs
    assert runs["counted elsewhere"].rc == 0, runs["counted elsewhere"].stderr[-2000:]
    state = torch.load(folder / "hash" / "checkpoint_last.pt", weights_only=True)["model"]
    (table,) = [value for name, value in state.items() if name.endswith("router.table")]
    frequencies = torch.from_numpy(count_tokens(tiny_data / "valid", len(table)))
    assert torch.equal(table, balanced_table(frequencies, 4))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another router", "the checkpoint is of another architecture"),
        ("another routing of features", "the checkpoint is of another architecture"),
        ("other experts", "the checkpoint has 4 experts in a layer but --num-experts asks for 8"),
        ("other experts of features", "the checkpoint has 4 experts in a layer but --num-experts asks for 8"),
        ("other heads", "the checkpoint has 1 heads in a layer but --num-heads asks for 4"),
        ("other prefix", "--prefix-fraction 0.6 asks for 9 after a prefix of 15"),
        ("another optimizer", "was trained with the optimizer FairseqAdam, this run has SGD: give the --optimizer"),
        ("another precision", "this run has FP16Optimizer: give the --optimizer, --bf16 and --fp16 that it was"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(odd_runs, name, words):
    _, runs = odd_runs
    assert runs[name].rc == 1 and words in runs[name].stderr, runs[name].stderr[-2000:]
    assert "Traceback" not in runs[name].stderr


def test_a_hash_model_goes_on_with_its_table(odd_runs, trained):
    """Whatever is asked for, and what made the table is written into the checkpoints that follow."""
    folder, runs = odd_runs
    run = runs["another table"]
    assert run.rc == 0, str(run)
    said = run.stdout + run.stderr
    assert "--hash-kind random, --hash-seed 7 has no effect: the table in" in said
    assert "was trained with" not in said
    checkpoints = [trained["hash_lm_tiny"][0] / "checkpoint_last.pt", folder / "table" / "checkpoint_last.pt"]
    before, after = (torch.load(path, weights_only=True) for path in checkpoints)
    (name,) = [name for name in before["model"] if name.endswith("router.table")]
    assert torch.equal(after["model"][name], before["model"][name])
    configs = [smlp.load_pretrained(path).decoder.config for path in checkpoints]
    assert configs[0] == configs[1] and configs[1].hash_kind == "balanced"


@pytest.mark.parametrize("arch", ["smlp_partial_tiny", "smlp_leaky_tiny"])
def test_evaluation_says_which_tokens_it_counts(trained, arch):
    _, _, test = trained[arch]
    assert "scoring positions from 5 on: the first 5 of each sample choose experts" in test.stdout + test.stderr


def test_leaky_warns_at_start_and_at_evaluation_and_others_do_not(trained):
    for arch, (_, train, test) in trained.items():
        for run in (train, test):
            assert ("look better than they are" in run.stdout + run.stderr) == (arch == "smlp_leaky_tiny"), arch


def test_the_checkpoint_records_the_balanced_hash(trained, tiny_data):
    folder, _, _ = trained["hash_lm_tiny"]
    model = smlp.load_pretrained(folder / "checkpoint_last.pt")
    (table,) = [value for name, value in model.state_dict().items() if name.endswith("router.table")]
    frequencies = count_tokens(tiny_data / "train", len(model.vocabulary))
    assert torch.equal(table, balanced_table(torch.from_numpy(frequencies), 4))
    loads = torch.zeros(4, dtype=torch.long).index_add(0, table, torch.from_numpy(frequencies))
    assert loads.max() - loads.min() <= frequencies.max()
    random = smlp.build("hash_lm_tiny", vocab_size=len(model.vocabulary), embed_dim=16, num_experts=4)
    assert not torch.equal(table, next(v for k, v in random.state_dict().items() if k.endswith("router.table")))


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if "leaky" not in arch])
def test_it_writes(trained, arch):
    folder, _, _ = trained[arch]
    model = smlp.load_pretrained(folder / "checkpoint_last.pt")
    pieces = list(model.stream("the s1 v1 a", 4, fill_prefix=True))
    assert len(pieces) == 4 and all(piece.strip() for piece in pieces)


def test_partial_routing_wants_a_prompt_beyond_its_prefix(trained):
    folder, _, _ = trained["smlp_partial_tiny"]
    model = smlp.load_pretrained(folder / "checkpoint_last.pt")
    with pytest.raises(smlp.UserError, match=r"3 tokens \(start symbol included\).*at least 6"):
        model.generate("the s1", max_tokens=2)
    assert model.generate("the s1 v1 a o3 and", max_tokens=2)


def test_leaky_routing_does_not_write(trained):
    folder, _, _ = trained["smlp_leaky_tiny"]
    with pytest.warns(UserWarning, match="look better than they are"):
        model = smlp.load_pretrained(folder / "checkpoint_last.pt")
    with pytest.raises(smlp.UserError, match="cannot generate text"):
        model.generate("the s1 v1 a o3 and", max_tokens=2)
