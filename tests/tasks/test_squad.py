"""The task ``squad`` and its criterion: windows against a slow reference, losses, best answers, gold scores of 100."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from squad_data import ASKED, write_squad, write_tokenizer

from smlp.cli.main import main
from smlp.cli.train import prepare
from smlp.errors import UserError
from smlp.text.tokenizer import load_tokenizer

pytest.importorskip("torchmetrics")

import smlp.models  # noqa: F401  as fairseq does, before anything of fairseq's
from smlp.criterions.span import WINDOWS, SpanCriterion, best_answers
from smlp.tasks.squad import SquadConfig, SquadTask

BOS, PAD, EOS = 0, 1, 2


@pytest.fixture(scope="module", params=["unigram", "gpt2"])
def data(request, tmp_path_factory):
    """Version 1.1 as train and valid, version 2.0 as valid1; with its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    files, tokenizer = write_squad(folder / "files"), write_tokenizer(folder / "tokenizer", request.param)
    arguments = ["--train", files["v1.1"], "--valid", files["v1.1"], files["v2.0"], "--tokenizer", tokenizer]
    assert main(["data", "squad", *map(str, arguments), "--out", str(folder / "out"), "--quiet"]) == 0
    return folder / "out", load_tokenizer(tokenizer)


def task_on(data, **options):
    return SquadTask.setup_task(SquadConfig(data=str(data[0]), **{"seed": 1, **options}))


def reference_windows(data, max_positions, stride, max_query, version):
    """Windows with their targets, from the texts alone: question id, tokens, first and last token of the answer."""
    tokenizer, rows = data[1], []
    for number, (context, text, answers) in enumerate(ASKED):
        if not answers and version == "v1.1":
            continue
        asked = [BOS, *tokenizer.encode(text)[:max_query], EOS]
        tokens = tokenizer.encode(context.replace("\n", " "))
        _, offsets = tokenizer.encode_with_offsets(context)
        wanted = []
        if answers:
            start = context.index(answers[0])
            wanted = [at for at, (a, b) in enumerate(offsets) if a < start + len(answers[0]) and b > start]
        begin = 0
        while begin < len(tokens):
            part = list(range(begin, min(begin + max_positions - len(asked) - 1, len(tokens))))
            target = (0, 0)
            if wanted and wanted[0] in part and wanted[-1] in part:
                target = (len(asked) + wanted[0] - begin, len(asked) + wanted[-1] - begin)
            rows.append((f"{number:024x}", [*asked, *(tokens[at] for at in part), EOS], target))
            if part[-1] == len(tokens) - 1:
                break
            begin += min(stride, len(part))
    return rows


@pytest.mark.parametrize(("max_positions", "stride", "max_query"), [(512, 128, 64), (60, 16, 20), (40, 100, 12)])
def test_windows_and_targets_are_those_of_a_slow_reference(data, max_positions, stride, max_query):
    task = task_on(data, max_positions=max_positions, doc_stride=stride, max_query_length=max_query)
    for subset, version in (("valid", "v1.1"), ("valid1", "v2.0")):
        task.load_dataset(subset)
        dataset, expected = task.datasets[subset], reference_windows(data, max_positions, stride, max_query, version)
        ids = task._splits[-1][1].ids
        found = [
            (ids[sample["window"][1]], sample["tokens"].tolist(), sample["target"])
            for sample in (dataset[at] for at in range(len(dataset)))
        ]
        assert found == expected
        assert [dataset.size(at) for at in range(len(dataset))] == [len(tokens) for _, tokens, _ in expected]
        if max_positions == 512:
            assert len(found) == len(ids) and sum(target != (0, 0) for _, _, target in found) == len(ids) - 2 * (
                version == "v2.0"
            )
        elif max_positions == 60:
            assert len(found) > len(ids) and (0, 0) in [target for _, _, target in found]


def test_batches_are_padded_on_the_right_in_a_fixed_random_order(data):
    task = task_on(data, max_positions=60, doc_stride=16)
    task.load_dataset("train")
    dataset = task.datasets["train"]
    order = dataset.ordered_indices()
    assert sorted(order) == list(range(len(dataset))) != order.tolist()
    assert (order == dataset.ordered_indices()).all()
    samples = [dataset[at] for at in sorted(range(len(dataset)), key=dataset.size)[:: len(dataset) - 1]]
    batch = dataset.collater(samples)
    short, long = (sample["tokens"].tolist() for sample in samples)
    assert batch["net_input"]["src_tokens"].tolist() == [short + [PAD] * (len(long) - len(short)), long]
    assert batch["net_input"]["src_lengths"].tolist() == [len(short), len(long)]
    assert batch["ntokens"] == len(short) + len(long) and batch["nsentences"] == 2


def slow_best(scores_n2, prefix, length, longest):
    best = (-math.inf, None, None)
    for first in range(prefix, prefix + length):
        for last in range(first, min(first + longest, prefix + length)):
            total = float(scores_n2[first, 0] + scores_n2[last, 1])
            if total > best[0]:
                best = (total, first - prefix, last - prefix)
    return [float(scores_n2[0].sum()), *best]


def test_the_best_answer_is_that_of_all_pairs():
    torch.manual_seed(0)
    for longest in (1, 3, 30, 2**31 - 1):
        scores = torch.randn(6, 15, 2)
        scores[:, 12:] += 9  # outside the context
        prefix, length = torch.tensor([3, 5, 3, 7, 11, 2]), torch.tensor([9, 1, 8, 3, 1, 10])
        found = best_answers(scores, prefix, length, longest)
        expected = [slow_best(scores[at], int(prefix[at]), int(length[at]), longest) for at in range(6)]
        torch.testing.assert_close(found, torch.tensor(expected))


class Table(torch.nn.Module):
    """A model whose scores are given; it records nothing."""

    def __init__(self, scores_Bn2):
        super().__init__()
        self.scores_Bn2 = torch.nn.Parameter(scores_Bn2)

    def forward(self, src_tokens, src_lengths, features_only, span):
        assert features_only and span
        return self.scores_Bn2, {}


def test_the_loss_is_the_mean_of_two_cross_entropies_without_padding(data):
    task = task_on(data, max_positions=60, doc_stride=16)
    task.load_dataset("train")
    dataset = task.datasets["train"]
    batch = dataset.collater([dataset[at] for at in range(len(dataset))])
    torch.manual_seed(0)
    model = Table(torch.randn(*batch["net_input"]["src_tokens"].shape, 2))
    criterion = SpanCriterion(task)
    loss, size, log = criterion(model, batch)
    loss.backward()
    expected = 0.0
    for row, length, target in zip(
        model.scores_Bn2.detach(), batch["net_input"]["src_lengths"], batch["target"], strict=True
    ):
        logs = row[:length].double().log_softmax(0)
        expected -= float(logs[target[0], 0] + logs[target[1], 1]) / 2
    assert size == len(dataset) and WINDOWS not in log
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert not model.scores_Bn2.grad[batch["net_input"]["src_tokens"] == PAD].any()


def validate(task, subset, batch_size, scores_of, ranks=1):
    """What fairseq logs after a validation: the batches of several ranks come together at each step."""
    from fairseq.logging import metrics

    dataset, criterion = task.datasets[subset], SpanCriterion(task).eval()
    batches = [dataset.collater([dataset[int(at)] for at in some]) for some in np.split(
        dataset.ordered_indices(), range(batch_size, len(dataset), batch_size)
    )]  # fmt: skip
    with metrics.aggregate(new_root=True) as meters:
        for at in range(0, len(batches), ranks):
            logs = [criterion(Table(scores_of(batch)), batch)[2] for batch in batches[at : at + ranks]]
            assert not criterion.logging_outputs_can_be_summed()
            with torch.no_grad(), metrics.aggregate():
                task.reduce_metrics(logs, criterion)
    return meters.get_smoothed_values()


def sure(batch):
    """Scores of a model that knows: high at the target, and no answer only where there is none."""
    scores = torch.zeros(*batch["net_input"]["src_tokens"].shape, 2)
    for row, target in zip(scores, batch["target"], strict=True):
        row[target[0], 0] = row[target[1], 1] = 9.0
    return scores


@pytest.mark.parametrize("ranks", [1, 3])
def test_gold_answers_score_100_over_windows_batches_and_ranks(data, tmp_path, ranks):
    """The question's answer is in some windows only: they outdo the others, which have none."""
    path = tmp_path / "{subset}.json"
    task = task_on(data, max_positions=60, doc_stride=16, predictions_file=str(path), max_answer_length=40)
    for subset, version in (("valid", "v1.1"), ("valid1", "v2.0")):
        task.load_dataset(subset)
        stats = validate(task, subset, 4, sure, ranks)
        assert stats["em"] == stats["f1"] == 100
        assert ("no_answer_threshold" in stats) == (version == "v2.0")
        answers = json.loads((tmp_path / f"{subset}.json").read_text())
        assert answers == {
            f"{number:024x}": texts[0] if texts else ""
            for number, (_, _, texts) in enumerate(ASKED)
            if texts or version == "v2.0"
        }


def test_a_given_threshold_is_kept(data, tmp_path):
    path = tmp_path / "answers.json"
    task = task_on(data, no_answer_threshold=-1000.0, predictions_file=str(path))
    task.load_dataset("valid1")
    stats = validate(task, "valid1", 4, sure)
    assert stats["no_answer_threshold"] == -1000 and stats["em"] == round(100 * 2 / 7, 2)
    assert set(json.loads(path.read_text()).values()) == {""}


def test_the_save_dir_gets_the_dictionary(data, tmp_path):
    """With ``smlp train``."""
    cfg = SimpleNamespace(
        task=SimpleNamespace(_name="squad", data=str(data[0])),
        distributed_training=SimpleNamespace(distributed_rank=0),
        checkpoint=SimpleNamespace(no_save=False, save_dir=str(tmp_path / "ck")),
    )
    assert tmp_path / "ck" / "dict.txt" in prepare(cfg)
    assert (tmp_path / "ck" / "dict.txt").read_bytes() == (data[0] / "dict.txt").read_bytes()


def test_wrong_options_and_data_are_one_sentence(data, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"PK")
    (tmp_path / "gold.json").write_text('{"version": "1.1", "data": []}')
    for options, message in (
        ({"data": str(tmp_path / "gone")}, "there is no file .*dict.txt: make the data with"),
        ({"predictions_file": str(tmp_path / "gone" / "a.json")}, "cannot write --predictions-file"),
        ({"predictions_file": str(tmp_path / "checkpoint.pt")}, "a file of another kind exists already"),
        ({"predictions_file": str(tmp_path / "gold.json")}, "a file of another kind exists already"),
    ):
        with pytest.raises(UserError, match=message):
            SquadTask.setup_task(SquadConfig(**{"data": str(data[0]), "seed": 1, **options}))
    with pytest.raises(UserError, match=r"gold.json: a file of another kind exists already"):
        task_on(data, predictions_file=str(tmp_path / "{subset}.json")).load_dataset("gold")
    (tmp_path / "valid").mkdir()
    task = task_on(data, predictions_file=str(tmp_path / "{subset}" / "answers.json"))
    task.load_dataset("valid")
    task.load_dataset("valid1", data_selector=None)  # as fairseq loads what it trains on, whose answers nobody writes
    with pytest.raises(UserError, match=r"cannot write --predictions-file .*valid1/answers.json"):
        task.load_dataset("valid1")
    task = task_on(data, predictions_file=str(tmp_path / "both.json"))
    task.load_dataset("valid")
    with pytest.raises(UserError, match=r"both.json cannot hold the answers of valid and valid1: write \{subset\} in"):
        task.load_dataset("valid1")
    with pytest.raises(UserError, match=r"there is no file .*test\.npz"):
        task_on(data).load_dataset("test")
    with pytest.raises(UserError, match="--max-positions 8 leaves no room for a context"):
        task_on(data, max_positions=8).load_dataset("valid")
