"""A checkpoint as a model of lm-evaluation-harness.

Importing this module registers the model's name, ``smlp``; the harness (0.4.13) looks for models nowhere else::

    import smlp.evaluation.lm_eval.model
    lm_eval.simple_evaluate("smlp", model_args="path=checkpoint_best.pt", tasks=["lambada_openai"])

The harness's own command line with this model is ``python -m smlp.evaluation.lm_eval run --model smlp ...``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from smlp.checkpoint.load import load_language_model
from smlp.errors import UserError
from smlp.evaluation.lm_eval.writing import WritingOrder
from smlp.inference.generation import TextWriter
from smlp.inference.language_model import LanguageModel
from smlp.inference.scoring.candidates import CandidateScorer, TokenScores, drop_nothing
from smlp.inference.scoring.texts import Candidates, NoTokenError, TokenizedText, TooLongError
from smlp.launch.team import Team
from smlp.text.tokenizer import NEWLINES

Result = tuple[float, bool]


class TooLongRecords(UserError):
    """Records with a continuation that the context cannot hold.

    Args:
        records: (task, number of the record), and for each what is wrong.
    """

    def __init__(self, records: dict[tuple[str, int], str]) -> None:
        (task, number), reason = min(records.items())
        by_task = Counter(name for name, _ in records)
        counts = ", ".join(f"{count} of {name}" for name, count in sorted(by_task.items()))
        super().__init__(
            f"{len(records)} records do not fit: {counts} (first: {task}, example {number}: {reason}); --skip-too-long "
            "leaves them out and counts them"
        )
        self.records = frozenset(records)


@register_model("smlp")
class HarnessModel(LM):
    """Scores and texts of a language model, as the harness asks for them.

    Requests of one record are scored together, so that their common beginning is read once. Those that are too long
    lose tokens from the left, each for itself, and the start symbol first, as in the harness's own models.

    Args:
        path: checkpoint, or a model from :func:`smlp.load_pretrained`.
        batch_tokens: positions in a batch.
        newline: what a line break becomes, ``eos`` (as in training) or ``space``.
        fill_prefix: put start symbols before prompts shorter than the prefix of a model with partial routing.
        device: torch device, for a checkpoint.
        dictionary, tokenizer: if they are not found next to the checkpoint.
        team: ranks among which the harness shares its records.
        batch_size, max_batch_size: of the harness's command line; ignored.

    Raises:
        UserError: a file is missing or damaged, there is no such device, or an argument is unknown or out of range.
    """

    def __init__(
        self,
        path: str | Path | LanguageModel = "",
        batch_tokens: int = 8192,
        newline: str = "eos",
        fill_prefix: bool = False,
        device: str | None = None,
        dictionary: str | None = None,
        tokenizer: str | None = None,
        team: Team | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        # the harness's command line turns "key=value" into numbers, truth values and texts, and checks nothing
        known = ["path", "batch_tokens", "newline", "fill_prefix", "device", "dictionary", "tokenizer"]
        for name in unknown:
            raise UserError(f"--model_args has {name!r}, which is not one of {', '.join(known)}")
        if path == "":
            raise UserError("--model_args names no checkpoint: give path=CHECKPOINT")
        for name, value, fits, wanted in (
            ("batch_tokens", batch_tokens, type(batch_tokens) is int and batch_tokens > 0, "a number of at least 1"),
            ("newline", newline, newline in NEWLINES, f"one of {', '.join(NEWLINES)}"),
            ("fill_prefix", fill_prefix, isinstance(fill_prefix, bool), "True or False"),
            ("team", team, team is None or isinstance(team, Team), "left out"),
        ):
            if not fits:
                raise UserError(f"{name} must be {wanted}, got {value!r:.40}")
        team = team or Team()
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None  # the harness's command line asks for it unless told otherwise
        if isinstance(path, LanguageModel):
            for name, value in (("device", device), ("dictionary", dictionary), ("tokenizer", tokenizer)):
                if value is not None:
                    raise UserError(f"{name}={value!r:.40} has no effect on a model that is loaded: leave it out")
        else:
            path = load_language_model(path, dictionary, tokenizer, mapped=True, what="the harness").to(
                team.device(device)
            )
        self.lm = path
        self.team = team
        self.newline = newline
        self.fill_prefix = fill_prefix
        self.batch_tokens = batch_tokens
        #: records whose contexts were cut on the left, and records whose continuations begin within the model's prefix
        self.num_truncated = self.num_partly_scored = 0
        #: continuations that add no token to their context: they are certain, with a log-probability of 0
        self.num_without_token = 0
        #: called before anything is scored or written; may be set
        self.begins: Callable[[], None] = lambda: None
        drop_nothing(self.lm.decoder)
        self._scorer = CandidateScorer(self.lm.decoder)
        self._encoding = self.lm.encoding(newline, fill_prefix)
        self._device = self.lm.decoder.embedding.weight.device
        self._rank, self._world_size = team.rank, team.size
        self._requests: list[Instance] = []

    @property
    def eot_token_id(self) -> int:
        """Id of ``</s>``, which ends lines and documents."""
        return self.lm.vocabulary.eos

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return self.lm.decoder.config.max_tokens

    def tok_encode(self, string: str) -> list[int]:
        """Return the ids of a text; no symbol is put before it."""
        return self.lm.tokenizer.encode_lines(string, self.newline)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Result]:
        """Return the log-probability of each continuation given its context, and whether it is what the model would
        write."""
        groups: dict[Any, list[int]] = {}
        texts: list[TokenizedText | None] = []
        for number, request in enumerate(requests):
            texts.append(self._encoded(request, *request.args))
            if texts[-1] is None:
                continue
            groups.setdefault((request.task_name, request.doc_id), []).append(number)
        results: list[Result] = [(0.0, True)] * len(requests)
        by_record = {key: [texts[number] for number in numbers] for key, numbers in groups.items()}
        self._check_lengths(by_record)
        members, candidates = [], []
        for (task, number), own in by_record.items():
            for places, group in self._fitted(own, f"{task}, example {number}"):
                members.append([groups[task, number][place] for place in places])
                candidates.append(group)
        for place, scored in self._scored(candidates, disable_tqdm):
            for number, text, scores in zip(members[place], candidates[place].texts, scored, strict=True):
                results[number] = _of_continuation(text, scores)
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def _encoded(self, request: Instance, context: str, continuation: str) -> TokenizedText | None:
        """Return both texts as ids, or None if the continuation has none and is certain.

        White space at the end of the context belongs to the continuation, as in the harness's ``TemplateLM``.
        """
        kept = context.rstrip()
        try:
            return self._encoding.pair(kept, context[len(kept) :] + continuation)
        except NoTokenError:
            self.num_without_token += 1
            return None
        except UserError as error:
            raise UserError(f"{request.task_name}, example {request.doc_id}: {error}") from None

    def _check_lengths(self, groups: dict[tuple[str, int], list[TokenizedText]]) -> None:
        """Refuse all records that the context cannot hold, of all ranks, before the first is scored.

        Raises:
            TooLongRecords: there are some.
        """
        too_long = {}
        for record, texts in groups.items():
            try:
                self._encoding.group(texts)
            except TooLongError as error:
                too_long[record] = str(error)
        found = {record: reason for part in self.team.gather(too_long) for record, reason in part.items()}
        if found:
            raise TooLongRecords(found)

    def _fitted(self, texts: Sequence[TokenizedText], where: str) -> list[tuple[list[int], Candidates]]:
        """Make texts fit the model, and count those that were cut; return groups with the places of their texts.

        Of a text that is too long, the last T + 1 tokens are left, of which the model reads T.
        """
        most, prefix_tokens = self.max_length, self.lm.decoder.config.prefix_tokens
        long = [place for place, text in enumerate(texts) if len(text.tokens) > most]
        short = [place for place in range(len(texts)) if place not in long]
        fitted = []
        for place in long:
            text = texts[place]
            num_cut = len(text.tokens) - most
            cut = TokenizedText(text.tokens[num_cut:], text.num_context - num_cut)
            fitted.append(([place], Candidates((cut,), num_cut, (text.tokens[num_cut - 1],))))
        if short:
            try:
                fitted.append((short, self._encoding.group([texts[place] for place in short])))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        if any(group.ends_within(prefix_tokens) for _, group in fitted):
            raise UserError(
                f"{where} ends within the first {prefix_tokens} positions, which only choose experts: fill the prefix "
                "(--fill-prefix)"
            )
        self.num_truncated += any(group.num_cut > 0 for _, group in fitted)
        self.num_partly_scored += any(group.begins_within(prefix_tokens) for _, group in fitted)
        return fitted

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, see :func:`rolling_windows`.

        Raises:
            UserError: the model routes by a prefix, which is not to be filled.
        """
        prefix_tokens = self.lm.decoder.config.prefix_tokens
        if prefix_tokens and not self.fill_prefix:
            raise UserError(
                f"the first {prefix_tokens} positions of this model only choose experts, so that no text can be scored "
                "from its beginning: fill the prefix (--fill-prefix)"
            )
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in rolling_windows(tokens, self.lm.start_token, self.max_length, prefix_tokens):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for place, (scores,) in self._scored(windows, disable_tqdm):
            totals[owners[place]] += _of_continuation(windows[place].texts[0], scores)[0]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model writes after each context, up to a stop string; contexts that leave no room
        are cut on the left, and counted.

        A request occurs as often as its task ``repeats`` it, and gets new random numbers each time: those with which
        :meth:`smlp.inference.language_model.LanguageModel.continuations` writes as many texts (``num_return``). Further
        copies, with which the harness makes all ranks' requests equally many, are no answers (:meth:`barrier`).

        Raises:
            UserError: a task's generation_kwargs ask for something unsupported; raised before anything is written.
        """
        self._requests = requests
        results = [""] * len(requests)
        repeats: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            repeats.setdefault(id(request), []).append(number)
        alike: dict[tuple[str, int], list[list[int]]] = {}
        for numbers in repeats.values():
            first = requests[numbers[0]]
            alike.setdefault((repr(first.args[1]), first.repeats or len(numbers)), []).append(numbers)
        orders = []
        for (_, count), members in alike.items():
            first = requests[members[0][0]]
            order = WritingOrder.of(first.args[1], first.task_name)
            orders.append((members, order, self._writer(order, count, first.task_name)))
        self.begins()
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank > 0, desc="generate_until") as progress:
            for members, order, writer in orders:
                contexts = [requests[numbers[0]].args[0] for numbers in members]
                for member, texts in self._written(contexts, order, writer):
                    for place, number in enumerate(members[member]):
                        results[number] = texts[place % len(texts)]
                    progress.update(len(members[member]))
        for request, text in zip(requests, results, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return results

    def _writer(self, order: WritingOrder, count: int, task: str) -> TextWriter:
        """Return a writer of ``count`` texts after each context; of one text where all would be the same."""
        room = self.max_length - self.lm.decoder.config.prefix_tokens - 1
        if order.max_tokens > room:
            kept = self.max_length - room
            warnings.warn(
                f"{task} asks for {order.max_tokens} new tokens, but at most {room} fit, and prompts are cut to "
                f"{kept} token{'s' * (kept > 1)}",
                stacklevel=2,
            )
        draws = order.method.get("temperature") != 0 and "beam" not in order.method
        try:
            return self.lm.writer(
                min(order.max_tokens, room),
                stop=() if "beam" in order.method else order.stop,
                num_return=count if draws else 1,
                fill_prefix=self.fill_prefix,
                **order.method,
            )
        except UserError as error:
            raise UserError(f"{task}, generation_kwargs: {error}") from None

    def _written(
        self, contexts: Sequence[str], order: WritingOrder, writer: TextWriter
    ) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of a context, and the texts that are written after it; in no particular order."""
        room = self.max_length - writer.limits.max_tokens
        prompts = []
        for context in contexts:
            tokens = [self.lm.start_token, *self.tok_encode(context)]
            self.num_truncated += len(tokens) > room
            prompts.append(tokens[-room:])
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        num_rows = order.method.get("beam", writer.num_return)
        size = max(1, self.batch_tokens // (self.max_length * num_rows))
        for begin in range(0, len(by_length), size):
            batch = by_length[begin : begin + size]
            texts: dict[int, dict[int, str]] = {}
            for text, shown in writer.finished([prompts[number] for number in batch]):
                texts.setdefault(batch[text.prompt], {})[text.draw] = shown
            for number, by_draw in texts.items():
                yield number, [order.until_stop(by_draw[draw]) for draw in sorted(by_draw)]

    def _scored(self, candidates: Sequence[Candidates], disable_tqdm: bool) -> Iterator[tuple[int, list[TokenScores]]]:
        """Yield the place and scores of every group, with a progress bar."""
        self.begins()
        with tqdm(total=len(candidates), disable=disable_tqdm or self.rank > 0, unit=" records") as progress:
            for found in self._scorer.each(candidates, self.batch_tokens):
                yield found
                progress.update()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of all ranks, one after the other."""
        return torch.tensor(self.team.gather(tensor.tolist())).flatten()

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on rank ``dst``, None elsewhere."""
        found = self.team.gather(obj)
        return found if self.rank == dst else None

    def barrier(self) -> None:
        """Wait for all ranks; the harness does so when it has noted answers, of which those to padding are dropped."""
        for request in self._requests:
            del request.resps[request.repeats or len(request.resps) :]
        self.team.gather(None)


def rolling_windows(
    tokens: Sequence[int], start_token: int, max_tokens: int, prefix_tokens: int = 0
) -> Iterator[Candidates]:
    """Yield windows of the model's context that score every token of a text once.

    Each token is predicted from at least one token or start symbol before it, and from P more where the first P
    positions only choose experts; the last window goes back as far as the context holds, as in the harness.

    Args:
        tokens: of the text.
        start_token: stands before the text, P + 1 times.
        max_tokens: T.
        prefix_tokens: P.
    """
    lead = prefix_tokens + 1
    stream = [start_token] * lead + list(tokens)
    for done in range(0, len(tokens), max_tokens - prefix_tokens):
        count = min(max_tokens - prefix_tokens, len(tokens) - done)
        end = lead + done + count
        begin = max(end - 1 - max_tokens, 0)
        text = TokenizedText(tuple(stream[begin + 1 : end]), end - begin - 1 - count)
        yield Candidates((text,), lead=(stream[begin],))


def _of_continuation(text: TokenizedText, scores: TokenScores) -> Result:
    first = max(text.num_context - (len(text.tokens) - len(scores.log_probs)), 0)
    return float(scores.log_probs[first:].sum()), bool(scores.is_greedy[first:].all())
