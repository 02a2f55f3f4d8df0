"""GLUE's metrics as validation logs them, against their definitions written out, also where these divide by zero."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smlp.errors import UserError
from smlp.fairseq_compat.command_line import load_plugin

REPORTS = ("report_mcc", "report_acc_and_f1", "report_pearson_and_spearman")


class Given(nn.Module):
    """A model whose scores are its input."""

    classification_heads = ("sentence_classification_head",)

    def forward(self, scores, **unused):
        return scores, {}

    def get_targets(self, sample, net_output):
        return sample["target"]


def logged(scores, targets, *reports, classes=("0", "1"), num_classes=None):
    """What a validation logs of rows that come in batches of 5, two of them at a time, as from two ranks."""
    load_plugin()
    from fairseq.criterions.sentence_prediction import SentencePredictionConfig, SentencePredictionCriterion
    from fairseq.data import Dictionary
    from fairseq.logging import metrics

    labels = Dictionary()
    for name in classes:
        labels.add_symbol(name)
    config = SentencePredictionConfig(regression_target=not classes, **{name: name in reports for name in REPORTS})
    task = SimpleNamespace(
        label_dictionary=labels, cfg=SimpleNamespace(data="d", num_classes=num_classes or len(classes))
    )
    criterion = SentencePredictionCriterion(config, task)
    batches = []
    for some, wanted in zip(torch.tensor(scores).split(5), torch.tensor(targets).split(5), strict=True):
        sample = {"net_input": {"scores": some}, "target": wanted, "ntokens": 7 * len(some)}
        batches.append(criterion(Given().eval(), sample)[2])
    with metrics.aggregate(new_root=True) as found:
        for at in range(0, len(batches), 2):
            with metrics.aggregate() as own:
                criterion.reduce_metrics(batches[at : at + 2])
            own.get_smoothed_values()  # as fairseq's trainer does, of a batch of one row too
    return found.get_smoothed_values()


@pytest.mark.parametrize(
    ("classes", "report", "needed"),
    [
        (
            ("no", "yes"),
            "report_mcc",
            "labels that are whole numbers of at most 64 bits, but d/label/dict.txt has no, yes",
        ),
        (("0", "9" * 20), "report_mcc", "labels .* at most 64 bits, but d/label/dict.txt has 0, 99999999999999999999"),
        (
            ("no", "yes"),
            "report_pearson_and_spearman",
            "labels .* whole numbers of at most 64 bits, but d/label/dict.txt has no",
        ),
        (("no", "yes"), "report_acc_and_f1", "two labels, 1 and another number, but d/label/dict.txt has no, yes"),
        (("0", "1", "2"), "report_acc_and_f1", "two labels, 1 and another number, but d/label/dict.txt has 0, 1, 2"),
        (("0", "2"), "report_acc_and_f1", "two labels, 1 and another number, but d/label/dict.txt has 0, 2"),
        ((), "report_mcc", None),
        ((), "report_acc_and_f1", None),
    ],
)
def test_metrics_that_the_labels_do_not_have_are_refused(classes, report, needed):
    option = f"--{report.replace('_', '-')}"
    said = f"{option} needs {needed}" if needed else f"{option} is of labels: with --regression-target, give --report-p"
    with pytest.raises(UserError, match=f"^{said}"):
        logged([], [], report, classes=classes)


def test_labels_are_numbers_as_fairseq_reads_them():
    assert logged(scores_of([0, 1], 3), [0, 1], "report_mcc", classes=("+1", "-1", "none"), num_classes=2)["mcc"] == 100
    assert logged(scores_of([0, 1], 2), [0, 1], "report_acc_and_f1", classes=("01", "00"))["f1"] == 100


def scores_of(classes, count):
    """Scores with the highest for the given class."""
    return [[float(at == own) for at in range(count)] for own in classes]


def accuracy(pairs):
    return 100 * sum(guess == label for guess, label in pairs) / len(pairs)


def f1(pairs):
    """2 TP / (2 TP + FP + FN) of the class 1; 0 if that is 0 / 0."""
    right, wrong = pairs.count((1, 1)), pairs.count((1, 0)) + pairs.count((0, 1))
    return 100 * 2 * right / (2 * right + wrong) if right + wrong else 0.0


def matthews(pairs):
    """The correlation of two classes, 0 if one of the two does not vary."""
    tp, tn, fp, fn = (pairs.count(one) for one in ((1, 1), (0, 0), (1, 0), (0, 1)))
    scale = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    return 100 * (tp * tn - fp * fn) / scale if scale else 0.0


def pearson(xs, ys):
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    product = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return 100 * product / (sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys)) ** 0.5


def ranks(values):
    """The number of smaller values, and half of the equal ones."""
    return [sum(other < one for other in values) + sum(other == one for other in values) / 2 for one in values]


LABELS = [1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1]
GUESSES = {
    "some right": [1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 1],
    "all right": LABELS,
    "all wrong": [1 - label for label in LABELS],
    "all of class 0": [0] * len(LABELS),
    "all of class 1": [1] * len(LABELS),
}


@pytest.mark.filterwarnings("ignore::UserWarning:sklearn")
@pytest.mark.parametrize("guesses", GUESSES.values(), ids=GUESSES)
@pytest.mark.parametrize("labels", [LABELS, [0] * len(LABELS)], ids=["two labels", "one label"])
@pytest.mark.parametrize("classes", [("0", "1"), ("1", "0")], ids=str)
def test_two_classes(guesses, labels, classes):
    """Class 1 is the one that is named so, whatever its number in the dictionary."""
    pairs = list(zip(guesses, labels, strict=True))
    scores = scores_of([classes.index(str(guess)) for guess in guesses], 2)
    targets = [classes.index(str(label)) for label in labels]
    found = logged(scores, targets, "report_mcc", "report_acc_and_f1", classes=classes)
    wanted = {"accuracy": accuracy(pairs), "f1": f1(pairs), "mcc": matthews(pairs)}
    wanted["acc_and_f1"] = (accuracy(pairs) + f1(pairs)) / 2
    assert {name: float(found[name]) for name in wanted} == pytest.approx(wanted, abs=0.051)


def test_numbers_worked_out_by_hand():
    """The definitions above: 2 * 4 / (2 * 4 + 2 + 2), and (4 * 5 - 2 * 2) / sqrt(6 * 6 * 7 * 7)."""
    pairs = list(zip(GUESSES["some right"], LABELS, strict=True))
    counts = [pairs.count(one) for one in ((1, 1), (0, 0), (1, 0), (0, 1))]
    assert counts == [4, 5, 2, 2]
    assert (round(f1(pairs), 2), round(matthews(pairs), 2)) == (66.67, 38.1)
    assert pearson([1, 2, 3], [1, 3, 2]) == pytest.approx(50)
    assert ranks([3.0, 1.0, 3.0]) == [2.0, 0.5, 2.0]


def test_three_classes():
    found = logged(scores_of([0, 1, 2, 2, 0, 0, 0], 3), [0, 1, 2, 1, 1, 0, 2], classes=("a", "b", "c"))
    assert found["accuracy"] == pytest.approx(100 * 4 / 7, abs=0.051)
    same = logged(scores_of([1] * 7, 3), [0, 1, 2, 1, 1, 0, 2], classes=("a", "b", "c"))
    assert same["accuracy"] == pytest.approx(100 * 3 / 7, abs=0.051)


@pytest.mark.parametrize("count", [11, 13], ids=["a last batch of one row", "thirteen rows"])
def test_numbers(count):
    labels = [0.0, 5.0, 2.5, 2.5, 1.0, 4.0, 4.0, 3.0, 0.5, 2.0, 5.0, 1.5, 3.5][:count]
    guesses = [0.5, 9.0, 2.0, 1.0, 1.0, 3.0, 8.0, 2.0, 0.7, 2.0, 3.0, 1.1, 2.9][:count]
    found = logged([[guess] for guess in guesses], labels, "report_pearson_and_spearman", classes=())
    wanted = {"pearson": pearson(guesses, labels), "spearman": pearson(ranks(guesses), ranks(labels))}
    assert abs(wanted["pearson"] - wanted["spearman"]) > 3, "so that they cannot be mixed up"
    wanted["pearson_and_spearman"] = sum(wanted.values()) / 2
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=0.051)


@pytest.mark.parametrize("guess", [2.0, float("nan")])
def test_numbers_that_do_not_vary_have_no_correlation(guess):
    found = logged([[guess]] * 12, [1.0, 2.0, 3.0] * 4, "report_pearson_and_spearman", classes=())
    wanted = pytest.approx([0.0 if guess == guess else guess] * 3, nan_ok=True)
    assert [found[name] for name in ("pearson", "spearman", "pearson_and_spearman")] == wanted
