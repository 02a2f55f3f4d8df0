"""The fairseq task ``squad``: find the answer to a question in a context, on data of ``smlp data squad``.

Letters: ``B`` windows of a batch, ``n`` tokens, ``W`` windows.
"""

# No `from __future__ import annotations` here: fairseq reads the types of an option's field, not their names.

import contextlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq import models
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING, OmegaConf, open_dict

from smlp.criterions.span import WINDOWS
from smlp.errors import UserError
from smlp.fairseq_compat.data import check_dictionary
from smlp.files import check_writable, write_whole
from smlp.text.squad import SquadScores, SquadSplit, answer_metric, score_answers, windows_of
from smlp.text.tokenizer_files import DICTIONARY, MASK

logger = logging.getLogger(__name__)

_SUBSET = "{subset}"  # in --predictions-file


@dataclass
class SquadConfig(FairseqDataclass):
    """Options of the task; the one without a help text is another part's."""

    data: str = field(default=MISSING, metadata={"help": "folder that 'smlp data squad' wrote"})
    max_positions: int = field(
        default=512, metadata={"help": "tokens of a window: question, part of a context, 3 more"}
    )
    doc_stride: int = field(default=128, metadata={"help": "tokens between the beginnings of a context's windows"})
    max_query_length: int = field(default=64, metadata={"help": "tokens of a question; the rest is cut off"})
    max_answer_length: int = field(default=30, metadata={"help": "most tokens of an answer that is predicted"})
    # fairseq knows typing.Optional, not `|`
    no_answer_threshold: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "answer nothing if the score of no answer is higher than the best answer's by more than this "
            "(default: what gives the best F1 on the split that is validated)"
        },
    )
    predictions_file: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "write the answers here at each validation that sees all questions, by question; "
            f"{_SUBSET} is the split's name"
        },
    )
    seed: int = II("common.seed")


def _check_predictions_file(path: str) -> None:
    """Raise ``UserError`` if answers cannot be written, or the file holds something other than answers."""
    check_writable(path, "--predictions-file")
    if not Path(path).is_file():
        return
    try:
        older = json.loads(Path(path).read_bytes() or b"{}")
    except (ValueError, RecursionError):
        older = None
    if not isinstance(older, dict) or not all(isinstance(answer, str) for answer in older.values()):
        raise UserError(f"--predictions-file {path}: a file of another kind exists already: name another one")


class SquadDataset(FairseqDataset):
    """Windows ``<s> question </s> part of the context </s>``.

    Args:
        split: with the questions.
        number: of the split, which comes back with each window.
        config: of the task.
        dictionary: of the data.
    """

    def __init__(self, split: SquadSplit, number: int, config: SquadConfig, dictionary: Dictionary) -> None:
        self._split, self._number, self._dictionary = split, number, dictionary
        self._seed = config.seed
        self._windows = windows_of(split, config.max_positions, config.doc_stride, config.max_query_length)
        self.sizes = self._windows.prefix + self._windows.length + 1

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        windows = self._windows
        names = ("question", "begin", "length", "prefix")
        question, begin, length, prefix = (int(getattr(windows, name)[index]) for name in names)
        asked, context = self._split.tokens_of(question)
        bos, eos = [self._dictionary.bos()], [self._dictionary.eos()]
        tokens = np.concatenate([bos, asked[: prefix - 2], eos, context[begin : begin + length], eos])
        first, last = (int(token) for token in self._split.answer_tokens[question])
        is_inside = begin <= first and last < begin + length
        target = (first - begin + prefix, last - begin + prefix) if is_inside else (0, 0)  # <s> is no answer
        return {
            "id": index,
            "tokens": torch.from_numpy(tokens),
            "target": target,
            "window": (self._number, question, begin, length, prefix),
        }

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch padded on the right; ``target`` is (B, 2), ``window`` (B, 5)."""
        if not samples:
            return {}
        tokens_Bn = data_utils.collate_tokens([sample["tokens"] for sample in samples], self._dictionary.pad())
        lengths_B = torch.tensor([len(sample["tokens"]) for sample in samples])
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": int(lengths_B.sum()),
            "net_input": {"src_tokens": tokens_Bn, "src_lengths": lengths_B},
            "target": torch.tensor([sample["target"] for sample in samples]),
            "window": torch.tensor([sample["window"] for sample in samples]),
        }

    def num_tokens(self, index: int) -> int:
        """Return the tokens of a window."""
        return int(self.sizes[index])

    size = num_tokens

    def ordered_indices(self) -> np.ndarray:
        """Return a fixed random order: windows of one context are alike, and would fill whole batches."""
        return np.random.default_rng(self._seed).permutation(len(self))


@register_task("squad", dataclass=SquadConfig)
class SquadTask(FairseqTask):
    """Extractive question answering as in BERT, scored by SQuAD's exact match and F1.

    Args:
        cfg: options.
        dictionary: of the data, with ``<mask>``, as the task ``masked_lm`` has it.
    """

    def __init__(self, cfg: SquadConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary
        self._splits: list[tuple[str, SquadSplit]] = []
        self._answered: set[str] = set()  # splits whose answers are written
        self._scored: tuple[torch.Tensor, SquadScores] | None = None

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **unused: Any) -> "SquadTask":
        """Load the dictionary.

        Raises:
            UserError: the data are missing or damaged, answers cannot be written, or torchmetrics is not installed.
        """
        if cfg.predictions_file and _SUBSET not in cfg.predictions_file:
            _check_predictions_file(cfg.predictions_file)
        answer_metric()
        if not (Path(cfg.data) / DICTIONARY).is_file():
            raise UserError(f"there is no file {Path(cfg.data) / DICTIONARY}: make the data with 'smlp data squad'")
        check_dictionary(cfg.data)
        dictionary = Dictionary.load(str(Path(cfg.data) / DICTIONARY))
        dictionary.add_symbol(MASK)
        return cls(cfg, dictionary)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build an encoder for windows of ``max_positions`` tokens, with a head for spans.

        Raises:
            UserError: the model cannot have one.
        """
        with open_dict(cfg) if OmegaConf.is_config(cfg) else contextlib.nullcontext():  # older models have a Namespace
            cfg.max_positions = self.cfg.max_positions
        model = models.build_model(cfg, self, from_checkpoint)
        if not hasattr(model, "register_span_head"):
            name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
            raise UserError(f"--arch {name} has no head for spans of text: --task squad needs an encoder of smlp")
        model.register_span_head()
        return model

    def load_dataset(self, split: str, combine: bool = False, **unused: Any) -> None:
        """Load a split.

        Raises:
            UserError: its files are missing or damaged, a window has no room for a question, or its answers cannot be
                written, as those of two splits into one file.
        """
        is_trained_on = "data_selector" in unused  # which fairseq gives for the training data alone
        if self.cfg.predictions_file and not is_trained_on:
            self._answered.add(split)
            if _SUBSET not in self.cfg.predictions_file and len(self._answered) > 1:
                raise UserError(
                    f"--predictions-file {self.cfg.predictions_file} cannot hold the answers of "
                    f"{' and '.join(sorted(self._answered))}: write {_SUBSET} in its name"
                )
            _check_predictions_file(self.cfg.predictions_file.replace(_SUBSET, split))
        found = SquadSplit.load(Path(self.cfg.data), split, len(self.dictionary))
        self.datasets[split] = SquadDataset(found, len(self._splits), self.cfg, self.dictionary)
        self._splits.append((split, found))
        logger.info(f"{split}: {len(found.ids)} questions in {len(self.datasets[split])} windows")

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log loss and speed; in validation also exact match and F1 of what was validated so far, and the threshold."""
        super().reduce_metrics(logging_outputs, criterion)
        if not any(WINDOWS in log for log in logging_outputs):
            return
        metrics.log_derived("em", lambda meters: round(self._scores(meters).exact_match, 2))
        metrics.log_derived("f1", lambda meters: round(self._scores(meters).f1, 2))
        windows_W6 = next(log[WINDOWS] for log in logging_outputs if WINDOWS in log)
        if self._splits[int(windows_W6[0, 0])][1].has_unanswerable:
            metrics.log_derived("no_answer_threshold", lambda meters: round(self._scores(meters).threshold, 6))

    def _scores(self, meters: Any) -> SquadScores:
        """Return the scores of the windows that a group of meters has; write the answers if these are all."""
        windows_W6 = meters[f"_{WINDOWS}"].tensor
        if self._scored is None or self._scored[0] is not windows_W6:
            name, split = self._splits[int(windows_W6[0, 0])]
            scores = score_answers(split, windows_W6[:, 1:].numpy(), self.cfg.no_answer_threshold)
            self._scored = windows_W6, scores
            if self.cfg.predictions_file and len(scores.predictions) == len(split.ids):
                self._write(name, scores.predictions)
        return self._scored[1]

    def _write(self, subset: str, predictions: dict[str, str]) -> None:
        if distributed_utils.get_global_rank() == 0:
            content = json.dumps(predictions, ensure_ascii=False, indent=1) + "\n"
            write_whole(self.cfg.predictions_file.replace(_SUBSET, subset), content.encode())

    def max_positions(self) -> int:
        """Return the tokens of the longest window."""
        return self.cfg.max_positions

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of questions and contexts."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """Return the source dictionary: models are built with either."""
        return self.dictionary
