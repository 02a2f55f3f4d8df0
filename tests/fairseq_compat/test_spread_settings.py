"""What fairseq may be asked for with experts spread over ranks, and random numbers that differ from rank to rank."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_states import differences
from layouts import command
from recording import updates_of

from smlp.errors import UserError
from smlp.fairseq_compat.batches import batch_seed, batch_seeds, for_other_ranks, real_batches_last
from smlp.fairseq_compat.needs import _check_devices, check_needs
from smlp.fairseq_compat.settings import check_backend, check_pairs, check_settings

pytestmark = pytest.mark.timeout(120)


def configuration(**changes) -> SimpleNamespace:
    """Of a run that works, but for some changes ``section__name=value``."""
    sections = {
        "common": {"amp": False, "cpu": False},
        "distributed_training": {"ddp_backend": "legacy_ddp", "zero_sharding": "none"},
        "optimization": {"use_bmuf": False},
        "ema": {"store_ema": False},
        "optimizer": {"_name": "adam"},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        assert name in sections[section]
        sections[section][name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in sections.items()})


@pytest.mark.parametrize("backend", ["legacy_ddp", "no_c10d", "pytorch_ddp", "c10d"])
def test_backends_that_work(backend):
    check_settings(configuration(distributed_training__ddp_backend=backend))


@pytest.mark.parametrize(
    "change, option",
    [
        ({"distributed_training__ddp_backend": "fully_sharded"}, "--ddp-backend fully_sharded"),
        ({"distributed_training__ddp_backend": "slowmo"}, "--ddp-backend slowmo"),
        ({"distributed_training__zero_sharding": "os"}, "--zero-sharding"),
        ({"optimizer___name": "adafactor"}, "--optimizer adafactor"),
        ({"optimizer___name": "lamb"}, "--optimizer lamb"),
        ({"common__amp": True}, "--amp"),
        ({"optimization__use_bmuf": True}, "--use-bmuf"),
        ({"ema__store_ema": True}, "--store-ema"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(change, option):
    key, value = next(iter(change.items()))
    section, _, name = key.partition("__")
    config = configuration()
    setattr(getattr(config, section), name, value)
    with pytest.raises(UserError) as refused:
        check_settings(config)
    message = str(refused.value)
    assert message.startswith(option) and "or give --expert-parallel-size 1" in message and "\n" not in message


def test_sharding_of_parameters_needs_gpus():
    with pytest.raises(UserError, match="--ddp-backend fully_sharded needs GPUs"):
        check_backend(configuration(distributed_training__ddp_backend="fully_sharded"), has_cuda=False)
    check_backend(configuration(), has_cuda=False)


@pytest.mark.parametrize(
    ("common", "backend", "has_cuda", "message"),
    [
        ({"amp": True, "bf16": True}, "legacy_ddp", True, "--amp and --bf16 are both given"),
        ({"amp": True, "fp16": True}, "legacy_ddp", True, "--amp and --fp16 are both given"),
        ({"amp": True, "memory_efficient_bf16": True}, "legacy_ddp", False, "--amp and --memory-efficient-bf16 are"),
        ({"amp": True, "bf16": True}, "legacy_ddp", False, None),  # --amp has no effect on a CPU
        ({}, "fully_sharded", True, "--ddp-backend fully_sharded divides the parameters among ranks"),
    ],
)
def test_what_one_gpu_cannot_do(common, backend, has_cuda, message):
    flags = dict.fromkeys(("amp", "bf16", "fp16", "memory_efficient_bf16", "tpu"), False)
    distributed = {"ddp_backend": backend, "zero_sharding": "none", "cpu_offload": False}
    subsets = {"train_subset": "train", "valid_subset": "valid", "combine_valid_subsets": False}
    kept = {"keep_interval_updates": -1, "keep_last_epochs": -1, "keep_best_checkpoints": -1}
    checkpoint = SimpleNamespace(checkpoint_suffix="", write_checkpoints_asynchronously=False, **kept)
    config = SimpleNamespace(
        common=SimpleNamespace(**{**flags, **common}),
        distributed_training=SimpleNamespace(**distributed),
        checkpoint=checkpoint,
        dataset=SimpleNamespace(**subsets),
    )
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        _check_devices(config, 1, has_cuda)
    if message is None:
        checkpoint.write_checkpoints_asynchronously = True
        with pytest.raises(UserError, match="--write-checkpoints-asynchronously writes damaged checkpoints"):
            _check_devices(config, 1, has_cuda)
        checkpoint.checkpoint_suffix, checkpoint.keep_best_checkpoints = "_a", 2
        with pytest.raises(UserError, match="--checkpoint-suffix '_a' holds _, with which --keep-best-checkpoints"):
            _check_devices(config, 1, has_cuda)
        checkpoint.checkpoint_suffix, checkpoint.keep_last_epochs = "-a(b", 2
        with pytest.raises(UserError, match=r"--checkpoint-suffix '-a\(b' holds \(, with which fairseq finds no"):
            _check_devices(config, 1, has_cuda)


def test_python_without_assertions_is_refused(monkeypatch):
    monkeypatch.setattr("smlp.fairseq_compat.needs.sys", SimpleNamespace(flags=SimpleNamespace(optimize=1)))
    with pytest.raises(UserError, match=r"one of which saves checkpoint_last\.pt: unset PYTHONOPTIMIZE"):
        check_needs(SimpleNamespace(model=SimpleNamespace()), 1, False)


@pytest.mark.parametrize("betas", ["(0.9", "0.9", "(0.9, 1.0)", "(0.9, 0.98, 0.99)", "('a', 'b')", "(0.9, -0.1)", ""])
def test_betas_of_adam_are_two_numbers(betas):
    optimizer = SimpleNamespace(_name="adam", adam_betas=betas)
    with pytest.raises(UserError, match=r"^--adam-betas must be two numbers from 0 to below 1") as refused:
        check_pairs(SimpleNamespace(optimizer=optimizer))
    assert repr(betas) in str(refused.value)
    for fine in ("(0.9, 0.98)", "[0.0, 0.999]"):
        optimizer.adam_betas = fine
        check_pairs(SimpleNamespace(optimizer=optimizer))


def test_a_run_with_spread_experts_refuses_at_its_start(tiny_data, tmp_path, run_fairseq_many):
    refused = command(tiny_data, "smlp", 2, 2, "--save-dir", tmp_path / "a", "--store-ema")
    wrong = command(tiny_data, "smlp", 2, 4, "--save-dir", tmp_path / "b")
    sharded = command(tiny_data, "smlp", 2, 1, "--save-dir", tmp_path / "c", "--ddp-backend", "fully_sharded")
    divided = command(
        *(tiny_data, "smlp", 2, 1, "--save-dir", tmp_path / "d", "--zero-sharding", "os", "--no-decay-norms")
    )
    reasons = ["--store-ema would save", "expert-parallel size of 4 must", "--ddp-backend fully_sharded needs GPUs"]
    reasons.append("--zero-sharding os keeps one rate")
    for run, said in zip(run_fairseq_many([refused, wrong, sharded, divided]), reasons, strict=True):
        assert run.rc == 1 and "Traceback" not in run.stderr
        for code, seconds, message in run.ranks:
            assert code == 1 and seconds < 30 and said in message, message


def test_fairscales_optimizer_gives_the_same_on_cpus(tiny_data, tmp_path, run_fairseq_many):
    """Each rank updates a part of the parameters; weights and moments are as without, also after resuming."""
    folders = {sharding: tmp_path / sharding for sharding in ("none", "os")}
    for num_updates in (2, 4):
        cases = [
            command(
                *(tiny_data, "smlp", 2, 1, "--save-dir", folder),
                *("--zero-sharding", sharding, "--max-update", num_updates, "--dropout", "0.1"),
            )
            for sharding, folder in folders.items()
        ]
        for run in run_fairseq_many(cases):
            assert run.rc == 0 and "no optimizer state" not in run.stderr + run.stdout, str(run)
    plain, sharded = (torch.load(folder / "checkpoint_last.pt", weights_only=False) for folder in folders.values())
    assert differences(plain["model"], sharded["model"]) == []
    moments = [state["last_optimizer_state"]["state"] for state in (plain, sharded)]
    assert differences(*moments) == []


def test_dropout_differs_from_rank_to_rank_and_comes_again(tiny_data, tmp_path, run_fairseq_many):
    """Each rank draws random numbers of its own for each update, the same in a second run."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    cases = [
        {
            **command(tiny_data, "smlp", 2, 2, "--save-dir", folder, "--dropout", dropout, "--max-update", 2),
            "record": str(folder),
        }
        for folder, dropout in zip(folders, (0.5, 0.5, 0.1), strict=True)
    ]
    for run in run_fairseq_many(cases):
        assert run.rc == 0, str(run)
    first, second, other = ([update["loss"] for update in updates_of(folder, 2)] for folder in folders)
    assert first == second and first[0] != other[0]
    seeds = [update["seed"] for rank in range(2) for update in torch.load(folders[0] / f"{rank}.pt")]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_seeds_follow_from_a_batchs_number_in_its_update(num_ranks):
    """The j-th batch of rank r is number ``j * W + r``; the first one has fairseq's seed."""
    of_ranks = [list(itertools.islice(batch_seeds(5, 7, rank, num_ranks), 8 // num_ranks)) for rank in range(num_ranks)]
    dealt = [seed for in_turn in zip(*of_ranks, strict=True) for seed in in_turn]
    assert dealt == [5 + 7, *(batch_seed(5, 7, number) for number in range(1, 8))]


def test_seeds_of_batches():
    seeds = {batch_seed(seed, update, number) for seed in (1, 2) for update in range(50) for number in range(1, 9)}
    assert len(seeds) == 2 * 50 * 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert batch_seed(1, 2, 3) == batch_seed(1, 2, 3)
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)  # as much as torch's generator on CPUs uses


def test_batches_that_count_for_nothing_come_first():
    real = [{"id": 1}, {"id": 2}]
    assert real_batches_last([real[0], real[1], {}, None]) == [{}, None, *real]
    assert real_batches_last(real) is real
    assert real_batches_last([{}, None]) == [{}, None]
    assert real_batches_last([]) == []


@pytest.mark.parametrize("position, before, after, want", [(5, 4, 2, 10), (10, 2, 1, 20), (20, 1, 4, 5), (7, 2, 4, 3)])
def test_the_position_in_an_epoch_follows_the_number_of_ranks(position, before, after, want):
    state = {"epoch": 2, "iterations_in_epoch": position, "num_shards": before}
    assert for_other_ranks(state, after) == {**state, "iterations_in_epoch": want}
    assert for_other_ranks({"iterations_in_epoch": position}, after) == {"iterations_in_epoch": position}


def in_older_format(data: Path, target: Path) -> Path:
    """Copies binarised data into fairseq's older format, of which only what was asked for beforehand can be read."""
    from fairseq.data import indexed_dataset

    target.mkdir()
    shutil.copy(data / "dict.txt", target)
    for split in ("train", "valid"):
        builder = indexed_dataset.IndexedDatasetBuilder(str(target / f"{split}.bin"), dtype=np.int32)
        for tokens in indexed_dataset.MMapIndexedDataset(str(data / split)):
            builder.add_item(tokens)
        builder.finalize(str(target / f"{split}.idx"))
    return target


def test_ranks_that_were_started_differently_are_refused(tiny_data, tmp_path, run_fairseq_many) -> None:
    """Otherwise each would train its own model, and only rank 0's would be saved."""
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    flipped = bytearray((tiny_data / "train.bin").read_bytes())
    flipped[:2], flipped[2:4] = flipped[2:4], flipped[:2]
    (other / "train.bin").write_bytes(flipped)
    shorter = tmp_path / "shorter"
    shutil.copytree(tiny_data, shorter)
    for end in ("bin", "idx"):
        shutil.copy(tiny_data / f"valid.{end}", shorter / f"train.{end}")
    valid = tmp_path / "valid"
    shutil.copytree(tiny_data, valid)
    for end in ("bin", "idx"):
        shutil.copy(tiny_data / f"train.{end}", valid / f"valid.{end}")
    changed = {
        r"--lr \[0.25\] where rank 0 has \[.*\], --seed 7 where rank 0 has \d+: start": (
            *(tiny_data, "--lr", 0.25, "--seed", 7, "--num-workers", 0),
        ),
        "rank 1 reads another text than rank 0 as train: it has other tokens": (other,),
        r"rank 1 reads another text than rank 0 as train: it has [\d,]+ bytes where rank 0 has [\d,]+": (shorter,),
        "rank 1 reads another text than rank 0 as valid: it has": (valid,),
        # of which one rank makes groups for its experts, the other none
        r"rank 1 has --arch dense_lm_tiny where rank 0 has smlp_tiny: start": (tiny_data, "--arch", "dense_lm_tiny"),
        # each with options that the other does not know
        r"rank 1 has --optimizer sgd where rank 0 has adam: start": (tiny_data, "--optimizer", "sgd"),
        r"rank 1 has --restore-file other.pt where rank 0 has checkpoint_last.pt: start": (
            *(tiny_data, "--restore-file", tmp_path / "other.pt"),
        ),
        r"rank 1 has --data-order-file a file where rank 0 has None: start": (
            *(tiny_data, "--data-order-file", tmp_path / "order.jsonl"),
        ),
        "": (tiny_data, "--num-workers", 0, "--no-progress-bar"),  # which may
    }
    older = in_older_format(tiny_data, tmp_path / "older")
    cases = [command(older, "smlp", 2, 2, "--max-update", 1, "--save-dir", tmp_path / "saved older")]
    for number, (last, *options) in enumerate(changed.values()):
        shared = ["smlp", 2, 2, "--max-update", 1, "--save-dir", tmp_path / f"saved {number}"]
        case, of_last = command(tiny_data, *shared), command(last, *shared, *options)
        args, args_of_last = ([str(argument) for argument in some["args"]] for some in (case, of_last))
        for some in (args, args_of_last):
            some.remove("--disable-validation")
        cases.append({**case, "args": args, "args_of_last": args_of_last})
    for words, run in zip(["", *changed], run_fairseq_many(cases), strict=True):
        for code, _, said in run.ranks:
            assert code == bool(words) and re.search(words, said), said
            assert "Traceback" not in said
