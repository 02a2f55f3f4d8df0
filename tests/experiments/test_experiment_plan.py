"""What an experiment means: models of equal cost, runs with their commands, folders that refuse to be mixed up."""

import itertools
import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from running import REPOSITORY

import smlp
from smlp.config import flatten
from smlp.config.registration import register_architecture
from smlp.errors import UserError
from smlp.experiments import slurm
from smlp.experiments.folder import DONE, Folder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.plan import as_json, main_runs, plan_models, spread_of, training_words, tuning_runs
from smlp.experiments.reading import read_experiment
from smlp.experiments.slurm import sweep_line
from smlp.experiments.tuning import check_runs

VOCAB = 64
FILE = """
data: data-bin
updates: 20
seeds: [1, 2]
batch_size: 4
update_freq: 2
recipe: {optimizer: adam, lr: 1.0e-3, dropout: 0}
models:
  gMLP: {arch: gmlp_lm_tiny}
  sMLP: {arch: smlp_tiny, recipe: {lr: 2.0e-3}}
"""


def experiment(tmp_path, text=FILE):
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return read_experiment(path)


def configure_for(vocab_size):
    """As fairseq's parser would, for settings of this package; other options mean nothing here."""

    def configure(words, _):
        settings = {"vocab_size": vocab_size}
        arch = words[words.index("--arch") + 1]
        known = flatten(smlp.preset(arch)) | {"tokens_per_sample": 0}
        for option, value in itertools.pairwise(words):
            name = option.removeprefix("--").replace("-", "_")
            if option.startswith("--") and name in known:
                field = "max_tokens" if name == "tokens_per_sample" else name
                settings[field] = type(known[name])(value)
        return smlp.preset(arch, **settings)

    return configure


configure = configure_for(VOCAB)


def test_what_an_architecture_switches_on_stays_on(tmp_path, own_tables):
    register_architecture("recomputed", like="smlp_tiny", checkpoint_activations=True, dropout=0.2)
    text = FILE.replace("smlp_tiny, recipe: {", "recomputed, checkpoint_activations: true, recipe: {dropout: 0, ")
    plan_models(experiment(tmp_path, text), VOCAB, configure)
    for before, after, held in (
        ("checkpoint_activations: true", "checkpoint_activations: false", "True"),
        ("checkpoint_activations: true, recipe: {", "recipe: {checkpoint_activations: false, ", "True"),
        ("dropout: 0, ", "dropout: false, ", r"0\.2"),
    ):
        with pytest.raises(UserError, match=rf"model sMLP: \w+: false leaves .* out, and recomputed has {held}"):
            plan_models(experiment(tmp_path, text.replace(before, after)), VOCAB, configure)


def test_models_and_their_costs(tmp_path):
    found = experiment(tmp_path)
    models = plan_models(found, VOCAB, configure)
    assert [(model.name, model.family, model.folder) for model in models] == [
        ("gMLP", "gmlp_lm", "gMLP"),
        ("sMLP", "smlp", "sMLP"),
    ]
    costs = [model.flops_per_token for model in models]
    assert spread_of(models) == max(costs) / min(costs) - 1 < 0.01
    assert models[1].config == smlp.preset("smlp_tiny", vocab_size=VOCAB, max_tokens=128, dropout=0)
    record = as_json(found, models)
    assert record["models"][1]["recipe"] == ["--optimizer", "adam", "--lr", "0.002", "--dropout", "0"]
    assert record["models"][1]["config"] == flatten(models[1].config)
    tuned = as_json(experiment(tmp_path, FILE + "tune: {lr: [1.0e-3, 3.0e-3], updates: 4}\n"), models)
    assert tuned["models"][1]["recipe"] == ["--optimizer", "adam", "--dropout", "0"]
    assert record["tokens"] == 20 * 4 * 2 * 128


def test_costs_that_differ_are_refused(tmp_path):
    text = FILE.replace("gmlp_lm_tiny", "gmlp_lm_tiny, num_dense_layers: 4")
    with pytest.raises(UserError, match=r"differ by [\d.]+%, more than max_spread 1.00%: gMLP .* M, sMLP .* M"):
        plan_models(experiment(tmp_path, text), VOCAB, configure)
    assert len(plan_models(experiment(tmp_path, text + "max_spread: 1.5\n"), VOCAB, configure)) == 2


EXAMPLES = sorted((REPOSITORY / "examples" / "compare").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_cost_what_they_say(path):
    found = read_experiment(path)
    vocab_size = found.vocab_size or found.text.vocab_size  # either is there: a dry run needs no data
    models = plan_models(found, vocab_size, configure_for(vocab_size))
    assert spread_of(models) <= found.max_spread
    counts = dict(quick=3, paper_small=11, paper_large=8, experts=7, heads=9, masked=9, levers=33)
    counts.update(untying=14, width=11, similarity=5, encoders=3, positions=9, one_gpu=7)
    assert len(models) == counts.get(path.stem, 10)


def test_an_option_that_fairseq_refuses_names_the_model(tmp_path):
    def refuse(words, _):
        raise UserError("unrecognized arguments: --colour red")

    with pytest.raises(UserError, match=r"small.yaml: model gMLP: unrecognized arguments: --colour red"):
        plan_models(experiment(tmp_path), VOCAB, refuse)


def test_matched_families(tmp_path):
    text = re.sub(r"models:.*", "match: {like: smlp_tiny, families: [gmlp_lm, smlp, hash_lm]}\n", FILE, flags=re.S)
    models = plan_models(experiment(tmp_path, text), VOCAB, configure)
    assert [model.name for model in models] == ["gmlp_lm", "smlp", "hash_lm"]
    assert spread_of(models) <= 0.01
    with pytest.raises(UserError, match=r"match.num_experts and match.like exclude each other"):
        plan_models(experiment(tmp_path, text.replace("like:", "num_experts: 2, like:")), VOCAB, configure)
    for wrong in ("like: foo", "foo: 3, like: smlp_tiny"):
        with pytest.raises(UserError, match=r"small.yaml: match: unknown .* 'foo'"):
            plan_models(experiment(tmp_path, text.replace("like: smlp_tiny", wrong)), VOCAB, configure)
    impossible = text.replace("like: smlp_tiny", "flops_per_token: 10.0")
    with pytest.raises(UserError, match=r"no settings of gmlp_lm cost 10 multiply-adds per token; the nearest cost"):
        plan_models(experiment(tmp_path, impossible), VOCAB, configure)


def test_runs_and_their_commands(tmp_path):
    text = FILE + "tune: {lr: [1.0e-3, 4.0e-3], updates: 5, seed: 7}\nevaluate: {validations: 4}\n"
    found = experiment(tmp_path, text)
    models = plan_models(found, VOCAB, configure)
    grid = tuning_runs(found, models)
    assert [run.folder for run in grid] == [f"tune/{m}-{v}" for v in (0.001, 0.004) for m in ("gMLP", "sMLP")]
    assert {(run.seed, run.updates) for run in grid} == {(7, 5)}
    runs = main_runs(found, models, {"gMLP": 0.004})
    assert [run.folder for run in runs] == ["runs/gMLP-s1", "runs/gMLP-s2"], "sMLP has no tuned value"
    words = training_words(found, runs[1], "data-bin", tmp_path / "save")
    options = dict(zip(words[1::2], words[2::2], strict=False))
    assert words[0] == "data-bin"
    assert words.count("--lr") == 1
    assert (options["--lr"], options["--seed"], options["--max-update"]) == ("0.004", "2", "20")
    assert options["--validate-interval-updates"] == options["--save-interval-updates"] == "5"
    assert words[words.index("--save-dir") + 1] == str(tmp_path / "save")
    dashed = training_words(found, runs[1], "-out/data", Path("-out"))
    assert dashed[0] == "./-out/data"
    assert dashed[dashed.index("--save-dir") + 1] == "./-out", "a path that begins with a dash is no option"
    assert dashed[dashed.index("--log-file") + 1] == "./-out/train.log"
    tuned = training_words(found, grid[0], "data-bin", tmp_path / "save")
    assert tuned[tuned.index("--validate-interval-updates") + 1] == "5", "once, at the end"
    line = sweep_line(found, runs[1], "data-bin", Folder(tmp_path / "out"))
    assert line.startswith("gMLP-s2 --task language_modeling --arch gmlp_lm_tiny ")
    assert "--save-dir" not in line
    assert f"--log-file {tmp_path}/out/runs/gMLP-s2/train.log " in line
    slurm.write_command(found, runs[1], "data-bin", Folder(tmp_path / "out"))
    command = (tmp_path / "out" / "runs" / "gMLP-s2" / "command.txt").read_text()
    pattern = rf"srun --ntasks=1 \S+ (-P )?-m smlp train data-bin .*--save-dir {tmp_path}/out/runs/gMLP-s2"
    assert re.match(pattern, command.splitlines()[-1]) and "--cpu" not in command
    found = experiment(tmp_path, text + "run: {where: slurm, tasks_per_node: 1}\n")
    slurm.write_command(found, runs[1], "data-bin", Folder(tmp_path / "out"))
    assert (tmp_path / "out" / "runs" / "gMLP-s2" / "command.txt").read_text().endswith(" --cpu\n")
    assert sweep_line(found, runs[1], "data-bin", Folder(tmp_path / "out")) == line, "submit.sh adds --cpu itself"


def test_a_folder_belongs_to_one_experiment(tmp_path):
    folder = Folder(tmp_path / "out")
    folder.path.mkdir()
    found = experiment(tmp_path)
    folder.settle(as_json(found, plan_models(found, VOCAB, configure)))
    more = experiment(tmp_path, FILE.replace("[1, 2]", "[1, 2, 3]") + "  dense: {arch: dense_lm_tiny}\n")
    folder.settle(as_json(more, plan_models(more, VOCAB, configure)))
    assert read_json(folder.experiment)["seeds"] == [1, 2, 3]
    changes = {
        "updates: 20": ("updates: 21", "was made with updates = 20, and the experiment now says 21"),
        "batch_size: 4": ("batch_size: 2", "was made with tokens_per_update = 1024, and the experiment now says 512"),
    }
    for before, (after, message) in changes.items():
        other = experiment(tmp_path, FILE.replace(before, after))
        with pytest.raises(UserError, match=message):
            folder.settle(as_json(other, plan_models(other, VOCAB, configure)))
    other = experiment(tmp_path, FILE + "evaluate: {validations: 3}\n")
    with pytest.raises(UserError, match=r"was made with evaluate.validations = 8, and the experiment now says 3"):
        folder.settle(as_json(other, plan_models(other, VOCAB, configure)))
    record = read_json(folder.experiment)
    del record["validations"]  # of an earlier version
    write_json(folder.experiment, record)
    folder.settle(as_json(other, plan_models(other, VOCAB, configure)))


def test_a_run_with_weights_belongs_to_its_settings(tmp_path):
    folder = Folder(tmp_path / "out")

    def runs(text):
        found = experiment(tmp_path, text)
        return [(run, run.made_with(found)) for run in main_runs(found, plan_models(found, VOCAB, configure), {})]

    for run, made_with in runs(FILE):
        folder.run(run.folder).claim(made_with)
    changed = FILE.replace("lr: 2.0e-3", "lr: 3.0e-3")
    for run, made_with in runs(changed):
        folder.run(run.folder).claim(made_with)  # nothing was trained yet
        folder.run(run.folder).last_checkpoint().write_text("weights")
        folder.run(run.folder).claim(made_with)
    changes = {"lr: 3.0e-3": "lr: 2.0e-3", "smlp_tiny": "smlp_tiny, num_experts: 4"}
    messages = ["sMLP-s1 was made with lr = 0.003, and .* now says 0.002", "num_experts = None, and .* now says 4"]
    for (before, after), message in zip(changes.items(), messages, strict=True):
        run, made_with = runs(changed.replace(before, after))[1]
        with pytest.raises(UserError, match=message):
            folder.run(run.folder).claim(made_with)
    run, made_with = runs(changed)[1]
    wider = replace(run.model, config=replace(run.model.config, ffn_dim=run.model.config.ffn_dim + 8))
    folder.run(run.folder).claim(made_with)
    same = replace(run.model, config=replace(run.model.config, hash_seed=9, checkpoint_activations=True))
    for model, words in (
        (run.model, None),
        (same, None),
        (wider, r"sMLP-s1 was made with ffn_dim = \d+, and smlp_tiny, or a plug-in,"),
    ):
        with pytest.raises(UserError, match=words) if words else nullcontext():
            check_runs(experiment(tmp_path, changed), [model], folder)  # of a trained run, too
    for run, made_with in runs(changed):
        del made_with["settings"]  # as in records of earlier versions
        folder.run(run.folder).update_state(made_with=made_with)
    check_runs(experiment(tmp_path, changed), [wider], folder)
    run, made_with = runs(changed)[1]
    folder.run(run.folder).claim(made_with)
    assert "settings" not in folder.run(run.folder).state()["made_with"], "today's may not be those of its weights"


def test_a_run_with_weights_belongs_to_those_that_it_began_with(tmp_path):
    first = tmp_path / "first.pt"
    found = experiment(tmp_path, FILE.replace("dropout: 0", f"dropout: 0, finetune_from_model: {first}"))
    run = main_runs(found, plan_models(found, VOCAB, configure), {})[0]
    own = Folder(tmp_path / "out").run(run.folder)
    own.claim(run.made_with(found))  # before there is a file
    own.last_checkpoint().write_text("weights")
    first.write_text("one")
    own.claim(run.made_with(found))
    first.write_text("another")
    os.utime(first, (0, 0))  # even if it is written within a tick of the clock
    with pytest.raises(UserError, match=r"was made with finetune_from_model_sha256 = .*, and .* now says"):
        own.claim(run.made_with(found))
    first.unlink()
    own.claim(run.made_with(found))
    first.write_text("a third")
    with pytest.raises(UserError, match="finetune_from_model_sha256"):
        own.claim(run.made_with(found))


def test_a_grid_over_the_model_is_refused(tmp_path):
    text = FILE + "max_spread: 9\ntune: {num_dense_layers: [1, 2], updates: 5}\n"
    with pytest.raises(UserError, match=r"tune.num_dense_layers is a setting of the model"):
        plan_models(experiment(tmp_path, text), VOCAB, configure)


def test_runs_of_a_grid_that_would_share_a_folder_are_refused(tmp_path):
    text = FILE.replace("sMLP:", "gMLP-x:") + "tune: {lr_scheduler: [x-b, b], updates: 4}\n"
    with pytest.raises(UserError, match=r"two runs of the grid would share the folder tune/gMLP-x-b: rename a model"):
        plan_models(experiment(tmp_path, text), VOCAB, configure)


def test_one_process_at_a_time(tmp_path):
    folder = Folder(tmp_path / "out")
    with folder.locked():
        assert folder.is_locked()
        with pytest.raises(UserError, match="another smlp compare run is running"), folder.locked():
            pass
    assert not folder.is_locked()


def test_checkpoints_of_a_run(tmp_path):
    run = Folder(tmp_path).run("runs/a-s1")
    run.update_state(state=DONE)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_20.pt"):
        (run.path / name).write_text("x")
    (run.path / "checkpoint_2_40.pt.0123abcd.7.tmp").write_text("x")  # of a killed process
    (run.path / "checkpoint_notes").mkdir()  # of the user's
    (run.path / "checkpoints").symlink_to(run.path / "checkpoint_notes")
    others = ["checkpoint_notes", "checkpoints", "run.json"]
    run.drop_checkpoints(keep_last=True)
    assert sorted(path.name for path in run.path.iterdir()) == sorted(["checkpoint_last.pt", *others])
    run.drop_checkpoints(keep_last=False)
    assert sorted(path.name for path in run.path.iterdir()) == others
    assert json.loads(run.state_file.read_text())["state"] == DONE
