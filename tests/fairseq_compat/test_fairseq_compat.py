"""What fairseq gets wrong on today's libraries, seen through its own commands with ``--user-dir``."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import TINY_LM, USER_DIR, Finished, run_python

from smlp.errors import UserError

pytestmark = pytest.mark.timeout(240)

PLUGIN = ["--user-dir", USER_DIR]


def test_a_plain_run_shows_its_log_and_no_noise(tiny_run) -> None:
    save_dir, run = tiny_run
    assert {path.name for path in save_dir.iterdir()} == {"checkpoint_best.pt", "checkpoint_last.pt"}
    assert "| INFO | valid |" in run.stdout
    assert run.errors == []


def test_eval_lm_is_not_silent_and_agrees_with_validation(tiny_run, tiny_data: Path, run_fairseq) -> None:
    """A real process: what silences eval-lm is the order of its imports."""
    save_dir, training = tiny_run
    args = ["--path", save_dir / "checkpoint_last.pt", "--gen-subset", "valid", "--tokens-per-sample", "32"]
    run = run_fairseq("eval_lm", tiny_data, *PLUGIN, *args)
    assert run.rc == 0, run.stderr
    assert run.errors == []
    perplexity = run.stdout.rpartition("Perplexity: ")[2].strip()
    # Validation during training sees every block too: fairseq by itself drops the last ones.
    validated = training.stdout.rpartition("valid on 'valid' subset")[2].split("| ppl ")[1].split()[0]
    assert float(perplexity) == pytest.approx(float(validated), abs=0.011)


def test_preprocess_writes_its_log(tiny_text: Path, tmp_path: Path, run_fairseq_many) -> None:
    args = [*PLUGIN, "--only-source", "--trainpref", tiny_text / "train.txt", "--destdir", tmp_path / "bin"]
    (run,) = run_fairseq_many([{"tool": "preprocess", "args": args}])
    assert run.rc == 0, run.stderr
    assert "Wrote preprocessed data" in run.stdout
    assert "Dictionary: " in (tmp_path / "bin" / "preprocess.log").read_text()


WORKING = {
    "bf16": ["--bf16"],
    "memory-efficient-bf16": ["--memory-efficient-bf16"],
    "eos": ["--sample-break-mode", "eos"],
    "complete": ["--sample-break-mode", "complete"],
    "ranks": [],
}


@pytest.fixture(scope="module")
def working(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory, run_fairseq_many) -> dict[str, Finished]:
    root = tmp_path_factory.mktemp("working")
    always = [tiny_data, *PLUGIN, *TINY_LM, "--max-update", "2"]
    first = {
        name: {"tool": "train", "args": [*always, "--save-dir", root / name, *extra]} for name, extra in WORKING.items()
    }
    first["ranks"]["ranks"] = 2
    results = run_fairseq_many(list(first.values()))

    again = {**first["ranks"], "args": [*first["ranks"]["args"], "--max-update", "4"]}
    model = [
        "--task",
        "language_modeling",
        "--path",
        root / "ranks" / "checkpoint_best.pt",
        "--tokens-per-sample",
        "32",
    ]
    generate = ["--sample-break-mode=eos", "--gen-subset=test", "--prefix-size=2", "--max-len-b=10", "--batch-size=8"]
    generate.append("--skip-invalid-size-inputs-valid-test")
    validate = ["--valid-subset", "valid", "--batch-size", "2"]
    second = {
        "ranks again": again,
        "generate": {"tool": "generate", "args": [tiny_data, *PLUGIN, *model, *generate]},
        # more than one rank gathers its logs as pickled objects
        "validate": {"tool": "validate", "args": [tiny_data, *PLUGIN, *model, *validate]},
    }
    results += run_fairseq_many(list(second.values()))
    return dict(zip([*first, *second], results, strict=True))


@pytest.mark.parametrize("name", WORKING)
def test_what_fairseq_refuses_by_mistake_trains(working, name: str) -> None:
    run = working[name]
    assert run.rc == 0, run.stderr
    assert "num_updates 2" in run.stdout
    assert run.errors == []


def test_ranks_train_together_and_resume(working) -> None:
    """torchrun without --distributed-world-size: one run of two ranks, not two runs into one directory."""
    first, again = working["ranks"], working["ranks again"]
    assert "distributed init (rank 0): env://" in first.stdout
    assert "training on 2 devices" in first.stdout
    assert again.rc == 0, again.stderr
    assert "@ 2 updates)" in again.stdout.partition("Loaded checkpoint")[2]
    assert "num_updates 4" in again.stdout


def test_generate_and_validate_work(working) -> None:
    assert working["generate"].rc == 0, working["generate"].stderr
    assert "Generate test with beam" in working["generate"].stdout
    assert working["validate"].rc == 0, working["validate"].stderr
    assert "valid on 'valid' subset" in working["validate"].stdout


@pytest.fixture
def applied() -> None:
    from smlp.fairseq_compat import apply

    apply()


def test_apply_twice_changes_nothing(applied) -> None:
    from fairseq import checkpoint_utils, options
    from fairseq.trainer import Trainer

    from smlp.fairseq_compat import apply

    def patched() -> list[Callable]:
        return [checkpoint_utils.torch_persistent_save, options.parse_args_and_arch, Trainer.__new__, sys.excepthook]

    before = patched()
    apply()
    assert patched() == before


def test_every_trainer_of_fairseq_is_ours(applied) -> None:
    """Those of a subclass keep its methods, above ours."""
    from fairseq.model_parallel.megatron_trainer import MegatronTrainer
    from fairseq.trainer import Trainer

    from smlp.fairseq_compat.trainer import SparseTrainer

    assert type(Trainer.__new__(Trainer)) is SparseTrainer
    other = Trainer.__new__(MegatronTrainer)
    assert isinstance(other, MegatronTrainer) and isinstance(other, SparseTrainer)
    assert type(other).train_step is SparseTrainer.train_step
    assert type(other).clip_grad_norm is MegatronTrainer.clip_grad_norm


def test_only_the_known_warnings_are_quiet() -> None:
    from smlp.fairseq_compat.logs import quiet_known_warnings

    message = "'pin_memory' argument is set as true but no accelerator is found"
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        quiet_known_warnings()
        warnings.warn_explicit(message, UserWarning, "x.py", 1, module="torch.utils.data.dataloader")
        assert seen == []
        warnings.warn_explicit(message, UserWarning, "x.py", 1, module="somebody.elses.module")
        warnings.warn_explicit("another message", UserWarning, "x.py", 1, module="torch.utils.data.dataloader")
        warnings.warn_explicit(message, RuntimeWarning, "x.py", 1, module="torch.utils.data.dataloader")
    assert len(seen) == 3


def test_ctrl_c_while_options_are_read_lists_none_of_them(caplog, monkeypatch) -> None:
    from smlp.fairseq_compat.command_line import training_configuration

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fairseq.dataclass.utils.compose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training_configuration(["data", "--task", "language_modeling", "--arch", "smlp_tiny"])
    assert not caplog.records


def test_logs_that_cannot_be_written_end_nothing(monkeypatch, capsys) -> None:
    from smlp.fairseq_compat.logs import say_once_that_logs_are_lost

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(logging.Handler, "handleError", logging.Handler.handleError)  # it is restored afterwards
    say_once_that_logs_are_lost()
    logger = logging.Logger("full")
    logger.addHandler(logging.StreamHandler(Full()))
    logger.warning("one")
    logger.warning("two")
    said = "smlp: warning: log lines cannot be written and are lost: No space left on device\n"
    assert capsys.readouterr().err == said
    logger.warning("%d", "no number")
    assert "TypeError: %d format" in capsys.readouterr().err


def test_fairseq_compiled_at_every_start_is_quiet_about_its_code() -> None:
    """PYTHONDONTWRITEBYTECODE, or packages in a folder that cannot be written."""
    from smlp.fairseq_compat.logs import quiet_known_warnings

    code = "x = 1\nx is not ''"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_known_warnings()
        compile(code, "/packages/fairseq/tasks/multires_hubert_pretraining.py", "exec")
        assert not seen
        compile(code, "/packages/mine/tasks.py", "exec")
    assert len(seen) == 1


def test_other_exceptions_keep_their_traceback(applied, capsys) -> None:
    for error, expected in ((UserError("wrong number"), "smlp: error: wrong number\n"), (KeyError("x"), "Traceback")):
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
        assert capsys.readouterr().err.startswith(expected)


def test_a_namespace_in_a_checkpoint_loads(applied) -> None:
    """Checkpoints of models without a dataclass hold one (``lightconv_lm``, for instance)."""
    file = io.BytesIO()
    torch.save({"cfg": argparse.Namespace(data="x")}, file)
    file.seek(0)
    assert torch.load(file)["cfg"].data == "x"


@pytest.mark.parametrize("count", [0, 3, 8, 20, 37])
def test_no_sample_is_dropped(applied, count: int) -> None:
    import numpy
    from fairseq.data import data_utils

    lengths = numpy.full(count, 5)
    batches = data_utils.batch_by_size(
        numpy.arange(count), lambda i: 5, num_tokens_vec=lengths, max_sentences=16, required_batch_size_multiple=8
    )
    assert [index for batch in batches for index in batch] == list(range(count))
    assert all(len(batch) <= 16 for batch in batches)


def test_a_sample_longer_than_a_batch_is_refused_by_every_task(applied) -> None:
    """Those of masked_lm, sentence_prediction and squad tell the length of one sample at a time."""
    import numpy
    from fairseq.data import data_utils

    for lengths in (None, numpy.array([3, 9, 4])):
        with pytest.raises(UserError, match="a batch of 5 tokens has no room for the longest sample, which has 9"):
            data_utils.batch_by_size(
                numpy.arange(3), num_tokens_fn=[3, 9, 4].__getitem__, num_tokens_vec=lengths, max_tokens=5
            )


def test_a_position_behind_the_epoch_is_compared_with_its_batches(applied) -> None:
    from fairseq.data import FairseqDataset
    from fairseq.data.iterators import EpochBatchIterator

    batches = EpochBatchIterator(
        FairseqDataset(), collate_fn=None, batch_sampler=[[index] for index in range(5)], num_shards=2
    )
    state = {"version": 2, "epoch": 1, "iterations_in_epoch": 4, "shuffle": True, "num_shards": 2}
    with pytest.raises(UserError, match="after 4 batches of an epoch, and an epoch of this run has 3:"):
        batches.load_state_dict(state)


def test_a_position_among_other_batches_is_warned_of(applied, caplog) -> None:
    from fairseq.data import ListDataset
    from fairseq.data.iterators import EpochBatchIterator

    def begun(size: int, **ranks: int) -> EpochBatchIterator:
        batches = [[*range(start, start + size)] for start in range(0, 24, size)]
        return EpochBatchIterator(ListDataset([*range(24)]), collate_fn=list, batch_sampler=batches, **ranks)

    saved = begun(2)
    epoch = saved.next_epoch_itr()
    for _ in range(4):
        next(epoch)
    state = saved.state_dict()
    older = {name: value for name, value in state.items() if name not in ("num_batches", "seed")}
    begun(2, num_shards=2).load_state_dict(state)
    begun(4, seed=3).load_state_dict(older)
    begun(4, seed=3).load_state_dict({**state, "iterations_in_epoch": 0})
    begun(4, seed=3, num_shards=2, shard_id=1).load_state_dict(state)
    assert not caplog.text
    begun(4).load_state_dict(state)
    assert "written in an epoch of 12 batches, and one of this run has 6: some texts are seen twice" in caplog.text
    caplog.clear()
    begun(2, seed=3).load_state_dict(state)
    assert "in the order of seed 1, and this run has 3: some texts are seen twice" in caplog.text
    assert "epoch of" not in caplog.text


@pytest.mark.parametrize("adds_epoch", [False, True])
def test_a_run_that_is_resumed_in_a_later_epoch_has_the_same_batches(applied, adds_epoch) -> None:
    """fairseq adds the epoch to the seed with --update-ordered-indices-seed, and asks for batches in the first only."""
    import numpy
    from fairseq.data import FairseqDataset
    from fairseq.tasks import FairseqTask

    class Numbers(FairseqDataset):
        can_reuse_epoch_itr_across_epochs = True

        def __len__(self) -> int:
            return 12

        def num_tokens(self, index: int) -> int:
            return 1

        def ordered_indices(self) -> numpy.ndarray:
            return numpy.random.permutation(len(self))  # noqa: NPY002 - fairseq sets its seed

    def batches(begins_in: int) -> list:
        task = FairseqTask(argparse.Namespace())
        task.adds_epoch_to_seed = adds_epoch
        seed = 5 + begins_in * adds_epoch
        iterator = task.get_batch_iterator(Numbers(), max_sentences=2, seed=seed, epoch=begins_in)
        iterator.epoch = 3
        return [iterator.seed, list(iterator.frozen_batches)]

    assert str(batches(1)) == str(batches(3))


@pytest.mark.parametrize("start", [[], ["--add-bos-token"]])
def test_lines_that_leave_no_room_for_the_start_symbol_are_left_out(tiny_data: Path, start: list[str]) -> None:
    """fairseq's sizes are without it."""
    from fairseq import tasks
    from fairseq.data import ListDataset, MonolingualDataset

    from smlp.fairseq_compat.command_line import training_configuration

    words = [str(tiny_data), "--task", "language_modeling", "--arch", "smlp_tiny", "--embed-dim", "16"]
    cfg = training_configuration([*words, "--tokens-per-sample", "8", "--optimizer", "adam", *start])
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    assert model.max_positions() == 8 + bool(start)
    lengths = [7, 8, 9, 10]
    texts = ListDataset([torch.full((length,), 5) for length in lengths])
    lines = MonolingualDataset(texts, lengths, task.dictionary, add_bos_token=bool(start))
    iterator = task.get_batch_iterator(
        lines, max_sentences=1, max_positions=model.max_positions(), ignore_invalid_inputs=True
    )
    assert sorted(number for batch in iterator.frozen_batches for number in batch) == [0, 1]
    with pytest.raises(UserError, match=f"longer than 8 tokens{' without the start symbol' if start else ''}, the"):
        task.filter_indices_by_size(lines.ordered_indices(), lines, model.max_positions())
    for size, context in ((9, 0), (7, 2)):  # fairseq has subtracted the context
        task.args.tokens_per_sample = size
        with pytest.raises(UserError, match=r"--tokens-per-sample 9 is longer than the context of [89] tokens"):
            task.eval_lm_dataloader(lines, max_positions=model.max_positions(), context_window=context)
    whole = task.build_dataset_for_inference([torch.tensor([5] * (7 + bool(start)) + [2])], [8 + bool(start)])
    assert task.get_batch_iterator(whole, max_sentences=1, max_positions=model.max_positions()).frozen_batches, (
        "of texts to continue, the size has the start symbol"
    )


@pytest.mark.parametrize(("break_mode", "context"), [("none", 0), ("eos", 0), ("none", 3)])
def test_a_prefix_with_a_start_symbol_has_no_score(tiny_data: Path, break_mode: str, context: int) -> None:
    """fairseq-eval-lm takes the symbol off each sample, as if it had been scored."""
    from fairseq import tasks
    from fairseq_cli.eval_lm import eval_lm

    from smlp.fairseq_compat.command_line import training_configuration

    words = [str(tiny_data), "--task", "language_modeling", "--arch", "smlp_partial_tiny", "--embed-dim", "16"]
    words += ["--tokens-per-sample", "15", "--add-bos-token", "--sample-break-mode", break_mode]
    cfg = training_configuration([*words, "--optimizer", "adam"])
    task = tasks.setup_task(cfg.task)
    model, prefix = task.build_model(cfg.model).eval(), 4
    assert model.decoder.core.config.prefix_tokens == prefix
    task.args.tokens_per_sample -= context  # as fairseq-eval-lm does
    task.load_dataset("valid")

    def batches() -> Any:
        options = {"batch_size": 4, "max_positions": model.max_positions(), "context_window": context}
        return task.eval_lm_dataloader(task.dataset("valid"), **options)

    found = eval_lm(
        [model], task.source_dictionary, batches(), target_dictionary=task.target_dictionary, remove_bos_token=True
    )
    scores = []
    for sample in batches():
        starts = sample.get("start_indices", [0] * len(sample["target"]))
        with torch.no_grad():
            logits = model(**sample["net_input"])[0].double().log_softmax(-1)
        for row, target, start in zip(logits, sample["target"], starts, strict=True):
            first = max(prefix, int(start) + 1)  # neither the start symbol nor the prefix
            scores += [row[place, token].item() for place, token in enumerate(target) if place >= first and token != 1]
    assert scores and found["loss"] == pytest.approx(-sum(scores) / len(scores) / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("task", "some", "every"),
    [
        (
            {"tokens_per_sample": 8, "max_target_positions": None, "shorten_method": "none"},
            "--sample-break-mode none with a --tokens-per-sample that is no larger cuts them (of sentences, "
            "--shorten-method truncate)",
            "lower --tokens-per-sample, or raise --max-tokens and --max-target-positions (of sentences, "
            "--shorten-method truncate)",
        ),
        (
            {"max_positions": 8, "shorten_method": "none"},
            "a larger --max-positions keeps them (of sentences, --shorten-method truncate)",
            "raise --max-tokens and --max-positions (of sentences, --shorten-method truncate)",
        ),
        ({"max_positions": 8}, "a larger --max-positions keeps them", "raise --max-tokens and --max-positions"),
    ],
)
def test_the_remedy_for_long_samples_names_options_of_the_task(task, some, every) -> None:
    import numpy

    from smlp.fairseq_compat.batches import check_lengths

    for lengths, said in (([9, 3], some), ([9, 9], every)):
        with pytest.raises(UserError) as error:
            check_lengths(numpy.array(lengths), 8, argparse.Namespace(**task), may_leave_out=False)
        assert str(error.value).endswith(said), error.value


READING = """
import atexit, threading
atexit.register(lambda: print(threading.active_count()))  # the last to be called
from fairseq.data.iterators import BufferedIterator
from smlp.fairseq_compat import buffering
buffering.apply()

buffer = BufferedIterator(3, range(100))
assert next(buffer) == 0 and threading.active_count() == 2
raise KeyboardInterrupt
"""


@pytest.mark.slow
def test_no_thread_is_inside_of_torch_when_python_shuts_down() -> None:
    """In C++, Python ends such a thread by an exception that nobody catches: SIGABRT instead of status 130."""
    done = run_python("-c", READING, timeout=60)
    assert done.stdout == "1\n" and done.errors[-1] == "KeyboardInterrupt", done.stderr


class _Numbers(torch.utils.data.Dataset):
    """Enough of a data set for fairseq's iterator."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


@pytest.mark.parametrize("buffer_size", [1, 10])
def test_loops_that_are_left_early_leave_nothing_behind(applied, buffer_size: int) -> None:
    """As validations with --max-valid-steps: no thread, and no batch that is kept open; the next loop begins anew."""
    import gc

    from fairseq.data.iterators import EpochBatchIterator

    batches = [[i] for i in range(100)]
    loops = EpochBatchIterator(
        _Numbers(), torch.stack, batches, num_workers=1, buffer_size=buffer_size, reuse_dataloader=True
    )
    gc.collect()
    found = []
    for _ in range(6):
        loop = loops.next_epoch_itr(shuffle=False)
        assert [int(batch) for batch, _ in zip(loop, range(3), strict=False)] == [0, 1, 2]
        del loop
        loops._cur_epoch_itr = None
        found.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    (threads, first_files), *_, (last_threads, last_files) = found
    assert last_threads == threads and last_files <= first_files + 4  # of one batch on its way more or less


def test_data_loaders_of_earlier_epochs_end_at_once(applied):
    """As between several data folders; those that wait for Python's garbage collection take 5 s to end."""
    import gc
    import multiprocessing

    from fairseq.data.iterators import EpochBatchIterator

    gc.collect()
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        loops = EpochBatchIterator(
            _Numbers(), torch.stack, [[0], [1]], num_workers=1, buffer_size=2, reuse_dataloader=True
        )
        assert len(list(loops.next_epoch_itr(shuffle=False))) == 2
        workers = set(multiprocessing.active_children()) - before
        assert workers
        del loops
        assert not workers & set(multiprocessing.active_children())
    finally:
        gc.enable()


def test_no_jump_of_the_clock_counts_as_training(monkeypatch):
    """Which --stop-time-hours would take for it."""
    from smlp.fairseq_compat.trainer import SparseTrainer

    trainer = object.__new__(SparseTrainer)
    trainer._start_time, trainer._previous_training_time = time.time(), 5.0
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert 5.0 <= trainer._local_cumulative_training_time() < 1000


def test_rows_of_a_batch_that_counts_for_nothing_are_none(monkeypatch):
    """Rows of zeros would be the answers to the first question of the first split."""
    from fairseq.tasks.fairseq_task import FairseqTask

    from smlp.fairseq_compat import batches

    found = {"loss": torch.tensor(2.0), "rows": torch.ones(4, 6)}
    monkeypatch.setattr(FairseqTask, "train_step", FairseqTask.train_step)
    monkeypatch.setattr(FairseqTask, "valid_step", lambda *_: (torch.tensor(2.0), 4, dict(found)))
    monkeypatch.setattr(batches, "real_sample", lambda task: {"id": 1})
    batches._count_repeated_batches_as_nothing()
    for is_summed, rows in ((True, 4), (False, 0)):
        criterion = argparse.Namespace(logging_outputs_can_be_summed=lambda is_summed=is_summed: is_summed)
        _, size, logged = FairseqTask.valid_step(argparse.Namespace(), {}, None, criterion)
        assert (
            size == 0 and float(logged["loss"]) == 0 and logged["rows"].shape == (rows, 6) and not logged["rows"].any()
        )


def test_masks_of_held_out_text_do_not_depend_on_the_seed():
    from smlp.fairseq_compat.data import MASK_SEED, held_out_masks

    task = argparse.Namespace(cfg=argparse.Namespace(seed=77), trained_split="part1")
    for split, seed in (("part1", 77), ("train", MASK_SEED), ("valid", MASK_SEED)):
        with held_out_masks(task, split):
            assert task.cfg.seed == seed
        assert task.cfg.seed == 77


@pytest.mark.parametrize("words", [["-agmlp_lm"], ["-a", "gmlp_lm"], ["-a=gmlp_lm"], ["--arch=gmlp_lm"]])
def test_an_architecture_is_seen_however_it_is_given(words):
    from smlp.fairseq_compat.arguments import has_option, option_value

    assert option_value(words, "--arch", "-a") == "gmlp_lm" and has_option(words, "--arch", "-a")
    assert not has_option(["--arch-x", "a"], "--arch", "-a")


def test_an_update_that_amp_repeats_is_recorded_once(monkeypatch) -> None:
    """After an overflow, fairseq calls train_step from within itself."""
    from fairseq.trainer import Trainer

    from smlp.fairseq_compat.trainer import SparseTrainer

    class Rank0(SparseTrainer):
        data_parallel_rank = 0

    calls = []

    def step(self, samples, raise_oom=False):
        calls.append(raise_oom)
        if len(calls) == 1:
            return self.train_step(samples, raise_oom)
        self._num_updates = 1
        return "done"

    monkeypatch.setattr(Trainer, "train_step", step)
    trainer, lines = object.__new__(Rank0), []
    trainer.core = trainer.experts = trainer.profiler = trainer._kept_memory = None
    trainer._num_updates, trainer._num_tokens, trainer._is_in_step = 0, 5, False
    trainer.update_times = SimpleNamespace(add=lambda update, **fields: lines.append(update))
    assert trainer.train_step([]) == "done" and len(calls) == 2
    assert lines == [1] and not trainer._is_in_step
