"""What a user may get wrong: each mistake is one clear sentence, exit status 1, and nothing already written is lost."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_states import save
from fairseq_cli.train import main
from running import TINY_LM, USER_DIR, Finished

from smlp import files
from smlp.cli.train import prepare
from smlp.config.plugins import named_files
from smlp.errors import UserError
from smlp.fairseq_compat import loading
from smlp.fairseq_compat.data import check_dictionary, check_folders, check_format, check_split, check_text
from smlp.fairseq_compat.loading import check_dictionary_of, check_file, check_restore_file
from smlp.fairseq_compat.needs import has_averages
from smlp.fairseq_compat.saving import own_save_dir
from smlp.fairseq_compat.settings import _check_log_file, check_profiling
from smlp.files import locked
from smlp.text.tokenizer_files import Vocabulary

pytestmark = [pytest.mark.long, pytest.mark.timeout(720)]


@pytest.fixture(scope="module")
def broken(tiny_data: Path, tiny_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of everything a user may get wrong."""
    root = tmp_path_factory.mktemp("broken")
    whole = (tiny_run[0] / "checkpoint_best.pt").read_bytes()
    (root / "truncated.pt").write_bytes(whole[: len(whole) // 3])
    (root / "garbage.pt").write_text("this is not a checkpoint\n")
    (root / "empty.pt").touch()
    torch.save({"weights": torch.zeros(2)}, root / "other.pt")

    kinds = root / "kinds"
    (kinds / "folder.pt").mkdir(parents=True)
    os.mkfifo(kinds / "pipe.pt")
    (kinds / "link.pt").symlink_to(root / "gone.pt")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (kinds / "flipped.pt").write_bytes(flipped)
    (root / "folder_best" / "checkpoint_best.pt").mkdir(parents=True)
    (root / "pipe_last").mkdir()
    os.mkfifo(root / "pipe_last" / "checkpoint_last.pt")
    for name, (way, value) in WRONG_STATES.items():
        state = torch.load(tiny_run[0] / "checkpoint_best.pt")
        place = reduce(lambda part, step: part[step], way[:-1], state)
        place.pop(way[-1]) if value is None else place.update({way[-1]: value})
        torch.save(state, kinds / f"{name}.pt")

    torch.save({"epoch": 3, "state_dict": {"weight": torch.zeros(2)}}, kinds / "images.pt")
    state = torch.load(tiny_run[0] / "checkpoint_best.pt")
    state["extra_state"]["of a plug-in"] = b""
    torch.save(state, kinds / "bytes.pt")
    state = torch.load(tiny_run[0] / "checkpoint_best.pt")
    state["extra_state"]["ema"] = {k: v for k, v in state["model"].items() if "embed_tokens" not in k}
    torch.save(state, kinds / "averages.pt")

    last = root / "corrupted_last"
    last.mkdir()
    (last / "checkpoint_best.pt").write_bytes(whole)
    (last / "checkpoint_last.pt").write_bytes(whole[:20000])

    shutil.copytree(tiny_data, root / "more_valid")
    shutil.copyfile(tiny_data / "valid.idx", root / "more_valid" / "valid1.idx")
    shutil.copyfile(tiny_data / "valid.bin", root / "more_valid" / "valid1.bin")
    shutil.copytree(tiny_data, root / "older_index")
    (root / "older_index" / "train.idx").write_bytes(b"TNTIDX\0\0" + b"junk" * 9)
    for name in ("no_train", "zero_tokens", "cut_bin", "cut_idx", "bad_dict", "small_dict", "large_dict"):
        shutil.copytree(tiny_data, root / name)
    for suffix in (".bin", ".idx"):
        (root / "no_train" / f"train{suffix}").unlink()
    index = (root / "zero_tokens" / "train.idx").read_bytes()
    (root / "zero_tokens" / "train.idx").write_bytes(index[:18] + bytes(8))  # header, then "0 lines"
    (root / "zero_tokens" / "train.bin").write_bytes(b"")
    (root / "cut_bin" / "train.bin").write_bytes((tiny_data / "train.bin").read_bytes()[:1000])
    (root / "cut_idx" / "train.idx").write_bytes((tiny_data / "train.idx").read_bytes()[:100])
    (root / "bad_dict" / "dict.txt").write_text("the 12\nno-count\n")
    words = (tiny_data / "dict.txt").read_text().splitlines()
    (root / "small_dict" / "dict.txt").write_text("\n".join(words[:-8]) + "\n")
    (root / "large_dict" / "dict.txt").write_text("\n".join([*words, *(f"madeup{i} 0" for i in range(8))]) + "\n")

    (root / "latin1.txt").write_bytes(b"first line\nna\xefve\n")
    (root / "nothing.txt").touch()
    return root


# name: (where in a checkpoint, what is put there; None takes it away)
WRONG_STATES: dict[str, tuple[list[str | int], object]] = {
    "epoch": (["extra_state", "train_iterator", "epoch"], -1),
    "updates": (["optimizer_history", -1, "num_updates"], "six"),
    "moment": (["last_optimizer_state", "state", 1, "exp_avg"], None),
    "exp_avg": (["last_optimizer_state", "state", 1, "exp_avg"], torch.zeros(3)),
    "exp_avg_sq": (["last_optimizer_state", "state", 1, "exp_avg_sq"], torch.full((32, 32), torch.nan)),
    "exp_avg, sparse": (["last_optimizer_state", "state", 1, "exp_avg"], torch.eye(32).to_sparse()),
    "exp_avg_sq, negative": (["last_optimizer_state", "state", 1, "exp_avg_sq"], torch.full((32, 32), -1.0)),
    "step": (["last_optimizer_state", "state", 1, "step"], "six"),
    "betas": (["last_optimizer_state", "param_groups", 0, "betas"], "low"),
    "eps": (["last_optimizer_state", "param_groups", 0, "eps"], None),
    "best": (["extra_state", "best"], "low"),
    "metrics": (["extra_state", "metrics"], "junk"),
    "extra_state": (["extra_state"], None),
    "weights": (["model", "decoder.layers.0.fc2.bias"], torch.full((32,), torch.nan)),
    "optimizer_history": (["optimizer_history"], None),
}

# name: (tool, arguments after the data directory, data directory or None for the good one, what the sentence must say)
TRAIN = ["--max-update", "2", "--save-dir", "{save}"]
BAD_INPUT: dict[str, tuple[str, list[str], str | None, list[str]]] = {
    "fp16 on a CPU": ("train", [*TRAIN, "--fp16"], None, ["--fp16", "GPU", "--bf16"]),
    "restore missing": ("train", [*TRAIN, "--restore-file", "{root}/none.pt"], None, ["none.pt", "truncated.pt"]),
    "finetune missing": (
        "train",
        [*TRAIN, "--finetune-from-model", "{root}/none.pt"],
        None,
        ["--finetune-from-model", "none.pt", "truncated.pt"],
    ),
    "lines longer than the context": (
        "train",
        [*TRAIN, "--sample-break-mode", "eos", "--max-target-positions", "6"],
        None,
        ["samples are longer than 6 tokens, the longest has 8", "--skip-invalid-size-inputs-valid-test leaves them"],
    ),
    "all lines longer than the context": (
        "train",
        [*TRAIN, "--sample-break-mode", "eos", "--max-target-positions", "2"],
        None,
        ["300 of 300 samples are longer than 2 tokens", "lower --tokens-per-sample"],
    ),
    "restore truncated": ("train", [*TRAIN, "--restore-file", "{root}/truncated.pt"], None, ["truncated.pt", "bytes"]),
    "restore folder": ("train", [*TRAIN, "--restore-file", "{root}/kinds/folder.pt"], None, ["folder.pt is a folder"]),
    "restore pipe": ("train", [*TRAIN, "--restore-file", "{root}/kinds/pipe.pt"], None, ["pipe.pt is", "a named pipe"]),
    "restore link": ("train", [*TRAIN, "--restore-file", "{root}/kinds/link.pt"], None, ["link to", "gone.pt"]),
    "finetune folder": (
        "train",
        [*TRAIN, "--finetune-from-model", "{root}/kinds/folder.pt"],
        None,
        ["folder.pt is a folder"],
    ),
    "finetune pipe": (
        "train",
        [*TRAIN, "--finetune-from-model", "{root}/kinds/pipe.pt"],
        None,
        ["pipe.pt is", "named pipe"],
    ),
    "two beginnings": (
        "train",
        [*TRAIN, "--finetune-from-model", "{root}/corrupted_last/checkpoint_best.pt", "--restore-file", "x.pt"],
        None,
        ["--finetune-from-model", "checkpoint_best.pt and --restore-file x.pt are both given"],
    ),
    "finetuning with a reset": (
        "train",
        [*TRAIN, "--finetune-from-model", "{root}/corrupted_last/checkpoint_best.pt", "--reset-optimizer"],
        None,
        ["checkpoint_best.pt and --reset-optimizer are both given"],
    ),
    "batches shorter than a sample": (
        "train",
        [*TRAIN, "--max-tokens-valid", "5"],
        None,
        ["a batch of 5 tokens has no room for the longest sample, which has 32: raise --max-tokens"],
    ),
    "a first rate below the last": (
        "train",
        [*TRAIN, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "4", "--stop-min-lr", "1e-9"],
        None,
        ["--stop-min-lr 1e-09 ends the training before its first update, whose learning rate is 0.0"],
    ),
    "another target": (
        "train",
        [*TRAIN, "--past-target"],
        None,
        ["--past-target: this model predicts the next token only"],
    ),
    "last is a pipe": ("train", ["--save-dir", "{root}/pipe_last"], None, ["checkpoint_last.pt is", "named pipe"]),
    "restore another class": (
        "train",
        [*TRAIN, "--restore-file", "{root}/kinds/bytes.pt"],
        None,
        ["bytes.pt holds __builtin__.bytes, which is not read: a plug-in that saved it can allow it with"],
    ),
    "averages that lack a weight": (
        "train",
        [*TRAIN, "--store-ema", "--restore-file", "{root}/kinds/averages.pt"],
        None,
        ["averages.pt is damaged: it has averages without decoder.embed_tokens.weight; without --store-ema"],
    ),
    "best is a folder": ("train", ["--save-dir", "{root}/folder_best"], None, ["checkpoint_best.pt is a folder"]),
    "restore flipped": (
        "train",
        [*TRAIN, "--restore-file", "{root}/kinds/flipped.pt"],
        None,
        ["flipped.pt is damaged", "differs from its checksum"],
    ),
    "finetune flipped": (
        "train",
        [*TRAIN, "--finetune-from-model", "{root}/kinds/flipped.pt"],
        None,
        ["flipped.pt is dama"],
    ),
    "finetune images": (
        "train",
        [*TRAIN, "--finetune-from-model", "{root}/kinds/images.pt"],
        None,
        ["images.pt is not a checkpoint of fairseq-train: it has no model and no configuration"],
    ),
    "eval flipped": ("eval_lm", ["--path", "{root}/kinds/flipped.pt"], None, ["flipped.pt is damaged"]),
    "eval pipe": ("eval_lm", ["--path", "{root}/kinds/pipe.pt"], None, ["pipe.pt is", "a named pipe"]),
    **{
        name: (
            "train",
            [*TRAIN, "--restore-file", f"{{root}}/kinds/{name}.pt"],
            None,
            [f"{name}.pt is damaged", str(way[-1])],
        )
        for name, (way, _) in WRONG_STATES.items()
    },
    "last corrupted": (
        "train",
        ["--max-update", "9", "--save-dir", "{root}/corrupted_last"],
        None,
        ["corrupted_last/checkpoint_last.pt (20,000 bytes)", "corrupted_last/checkpoint_best.pt can be loaded"],
    ),
    "no data directory": ("train", TRAIN, "nowhere", ["nowhere", "fairseq-preprocess"]),
    "no train.bin": ("train", TRAIN, "no_train", ["train.idx", "test, valid", "fairseq-preprocess"]),
    "zero tokens": ("train", TRAIN, "zero_tokens", ["train.idx lists no sentence", "fairseq-preprocess"]),
    "dictionary that is too small": ("train", TRAIN, "small_dict", ["valid.bin holds the id", "has 88 symbols"]),
    "dictionary of another model": (
        "train",
        [*TRAIN, "--restore-file", "{root}/corrupted_last/checkpoint_best.pt"],
        "large_dict",
        ["checkpoint_best.pt", "[96, 32]", "[104, 32]", "dictionary"],
    ),
    "metric that is none": (
        "train",
        [*TRAIN, "--best-checkpoint-metric", "nll_loss"],
        None,
        ["--best-checkpoint-metric nll_loss is not measured by", ": give one of loss, ppl"],
    ),
    "composite loss": (
        "train",
        [*TRAIN, "--criterion", "composite_loss", "--underlying-criterion", "cross_entropy"],
        None,
        ["--criterion composite_loss is for models of several outputs"],
    ),
    "languages": (
        "train",
        [*TRAIN, "--task", "multilingual_language_modeling"],
        None,
        ["needs a folder of data for each language", "has none: give --task language_modeling"],
    ),
    "metric of another criterion": (
        "train",
        [*TRAIN, "--best-checkpoint-metric", "accuracy"],
        None,
        ["--best-checkpoint-metric accuracy is not among what validation measures: loss, "],
    ),
    "plasma": ("train", [*TRAIN, "--use-plasma-view"], None, ["--use-plasma-view needs pyarrow.plasma"]),
    "profile of a GPU": ("train", [*TRAIN, "--profile"], None, ["--profile is for nvprof", "--profile-updates N"]),
    "composite": ("train", [*TRAIN, "--optimizer", "composite"], None, ["--optimizer composite needs groups"]),
    "half moments": ("train", [*TRAIN, "--fp16-adam-stats"], None, ["--fp16-adam-stats needs a GPU"]),
    "lamb": ("train", [*TRAIN, "--optimizer", "lamb"], None, ["--optimizer lamb needs apex"]),
    "relative step": (
        "train",
        [*TRAIN, "--optimizer", "adafactor", "--relative-step"],
        None,
        ["--relative-step sets a learning rate"],
    ),
    "no quantization": (
        "train",
        [*TRAIN, "--quantization-config-path", "/nope"],
        None,
        ["--quantization-config-path /nope"],
    ),
    "odd quantization": (
        "train",
        [*TRAIN, "--quantization-config-path", "{root}/nothing.txt"],
        None,
        ["nothing.txt is not what fairseq reads"],
    ),
    "manual rates": (
        "train",
        [*TRAIN, "--lr-scheduler", "manual", "--epoch2lr", "x"],
        None,
        ["--epoch2lr must be a dictionary", "got 'x'"],
    ),
    "endless manual rates": (
        "train",
        [*TRAIN, "--lr-scheduler", "manual", "--epoch2lr", "{{'1-99999999999': 0.1}}"],
        None,
        ["--epoch2lr must be a dictionary"],
    ),
    "two mixed precisions": (
        "train",
        [*TRAIN, "--amp", "--memory-efficient-bf16"],
        None,
        ["--amp and --memory-efficient-bf16"],
    ),
    "an optimizer that is not for it": (
        "train",
        [*TRAIN, "--optimizer", "adagrad", "--memory-efficient-bf16"],
        None,
        ["--optimizer adagrad cannot train with --memory-efficient-bf16: give --bf16"],
    ),
    "averages that are none": (
        "train",
        [*TRAIN, "--store-ema", "--ema-seed-model", "{root}/corrupted_last/checkpoint_best.pt"],
        None,
        ["checkpoint_best.pt has no averages"],
    ),
    "TPU": ("train", [*TRAIN, "--tpu"], None, ["--tpu needs torch_xla"]),
    "CPU offload": ("train", [*TRAIN, "--cpu-offload"], None, ["--cpu-offload needs --ddp-backend fully_sharded"]),
    "lowest rate": (
        "train",
        [*TRAIN, "--lr-scheduler", "cosine", "--lr", "1e-4", "--min-lr", "1e-3"],
        None,
        ["--min-lr 0.001 is above --lr 0.0001"],
    ),
    "suffix": ("train", [*TRAIN, "--checkpoint-suffix", "/../x"], None, ["--checkpoint-suffix '/../x' is a part of"]),
    "zero sharding": ("train", [*TRAIN, "--zero-sharding", "os"], None, ["--zero-sharding os divides"]),
    "pipeline": ("train", [*TRAIN, "--pipeline-model-parallel"], None, ["--pipeline-model-parallel is for"]),
    "no average to begin with": (
        "train",
        [*TRAIN, "--store-ema", "--ema-seed-model", "/nope.pt"],
        None,
        ["--ema-seed-model: there is no checkpoint /nope.pt"],
    ),
    "criterion of another task": (
        "train",
        [*TRAIN, "--criterion", "ctc"],
        None,
        ["--criterion ctc is for another task than language_modeling"],
    ),
    "adaptive loss": (
        "train",
        [*TRAIN, "--criterion", "adaptive_loss"],
        None,
        ["--criterion adaptive_loss needs a model with --adaptive-softmax-cutoff"],
    ),
    "two ways to validate": (
        "train",
        [*TRAIN, "--combine-valid-subsets", "--valid-subset", "valid,test"],
        None,
        ["--combine-valid-subsets reads valid, valid1"],
    ),
    "split without a name": (
        "train",
        [*TRAIN, "--valid-subset", "valid,,test"],
        None,
        ["--valid-subset 'valid,,test' na"],
    ),
    "training on no split": ("train", [*TRAIN, "--train-subset", ""], None, ["--train-subset '' names no split"]),
    "more to validate on": (
        "train",
        TRAIN,
        "more_valid",
        ["more files to validate on than --valid-subset valid names"],
    ),
    "older index": ("train", TRAIN, "older_index", ["train.idx is not a fairseq index of an older kind"]),
    "data on two lines": ("train", TRAIN, "two\nlines", ["there is no data directory", "two\\nlines"]),
    "overrides of texts": (
        "train",
        [*TRAIN, "--optimizer-overrides", "{{'lr': 'x'}}"],
        None,
        ["--optimizer-overrides must be a dictionary of numbers"],
    ),
    **{
        f"overrides {given}": (
            "train",
            [*TRAIN, "--restore-file", "{root}/corrupted_last/checkpoint_best.pt", "--optimizer-overrides", given],
            None,
            ["--optimizer-overrides", said],
        )
        for given, said in {
            "{{'betas': (2, 3)}}": "betas of the optimizer is (2, 3), which must be from 0 to below 1",
            "{{'weight_decay': -1}}": "weight_decay of the optimizer is -1, which must be at least 0",
            "{{'weigth_decay': 1}}": "names 'weigth_decay', and the optimizer has",
            "{{'amsgrad': True}}": "amsgrad of the optimizer is True, not False",
        }.items()
    },
    "another schedule": (
        "train",
        [
            *TRAIN,
            "--restore-file",
            "{root}/corrupted_last/checkpoint_best.pt",
            "--lr-scheduler",
            "reduce_lr_on_plateau",
        ],
        None,
        ["training cannot resume from", "--reset-lr-scheduler"],
    ),
    "fewer batches": (
        "train",
        [
            *TRAIN,
            "--restore-file",
            "{root}/corrupted_last/checkpoint_best.pt",
            "--batch-size",
            "300",
            "--max-update",
            "9",
        ],
        None,
        [
            "the checkpoint was written after 4 batches of an epoch, and an epoch of this run has 2",
            "--reset-dataloader",
        ],
    ),
    "two ranks, no GPU": ("train", [*TRAIN, "--distributed-world-size", "2"], None, ["2 GPUs", "torchrun"]),
    "ranks that nobody starts": (
        "train",
        [*TRAIN, "--distributed-world-size", "2", "--distributed-init-method", "tcp://localhost:1"],
        None,
        ["--distributed-no-spawn"],
    ),
    "save-dir is a file": ("train", ["--save-dir", "{root}/garbage.pt"], None, ["--save-dir", "garbage.pt"]),
    "save-dir in use": (
        "train",
        ["--save-dir", "{root}/busy"],
        None,
        ["another run is running in"],
    ),
    "no batch": ("train", [*TRAIN, "--batch-size", "0"], None, ["--batch-size must be at least 1, got 0"]),
    "no size of batches": (
        "train",
        ["--arch", "smlp_tiny", "--task", "language_modeling"],
        None,
        ["give --batch-size"],
    ),
    "log file nowhere": (
        "train",
        [*TRAIN, "--log-file", "{root}/none/log"],
        None,
        ["cannot write --log-file", "no folder", "/none"],
    ),
    "data of another format": (
        "train",
        [*TRAIN, "--dataset-impl", "raw"],
        None,
        ["--dataset-impl raw: the data", "valid are in the format 'mmap'; leave --dataset-impl out"],
    ),
    "two vocabularies": (
        "train",
        ["--arch", "smlp_tiny", "--task", "language_modeling", "--output-dictionary-size", "9", "--batch-size", "1"],
        None,
        ["--output-dictionary-size 9: --arch smlp_tiny has one vocabulary"],
    ),
    "context that fits no memory": (
        "train",
        [
            "--arch",
            "smlp_tiny",
            "--task",
            "language_modeling",
            "--tokens-per-sample",
            "1000000000",
            "--batch-size",
            "1",
        ],
        None,
        ["the weights of this model take", "GiB", "a context of 1000000000 tokens"],
    ),
    "unknown arch": ("train", [*TRAIN, "--arch", "smlp_tyni"], None, ["smlp_tyni", "did you mean 'smlp_tiny'"]),
    "eval missing": ("eval_lm", ["--path", "{root}/none.pt"], None, ["none.pt", "directory holds"]),
    "eval truncated": ("eval_lm", ["--path", "{root}/truncated.pt"], None, ["truncated.pt", "bytes"]),
    "eval post-process": (
        "eval_lm",
        ["--path", "{root}/none.pt", "--post-process", "sentencepiece"],
        None,
        ["--post-process sentencepiece is not for fairseq-eval-lm"],
    ),
    "eval without path": ("eval_lm", [], None, ["--path"]),
    "eval with another dictionary": (
        "eval_lm",
        ["--path", "{root}/corrupted_last/checkpoint_best.pt"],
        "small_dict",
        ["checkpoint_best.pt", "[96, 32]", "[88, 32]"],
    ),
    "text not UTF-8": ("preprocess", ["--trainpref", "{root}/latin1.txt"], "", ["latin1.txt", "0xef", "line 2"]),
    "text empty": ("preprocess", ["--trainpref", "{root}/nothing.txt"], "", ["nothing.txt", "empty"]),
    "text missing": ("preprocess", ["--trainpref", "{root}/none.txt"], "", ["none.txt"]),
}


@pytest.fixture(scope="module")
def refused(broken: Path, tiny_data: Path, run_fairseq_many) -> dict[str, Finished]:
    cases = []
    for name, (tool, args, data, _) in BAD_INPUT.items():
        places = {"root": broken, "save": broken / "save" / name.replace(" ", "-")}
        filled = [arg.format(**places) for arg in args]
        if tool == "preprocess":
            filled = ["--only-source", "--destdir", places["save"], *filled]
        else:
            usual = (
                TINY_LM if tool == "train" and "smlp_tiny" not in args else ["--optimizer", "adam"] * (tool == "train")
            )
            filled = [broken / data if data else tiny_data, *usual, *filled]
        cases.append({"tool": tool, "args": ["--user-dir", USER_DIR, *filled]})
    with locked(broken / "busy", "run"):
        return dict(zip(BAD_INPUT, run_fairseq_many(cases, timeout=600), strict=True))


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_clear_sentence(refused, name: str) -> None:
    run = refused[name]
    assert run.rc == 1, run.stdout + run.stderr
    (sentence,) = run.errors
    assert sentence.startswith("smlp: error: ")
    for part in BAD_INPUT[name][3]:
        assert part in sentence


def test_missing_moments_are_named(tiny_run, tiny_data: Path, tmp_path: Path, run_fairseq_many) -> None:
    """A parameter without any may be one that was never trained, and all are missing where they were not saved."""
    state = torch.load(tiny_run[0] / "checkpoint_best.pt")
    del state["last_optimizer_state"]["state"][1]
    torch.save(state, tmp_path / "less.pt")
    del state["last_optimizer_state"]
    torch.save(state, tmp_path / "none.pt")
    args = [tiny_data, "--user-dir", USER_DIR, *TINY_LM, "--max-update", "5"]
    less, none, weights = run_fairseq_many(
        [
            {"tool": "train", "args": [*args, "--no-save", "--restore-file", tmp_path / f"{name}.pt", *more]}
            for name, *more in (("less",), ("none",), ("none", "--reset-optimizer"))
        ]
    )
    assert [run.rc for run in (less, none, weights)] == [0] * 3, str(less) + str(none) + str(weights)
    assert re.search(
        r"less\.pt has no optimizer state for 1 of \d+ parameters, decoder\.\S+: their moments", less.stdout
    )
    lost = r"none\.pt was written after \d+ updates without the optimizer's state: .* begin with update 0"
    assert re.search(lost, none.stdout) and not re.search(lost, weights.stdout + less.stdout)


def test_averages_that_are_not_finite_or_not_whole_are_named() -> None:
    from smlp.fairseq_compat.loading import check_averages

    model = torch.nn.Linear(3, 2)
    check_averages("a.pt", model.state_dict(), model)
    check_averages("a.pt", {}, model, may_lack=True)  # of a head that is new
    with pytest.raises(UserError, match="it has averages without weight"):
        check_averages("a.pt", {}, model)
    model.bias.data[1] = torch.nan
    with pytest.raises(UserError, match=r"^a\.pt is damaged: it has averages with 1 of 2 weights of bias not finite; "):
        check_averages("a.pt", model.state_dict(), model)


def test_an_optimizer_of_any_name_is_named() -> None:
    from smlp.fairseq_compat.loading import other_optimizer

    said = "Optimizer does not match; please reset the optimizer (--reset-optimizer). A-b c vs FairseqAdam"
    assert "a.pt was trained with the optimizer A-b c, this run has FairseqAdam: give" in other_optimizer("a.pt", said)


HYDRA = """common.user_dir={user_dir} task=language_modeling task.data={data} +model._name=smlp +model.embed_dim=8
    optimizer=adam optimization.lr=[0.01] optimization.max_update=1 dataset.batch_size=4 checkpoint.no_save=true"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("+model.embed_dimm=3", "the configuration cannot be read: Key 'embed_dimm' not in 'LanguageModelConfig'"),
        ("dataset.batch_size=-1", "--batch-size must be at least 1, got -1"),
        ("checkpoint.best_checkpoint_metric=x", "--best-checkpoint-metric x is not measured by cross_entropy"),
        ("task=masked_lm", "the configuration cannot be read: Interpolation"),
        ("optimizer._name=adm", "there is no optimizer 'adm'"),
    ],
)
def test_a_configuration_of_hydra_is_checked(changes: str, said: str, tiny_data, tmp_path, run_fairseq_many) -> None:
    words = [*HYDRA.format(user_dir=USER_DIR, data=tiny_data).split(), changes]
    (run,) = run_fairseq_many([{"tool": "hydra_train", "args": words, "folder": str(tmp_path)}])
    assert run.rc == 1 and "Traceback" not in run.stderr
    assert run.errors[-1].startswith(f"smlp: error: {said}")


def test_wandb_says_what_it_wants(tiny_data: Path, tmp_path: Path, run_fairseq_many) -> None:
    pytest.importorskip("wandb")
    args = [tiny_data, "--user-dir", USER_DIR, *TINY_LM, "--max-update", "1", "--save-dir", tmp_path / "save"]
    nobody = {"WANDB_API_KEY": "", "HOME": str(tmp_path)}  # no login is found there
    case = {"tool": "train", "args": [*args, "--wandb-project", "mine"], "environment": nobody}
    (run,) = run_fairseq_many([case])
    assert run.rc == 1 and "Traceback" not in run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("smlp: error: --wandb-project mine: ")


def test_bad_input_leaves_everything_in_place(refused, broken: Path) -> None:
    assert (broken / "corrupted_last" / "checkpoint_last.pt").stat().st_size == 20000
    torch.load(broken / "corrupted_last" / "checkpoint_best.pt")
    assert not list((broken / "save").rglob("*.pt"))


def test_a_finetuned_run_goes_on_without_what_it_began_with(tmp_path: Path) -> None:
    """Only its first start reads that."""
    options = {"restore_file": "checkpoint_last.pt", "finetune_from_model": str(tmp_path / "gone.pt")}
    cfg = SimpleNamespace(save_dir=str(tmp_path), no_last_checkpoints=False, **options)
    with pytest.raises(UserError, match=r"--finetune-from-model: no checkpoint at .*gone\.pt"):
        check_restore_file(cfg, SimpleNamespace(checkpoint_suffix=""))
    (tmp_path / "checkpoint_last.pt").touch()
    check_restore_file(cfg, SimpleNamespace(checkpoint_suffix=""))


def test_a_suffix_is_a_part_of_names(tmp_path: Path, monkeypatch, caplog) -> None:
    from fairseq import checkpoint_utils

    path = save(tmp_path, "base_lm_tiny", "checkpoint_1_3_a.pt")
    (tmp_path / "checkpoint_1_4.pt").write_bytes(path.read_bytes())  # of a run without the suffix
    cfg = SimpleNamespace(save_dir=str(tmp_path), restore_file="checkpoint_last.pt", finetune_from_model=None)
    cfg.no_last_checkpoints = False
    check_restore_file(cfg, SimpleNamespace(checkpoint_suffix="_a"))
    assert f"To continue, use --restore-file {tmp_path}/checkpoint_1_3.pt" in caplog.text
    token = loading._suffix.set("_a")
    said = loading.remedy_for(tmp_path / "checkpoint_last_a.pt")
    loading._suffix.reset(token)
    assert said.startswith(f"{path} can be loaded instead (--restore-file {tmp_path}/checkpoint_1_3.pt to train on")

    (tmp_path / "data").mkdir()
    symbols = (tmp_path / "dict.txt").read_text().splitlines()
    (tmp_path / "data" / "dict.txt").write_text("\n".join(reversed(symbols)) + "\n")
    found = SimpleNamespace(model=SimpleNamespace(other_dictionary=False)), SimpleNamespace(cfg=cfg)
    cfg.data = str(tmp_path / "data")
    for name in ("load_checkpoint", "load_checkpoint_to_cpu", "load_model_ensemble_and_task"):
        monkeypatch.setattr(checkpoint_utils, name, lambda *args: ([], *found))
    loading.apply()
    with pytest.raises(UserError, match=r"checkpoint_1_3_a.pt was trained with the dictionary"):
        checkpoint_utils.load_model_ensemble_and_task([f"{tmp_path}/checkpoint_1_3.pt"], suffix="_a")


def test_a_dictionary_that_its_manifest_does_not_know_is_refused(tmp_path: Path) -> None:
    dictionary = tmp_path / "dict.txt"
    dictionary.write_text("the 3\nof 2\n")
    row = {"name": "dict.txt", "bytes": 11, "sha256": hashlib.sha256(dictionary.read_bytes()).hexdigest()}
    (tmp_path / "manifest.json").write_text(json.dumps({"step": "binarize", "outputs": [row]}))
    check_dictionary(tmp_path)
    dictionary.write_text("of 3\nthe 2\n")
    with pytest.raises(UserError, match=r"dict.txt has changed: its SHA-256 is .*manifest.json says"):
        check_dictionary(tmp_path)


def test_a_dictionary_in_another_order_is_refused(tmp_path: Path, caplog) -> None:
    """That of the checkpoint is beside it, or with the data that its configuration names."""
    path, data, strict = save(tmp_path, "base_lm_tiny"), tmp_path / "data", SimpleNamespace(other_dictionary=False)
    data.mkdir()
    beside = (tmp_path / "dict.txt").read_text()
    (data / "dict.txt").write_text(beside.replace(" 1\n", " 7\n"))
    check_dictionary_of(str(path), data, strict)  # the same symbols
    lines = beside.splitlines()
    lines[2], lines[5] = lines[5], lines[2]
    (data / "dict.txt").write_text("\n".join(lines) + "\n")
    for place in ("dict.txt", "made/dict.txt"):
        words = rf"{place}, and the data have {data}/dict\.txt, .* from line 3 on \('w2' there, 'w5' here\)"
        with pytest.raises(UserError, match=words):
            check_dictionary_of(str(path), data, strict)
        state = torch.load(path)
        state["cfg"]["task"]["data"] = f"{tmp_path}/made:more"
        torch.save(state, path)
        (tmp_path / "made").mkdir(exist_ok=True)
        if (tmp_path / "dict.txt").exists():
            (tmp_path / "dict.txt").rename(tmp_path / "made" / "dict.txt")
    caplog.clear()
    check_dictionary_of(str(path), data, SimpleNamespace(other_dictionary=True))
    assert "from line 3 on" in caplog.text
    (tmp_path / "pairs" / "input0").mkdir(parents=True)  # data of the task sentence_prediction
    (tmp_path / "pairs" / "input0" / "dict.txt").write_bytes((data / "dict.txt").read_bytes())
    with pytest.raises(UserError, match=r"input0/dict\.txt, .* from line 3 on"):
        check_dictionary_of(str(path), tmp_path / "pairs", strict)
    prepare_cfg = SimpleNamespace(
        task=SimpleNamespace(_name="language_modeling", data=str(data)),
        dataset=SimpleNamespace(dataset_impl="raw"),
        distributed_training=SimpleNamespace(distributed_rank=0),
        checkpoint=SimpleNamespace(no_save=False, save_dir=str(tmp_path)),
        model=strict,
    )
    path.rename(tmp_path / "checkpoint_last.pt")
    with pytest.raises(UserError, match="from line 3 on"):
        prepare(prepare_cfg)
    assert not (tmp_path / "dict.txt").exists(), "nothing is put beside a checkpoint of another dictionary"


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(2), {"model": {}, "cfg": [1]}, {"extra_state": [1]}])
def test_a_file_of_something_else_is_no_error_of_ours(tmp_path: Path, content: object) -> None:
    """What it is not is said when it is read."""
    path = tmp_path / "x.pt"
    torch.save(content, path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dict.txt").write_text("a 1\n")
    check_dictionary_of(str(path), tmp_path / "data", SimpleNamespace(other_dictionary=False))
    assert not has_averages(str(path))


@pytest.mark.slow
def test_two_runs_of_hydra_need_a_save_dir_each(tiny_data, tmp_path, run_fairseq_many) -> None:
    words = HYDRA.format(user_dir=USER_DIR, data=tiny_data).replace("no_save=true", f"save_dir={tmp_path}/save").split()
    words += ["+model.num_experts=2", "dataset.disable_validation=true"]
    with locked(tmp_path / "save", "run"):
        (run,) = run_fairseq_many([{"tool": "hydra_train", "args": words, "folder": str(tmp_path)}])
    assert run.rc == 1 and f"another run is running in --save-dir {tmp_path}/save" in run.errors[-1]
    (run,) = run_fairseq_many([{"tool": "hydra_train", "args": words, "folder": str(tmp_path)}])
    assert run.rc == 0 and (tmp_path / "save" / "checkpoint_last.pt").exists()
    assert not (tmp_path / "save" / ".lock").exists()


@pytest.mark.slow
def test_jobs_of_hydra_are_trainings_of_their_own(tiny_data, tmp_path, run_fairseq_many) -> None:
    """The second has another criterion than fairseq's default, too, and is worse than the first."""
    words = HYDRA.format(user_dir=USER_DIR, data=tiny_data).replace("no_save=true", "save_dir=save").split()
    words = [word for word in words if not word.startswith(("optimization.lr", "criterion"))]
    words += [
        "+model.num_experts=2",
        "criterion._name=moe_cross_entropy",
        "optimization.lr=[0.1],[1e-9]",
        "dataset.num_workers=0",
    ]
    words = ["-m", *words, f"hydra.sweep.dir={tmp_path}/jobs"]
    (run,) = run_fairseq_many([{"tool": "hydra_train", "args": words, "folder": str(tmp_path)}])
    assert run.rc == 0, str(run)
    assert len(list((tmp_path / "jobs").glob("*/save/checkpoint_best.pt"))) == 2


def test_what_would_take_memory_is_not_read_at_all(tmp_path: Path) -> None:
    """Not even by torch, whose ``weights_only`` allows it."""
    path = save(tmp_path, "base_lm_tiny")
    state = torch.load(path)
    state["extra_state"]["best"] = bytearray(8)
    torch.save(state, path)
    torch.load(path, weights_only=True)
    with pytest.raises(UserError, match=r"whole\.pt holds \S+\.bytearray, which is not read"):
        check_file(str(path))


@pytest.mark.parametrize("name", ["truncated.pt", "garbage.pt", "empty.pt", "other.pt"])
def test_no_file_passes_for_a_checkpoint(broken: Path, name: str) -> None:
    from fairseq import checkpoint_utils

    from smlp.fairseq_compat import apply

    apply()
    said = rf"{name} \({(broken / name).stat().st_size:,} bytes\)"
    if name == "other.pt":  # which is whole
        said = f"{name} is not a checkpoint of fairseq-train: it has no model and no configuration"
    with pytest.raises(UserError, match=said):
        checkpoint_utils.load_checkpoint_to_cpu(str(broken / name))


def test_a_whole_split_is_counted(tiny_data: Path, tiny_text: Path) -> None:
    for split in ("train", "valid", "test"):
        lines = (tiny_text / f"{split}.txt").read_text().splitlines()
        assert check_split(tiny_data, split) == sum(len(line.split()) + 1 for line in lines)  # one </s> a line


@pytest.mark.parametrize(
    ("directory", "what"),
    [
        ("no_train", r"has no train\.idx .*splits test, valid\)"),
        ("zero_tokens", r"train\.idx lists no sentence; make it with fairseq-preprocess"),
        ("cut_bin", r"train\.bin holds 1000 bytes, but train\.idx lists \d+ tokens of 2 bytes"),
        ("cut_idx", r"train\.idx holds 100 bytes, but 300 sentences need 3626"),
    ],
)
def test_a_damaged_split_is_named(broken: Path, directory: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        check_split(broken / directory, "train")


def test_a_malformed_dictionary_is_named(broken: Path, tiny_data: Path) -> None:
    check_dictionary(tiny_data)
    with pytest.raises(UserError, match=r"dict\.txt, line 2: .*'no-count'"):
        check_dictionary(broken / "bad_dict")


@pytest.mark.parametrize(
    ("content", "said"),
    [("a 1\nb １\n", r"line 2: expected '(?i:symbol count)', .* 'b １'"), ("\ufeffa 1\nb 1\n", "byte-order mark")],
)
def test_training_reads_dictionaries_as_everything_else(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "dict.txt").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        check_dictionary(tmp_path)
    with pytest.raises(UserError, match=said):
        Vocabulary.load(tmp_path / "dict.txt")


def test_all_shards_have_one_dictionary(tmp_path: Path) -> None:
    contents = ("a 3\nb 2\n", "a 9\nb 2\n", "a 9\n", "a 3\nc 2\n")  # counts may differ, and the end may be missing
    folders = [tmp_path / name for name in "0123"]
    for folder, content in zip(folders, contents, strict=True):
        folder.mkdir()
        (folder / "dict.txt").write_text(content)
    check_folders(folders[:3])
    with pytest.raises(UserError, match=r"3/dict.txt differs from .*0/dict.txt from line 2 on \('c' there, 'b' here\)"):
        check_folders(folders)


def test_a_count_is_a_number_that_can_be_held(tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text(f"the 12\nof {'9' * 5000}\n")
    with pytest.raises(UserError, match=r"dict\.txt, line 2: expected 'SYMBOL COUNT', found 'of 99"):
        check_dictionary(tmp_path)


@pytest.mark.parametrize("entry", ["the 1", "<unk> 1", "v1 1 #fairseq:overwrite"])
def test_a_symbol_stands_once_in_a_dictionary(tiny_data: Path, tmp_path: Path, entry: str) -> None:
    """Unless the flag that fairseq knows says so."""
    lines = (tiny_data / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join([*lines, entry]) + "\n")
    if entry.endswith("overwrite"):
        check_dictionary(tmp_path)
        return
    with pytest.raises(UserError, match=rf"line {len(lines) + 1}: the symbol '{entry[:-2]}' occurs already in "):
        check_dictionary(tmp_path)


def what_is_checked(directory: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    split = partial(check_split, directory, "train", 104)
    dictionary = partial(check_dictionary, directory)
    return {
        **{name: (directory / name, split) for name in ("train.idx", "train.bin")},
        "dict.txt": (directory / "dict.txt", dictionary),
        "folder": (directory, dictionary),
    }


def test_what_is_called_as_a_split_does_not_take_its_place(tiny_data: Path, tmp_path: Path) -> None:
    """fairseq reads it as text, although there are binarised data."""
    from fairseq.data import Dictionary, data_utils, indexed_dataset

    import smlp.models  # noqa: F401  it applies the remedies

    shutil.copytree(tiny_data, data := tmp_path / "data")
    (data / "train").write_text("another text\n")
    (data / "valid").mkdir()
    dictionary = Dictionary.load(str(data / "dict.txt"))
    for split in ("train", "valid"):
        assert indexed_dataset.infer_dataset_impl(str(data / split)) == "mmap"
        found = data_utils.load_indexed_dataset(str(data / split), dictionary)
        wanted = data_utils.load_indexed_dataset(str(tiny_data / split), dictionary)
        assert len(found) == len(wanted) and torch.equal(found[0], wanted[0])
        check_format(str(data / split), "mmap")
    assert indexed_dataset.infer_dataset_impl(str(data / "dict.txt")) == "raw"
    check_format(str(data / "train"), "raw")  # if it is asked for


def test_processes_do_not_share_a_place_in_a_file_of_the_older_format(tiny_data: Path, tmp_path: Path) -> None:
    from fairseq.data import indexed_dataset

    import smlp.models  # noqa: F401  it applies the remedies

    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "train.bin"))
    for tokens in indexed_dataset.MMapIndexedDataset(str(tiny_data / "train")):
        builder.add_item(tokens)
    builder.finalize(str(tmp_path / "train.idx"))
    dataset = indexed_dataset.IndexedDataset(str(tmp_path / "train"), fix_lua_indexing=False)
    dataset[3]
    before = dataset.data_file.tell()
    if (pid := os.fork()) == 0:
        try:
            dataset[200]
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert dataset.data_file.tell() == before


@pytest.mark.parametrize("name", ["train.idx", "train.bin", "dict.txt"])
@pytest.mark.parametrize("how", ["pipe", "empty"])
def test_a_pipe_or_an_empty_file_is_no_data(tiny_data: Path, tmp_path: Path, name: str, how: str) -> None:
    shutil.copytree(tiny_data, tmp_path / "data")
    path, check = what_is_checked(tmp_path / "data")[name]
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
    with pytest.raises(UserError, match=rf"{name} is (not a regular file|empty \(0 bytes\))"):
        check()


@pytest.mark.parametrize("name", ["train.idx", "train.bin", "dict.txt", "folder"])
def test_data_that_may_not_be_read_are_named(tiny_data: Path, monkeypatch, name: str) -> None:
    path, check = what_is_checked(tiny_data)[name]
    module, function, allowed = (Path, "stat", Path.stat) if name == "folder" else (files, "open", open)

    def refuse(place: Path, *args: object, **kw: object) -> object:
        if place == path or (name == "folder" and path in place.parents):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return allowed(place, *args, **kw)

    monkeypatch.setattr(module, function, refuse, raising=False)  # permissions mean nothing to root
    with pytest.raises(UserError, match=rf"(cannot read )?{path}( cannot be read)?: Permission denied"):
        check()


def test_another_dictionary_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "dict.txt").write_text("the 3\nof 2\n")
    path, read = folders[1] / "dict.txt", io.open

    def refuse(place: Path, *args: Any, **kw: Any) -> object:
        if place == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return read(place, *args, **kw)

    check_folders(folders)
    for module in (files, io):  # pathlib calls io.open
        monkeypatch.setattr(module, "open", refuse, raising=False)
    with pytest.raises(UserError, match=rf"cannot read {path}: Permission denied"):
        check_folders(folders)


def logging_to(path: str) -> SimpleNamespace:
    rank = SimpleNamespace(distributed_rank=0)
    return SimpleNamespace(common=SimpleNamespace(log_file=path), distributed_training=rank)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda x: locked(x, "run", "--save-dir").__enter__(), "cannot write to --save-dir {}: Permission denied"),
        (lambda x: files.check_folder(x, "--out", "logs"), "--out: {} cannot be reached: Permission denied"),
        (
            lambda x: check_profiling(SimpleNamespace(model=SimpleNamespace(profile_updates=1, profile_dir=x))),
            "--profile-dir: {} cannot be reached: Permission denied",
        ),
        (
            lambda x: _check_log_file(logging_to(x)),
            "cannot write --log-file {}: Permission denied",
        ),
        (named_files, "SMLP_PLUGINS names {}, which is not a file that can be read"),
    ],
)
def test_what_lies_in_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch, check, words) -> None:
    path = tmp_path / "closed" / "x"
    path.parent.mkdir()

    def refusing(function: Any) -> Any:
        def refuse(place: Any, *args: Any, **kw: Any) -> object:
            if str(place) == str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
            return function(place, *args, **kw)

        return refuse

    for name in ("stat", "mkdir"):  # permissions mean nothing to root
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(UserError, match=rf"^{words.format(path)}"):
        check(str(path))


def test_each_job_of_hydra_locks_its_own_folder(tmp_path: Path, monkeypatch) -> None:
    """Jobs of a multirun run in folders of their own, and their save-dirs may have one relative name."""
    checkpoint = SimpleNamespace(save_dir="saved", no_save=False)
    config = SimpleNamespace(checkpoint=checkpoint, distributed_training=SimpleNamespace(distributed_rank=0))
    folders = [tmp_path / job / "saved" for job in "01"]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.chdir(folders[0].parent)
    with own_save_dir(config, main):
        monkeypatch.chdir(folders[1].parent)
        with own_save_dir(config, main):
            assert all(map(files.is_locked, folders))
    assert not any(map(files.is_locked, folders)) and not any(map(os.listdir, folders))


def test_lines_of_a_log_are_added_to_text_only(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    config = logging_to(str(path))
    for content in (b"", "an older line, ä\n".encode()):
        path.write_bytes(content)
        _check_log_file(config)
    path.write_bytes(b"5\0")
    with pytest.raises(UserError, match=rf"^cannot write --log-file {path}: it is not a text file"):
        _check_log_file(config)


def test_text_is_checked_across_chunk_borders(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    # Each letter takes two bytes and the first one is not at an even place: one of them straddles the border.
    text.write_bytes(b"x" + "ä".encode() * (1 << 19) + b"\nend\n")
    check_text(text)
    text.write_bytes(b"x" + "ä".encode() * (1 << 19) + b"\n\xe4\n")
    with pytest.raises(UserError, match=rf"0xe4 at position {(1 << 20) + 2:,} \(line 2\)"):
        check_text(text)
