"""Texts of concurrent requests: each as if it were alone."""

import queue
import threading

import pytest
import torch
from tiny_checkpoints import write_checkpoint
from tiny_decoders import VARIANTS, make

from smlp.checkpoint.load import load_language_model
from smlp.errors import UserError
from smlp.inference.generation import Limits, Request, Sampling, sampled_texts
from smlp.inference.generation.prompts import ready_prompts
from smlp.inference.scoring.candidates import drop_nothing
from smlp.serving.engine import BusyError, Engine, Failed, NewToken, PromptJob, PromptScores, prompt_scores
from smlp.text.tokenizer import Tokenizer, Vocabulary

SECONDS = 60  # until a test gives up
SYMBOLS = [f"w{number}" for number in range(36)]
BANNED = [0, 1, 3]


def engine_of(decoder, most_texts=16, most_waiting=64):
    return Engine(drop_nothing(decoder) or decoder, Tokenizer(Vocabulary(SYMBOLS)), BANNED, most_texts, most_waiting)


@pytest.fixture
def engine():
    made = engine_of(make("smlp"))
    yield made
    made.close()


def job_of(decoder, prompt, max_tokens=5, num_return=1, **sampling):
    """A job whose events go to a queue of its own."""
    limits = Limits(max_tokens, when_full="stop")
    (ready,) = ready_prompts(decoder.config, [prompt], limits)
    events = queue.Queue()
    return PromptJob(prompt, Request(ready, limits, Sampling(**sampling), num_return), events.put), events


def texts_of(job, events):
    """The new ids of each text, when all are finished."""
    found = {draw: [] for draw in range(job.num_texts)}
    left = len(found)
    while left:
        event = events.get(timeout=SECONDS)
        assert isinstance(event, NewToken), event
        found[event.draw].append(event.token)
        left -= event.finish is not None
    return found


def alone(decoder, job):
    request = job.request
    texts = sampled_texts(decoder, [job.prompt], request.limits, request.sampling, request.num_return, BANNED)
    return {text.draw: text.tokens for text in texts if text.finish is not None}


WISHES = [
    {"prompt": [2, 7, 9, 11], "max_tokens": 6, "temperature": 0},
    {"prompt": [2, 7, 9, 12], "max_tokens": 4, "seed": 5, "top_k": 8, "num_return": 2},
    {"prompt": [2, 9, 8, 30, 4], "max_tokens": 7, "seed": 6, "temperature": 1.5},
    {"prompt": [2, 9, 8, 4, 6, 5], "max_tokens": 3, "seed": 6, "top_p": 0.7, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "," not in name])
def test_a_text_does_not_depend_on_others(variant):
    decoder = make(variant)
    engine = engine_of(decoder)
    try:
        together = [job_of(decoder, **wish) for wish in WISHES]
        engine.submit([job for job, _ in together])
        first = together[0][1].get(timeout=SECONDS)  # the others come while this one is being written
        later = [job_of(decoder, **wish) for wish in WISHES]
        for job, _ in later:
            engine.submit([job])
        together[0][1].queue.appendleft(first)
        for job, events in [*together, *later]:
            assert texts_of(job, events) == alone(decoder, job)
    finally:
        engine.close()


def test_several_clients_at_a_time(engine):
    found, lock = [], threading.Lock()

    def client(number):
        job, events = job_of(engine.decoder, [2, 4 + number], 6, seed=number)
        engine.submit([job])
        texts = texts_of(job, events)
        with lock:
            found.append(texts == alone(engine.decoder, job))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [True] * 6


def held(engine):
    """A job whose first token waits for the event that is returned, and what it does then."""
    begun, goes_on = threading.Event(), threading.Event()
    job, events = job_of(engine.decoder, [2, 5], 8, num_return=2)

    def emit(event):
        begun.set()
        assert goes_on.wait(SECONDS)
        events.put(event)

    job.emit = emit
    engine.submit([job])
    assert begun.wait(SECONDS)
    return job, events, goes_on


def test_room_and_queue_are_limited():
    engine = engine_of(make("smlp"), most_texts=2, most_waiting=2)
    try:
        job, events, goes_on = held(engine)
        waiting = [job_of(engine.decoder, [2, 6], 2) for _ in range(2)]
        engine.submit([one for one, _ in waiting])
        assert engine.state()["waiting"] == 2
        with pytest.raises(BusyError, match="2 prompts are waiting, and 1 more would exceed 2"):
            engine.submit([job_of(engine.decoder, [2, 6])[0]])
        waiting[0][0].is_cancelled = True  # a client that left makes room
        later, later_events = job_of(engine.decoder, [2, 6], 2)
        engine.submit([later])
        goes_on.set()
        assert texts_of(job, events) == alone(engine.decoder, job)
        assert texts_of(later, later_events) == alone(engine.decoder, later)
        assert waiting[0][1].empty()
    finally:
        engine.close()


def test_what_there_is_room_for_does_not_count_as_waiting():
    engine = engine_of(make("smlp"), most_texts=4, most_waiting=1)
    try:
        _, _, goes_on = held(engine)  # two texts
        for _ in range(3):  # room for two of them, which the engine has not taken yet
            engine.submit([job_of(engine.decoder, [2, 6], 2)[0]])
        with pytest.raises(BusyError, match="1 prompts are waiting, and 1 more would exceed 1"):
            engine.submit([job_of(engine.decoder, [2, 6], 2)[0]])
        goes_on.set()
    finally:
        engine.close()


def test_a_cancelled_text_leaves_its_batch(engine):
    job, events, goes_on = held(engine)
    job.is_cancelled = True
    goes_on.set()
    after, after_events = job_of(engine.decoder, [2, 8], 3)
    engine.submit([after])
    texts_of(after, after_events)
    assert events.qsize() <= 2, "at most the tokens of the step in which it was cancelled"
    engine.close()
    assert engine.state() == {"writing": 0, "waiting": 0}


def test_a_prompt_that_nobody_waits_for_is_read_no_further():
    engine = engine_of(make("smlp"), most_texts=3)
    try:
        short, events = job_of(engine.decoder, [2, 5], 8)
        long, long_events = job_of(engine.decoder, [2, *[5] * 9], 1, num_return=2)
        after, after_events = job_of(engine.decoder, [2, 6], 1)
        emit, order = short.emit, []

        def leave(event):
            if not order:
                long.is_cancelled = True
                engine.submit([after])
            order.append("short")
            emit(event)

        after.emit = lambda event: (order.append("after"), after_events.put(event))
        short.emit = leave
        engine.submit([short, long])
        assert texts_of(short, events) == alone(engine.decoder, short)
        assert texts_of(after, after_events) == alone(engine.decoder, after)
        assert order.index("after") <= 3 and long_events.empty()
    finally:
        engine.close()


def nan(hidden_nH):
    return hidden_nH.new_full((len(hidden_nH), 40), torch.nan)


def wrong_key(hidden_nH):
    return {}["expert 7"]


@pytest.mark.parametrize(("project", "reason"), [(nan, "NaN"), (wrong_key, "unexpected KeyError in smlp/inference")])
def test_an_error_ends_its_batch_alone(engine, monkeypatch, project, reason):
    _, events, goes_on = held(engine)
    with monkeypatch.context() as broken:
        broken.setattr(engine.decoder, "project", project)
        goes_on.set()
        seen = []
        while not isinstance(event := events.get(timeout=SECONDS), Failed):
            seen.append(event)
    assert len(seen) == 2 and reason in event.reason
    after, after_events = job_of(engine.decoder, [2, 8], 3)
    engine.submit([after])
    assert texts_of(after, after_events) == alone(engine.decoder, after)


def test_closing_fails_what_is_left(engine):
    _, _, goes_on = held(engine)
    waits, waits_events = job_of(engine.decoder, [2, 6])
    engine.submit([waits])
    closing = threading.Thread(target=engine.close)
    closing.start()
    goes_on.set()
    closing.join(SECONDS)
    assert isinstance(waits_events.get(timeout=SECONDS), Failed)
    with pytest.raises(BusyError, match="shutting down"):
        engine.submit([waits])


@pytest.mark.parametrize("variant", ["smlp", "partial"])
def test_scores_of_a_prompt(variant, monkeypatch):
    monkeypatch.setattr("smlp.serving.engine._POSITIONS", 4)  # several pieces
    decoder = make(variant).double()
    prompt = [2, 7, 9, 11, 30, 8, 4, 5, 6, 10, 12]
    found = prompt_scores(decoder, prompt, 3)
    log_probs_nV = decoder(torch.tensor([prompt])).logits[0].detach().float().log_softmax(1)
    for place, (log_prob, top) in enumerate(zip(found.log_probs, found.top, strict=True)):
        if place < decoder.config.prefix_tokens:
            assert (log_prob, top) == (None, [])
            continue
        assert log_prob == pytest.approx(float(log_probs_nV[place, prompt[place + 1]]), abs=1e-5)
        best = log_probs_nV[place].topk(3)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [one for _, one in top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert isinstance(found, PromptScores) and len(found.log_probs) == 10
    torch.nn.init.constant_(decoder.norm.weight, torch.inf)
    with pytest.raises(UserError, match="next-token scores are NaN"):  # JSON has no NaN
        prompt_scores(decoder, prompt, 3)


def test_greedy_texts_are_those_of_generate(tmp_path):
    path, _ = write_checkpoint(tmp_path, SYMBOLS, max_tokens=16)
    model = load_language_model(path)
    engine = engine_of(model.decoder)
    try:
        for prompt in ("w3 w4", "w8"):
            (found,) = next(model.continuations([prompt], 6, greedy=True))
            job, events = job_of(model.decoder, [model.start_token, *model.tokenize(prompt)], 6, temperature=0)
            engine.submit([job])
            assert texts_of(job, events) == {0: found.tokens}
    finally:
        engine.close()
