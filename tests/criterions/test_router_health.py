"""The router-health record: in fairseq's logs and as JSON lines, for every router, through fairseq's own tools."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from running import USER_DIR, run_python

import smlp
from smlp.criterions.moe_cross_entropy import _repeat_health
from smlp.criterions.router_health import LOGGED, REALISED, HealthRecorder, probe_choices
from smlp.fairseq_compat import needs
from smlp.fairseq_compat.records import Journal
from smlp.nn.state import ForwardContext

T = 24
COMMON = [
    *("--user-dir", USER_DIR, "--task", "language_modeling", "--optimizer", "adam", "--lr", "5e-3", "--num-workers", 0),
    *("--log-format", "json", "--no-epoch-checkpoints", "--seed", 3, "--tokens-per-sample", T, "--batch-size", 4),
    *("--embed-dim", 16, "--ffn-dim", 16, "--num-heads", 2, "--num-dense-layers", 1, "--dropout", "0.1"),
    *("--log-interval", 2, "--max-update", 5),
]
EPOCHS = ["--batch-size", 16, "--save-interval-updates", 7]  # of six updates
NARROW = ["--num-sparse-layers", 1, "--num-experts", 4]
KINDS = {
    "gmlp_lm": ["--num-sparse-layers", 0],
    "smlp": NARROW,
    "smlp_partial": NARROW,
    "smlp_leaky": NARROW,
    "gmlp_moe": NARROW,
    "gshard_lm": [*NARROW, "--router-jitter", "0.05"],
    "switch_lm": NARROW,
    "base_lm": NARROW,
    "hash_lm": NARROW,
}
EVEN = {
    *("router", "items", "num_experts", "num_items", "num_assignments", "load_min", "load_max", "load_cv"),
    *("min_over_mean", "max_over_mean", "dead_experts", "load_entropy"),
}
GATED = {"gate_entropy", "margin"}
WEIGHED = GATED | {"alpha_mean", "alpha_low_share"}
DROPPING = {"drop_share", "drop_share_capacity", "unassigned_share"}
BY_TOKENS = "layer 1 (tMoE)"
FIELDS = {
    "gmlp_lm": {},
    "smlp": {BY_TOKENS: EVEN | WEIGHED},
    "smlp_partial": {"layer 1 (sMoE)": EVEN | GATED, BY_TOKENS: EVEN | WEIGHED},
    "smlp_leaky": {"layer 1 (sMoE)": EVEN | GATED, BY_TOKENS: EVEN | WEIGHED},
    "gmlp_moe": {"layer 1 (gMLP-MoE)": EVEN | WEIGHED},
    "gshard_lm": {BY_TOKENS: EVEN | WEIGHED | DROPPING | {"drop_share_second_expert"}},
    "switch_lm": {BY_TOKENS: EVEN | WEIGHED | DROPPING},
    "base_lm": {BY_TOKENS: EVEN | WEIGHED},
    "hash_lm": {BY_TOKENS: EVEN},
}


def train(data, save_dir, arch, *more):
    return {"tool": "train", "args": [data, *COMMON, "--arch", f"{arch}_tiny", "--save-dir", save_dir, *more]}


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory, run_fairseq_many):
    """Folder of the save-dirs, and what each run printed."""
    folder = tmp_path_factory.mktemp("health")
    gshard = KINDS["gshard_lm"]
    cases = {arch: train(tiny_data, folder / arch, arch, *more) for arch, more in KINDS.items()}
    others = {
        "recompute": ["--checkpoint-activations"],
        "never": ["--log-interval", 1000],
        "wide": ["--num-sparse-layers", 3, "--num-dense-layers", 3, "--num-experts", 16],
        "no save": ["--no-save"],
        "elsewhere": [
            *("--no-save", "--router-health-file", folder / "other" / "file.jsonl"),
            *("--criterion", "moe_cross_entropy", "--validate-interval-updates", 1),
        ],
        "epochs": [*EPOCHS, "--log-interval", 6, "--max-update", 13, "--criterion", "cross_entropy"],
        "other criterion": ["--criterion", "label_smoothed_cross_entropy"],
    }
    cases |= {name: train(tiny_data, folder / name, "gshard_lm", *gshard, *more) for name, more in others.items()}
    results = run_fairseq_many(list(cases.values()), timeout=240)
    for name, run in zip(cases, results, strict=True):
        assert (run.rc == 0) == (name != "other criterion"), (name, run.stderr[-2000:])
    return folder, dict(zip(cases, results, strict=True))


def journal(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def logged(run):
    """The records of fairseq's training log, with numbers as numbers."""
    lines = [line[line.index("{") :] for line in (run.stdout + run.stderr).splitlines() if 'num_updates": "' in line]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("arch", KINDS)
def test_every_router_has_its_record(runs, arch):
    folder, _ = runs
    records = journal(folder / arch / "router_health.jsonl")
    assert [record["update"] for record in records] == [2, 4], "those that are logged, and no validation"
    for number, record in enumerate(records):
        churn = {"churn"} if number else set()
        assert {name: set(figures) for name, figures in record["layers"].items()} == {
            name: figures | churn for name, figures in FIELDS[arch].items()
        }
        assert 0 < record["tokens"] <= record["positions"] == 4 * T
        assert record["work"]["ratio"] == record["work"]["realised_flops"] / record["work"]["nominal_flops"]
        for name, figures in record["layers"].items():
            features = name.endswith("(sMoE)")
            assert figures["items"] == ("features" if features else "tokens")
            assert figures["num_items"] == (4 * 16 if features else record["tokens"])
            assert 0 <= figures["load_entropy"] <= torch.tensor(4.0).log() + 1e-6
    if arch in ("smlp", "base_lm", "smlp_partial"):  # balanced: loads differ by one at most
        assert records[0]["layers"][BY_TOKENS]["load_max"] - records[0]["layers"][BY_TOKENS]["load_min"] <= 1
    if arch == "hash_lm":
        assert records[1]["layers"][BY_TOKENS]["churn"] == 0


def test_fairseq_logs_a_bounded_number_of_keys(runs):
    _, printed = runs
    for name in ("gshard_lm", "wide"):
        last = [record for record in logged(printed[name]) if "loss" in record][-1]
        keys = {key for key in last if key.startswith("router_")}
        assert keys == {*LOGGED, REALISED} and len(keys) == 13
    hashed = [record for record in logged(printed["hash_lm"]) if "loss" in record][-1]
    absent = {"router_gate_entropy", "router_margin", "router_alpha", "router_alpha_low", "router_drop", "router_skip"}
    assert {key for key in hashed if key.startswith("router_")} == {*LOGGED, REALISED} - absent


@pytest.mark.slow
def test_tensorboard_and_wandb_show_each_layer(tiny_data, tmp_path, monkeypatch):
    """The figures of ``router_health.jsonl``, next to what fairseq writes."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    (tmp_path / "wandb").mkdir()
    for name, value in (("MODE", "offline"), ("DIR", tmp_path / "wandb"), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    words = train(tiny_data, tmp_path / "run", "switch_lm", *NARROW, "--cpu")["args"]
    live = ["--tensorboard-logdir", tmp_path / "tensorboard", "--wandb-project", "smlp-test"]
    done = run_python("-m", "fairseq_cli.train", *words, *live, timeout=120)
    assert done.rc == 0, done.stderr

    records = journal(tmp_path / "run" / "router_health.jsonl")
    want = {
        f"layer_1_tMoE/{name}": [
            (record["update"], pytest.approx(record["layers"][BY_TOKENS][name])) for record in records
        ]
        for name, value in records[0]["layers"][BY_TOKENS].items()
        if not isinstance(value, str)
    }
    events = {}
    for name in ("routers", "train_inner"):
        events[name] = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard" / name))
        events[name].Reload()
    tags = events["routers"].Tags()["scalars"]
    found = {name: [(event.step, event.value) for event in events["routers"].Scalars(name)] for name in tags}
    assert [step for step, _ in found.pop("layer_1_tMoE/churn")] == [4]
    assert found == want and len(found) > 10
    assert [event.step for event in events["train_inner"].Scalars("router_load_cv")][:2] == [2, 4]
    (log,) = (tmp_path / "wandb").rglob("run-*.wandb")
    assert b"layer_1_tMoE/load_cv" in log.read_bytes() and b"train_inner/router_load_cv" in log.read_bytes()


def test_a_resumed_run_replaces_later_points_of_tensorboard(tmp_path, monkeypatch):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from fairseq.logging import progress_bar

    from smlp.fairseq_compat.trainer import _replace_later_points

    monkeypatch.setattr(progress_bar, "SummaryWriter", progress_bar.SummaryWriter)  # put back afterwards
    for first, last in ((1, 7), (5, 9)):
        with progress_bar.SummaryWriter(str(tmp_path)) as writer:
            for update in range(first, last + 1):
                writer.add_scalar("loss", 0.5, update)
        _replace_later_points(4)
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 10))


@pytest.mark.parametrize(("option", "library"), [("tensorboard_logdir", "tensorboard"), ("wandb_project", "wandb")])
def test_a_missing_library_is_named(option, library, monkeypatch):
    common = SimpleNamespace(tensorboard_logdir=None, wandb_project=None)
    found = {library}
    monkeypatch.setattr(needs, "_is_installed", lambda name: name in found)
    setattr(common, option, "here")
    needs._check_logs(common)
    found.clear()
    with pytest.raises(smlp.UserError, match=rf"--{option.replace('_', '-')} needs {library}: pip install"):
        needs._check_logs(common)


def test_a_folder_of_logs_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "_is_installed", lambda name: True)
    (tmp_path / "file").touch()
    for folder, message in (("file", "is a file: name a folder"), ("file/logs", "cannot be made: .* is not a folder")):
        with pytest.raises(smlp.UserError, match=f"--tensorboard-logdir.*{message}"):
            needs._check_logs(SimpleNamespace(tensorboard_logdir=str(tmp_path / folder), wandb_project=None))
    needs._check_logs(SimpleNamespace(tensorboard_logdir="s3://bucket/logs", wandb_project=None))


def test_the_logs_show_the_pooled_record(runs):
    folder, printed = runs
    records = journal(folder / "wide" / "router_health.jsonl")
    lines = {int(line["num_updates"]): line for line in logged(printed["wide"]) if "loss" in line}
    for record in records:
        line = lines[record["update"]]
        for key, name in LOGGED.items():
            if name in record["pooled"]:
                assert float(line[key]) == pytest.approx(record["pooled"][name], abs=6e-4)
        assert float(line[REALISED]) == pytest.approx(record["work"]["ratio"], abs=6e-4)
        layers = record["layers"].values()
        assert len(layers) == 3
        assert record["pooled"]["load_cv"] == pytest.approx(sum(layer["load_cv"] for layer in layers) / 3)


def test_recomputed_blocks_do_not_count_twice(runs):
    folder, _ = runs
    plain, recomputed = (journal(folder / name / "router_health.jsonl") for name in ("gshard_lm", "recompute"))
    for record, other in zip(plain, recomputed, strict=True):
        for part in ("update", "tokens", "positions", "pooled", "layers"):
            assert record[part] == other[part]
        assert record["work"]["recomputed_flops"] == 0 < other["work"]["recomputed_flops"]


def test_recording_does_not_change_the_training(runs):
    folder, _ = runs
    states = [torch.load(folder / name / "checkpoint_last.pt")["model"] for name in ("gshard_lm", "never")]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert not (folder / "never" / "router_health.jsonl").exists()


def test_where_the_record_goes(runs):
    folder, printed = runs
    assert not (folder / "no save" / "router_health.jsonl").exists()
    assert journal(folder / "other" / "file.jsonl") == journal(folder / "gshard_lm" / "router_health.jsonl")
    assert "valid_loss" in printed["elsewhere"].stdout + printed["elsewhere"].stderr


def test_between_records_the_last_one_is_shown(runs):
    """Six updates an epoch, a record at each epoch's last; the third epoch has one update and no record."""
    _, printed = runs
    epochs = [record for record in logged(printed["epochs"]) if "train_loss" in record]
    assert [int(record["train_num_updates"]) for record in epochs] == [6, 12, 13]
    assert epochs[2]["train_router_load_cv"] == epochs[1]["train_router_load_cv"] != "None"
    assert not [key for record in logged(printed["epochs"]) for key in record if key.startswith("valid_router")]


def test_other_criteria_are_refused_in_one_sentence(runs):
    _, printed = runs
    (sentence,) = printed["other criterion"].errors
    assert sentence.startswith("smlp: error: --criterion label_smoothed_cross_entropy cannot train")
    assert "load_balance_weight=0.01" in sentence


@pytest.fixture(scope="module")
def continued(runs, tiny_data, run_fairseq_many):
    """The run of several epochs, again from update 7; and fairseq's other tools on two checkpoints."""
    folder, _ = runs
    before = journal(folder / "epochs" / "router_health.jsonl")
    again = [*EPOCHS, "--log-interval", 3, "--max-update", 10]
    again += ["--restore-file", folder / "epochs" / "checkpoint_2_7.pt"]
    shared = [tiny_data, "--user-dir", USER_DIR, "--batch-size", 4, "--tokens-per-sample", T, "--path"]
    partial = [folder / "smlp_partial" / "checkpoint_last.pt", "--task", "language_modeling", "--log-format", "simple"]
    cases = {
        "again": train(tiny_data, folder / "epochs", "gshard_lm", *KINDS["gshard_lm"], *again),
        "validate": {"tool": "validate", "args": [*shared, *partial]},
        "eval-lm": {"tool": "eval_lm", "args": [*shared, folder / "switch_lm" / "checkpoint_last.pt"]},
    }
    results = dict(zip(cases, run_fairseq_many(list(cases.values())), strict=True))
    for name, run in results.items():
        assert run.rc == 0, (name, run.stderr[-2000:])
    return folder, before, results


def test_a_resumed_run_drops_the_lines_that_it_writes_again(continued):
    folder, before, results = continued
    assert "@ 7 updates)" in results["again"].stdout + results["again"].stderr
    after = journal(folder / "epochs" / "router_health.jsonl")
    assert [record["update"] for record in before] == [6, 12]
    assert [record["update"] for record in after] == [6, 9]
    assert after[0] == before[0]
    assert "churn" not in after[1]["pooled"], "the choices of another process are not known"


def test_a_figure_that_the_first_record_lacks_is_that_of_the_checkpoint():
    """As ``router_churn`` of a run that resumes where a line of its log ended; it was None in the log."""
    kept = metrics.state_dict()
    try:
        metrics.reset()
        for loads in (False, True):
            with metrics.aggregate("train"), metrics.aggregate("train_inner"):
                if loads:
                    _repeat_health(but={"router_load_cv"})
                else:
                    metrics.log_scalar("router_churn", 0.25)
                    metrics.log_scalar("router_load_cv", 0.5)
            if not loads:
                metrics.reset_meters("train_inner")
                metrics.load_state_dict(metrics.state_dict())
        assert metrics.get_smoothed_values("train_inner") == {"router_churn": 0.25, "router_load_cv": None}
        with metrics.aggregate("valid", new_root=True):
            _repeat_health(but=())
        assert metrics.get_smoothed_values("valid") == {}
    finally:
        metrics.reset()
        metrics.load_state_dict(kept)


def test_validate_counts_what_training_counted(runs, continued):
    _, printed = runs
    _, _, results = continued
    output = results["validate"].stdout + results["validate"].stderr
    told = "counting positions 5 to 23 of 24: the first 5 choose experts"
    assert output.count(told) == 1
    trained = printed["smlp_partial"].stdout + printed["smlp_partial"].stderr
    assert trained.count(told) == 1
    valid_loss = float(re.search(r'"valid_loss": "([\d.]+)"', trained)[1])
    validated = float(re.search(r"valid on 'valid' subset \| loss ([\d.]+)", output)[1])
    assert validated == pytest.approx(valid_loss, abs=2e-3)


def make(arch, **more):
    torch.manual_seed(0)
    settings = {"vocab_size": 50, "max_tokens": T, "embed_dim": 16, "ffn_dim": 16, "num_heads": 2, "num_experts": 4}
    return smlp.build(f"{arch}_tiny", **{**settings, "num_dense_layers": 1, "num_sparse_layers": 1, **more})


@pytest.mark.parametrize("arch", ["gshard_lm", "smlp_partial", "base_lm"])
def test_the_probe_leaves_no_trace(arch):
    decoder = make(arch, router_jitter=0.1).train()
    decoder.blocks[0].dropout.eval()
    recorder = HealthRecorder(decoder, torch.randint(2, 50, (100, T)), None)
    modes, state = [module.training for module in decoder.modules()], torch.get_rng_state()
    assert recorder.probe_Bn.shape == (1024 // T, T)
    choices = probe_choices(decoder, recorder.layers, recorder.probe_Bn)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in decoder.modules()] == modes
    again = probe_choices(decoder, recorder.layers, recorder.probe_Bn)
    assert all(torch.equal(first, second) for first, second in zip(choices, again, strict=True))
    assert [choice.numel() for choice in choices][-1] == recorder.probe_Bn.numel()


def test_a_probe_under_autocast_leaves_the_gradients_whole():
    """Before torch 2.10 weights converted under no_grad would be used again (pytorch issue 112583)."""
    decoder, tokens = make("gshard_lm").train(), torch.randint(2, 50, (2, T))
    with torch.autocast("cpu", torch.bfloat16):
        HealthRecorder(decoder, tokens, None).start(1)
        decoder(tokens).logits.float().sum().backward()
    assert [name for name, parameter in decoder.named_parameters() if parameter.grad is None] == []


def test_churn_is_counted_since_the_last_report_also_if_an_update_is_tried_again():
    decoder, tokens = make("switch_lm").train(), torch.randint(2, 50, (2, T))
    recorder = HealthRecorder(decoder, tokens, None)
    gate = decoder.blocks[1].token_moe.router.weight

    def update(number, micro_batches=1, report=True):
        total = 0
        for _ in range(micro_batches):
            recorder.start(number)
            context = ForwardContext(observe=True)
            decoder(tokens, context=context)
            total = total + recorder.sums(context)
        return recorder.report(total) if report else None

    assert "router_churn" not in update(1)
    assert update(2)["router_churn"] == 0
    with torch.no_grad():
        gate.copy_(gate.roll(1, dims=0))
    update(3, report=False)  # such as one whose gradient overflows
    assert update(3, micro_batches=3)["router_churn"] == 1, "every expert has another number now"
    assert update(4)["router_churn"] == 0


def test_a_journal_drops_damaged_lines_and_survives_a_full_disk(tmp_path, caplog):
    path = tmp_path / "new" / "health.jsonl"
    first = Journal(path, 0, "router-health record")
    for update in (1, 2, 3):
        first.append({"update": update})
    with path.open("a") as file:
        file.write('{"update": 4, "wor')
    Journal(path, 2, "router-health record").append({"update": 3, "again": True})
    assert journal(path) == [{"update": 1}, {"update": 2}, {"update": 3, "again": True}]
    with caplog.at_level(logging.WARNING):
        lost = Journal(Path("/dev/null/health.jsonl"), 0, "router-health record")
        lost.append({"update": 1})
    assert len(caplog.messages) == 1 and "/dev/null/health.jsonl" in caplog.messages[0]
