"""What fairseq makes of shards in training: every block once in an epoch, in an order that only the seed changes.

Documents are runs of numbers that stand nowhere else, so that a block says where it comes from.
"""

import json
import re

import pytest
from running import TINY_LM, USER_DIR, run_python

DOCUMENTS, WORDS, BLOCK = 24, 10, 8
DOCUMENT_TOKENS = WORDS + 3  # two lines with their ends, and an empty line


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """``DATA1:DATA2`` with 24 documents each, of two lines of 5 words and an empty one; the first has a valid split."""
    import torch
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    folder, vocabulary = tmp_path_factory.mktemp("shards"), Dictionary()
    numbers = iter(range(2 * DOCUMENTS * WORDS))
    for shard in (0, 1):
        (folder / str(shard)).mkdir()
        documents = [[str(next(numbers)) for _ in range(WORDS)] for _ in range(DOCUMENTS)]
        for split in ("train", "valid") if shard == 0 else ("train",):
            prefix = str(folder / str(shard) / split)
            builder = MMapIndexedDatasetBuilder(prefix + ".bin")
            for document in documents:
                for line in (document[: WORDS // 2], document[WORDS // 2 :]):
                    builder.add_item(vocabulary.encode_line(" ".join(line), line_tokenizer=str.split).long())
                builder.add_item(torch.tensor([vocabulary.eos()]))
            builder.finalize(prefix + ".idx")
    for shard in (0, 1):
        vocabulary.save(str(folder / str(shard) / "dict.txt"))
    return f"{folder / '0'}:{folder / '1'}"


def run_case(shards, folder, name, *options, break_mode="none"):
    """Three epochs: the first shard, the second, the first again."""
    tiny = [*TINY_LM]
    tiny[tiny.index("--tokens-per-sample") + 1] = str(BLOCK)
    validated = [] if "--valid-subset" in options else ["--disable-validation"]
    args = [
        *(shards, "--user-dir", USER_DIR, *tiny, "--batch-size", "3", "--update-freq", "2", "--max-epoch", "3"),
        *("--sample-break-mode", break_mode, *validated, "--save-dir", folder / name, *options),
    ]
    return {"tool": "train", "args": args, "samples": str(folder / f"{name}.json")}


def samples_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def blocks(updates):
    return [tuple(row) for update in updates for row in update]


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory, run_fairseq_many):
    """Sequences of every update: in one go, with workers that load, and stopped in the middle of the second shard."""
    folder = tmp_path_factory.mktemp("runs")
    through = ("--batch-size-valid", "3")
    first = shards.partition(":")[0]
    cases = [
        run_case(shards, folder, "whole"),
        run_case(shards, folder, "two-workers", "--num-workers", "2"),
        run_case(shards, folder, "document", break_mode="complete_doc"),
        run_case(first, folder, "one-shard"),
        run_case(first, folder, "curriculum", "--curriculum", "1"),
        run_case(first, folder, "validated", "--valid-subset", "train,valid", "--validate-interval-updates", "4"),
        run_case(shards, folder, "stopped", "--max-update", "9", *through),
    ]
    for run in run_fairseq_many(cases, timeout=200):
        assert run.rc == 0, run.stderr
    (folder / "stopped.json").rename(folder / "before.json")
    (resumed,) = run_fairseq_many([run_case(shards, folder, "stopped", *through)])
    assert resumed.rc == 0, resumed.stderr
    names = ("whole", "two-workers", "document", "one-shard", "curriculum", "validated", "before", "stopped")
    return {name: samples_of(folder, name) for name in names}


def test_every_block_comes_once_in_an_epoch_in_an_order_of_its_own(runs):
    per_epoch = -(-DOCUMENTS * DOCUMENT_TOKENS // BLOCK)
    seen = blocks(runs["whole"])
    epochs = [seen[begin : begin + per_epoch] for begin in range(0, len(seen), per_epoch)]
    assert [len(epoch) for epoch in epochs] == [per_epoch] * 3
    assert all(len(set(epoch)) == per_epoch for epoch in epochs)
    assert set(epochs[0]) == set(epochs[2]) and not set(epochs[0]) & set(epochs[1])
    assert epochs[0] != epochs[2]


def test_the_order_does_not_depend_on_the_workers(runs):
    assert runs["two-workers"] == runs["whole"]


def test_validation_on_the_training_text_does_not_move_its_position(runs):
    assert runs["validated"] == runs["one-shard"]


def test_a_curriculum_leaves_one_epoch_in_order_and_no_other(runs):
    updates = len(runs["one-shard"]) // 3
    assert runs["curriculum"][updates:] == runs["one-shard"][updates:]
    ordered, shuffled = (blocks(runs[name][:updates]) for name in ("curriculum", "one-shard"))
    assert ordered != shuffled and sorted(ordered) == sorted(shuffled)


def test_a_stop_in_the_middle_of_a_shard_repeats_and_skips_nothing(runs):
    assert len(runs["before"]) == 9 and len(blocks(runs["before"])) > DOCUMENTS * DOCUMENT_TOKENS // BLOCK
    assert runs["before"] + runs["stopped"] == runs["whole"]


def test_with_complete_doc_no_block_holds_two_documents(runs):
    """A document's 13 tokens do not fit a block of 8: its second line is a block of its own."""

    def documents_in(block):
        return {(token - 4) // WORDS for token in block if token >= 4}

    assert all(len(documents_in(block)) <= 1 for block in blocks(runs["document"]))
    assert any(len(documents_in(block)) == 2 for block in blocks(runs["whole"]))


def test_the_log_says_how_much_of_the_time_goes_into_waiting_for_data(shards, tmp_path, run_fairseq_many):
    """A loader that sleeps 50 ms a sequence, six of them an update, takes nearly all of the time of a tiny model."""
    delay = {"rank": 0, "place": "fairseq.data.monolingual_dataset:MonolingualDataset.__getitem__", "how": "delay"}
    quick = run_case(shards, tmp_path, "quick", "--max-update", "6", "--no-save")
    slow = {**run_case(shards, tmp_path, "slow", "--max-update", "6", "--no-save"), "fault": delay}
    waits = []
    for run in run_fairseq_many([quick, slow]):
        assert run.rc == 0, run.stderr
        waits.append([float(share) for share in re.findall(r"data_wait=([\d.]+)", run.stdout)][1:])
    assert len(waits[0]) == len(waits[1]) == 5
    assert max(waits[1]) <= 100 and min(waits[1]) > 60 > max(waits[0])


NARROW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))  # of files in /dev/shm, through which workers pass batches, too
from smlp.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_worker_that_cannot_pass_its_batches_ends_the_run(tiny_data):
    """It would only print why, and training would wait for ever."""
    small = ["--embed-dim", "16", "--ffn-dim", "16", "--num-dense-layers", "1", "--tokens-per-sample", "32"]
    words = [
        "train",
        tiny_data,
        "--arch",
        "gmlp_lm_tiny",
        *small,
        "--max-update",
        "1",
        "--no-save",
        "--num-workers",
        "1",
    ]
    run = run_python("-c", NARROW, *words, "--cpu", timeout=60)
    assert run.rc == 1 and "a process that reads batches cannot pass them on: " in run.stderr, run.stderr
    assert run.errors[-1].startswith("smlp: error: a process that reads batches has ended (DataLoader worker")


@pytest.mark.parametrize("position", [0, 1])
def test_masks_are_drawn_anew_in_each_epoch_whatever_the_workers(position):
    """Also where a run is resumed: at the beginning of the third epoch, and after a batch of it."""
    import torch
    from fairseq.data import Dictionary, ListDataset, MaskTokensDataset
    from fairseq.data.iterators import EpochBatchIterator

    from smlp.fairseq_compat import apply

    apply()
    vocabulary = Dictionary()
    mask = vocabulary.add_symbol("<mask>")
    words = [vocabulary.add_symbol(str(number)) for number in range(40)]
    texts = ListDataset([torch.tensor(words[:32]).roll(number) for number in range(6)], [32] * 6)

    def begun(workers):
        masked, _ = MaskTokensDataset.apply_mask(texts, vocabulary, vocabulary.pad(), mask, seed=1)
        lists = {"collate_fn": torch.stack, "batch_sampler": [[0, 1], [2, 3], [4, 5]], "num_workers": workers}
        return EpochBatchIterator(masked, **lists, reuse_dataloader=True, persistent_workers=workers > 0)

    def drawn(iterator):
        return torch.cat(list(iterator.next_epoch_itr(shuffle=False))).tolist()

    here, worker = begun(0), begun(1)
    epochs = [drawn(here) for _ in range(3)]
    assert [drawn(worker) for _ in range(3)] == epochs and epochs[0] != epochs[1] != epochs[2]
    resumed = begun(1)
    resumed.dataset.set_epoch(3)  # as the task does
    resumed.load_state_dict({"epoch": 3, "iterations_in_epoch": position, "shuffle": False})
    assert drawn(resumed) == epochs[2][2 * position :]
    kept = worker.dataloader
    worker.next_epoch_itr(shuffle=False, set_dataset_epoch=False)  # as validation does
    assert worker.dataloader is kept
