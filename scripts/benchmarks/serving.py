"""Concurrent requests to the engine of ``smlp serve`` against the same requests one after the other."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.report import Row, compared
from benchmarks.settings import Settings
from benchmarks.timing import interleaved
from smlp.config.presets import preset
from smlp.inference.generation import Limits, Request, Sampling
from smlp.inference.generation.prompts import ready_prompts
from smlp.inference.scoring.candidates import drop_nothing
from smlp.nn.decoder import Decoder
from smlp.serving.engine import Engine, Event, NewToken, PromptJob
from smlp.text.tokenizer import Tokenizer, Vocabulary

SECTION = "Serving: each token of eight requests"
CONTEXT, NEW_TOKENS, REQUESTS = 256, 100, 8


def rows(settings: Settings) -> Iterator[Row]:
    """Yield a row for each architecture; a CPU's time is that of its threads."""
    context, new_tokens = settings.sized(CONTEXT, NEW_TOKENS)
    tokenizer = Tokenizer(Vocabulary([f"w{number}" for number in range(preset("smlp_tiny").vocab_size - 4)]))
    for arch in ("smlp_tiny", "switch_lm_tiny", "gmlp_lm_tiny"):
        model = Decoder(preset(arch, max_tokens=context)).to(settings.device, settings.dtype).eval()
        drop_nothing(model)
        engine = Engine(model, tokenizer, [0, 1, 2, 3], REQUESTS, REQUESTS)  # </s>, which ends a text, is never chosen
        runs = {str(count): partial(_write, engine, count, new_tokens) for count in (1, REQUESTS)}
        clock = time.process_time if settings.device == "cpu" else None
        try:
            seconds = interleaved(runs, 2 if settings.quick else min(settings.repeats, 5), settings.device, clock)
        finally:
            engine.close()
        what = f"{arch}, context {context}, {new_tokens} new tokens each"
        tokens = REQUESTS * new_tokens
        yield compared(
            SECTION, what, seconds[str(REQUESTS)] / tokens, "one after the other", seconds["1"] / tokens, 2.0
        )


def _write(engine: Engine, at_a_time: int, new_tokens: int) -> None:
    """Have :data:`REQUESTS` texts written, so many at a time."""
    limits, prompt = Limits(new_tokens, when_full="stop"), [2, 10, 11, 12]
    (ready,) = ready_prompts(engine.decoder.config, [prompt], limits)
    for first in range(0, REQUESTS, at_a_time):
        numbers = range(first, first + at_a_time)
        events: queue.Queue[Event] = queue.Queue()
        engine.submit([PromptJob(prompt, Request(ready, limits, Sampling(seed=n)), events.put) for n in numbers])
        ended = 0
        while ended < len(numbers):
            event = events.get()
            assert isinstance(event, NewToken), event
            ended += event.finish is not None
