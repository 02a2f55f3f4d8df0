"""The file of an experiment: what it may say, and one clear sentence for everything else."""

import os

import pytest

from smlp.errors import UserError
from smlp.experiments.reading import read_experiment
from smlp.experiments.spec import grid_folder, option_words
from smlp.experiments.yaml_file import read_yaml

FILE = """
data: data-bin
tokens: 100k
seeds: [1, 2]
recipe: {optimizer: adam, adam_betas: "(0.9, 0.98)", lr: 2e-3, clip-norm: 1.0, sync: true, amp: false}
models:
  gMLP: {arch: gmlp_lm_tiny}
  sMLP E=4: {arch: smlp_tiny, num_experts: 4, recipe: {lr: 1.0e-3}}
"""


def read(tmp_path, text, name="small.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return read_experiment(path)


def test_what_it_says(tmp_path):
    found = read(tmp_path, FILE + "evaluate: {validations: 4, targets: [30, 5.0e+1]}\nrun: {jobs: 2, threads: 1}\n")
    assert (found.name, found.title, found.seeds) == ("small", "small", (1, 2))
    assert found.tokens_per_update == 1024
    assert found.updates == 97, "whole updates that 100,000 tokens pay for"
    assert found.tokens == 97 * 1024
    gmlp, smlp = found.models
    assert (gmlp.name, gmlp.arch, gmlp.overrides, gmlp.recipe) == ("gMLP", "gmlp_lm_tiny", {}, {})
    assert (smlp.overrides, smlp.recipe, smlp.folder) == ({"num_experts": 4}, {"lr": 1e-3}, "sMLP_E_4")
    assert found.evaluation.targets == (30.0, 50.0)
    assert found.resources.jobs == 2
    words = option_words(found.recipe)
    assert words == [
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "2e-3", "--clip-norm", "1.0", "--sync"),
    ]


def test_an_empty_value_takes_back_an_option_of_all(tmp_path):
    found = read(tmp_path, FILE.replace("recipe: {lr: 1.0e-3}", "recipe: {clip_norm: }"))
    assert "--clip-norm" not in option_words({**found.recipe, **found.models[1].recipe})


@pytest.mark.parametrize(
    ("budget", "updates"), [("updates: 7", 7), ("tokens: 1.5M", 1464), ("tokens: 2_048", 2), ("tokens: 1024", 1)]
)
def test_budgets(tmp_path, budget, updates):
    assert read(tmp_path, FILE.replace("tokens: 100k", budget)).updates == updates


def test_ranks_share_an_update(tmp_path):
    slurm = "run: {where: slurm, nodes: 2, gpus_per_node: 4}\n"
    found = read(tmp_path, FILE + slurm)
    assert (found.resources.ranks, found.tokens_per_update) == (8, 8192)


def test_names_stay_as_they_stand_there(tmp_path):
    found = read(tmp_path, FILE.replace("sMLP E=4", "sMLP-E4"))
    assert [model.name for model in found.models] == ["gMLP", "sMLP-E4"]


def test_numbers_that_yaml_takes_for_text(tmp_path):
    found = read(tmp_path, FILE.replace("100k", "16.1k") + "tune: {lr: [1.0e-3, 2e-3], updates: 5}\n")
    assert found.updates == 15
    assert found.tuning.values == (0.001, 0.002)
    found = read(tmp_path, FILE + 'tune: {plasma_path: ["x/../../../mine", y], updates: 5}\n')
    assert [grid_folder("sMLP", value) for value in found.tuning.values] == ["tune/sMLP-x_.._.._.._mine", "tune/sMLP-y"]
    assert grid_folder("sMLP", "(0.9, 0.98)") == "tune/sMLP-_0.9_0.98_", "a name that a list of a sweep may have"
    with pytest.raises(UserError, match="needs at least two different values"):
        read(tmp_path, FILE + "tune: {plasma_path: [a/b, a_b], updates: 5}\n")
    for bad in (".inf", ".nan"):
        with pytest.raises(UserError, match="tokens must be a whole number"):
            read(tmp_path, FILE.replace("100k", bad))


def test_a_copy_in_the_folder_of_runs_has_the_folders_name(tmp_path):
    (tmp_path / "quick").mkdir()
    assert read(tmp_path / "quick", FILE, "experiment.yaml").name == "quick"


def test_a_section_quick(tmp_path):
    """It replaces settings as a whole, and takes away those that are empty there."""
    text = FILE + TUNE + "quick: {tokens: 20k, seeds: 3, tune: null, models: {small: {arch: gmlp_lm_tiny}}}\n"
    whole = read(tmp_path, text)
    quick = read_experiment(tmp_path / "small.yaml", is_quick=True)
    assert not whole.is_quick and quick.is_quick
    assert (whole.updates, whole.seeds, len(whole.models), whole.tuning is None) == (97, (1, 2), 2, False)
    assert (quick.updates, quick.seeds, [model.name for model in quick.models]) == (19, (3,), ["small"])
    assert quick.tuning is None and quick.recipe == whole.recipe
    read(tmp_path, FILE + "quick:\n")
    with pytest.raises(UserError, match="--quick needs a section quick"):
        read_experiment(tmp_path / "small.yaml", is_quick=True)


def test_a_pipe_without_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"cannot read .*/pipe: nothing writes to this pipe"):
        read_yaml(tmp_path / "pipe")


TUNE = "tune: {lr: [1.0e-3, 2.0e-3], updates: 10}\n"
MISTAKES = {
    "twice": (FILE + "seeds: [3]\n", r"small.yaml, line 9: 'seeds' is given twice"),
    "no yaml": ("models: [a\n", r"small.yaml, line 2: "),
    "a list": ("- 1\n", r"holds a list; names with values"),
    "unknown": (FILE + "model: {}\n", r"model is unknown; did you mean 'models'\?"),
    "octal": (FILE.replace("[1, 2]", "[010]"), r"small.yaml, line \d+: 010 means 8 in YAML: write it in decimals"),
    "base 60": (FILE.replace("[1, 2]", "[1:30]"), r"small.yaml, line \d+: 1:30 means 90 in YAML"),
    "base 60 with a point": (
        FILE.replace("lr: 2e-3", "lr: 1:30.5"),
        r"small.yaml, line \d+: 1:30.5 means 90.5 in YAML",
    ),
    "unknown inside": (FILE + "run: {job: 2}\n", r"run.job is unknown; did you mean 'jobs'\?"),
    "no budget": (FILE.replace("tokens: 100k\n", ""), r"give tokens or updates"),
    "two budgets": (FILE + "updates: 7\n", r"tokens and updates set the same thing"),
    "less than an update": (FILE.replace("100k", "100"), r"tokens is 100, less than an update's 1024 tokens"),
    "no number": (FILE.replace("100k", "many"), r"tokens must be a whole number, got 'many'"),
    "half a token": (FILE.replace("100k", "0.5"), r"tokens must be a whole number, got 0.5"),
    "no data": (FILE.replace("data: data-bin\n", ""), r"give data .* or text"),
    "two data": (FILE + "text: {source: python}\n", r"data and text are both given"),
    "text": (FILE.replace("data: data-bin", "text: {source: web}"), r"text.source must be one of python, got 'web'"),
    "no models": ("data: d\nupdates: 3\n", r"there is nothing to compare"),
    "no families": ("data: d\nupdates: 3\nmatch: {like: smlp_tiny, families: []}\n", r"there is nothing to compare"),
    "no arch": (FILE.replace("smlp_tiny", "smlp_tny"), r"models.sMLP E=4.arch is unknown: 'smlp_tny'"),
    "reserved": (FILE.replace("lr: 2e-3", "seed: 3"), r"recipe.seed is set by smlp compare; .*: seeds"),
    "given twice": (FILE.replace("lr: 2e-3", "lr: 2e-3, clip_norm: 2"), r"recipe.clip-norm is given twice"),
    "a comma": (
        FILE.replace("lr: 2e-3", "betas: (0.9, 0.98)"),
        r"recipe.0.98\) is not the name of a setting; .* quotes",
    ),
    "same value": (FILE + "tune: {lr: [1e-3, 1.0e-3], updates: 5}\n", r"tune.lr needs at least two different values"),
    "same number": (FILE + "tune: {lr: [1, 1.0], updates: 5}\n", r"tune.lr needs at least two different values"),
    "a line end in a name": (
        FILE + '  "a\\nb": {arch: smlp_tiny}\n',
        r"models: the name 'a\\nb' has a control character",
    ),
    "odd size": (FILE + "match: {like: smlp, embed_dim: [1, 2]}\n", r"match.embed_dim must be a whole number"),
    "context": (
        FILE.replace("lr: 2e-3", "max_target_positions: 64"),
        r"recipe.max_target_positions is set by smlp compare; .*: tokens_per_sample",
    ),
    "early end": (FILE.replace("lr: 2e-3", "patience: 3"), r"recipe.patience is set by smlp compare"),
    "no value": (FILE.replace("num_experts: 4", "num_experts: null"), r"num_experts has no value; leave it out"),
    "an option without a value": (
        FILE.replace("lr: 2e-3", "lr: "),
        r"recipe.lr has no value; leave it out for the default of smlp train",
    ),
    "grid with an empty value": (FILE + TUNE.replace("2.0e-3", "null"), r"tune.lr has an empty value, got \[0.0"),
    "training text as subset": (
        FILE + "evaluate: {subsets: [valid, train]}\n",
        r"evaluate.subsets has train, .* in the log: \['valid', 'train'\]",
    ),
    "reserved setting": (FILE.replace("num_experts: 4", "batch-size: 4"), r"batch_size is the same for all models"),
    "same seeds": (FILE.replace("[1, 2]", "[1, 1]"), r"seeds must be different numbers, got \[1, 1\]"),
    "empty name": (FILE + "  '': {arch: smlp_tiny}\n", "models: the name '' is empty"),
    "same folder": (FILE + "  sMLP_E 4: {arch: smlp_tiny}\n", r"'sMLP E=4' and 'sMLP_E 4' would share the folder"),
    "quick": (FILE + "quick: {seed: [1]}\n", r"seed is unknown; did you mean 'seeds'\?"),
    "quick budget": (FILE + "quick: {tokens: 9}\n", r"tokens is 9, .* \(with the changes in its section quick\)$"),
    "quick list": (FILE + "quick: [1]\n", r"quick must be names with values, got a list"),
    "grid": (FILE + "tune: {updates: 10}\n", r"tune needs one option .*; it has no option"),
    "grid of two": (FILE + TUNE.replace("updates", "clip_norm: [1, 2], updates"), r"it has lr, clip_norm"),
    "grid of one": (FILE + TUNE.replace(", 2.0e-3", ""), r"tune.lr needs at least two different values"),
    "match": (FILE + "match: {families: [smlp]}\n", r"match needs either like .* or flops_per_token"),
    "family": (FILE + "match: {like: smlp, families: [lstm]}\n", r"match.families has 'lstm', which is not one of"),
    "validations": (FILE + "evaluate: {validations: 98}\n", r"evaluate.validations is 98, more than the 97 updates"),
    "precision": (FILE + "evaluate: {dtype: int8}\n", r"evaluate.dtype must be one of fp32, bf16, fp16, got 'int8'"),
    "where": (FILE + "run: {where: cloud}\n", r"run.where must be one of local, slurm, got 'cloud'"),
    "slurm": (FILE + "run: {where: slurm}\n", r"run needs gpus_per_node or"),
    "of slurm": (FILE + "run: {gpus_per_node: 8}\n", r"run.gpus_per_node is for where: slurm, and run.where is local"),
    "mfu": (FILE + "run: {mfu: 30}\n", r"run.mfu is a share .*, got 30"),
    "no rate": (FILE.replace("lr: 2e-3", "lr: 0"), r"recipe.lr must be a positive number, got 0"),
    "negative rate": (
        FILE + "  other: {arch: smlp_tiny, recipe: {lr: -0.01}}\n",
        r"models.other.recipe.lr must be a positive number, got -0.01",
    ),
    "no rate beside settings": (
        FILE.replace("lr: 2e-3", "dropout: 0").replace("gmlp_lm_tiny", "gmlp_lm_tiny, lr: 0"),
        r"models.gMLP.lr must be a positive number, got 0",
    ),
    "grid with no rate": (FILE + TUNE.replace("2.0e-3", "0"), r"tune.lr must be a positive number, got 0"),
    "seed too large": (
        FILE.replace("[1, 2]", "[1, 4294967295]"),
        r"seeds has 4294967295; training accepts at most 4293918720",
    ),
    "seed of the grid": (FILE + TUNE.replace("updates", "seed: 5B, updates"), r"tune.seed has 5000000000; training"),
    "rate beside settings": (
        FILE.replace("num_experts: 4", "lr: 3"),
        r"models.sMLP E=4.lr would have no effect, because recipe sets it too: put it into models.sMLP E=4.recipe",
    ),
    "option of the grid beside settings": (
        FILE.replace("num_experts: 4", "dropout: 0.1") + "tune: {dropout: [0, 0.2], updates: 9}\n",
        r"models.sMLP E=4.dropout would have no effect, because tune sets it too: leave it out",
    ),
    "help": (FILE.replace("lr: 2e-3", "help: true"), r"recipe.help is set by smlp compare"),
    "long warm-up in the grid": (
        FILE.replace("lr: 2e-3", "lr: 2e-3, lr_scheduler: cosine") + "tune: {warmup_updates: [5, 50], updates: 9}\n",
        r"recipe.warmup_updates is 50, and a run has 9 updates \(tune\): the cosine schedule",
    ),
    "no subset": (FILE + "evaluate: {subsets: []}\n", r"evaluate.subsets must be different names, got \[\]"),
    "a subset twice": (FILE + "evaluate: {subsets: [valid, valid]}\n", r"evaluate.subsets must be different names"),
    "a path as subset": (
        FILE + "evaluate: {subsets: [../data-bin/valid]}\n",
        r"small.yaml: evaluate.subsets names the file '../data-bin/valid', which would lie outside its folder",
    ),
    "tasks without data": (
        FILE + "evaluate: {zeroshot: {tasks: [copa], limit: 3}}\n",
        r"evaluate.zeroshot.data \(the folder of the tasks\) is missing, but tasks, limit",
    ),
    "misspelled data": (FILE + "evaluate: {zeroshot: {dta: d}}\n", r"zeroshot.data .* is missing, but dta"),
    "warm-up": (
        FILE.replace("lr: 2e-3", "lr_scheduler: cosine, warmup_updates: 50") + TUNE,
        r"recipe.warmup_updates is 50, and a run has 10 updates \(tune\)",
    ),
    "warm-up of a model": (
        FILE.replace("recipe: {lr: 1.0e-3}", "recipe: {lr_scheduler: cosine, warmup_updates: 99}"),
        r"models.sMLP E=4.recipe.warmup_updates is 99, and a run has 97 updates",
    ),
    "warm-up beside settings": (
        FILE.replace("num_experts: 4", "lr_scheduler: cosine, warmup_updates: 99"),
        r"models.sMLP E=4.warmup_updates is 99, and a run has 97 updates",
    ),
    "warm-up in a grid of schedules": (
        FILE.replace("lr: 2e-3", "lr: 2e-3, warmup_updates: 15")
        + "tune: {lr_scheduler: [fixed, cosine], updates: 9}\n",
        r"recipe.warmup_updates is 15, and a run has 9 updates \(tune\): the cosine schedule",
    ),
    "no vocabulary": (FILE + "vocab_size: 4\n", r"vocab_size must be at least 5, got 4"),
    "a date": (FILE.replace("  gMLP:", "  2020-01-01:"), r"is a date, where a name is expected"),
    "deep": ("models: " + "[" * 3000 + "]" * 3000, r"small.yaml is nested too deep"),
    "huge exponent": (FILE.replace("100k", "1e999999999"), r"tokens must be a whole number, got '1e999999999'"),
    "many digits": (FILE.replace("100k", "9" * 5000), r"a value cannot be read: Exceeds the limit"),
    "many bits": (FILE.replace("100k", "0x" + "f" * 5000), r"tokens must be at most .*, got a number of thousands"),
    "too much": (
        FILE.replace("100k", "9" * 200),
        r"tokens must be at most 1,000,000,000,000,000,000, got 9{100}\.\.\.$",
    ),
    "many octal digits": (FILE.replace("100k", "0" + "7" * 400), r"a value cannot be read: "),
    "no date": (FILE.replace("100k", "2020-99-99"), r"a value cannot be read: month must be in 1..12"),
    "no time": (FILE.replace("100k", "!!timestamp x"), r", line \d+: a value cannot be read as timestamp"),
    "no truth": (FILE.replace("100k", "!!bool x"), r", line \d+: a value cannot be read as bool"),
    "no digits": (FILE.replace("100k", '!!int "_"'), r", line \d+: a value cannot be read as int"),
    "merge": ("a: &a {b: 1}\n<<: *a\n" + FILE, r"line 2: '<<' is not supported"),
    "aliases": (
        "k0: &k0 [1]\n" + "".join(f"k{n + 1}: &k{n + 1} [{', '.join([f'*k{n}'] * 9)}]\n" for n in range(9)),
        r"small.yaml has [0-9,]+ values with aliases expanded; at most 1,000,000",
    ),
    "alias of itself": ("a: &a {b: *a}\n", r"an alias is used inside its own value"),
    "half a character": (FILE + 'title: "\\ud800"\n', r"has a lone surrogate"),
    "models": (
        FILE + "".join(f"  m{n}: {{arch: smlp_tiny}}\n" for n in range(5000)),
        r"10,004 runs of 5,002 models are too many: at most 5,000",
    ),
    "threads": (FILE + "run: {threads: 100000}\n", r"make 100,000 threads at a time: at most 1,024"),
    "long name": (FILE.replace("sMLP E=4", "g" * 300), r"a name of 300 characters becomes a folder: at most 150"),
}


_ENCODER = "  BERT: {arch: bert_mlm_tiny}\n"
MISTAKES |= {
    "masked and causal": (
        FILE + _ENCODER,
        r"BERT is a masked language model and gMLP predicts next tokens: .* cannot be compared$",
    ),
    "made an encoder": (
        FILE.replace("{arch: gmlp_lm_tiny}", "{arch: gmlp_lm_tiny, direction: bidirectional}"),
        r"gMLP is a masked language model and sMLP E=4 predicts next tokens",
    ),
    "masked and matched": (
        FILE[: FILE.index("  gMLP")] + _ENCODER + "match: {like: smlp_tiny}\n",
        r"BERT is a masked language model and match predicts next tokens",
    ),
    "other masks": (
        FILE[: FILE.index("  gMLP")] + _ENCODER + "  B: {arch: bert_mlm_tiny, recipe: {mask_prob: 0.03}}\n",
        r"small.yaml: mask_prob decides what is validated on: it must be the same for all runs, as in recipe$",
    ),
    "models that are validated on unlike tokens": (
        FILE[: FILE.index("  gMLP")] + _ENCODER + "  B: {arch: bert_mlm_tiny, recipe: {shorten_method: truncate}}\n",
        r"small.yaml: shorten_method decides what is validated on: it must be the same for all runs, as in recipe$",
    ),
    "texts of next tokens that are shortened": (
        FILE.replace("recipe: {lr: 1.0e-3}", "recipe: {shorten_method: truncate}"),
        r"small.yaml: shorten_method shortens what language models are validated on",
    ),
    "those of all": (
        FILE.replace("sync: true", "shorten_method: truncate"),
        r"small.yaml: shorten_method shortens what language models are validated on",
    ),
    "tuned shortening": (
        FILE + "tune: {tokens: 50k, shorten_method: [none, truncate]}\n",
        r"small.yaml: shorten_method shortens what language models are validated on",
    ),
    "one of two splits shortened": (
        FILE[: FILE.index("  gMLP")].replace("sync: true", "shorten_method: truncate, shorten_data_split_list: train")
        + _ENCODER
        + "  B: {arch: bert_mlm_tiny, recipe: {shorten_data_split_list: 'train,valid'}}\n",
        r"small.yaml: shorten_data_split_list decides what is validated on",
    ),
    "combined splits": (
        FILE.replace("sync: true", "combine_valid_subsets: true"),
        r"combine_valid_subsets",
    ),
    "whole words": (
        FILE[: FILE.index("  gMLP")] + _ENCODER + "  B: {arch: bert_mlm_tiny, recipe: {mask_whole_words: true}}\n",
        r"small.yaml: mask_whole_words decides what is validated on",
    ),
    "tuned masks": (
        FILE[: FILE.index("  gMLP")] + _ENCODER + "tune: {tokens: 50k, mask_stdev: [0.1, 0.2]}\n",
        r"small.yaml: mask_stdev decides what is validated on",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(tmp_path, mistake):
    text, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)


def test_what_is_the_default_is_no_other_mask(tmp_path):
    own = "  B: {arch: bert_mlm_tiny, recipe: {mask_whole_words: false}}\n"
    assert len(read(tmp_path, FILE[: FILE.index("  gMLP")] + _ENCODER + own).models) == 2


@pytest.mark.parametrize("own", ["shorten_method: none", "shorten_method: truncate, shorten_data_split_list: train"])
def test_a_model_may_shorten_what_it_is_trained_on(tmp_path, own):
    assert len(read(tmp_path, FILE.replace("recipe: {lr: 1.0e-3}", f"recipe: {{{own}}}")).models) == 2


def test_all_encoders_may_have_masks_of_their_own(tmp_path):
    text = FILE[: FILE.index("  gMLP")] + _ENCODER + "  B: {arch: bert_mlm_tiny, recipe: {mask_prob: 0.2}}\n"
    assert read(tmp_path, text.replace("bert_mlm_tiny}", "bert_mlm_tiny, mask_prob: 0.2}")).models[1].recipe


def test_data_in_several_folders(tmp_path):
    for name in ("shard10", "shard02"):
        (tmp_path / name).mkdir()
    pattern = f"{tmp_path}/shard*"
    assert read(tmp_path, FILE.replace("data-bin", pattern)).data == f"{tmp_path}/shard02:{tmp_path}/shard10"
    assert read(tmp_path, FILE.replace("data-bin", f"[one, '{pattern}']")).data.split(":")[::2] == [
        "one",
        f"{tmp_path}/shard10",
    ]
    assert read(tmp_path, FILE.replace("data-bin", "none*")).data == "none*", (
        "whoever opens it says that it is not there"
    )
    with pytest.raises(UserError, match=r"data must be a folder, a pattern or a list of them, got 3"):
        read(tmp_path, FILE.replace("data-bin", "[a, 3]"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none.yaml: No such file"):
        read_experiment(tmp_path / "none.yaml")
