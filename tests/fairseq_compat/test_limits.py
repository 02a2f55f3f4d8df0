"""Options of fairseq whose numbers cannot work: one sentence that names them, before anything is built or written."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import ListConfig

from smlp.config import all_settings
from smlp.config.presets import preset
from smlp.costs import memory
from smlp.costs.memory import check_training, check_weights
from smlp.errors import UserError
from smlp.fairseq_compat.command_line import load_plugin
from smlp.fairseq_compat.limits import LIMITS, check_numbers
from smlp.fairseq_compat.settings import check_before_start
from smlp.launch import local

#: what fairseq reads as a number and nothing here depends on, or what is checked elsewhere
_NOT_IN_THE_TABLE = {
    *("distributed_num_procs", "expert_parallel_size", "profile_updates", "output_dictionary_size", "base_shuffle"),
    *("pad", "eos", "unk", "mask_prob"),
}
_OPTIMIZERS = ("adam", "sgd", "adafactor", "adamax", "adadelta", "adagrad", "nag")
_SCHEDULES = ("cosine", "inverse_sqrt", "polynomial_decay", "tri_stage", "triangular", "step", "reduce_lr_on_plateau")


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    load_plugin()


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fairseq-train"])


def parse(*words: str, task: bool = True) -> argparse.Namespace:
    """What fairseq-train makes of a command line."""
    given = ["data", *(["--task", "language_modeling"] if task else []), "--optimizer", "adam", "--max-update", "9"]
    arch = [] if "--arch" in words else ["--arch", "smlp_tiny"]
    return options.parse_args_and_arch(options.get_training_parser(), [*given, *arch, *words])


@pytest.mark.parametrize("name", ["stop_min_lr", "decay_rate", "no_answer_threshold"])
@pytest.mark.parametrize("value", [-1e30, -math.inf])
def test_what_is_below_all_numbers_is_told_so(name: str, value: float) -> None:
    with pytest.raises(UserError, match=re.escape(f"must be at least {1 - 2**63}, got {value}")):
        check_numbers({name: value})


@pytest.mark.parametrize("given", [[], ListConfig([])])
def test_a_list_needs_a_number(given: list[float]) -> None:
    with pytest.raises(UserError, match=r"^--update-freq needs at least one number, got \[\]"):
        check_numbers({"update_freq": given})


@pytest.mark.parametrize("name", LIMITS)
def test_the_borders_of_each_option(name: str) -> None:
    lowest, highest, why = LIMITS[name]
    for fine in (lowest, highest, [lowest, highest], None, "text"):
        check_numbers({name: fine})
    below, above = (math.nextafter(lowest, -math.inf), math.nextafter(highest, math.inf))
    for wrong in (below, above, math.nan, [lowest, below]):
        if wrong == highest == math.inf:
            continue
        with pytest.raises(UserError, match=rf"^--{name.replace('_', '-')} must be .*, got ") as refused:
            check_numbers({name: wrong})
        assert why in str(refused.value)


@pytest.mark.parametrize(
    ("arch", "task"),
    [
        ("smlp_tiny", "language_modeling"),
        ("transformer_lm", "language_modeling"),
        ("amlp_mlm_tiny", "squad"),
        ("gmlp_mlm_tiny", "masked_lm"),
    ],
)
def test_every_number_of_fairseq_train_is_in_the_table(arch: str, task: str) -> None:
    parser = options.get_training_parser()
    for optimizer, schedule in zip(_OPTIMIZERS, _SCHEDULES, strict=True):
        words = ["data", "--task", task, "--arch", arch, "--optimizer", optimizer, "--max-update", "9"]
        words += ["--lr-scheduler", schedule, "--max-lr", "1", "--decay-steps", "1"]
        parser = options.get_training_parser()
        options.parse_args_and_arch(parser, words, parse_known=True)
        # a list's numbers are read by a function without a name
        read = {action.dest for action in parser._actions if getattr(action.type, "__name__", "") in ("int", "float")}
        assert read - LIMITS.keys() - all_settings().keys() <= _NOT_IN_THE_TABLE


# words: what the sentence must say
REFUSED: dict[str, list[str]] = {
    "--batch-size 0": ["--batch-size must be at least 1, got 0", "--max-tokens"],
    "--max-sentences -4": ["--batch-size must be at least 1, got -4"],
    "--batch-size-valid 0": ["--batch-size-valid must be at least 1, got 0"],
    "--batch-size-valid 1.5": ["argument --batch-size-valid/--max-sentences-valid: invalid int value: '1.5'"],
    "--update-epoch-batch-itr maybe": ["argument --update-epoch-batch-itr: expected true or false, got 'maybe'"],
    "--required-batch-size-multiple 1000000000000": ["must be from 1 to 2147483647, got 1000000000000"],
    "--required-batch-size-multiple 0": ["--required-batch-size-multiple must be from 1 to 2147483647, got 0"],
    "--seed -1": ["--seed must be from 0 to 4293918720, got -1"],
    f"--seed {2**40}": ["got 1099511627776"],
    "--num-workers -1": ["--num-workers must be from 0 to", "got -1"],
    "--num-workers 10000": ["--num-workers must be from 0 to", "got 10000", "cores"],
    "--log-interval 0": ["--log-interval must be at least 1, got 0"],
    "--lr ": ["argument --lr: expected a number, or several with commas between them, got ''"],
    "--lr -1": ["--lr must be at least 0, got -1.0"],
    "--lr 1e-3,-1": ["--lr must be at least 0, got -1.0"],
    "--lr 1e999": ["--lr must be at least 0 and finite, got inf"],
    f"--batch-size {10**23}": ["--batch-size must be at least 1 and at most 9223372036854775807, got 1000"],
    "--lr-scheduler pass_through": ["pass_through is for optimizers with schedules of their own"],
    "--model-parallel-size 2": ["--model-parallel-size must be from 1 to 1, got 2"],
    "--num-shards 3 --shard-id 3": ["--shard-id must be below --num-shards 3, got 3"],
    "--lr abc": ["argument --lr: expected a number", "'abc'"],
    "--lr 1e-": ["argument --lr: expected a number", "'1e-'"],
    "--adam-eps 0": ["--adam-eps must be above 0, got 0.0"],
    "--weight-decay nan": ["--weight-decay must be at least 0, got nan"],
    "--clip-norm nan": ["--clip-norm must be at least 0, got nan (0 clips nothing)"],
    "--update-freq 1.5": ["argument --update-freq: expected a whole number", "'1.5'"],
    "--update-freq 2,0": ["--update-freq must be at least 1, got 0"],
    "--batch-size 1.5": ["argument --batch-size/--max-sentences: invalid int value: '1.5'"],
    "--warmup-updates -5": ["--warmup-updates must be at least 0, got -5"],
    "--tokens-per-sample 0": ["--tokens-per-sample must be from 1 to 2147483647, got 0"],
    "--unknown 3": ["unrecognized arguments: --unknown 3"],
    "--fp16 --bf16": ["--fp16 and --bf16 are both given"],
    "--memory-efficient-bf16 --fp16": ["--fp16 and --memory-efficient-bf16 are both given"],
    "--lr-scheduler nope": ["argument --lr-scheduler: invalid choice: 'nope'"],
    "--lr-scheduler cosine --warmup-updates 9": ["no update left after --warmup-updates 9 of --max-update 9"],
    "--lr-scheduler cosine --max-update 0": ["cosine needs --lr-period-updates, or --max-update"],
    "--lr-scheduler cosine --lr 1,2": ["cosine takes one learning rate, and --lr has 2: 1.0,2.0"],
    "--lr-scheduler inverse_sqrt --warmup-updates 0": ["inverse_sqrt needs --warmup-updates of at least 1, got 0"],
    "--lr-scheduler polynomial_decay --max-update 0": ["polynomial_decay needs --total-num-update, or --max-update"],
    "--lr-scheduler triangular": ["required: --max-lr"],
    "--lr-scheduler triangular --max-lr 0.1 --lr 0.2": ["triangular needs a --max-lr above --lr 0.2, got 0.1"],
    "--lr-scheduler triangular --max-lr 1 --lr-period-updates 1": ["--lr-period-updates of at least 2, got 1.0"],
    "--lr-scheduler tri_stage": ["tri_stage needs --decay-steps of at least 1, or --phase-ratio"],
    "--lr-scheduler tri_stage --phase-ratio (0.1,0.4,0.4)": ["that add up to 1, got (0.1, 0.4, 0.4)"],
    "--lr-scheduler tri_stage --phase-ratio (0.5,0.5,0)": ["no update to decay in", "--max-update 9"],
    "--lr-scheduler step --lr 0": ["step needs a --lr above --min-lr 0.0, got 0.0"],
    "--lr-scheduler reduce_lr_on_plateau --lr-shrink 1": ["needs an --lr-shrink below 1, got 1.0"],
    "--arch transformer_lm --dropout 1.5": ["--dropout must be from 0 to 1, got 1.5"],
    "--arch transformer_lm --decoder-attention-heads 0": ["--decoder-attention-heads must be at least 1, got 0"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_when_the_command_line_is_read(words: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(*words.split(" "))
    for part in REFUSED[words]:
        assert part in str(refused.value)
    assert "\n" not in str(refused.value) and "lambda" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--mask-prob 1", "--mask-prob must be above 0 and below 1, got 1.0"),
        ("--mask-prob nan", "--mask-prob must be above 0 and below 1, got nan"),
        ("--random-token-prob 0.7 --leave-unmasked-prob 0.7", "0.7 and --leave-unmasked-prob 0.7 are together more"),
        ("--mask-multiple-length 0", "--mask-multiple-length must be from 1"),
        ("--tokens-per-sample 1", "--tokens-per-sample must be at least 2, because each sample begins with <s>, got 1"),
        ("--mask-whole-words", "--mask-whole-words does not work with --task masked_lm"),
        ("--d2v2-multi", "--d2v2-multi does not work with --task masked_lm"),
    ],
)
def test_masking_that_cannot_work_is_refused(words: str, sentence: str) -> None:
    masked = ("--task", "masked_lm", "--arch", "gmlp_mlm_tiny")
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse(*masked, *words.split(" "), task=False)
    parse(*masked, "--mask-prob", "0.5", "--random-token-prob", "0.5", "--leave-unmasked-prob", "0.5", task=False)


@pytest.mark.parametrize(
    "words",
    [
        *("--max-tokens 64", "--clip-norm 0", "--clip-norm inf", "--seed 0", "--max-update 0", "--lr 0,0.2"),
        *("--update-freq 1,2", "--update-freq [2]", "--weight-decay 0", "--num-workers 0"),
        *("--lr-scheduler cosine", "--lr-scheduler cosine --warmup-updates 10", "--lr-scheduler inverse_sqrt"),
        *("--lr-scheduler tri_stage --decay-steps 1", "--lr-scheduler triangular --max-lr 1", "--lr-scheduler step"),
        *("--lr-scheduler reduce_lr_on_plateau", "--arch transformer_lm --dropout 0"),
    ],
)
def test_what_works_is_let_pass(words: str) -> None:
    args = parse(*words.split(" "))
    assert args.batch_size is None and not args.tpu


@pytest.mark.parametrize(("word", "value"), [("True", True), ("true", True), ("0", False), ("FALSE", False)])
def test_a_truth_is_read_in_the_usual_ways(word: str, value: bool) -> None:
    assert parse("--update-epoch-batch-itr", word).update_epoch_batch_itr is value


def test_polynomial_decay_ends_with_the_last_update_unless_told_otherwise() -> None:
    """fairseq's help says so; without this it has no value at all."""
    for words, total in ((["--max-update", "7"], 7), (["--total-num-update", "5"], 5)):
        assert parse("--lr-scheduler", "polynomial_decay", *words).total_num_update == total


@pytest.mark.parametrize("arch", ["smlp_tiny", "transformer_lm"])
@pytest.mark.parametrize("task", [None, "translation", "masked_lm", "cross_lingual_lm"])
def test_a_language_model_needs_its_task(arch: str, task: str | None) -> None:
    words = ["--arch", arch, "--tokens-per-sample", "8", *(["--task", task] if task else [])]
    said = rf"^--arch {arch} is a language model, but --task is {task or 'translation'}: give --task language_modeling"
    with pytest.raises(UserError, match=said):
        parse(*words, task=False)


def test_training_needs_a_model() -> None:
    with pytest.raises(UserError, match=r"^there is no model to train: give --arch"):
        options.parse_args_and_arch(options.get_training_parser(), ["data"])


@pytest.mark.parametrize("rank", [0, None, 1])  # None stands for no ranks in fairseq-hydra-train
def test_only_the_first_rank_writes_the_log_file(tmp_path: Path, rank: int) -> None:
    """The others would meet its folder before the first has made it."""
    path = tmp_path / ("made later" if rank else "") / "log"
    words = ["--batch-size", "2", "--save-dir", str(tmp_path), "--no-save", "--log-file", str(path)]
    cfg = convert_namespace_to_omegaconf(parse("--tokens-per-sample", "8", *words))
    cfg.distributed_training.distributed_rank = rank
    check_before_start(cfg, 2, has_cuda=False)
    assert cfg.common.log_file == (None if rank else str(path))
    if rank:  # nor does it matter what lies there on its machine
        cfg.common.log_file = str(tmp_path)
        check_before_start(cfg, 2, has_cuda=False)


def test_validation_needs_a_task_and_a_size_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/fairseq-validate"])
    with pytest.raises(UserError, match=r"^there is no task: give that of the checkpoint, such as --task language_"):
        options.parse_args_and_arch(options.get_validation_parser(), ["data", "--path", "x.pt"])
    words = ["data", "--path", "x.pt", "--task", "language_modeling"]
    for suppress_defaults in (False, True):
        with pytest.raises(UserError, match=r"^there is no size for the batches: give --batch-size or --max-tokens$"):
            options.parse_args_and_arch(options.get_validation_parser(), words, suppress_defaults=suppress_defaults)
    given = options.parse_args_and_arch(
        options.get_validation_parser(), [*words, "--max-tokens", "9"], suppress_defaults=True
    )
    assert given.max_tokens == 9 and not hasattr(given, "batch_size")
    monkeypatch.setattr(sys, "argv", ["other-tool"])  # which may need neither
    assert options.parse_args_and_arch(options.get_validation_parser(), words).max_tokens is None


def test_weights_that_fit_no_memory_are_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: 2**33)
    check_weights(preset("smlp_large"), 32)
    for settings in ({"embed_dim": 10**9}, {"max_tokens": 10**9}):
        with pytest.raises(UserError, match=r"weights of this model take [\d,]+ GiB, and .* has a memory of 8 GiB"):
            check_weights(preset("smlp_tiny", **settings))


def test_training_that_fits_no_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights alone would fit."""
    config = preset("smlp_large")
    monkeypatch.setattr(memory, "memory_bytes", lambda: 40 * 2**30)
    check_weights(config)
    with pytest.raises(UserError, match=r"take 36 GiB, with gradients and moments of Adam 14\d GiB, .* of 40 GiB"):
        check_training(config)


def test_more_ranks_than_the_memory_holds_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "memory_bytes", lambda: 2**30)
    monkeypatch.setattr(local, "_LocalRanks", None)
    with pytest.raises(UserError, match=r"--nproc 5: this machine has 1 GiB of memory, and each rank .* at most 4"):
        local.run_ranks(["true"], 5)
