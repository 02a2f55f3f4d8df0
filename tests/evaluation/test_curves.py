"""Reading fairseq's JSON training log, and the picture drawn from it."""

import json
import logging

import numpy as np
import pytest
from fairseq.logging import progress_bar

from smlp.errors import UserError
from smlp.evaluation.curves import LossPoint, TrainingCurve, draw_curves, read_training_log
from smlp.plots.drawing import plain_number


def write_log(path, lines: list) -> None:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")


def inner(updates: int, loss: str, **more: str) -> dict:
    return {"epoch": 1, "update": 0.5, "loss": loss, "ppl": "9", "num_updates": str(updates), "wall": "2", **more}


def valid(updates: int, loss: str) -> dict:
    return {"epoch": 1, "valid_loss": loss, "valid_ppl": "9", "valid_num_updates": str(updates)}


def epoch(updates: int, loss: str) -> dict:
    return {"epoch": 1, "train_loss": loss, "train_num_updates": str(updates), "train_train_wall": "3"}


def test_training_and_validation_points_in_order_once(tmp_path):
    path = tmp_path / "train.log"
    rows = [
        "{'_name': None}",
        "task: LanguageModelingTask",
        inner(8, "6.5"),
        inner(4, "7.5"),
        valid(8, "7"),
        valid(8, "7"),
    ]
    write_log(
        path,
        [*rows, epoch(8, "7.0"), inner(12, "nan"), inner(8, "6.25"), "{not json", "[1]", '{"loss": "5.0", "num_up'],
    )
    curve = read_training_log(path, "run")
    assert curve.name == "run"
    assert curve.train == (LossPoint(4, 7.5), LossPoint(8, 6.25))
    assert curve.valid == (LossPoint(8, 7.0),)
    assert curve.train[0].perplexity == pytest.approx(2**7.5)


def test_likelihood_is_preferred_to_a_loss_with_auxiliary_terms(tmp_path):
    write_log(tmp_path / "train.log", [inner(4, "7.5", nll_loss="7.0")])
    assert read_training_log(tmp_path / "train.log", "run").train == (LossPoint(4, 7.0),)


def test_epoch_averages_stand_in_for_a_run_without_log_intervals(tmp_path):
    write_log(tmp_path / "train.log", [epoch(11, "6.6"), epoch(22, "4.5"), valid(22, "5")])
    curve = read_training_log(tmp_path / "train.log", "run")
    assert curve.train == (LossPoint(11, 6.6), LossPoint(22, 4.5))


def test_reads_what_fairseqs_own_progress_bar_writes(tmp_path):
    path = tmp_path / "train.log"
    logger = logging.getLogger("fairseq.logging.progress_bar")
    level, handlers = logger.level, list(logger.handlers)
    logger.setLevel(logging.INFO)
    try:
        for number in (1, 2):  # the second bar makes each line appear twice
            bar = progress_bar.progress_bar(
                range(8), log_format="json", log_interval=4, log_file=str(path), epoch=number, default_log_format="json"
            )
            for step in bar:
                update = (number - 1) * 8 + step + 1
                bar.log({"loss": 9 - update / 8, "num_updates": update}, tag="train_inner", step=update)
            bar.print({"loss": 8.5 - number, "num_updates": number * 8}, tag="valid", step=number * 8)
    finally:
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
    assert len(path.read_text().splitlines()) == 9  # 2 + 1 lines, then 2 * (2 + 1)
    curve = read_training_log(path, "run")
    assert curve.train == (LossPoint(4, 8.5), LossPoint(8, 8.0), LossPoint(12, 7.5), LossPoint(16, 7.0))
    assert curve.valid == (LossPoint(8, 7.5), LossPoint(16, 6.5))


def test_missing_and_empty_logs_are_named(tmp_path):
    with pytest.raises(UserError, match=r"gone.log cannot be read: No such file"):
        read_training_log(tmp_path / "gone.log", "run")
    (tmp_path / "plain.log").write_text("2026 | INFO | loss 5\n")
    with pytest.raises(UserError, match=r"plain.log holds no finite loss in 2 lines: did the run diverge, or was the"):
        read_training_log(tmp_path / "plain.log", "run")


def test_picture_shows_every_run_and_baseline(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    points = tuple(LossPoint(update, 12 - update / 20) for update in range(0, 101, 10))
    curves = [TrainingCurve("gMLP", points, points[::5]), TrainingCurve("sMLP", points[:8], ())]

    def picture(name: str, *arguments) -> np.ndarray:
        draw_curves(*arguments[:1], tmp_path / "new" / name, *arguments[1:])
        return imread(tmp_path / "new" / name)

    both, one = picture("both.png", curves), picture("one.png", curves[:1])
    lined = picture("lined.png", curves, {"trigram": 300.0})
    assert both.shape[0] >= 600 and both.shape[1] >= 900
    assert not np.array_equal(both, one) and not np.array_equal(both, lined)

    def pixels(image: np.ndarray, colour: tuple[int, int, int]) -> int:
        return int((np.abs(image[..., :3] - np.array(colour) / 255).max(axis=-1) < 0.01).sum())

    first, second, baseline = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x55, 0x55, 0x55)
    assert pixels(one, first) > 500 and pixels(one, second) == 0
    # The second run was never validated: its thin line is translucent, only its legend marker has the full colour.
    assert pixels(both, second) > 20
    assert pixels(lined, baseline) > pixels(both, baseline) + 500


def test_ticks_say_their_values():
    assert [plain_number(value) for value in (1.2, 1.5, 15.0, 2000.0, 2e7)] == [
        "1.2",
        "1.5",
        "15",
        "2,000",
        "20,000,000",
    ]


def test_too_many_or_no_runs(tmp_path):
    with pytest.raises(UserError, match="there is no loss to draw: a, b without any point"):
        draw_curves([TrainingCurve("a", (), ()), TrainingCurve("b", (), ())], tmp_path / "x.png")
    with pytest.raises(UserError, match="between 1 and 6 training curves can be drawn, not 0"):
        draw_curves([], tmp_path / "x.png")
