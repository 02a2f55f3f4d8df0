"""Scoring the candidates of multiple-choice records in batches that share prompts, against one candidate at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.report import Row, compared
from benchmarks.settings import Settings, drawn, matched
from benchmarks.timing import interleaved
from smlp.inference.scoring.candidates import CandidateScorer
from smlp.inference.scoring.texts import Candidates, TokenizedText, fit
from smlp.nn.decoder import Decoder

SECTION = "Scoring multiple-choice records, for each record"
BATCH_TOKENS = 8192
PAPER_VOCABULARY = 51200
#: tokens of HellaSwag's contexts and endings (300 records of its validation set, a vocabulary of 8192 pieces): mean,
#: standard deviation, least, most
CONTEXT, ENDING = (37, 12, 13, 70), (17, 8, 4, 61)


def rows(settings: Settings) -> Iterator[Row]:
    """Yield a row for each architecture, and one with a dictionary as large as the paper's."""
    archs = ["smlp"] if settings.quick else ["smlp", "switch_lm"]
    num_records, num_alone = settings.sized(*((24, 6) if settings.quick else (400, 20)))
    matches = matched(settings, archs)
    configs = [(arch, matches[arch].config) for arch in archs]
    if not settings.quick and settings.device == "cpu":
        configs.append(("smlp", replace(matches["smlp"].config, vocab_size=PAPER_VOCABULARY)))
    for arch, config in configs:
        model = drawn(config, settings).eval()
        groups = _records(num_records, config.vocab_size, config.max_tokens)
        alone = groups[:: max(num_records // num_alone, 1)]
        variants = {"batched": _batched(model, groups), "alone": _one_at_a_time(model, alone)}
        seconds = interleaved(variants, 1 if settings.quick else 3, settings.device)
        what = f"{arch}, {config.vocab_size} symbols, {num_records} records like HellaSwag's"
        each = seconds["batched"] / len(groups), seconds["alone"] / len(alone)
        yield compared(SECTION, what, each[0], "one candidate at a time", each[1], 5.0)


def _records(count: int, vocab_size: int, max_tokens: int) -> list[Candidates]:
    draw = random.Random(0)

    def tokens(mean: int, deviation: int, least: int, most: int) -> tuple[int, ...]:
        length = min(max(round(draw.gauss(mean, deviation)), least), most)
        return tuple(draw.randrange(4, max(vocab_size, 5)) for _ in range(length))

    groups = []
    for _ in range(count):
        context = tokens(*CONTEXT)
        texts = [TokenizedText(context + tokens(*ENDING), len(context)) for _ in range(4)]
        groups.append(fit([_shortened(text, max_tokens) for text in texts], max_tokens))
    return groups


def _shortened(text: TokenizedText, max_tokens: int) -> TokenizedText:
    """Shorten a text for the tiny models of the tests."""
    return TokenizedText(text.tokens[: text.num_context + max_tokens], text.num_context)


def _batched(model: Decoder, groups: Sequence[Candidates]) -> Callable[[], None]:
    scorer = CandidateScorer(model)

    def run() -> None:
        for batch in scorer.plan(groups, BATCH_TOKENS):
            scorer.score(groups, batch)

    return run


def _one_at_a_time(model: Decoder, groups: Sequence[Candidates]) -> Callable[[], None]:
    @torch.inference_mode()
    def run() -> None:
        for group in groups:
            for text in group.texts:
                ids = torch.tensor([[*group.lead, *text.tokens]], device=model.embedding.weight.device)
                log_probs = model(ids[:, :-1]).logits.float().log_softmax(2)
                log_probs.gather(2, ids[:, 1:].unsqueeze(2)).cpu()

    return run
