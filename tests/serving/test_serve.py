"""``smlp serve``: its endpoints, OpenAI's client, a browser, and the command itself."""

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from browser import chromium
from running import REPOSITORY
from tiny_checkpoints import write_checkpoint

import smlp
from data_prep.tokenize.models import train_byte_level
from smlp.checkpoint.load import load_language_model
from smlp.cli.main import main
from smlp.cli.serve import _Full, _is_no_cancelled_request, _listener, _name_of
from smlp.inference.generation.continuations import banned_tokens
from smlp.inference.language_model import LanguageModel
from smlp.inference.scoring.candidates import drop_nothing
from smlp.text.tokenizer import Tokenizer, Vocabulary
from smlp.text.tokenizer_files import find_tokenizer

pytest.importorskip("starlette", reason="needs the extra serve")

import uvicorn
from starlette.testclient import TestClient

from smlp.serving.app import MOST_BYTES, make_app
from smlp.serving.completion_request import RequestReader
from smlp.serving.engine import BusyError, Engine

SYMBOLS = [f"w{number}" for number in range(36)]
SECONDS = 60  # until a test gives up
PROMPT = "w3 w4 w5"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path, _ = write_checkpoint(tmp_path_factory.mktemp("model"), SYMBOLS, max_tokens=16)
    return path


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_language_model(checkpoint)


@contextmanager
def application(model, api_key=None, most_waiting=8):
    drop_nothing(model.decoder)
    engine = Engine(model.decoder, model.tokenizer, banned_tokens(model.vocabulary), 8, most_waiting)
    reader = RequestReader("tiny", model.decoder.config, model.tokenizer, model.start_token, 12, 8, 9)
    try:
        yield make_app(engine, reader, api_key)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def client(model):
    with application(model) as app, TestClient(app) as found:
        yield found


def ask(client, **body):
    answer = client.post("/v1/completions", json=body)
    return answer.status_code, answer.json()


def events(client, **body):
    with client.stream("POST", "/v1/completions", json={"stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_model_is_named(client):
    (found,) = client.get("/v1/models").json()["data"]
    assert (found["id"], found["max_model_len"], found["max_tokens"]) == ("tiny", 16, 12)
    assert client.get("/v1/models/tiny").json() == found
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json() == {"status": "ok", "writing": 0, "waiting": 0}


def test_greedy_text_is_that_of_generate(client, model):
    status, found = ask(client, model="tiny", prompt=PROMPT, max_tokens=6, temperature=0)
    assert status == 200
    (choice,) = found["choices"]
    assert choice == {
        "index": 0, "text": model.generate(PROMPT, 6, greedy=True), "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    by_ids = ask(client, prompt=model.tokenize(PROMPT), max_tokens=6, temperature=0)[1]
    assert by_ids["choices"] == found["choices"]


def test_several_prompts_and_texts(client):
    prompts = [PROMPT, "w8"]
    _, found = ask(client, prompt=prompts, n=2, max_tokens=4, seed=7)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in found["choices"]]
    for number, prompt in enumerate(prompts):
        _, alone = ask(client, prompt=prompt, n=2, max_tokens=4, seed=7)
        assert [choice["text"] for choice in alone["choices"]] == texts[2 * number : 2 * number + 2]
    assert texts[0] != texts[1]
    without = {ask(client, prompt=PROMPT, max_tokens=8)[1]["choices"][0]["text"] for _ in range(6)}
    assert len(without) > 1, "without a seed, each request draws anew"


def test_more_texts_than_there_is_room_for_wait(client):
    prompts = [f"w{number}" for number in range(9)]
    status, found = ask(client, prompt=prompts, n=3, max_tokens=3, seed=7)  # 27 texts, 8 at a time
    assert status == 200
    texts = [choice["text"] for choice in found["choices"]]
    for number, prompt in enumerate(prompts):
        _, alone = ask(client, prompt=prompt, n=3, max_tokens=3, seed=7)
        assert [choice["text"] for choice in alone["choices"]] == texts[3 * number : 3 * number + 3]


@pytest.mark.parametrize("stop", [None, [f"{digit} x" for digit in (1, 2, 3, 5)]])  # the second holds texts back
def test_a_stream_says_the_same(client, stop):
    body = {"prompt": [PROMPT, "w8"], "n": 2, "max_tokens": 5, "seed": 3, "logprobs": 2, "stop": stop}
    whole = ask(client, **body)[1]["choices"]
    chunks = events(client, **body, stream_options={"include_usage": True})
    assert chunks.pop()["usage"]["completion_tokens"] == 20
    for choice in whole:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own] == [None] * 4 + ["length"]
        for name, values in choice["logprobs"].items():
            assert [value for one in own for value in one["logprobs"][name]] == values


@pytest.mark.parametrize("prompt", [PROMPT, " w3  w4\tw5"])
def test_log_probabilities(client, model, prompt):
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "logprobs": 4, "echo": True}
    (choice,) = ask(client, **body)[1]["choices"]
    assert choice["text"].startswith(PROMPT + " ")
    found = choice["logprobs"]
    ids = [model.start_token, *model.tokenize(choice["text"])]
    log_probs_nV = model.decoder(torch.tensor([ids])).logits[0].detach().log_softmax(1)
    want = [float(log_probs_nV[place, token]) for place, token in enumerate(ids[1:])]
    assert found["token_logprobs"] == pytest.approx(want, abs=1e-4)
    assert "".join(found["tokens"]) == choice["text"]
    pieces = zip(found["tokens"], found["text_offset"], strict=True)
    assert all(choice["text"][offset:].startswith(token) for token, offset in pieces)
    for place, top in enumerate(found["top_logprobs"]):
        assert list(top.values())[:4] == pytest.approx(log_probs_nV[place].topk(4).values.tolist(), abs=1e-4)
        assert top[found["tokens"][place]] == found["token_logprobs"][place] and len(top) <= 5
    (scored,) = ask(client, **{**body, "max_tokens": 0})[1]["choices"]
    assert scored["text"] == PROMPT
    assert scored["logprobs"]["token_logprobs"] == pytest.approx(want[:3], abs=1e-4)


def test_ids_may_end_within_a_character(tmp_path):
    for name, content in train_byte_level(["über dem Café"] * 5, 290).items():
        (tmp_path / name).write_bytes(content)
    symbols = len(json.loads((tmp_path / "encoder.json").read_text()))
    (tmp_path / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in range(symbols)))
    tokenizer = Tokenizer(Vocabulary.load(tmp_path / "dict.txt"), find_tokenizer([tmp_path]))
    sizes = {"embed_dim": 8, "ffn_dim": 8, "max_tokens": 16, "num_dense_layers": 1}
    decoder = smlp.build("gmlp_lm_tiny", vocab_size=len(tokenizer.vocabulary), **sizes).eval()
    with application(LanguageModel(decoder, tokenizer)) as app, TestClient(app) as client:
        body = {"prompt": tokenizer.encode("a 中")[:-1], "max_tokens": 4, "echo": True, "seed": 3}
        (plain,) = ask(client, **body)[1]["choices"]
        (choice,) = ask(client, **body, logprobs=1)[1]["choices"]
        # some of them end within a character
        body |= {"echo": False, "temperature": 2, "max_tokens": 5, "n": 8, "logprobs": 1}
        written = ask(client, **body)[1]["choices"]
        chunks = [chunk["choices"][0] for chunk in events(client, **body)]
    assert any(one["text"].endswith("\ufffd") for one in written)
    for one in written:
        assert "".join(one["logprobs"]["tokens"]) == one["text"]
        own = [chunk for chunk in chunks if chunk["index"] == one["index"]]
        assert [token for chunk in own for token in chunk["logprobs"]["tokens"]] == one["logprobs"]["tokens"]
    found = choice["logprobs"]
    assert choice["text"] == plain["text"] and choice["text"].startswith("a \ufffd")
    assert choice["text"].startswith("".join(found["tokens"]))
    pieces = zip(found["tokens"], found["text_offset"], strict=True)
    assert all(choice["text"][offset:].startswith(token) for token, offset in pieces)


def test_ends_of_texts(client, model):
    text = model.generate(PROMPT, 6, greedy=True)
    stop = text.split()[2]
    (choice,) = ask(client, prompt=PROMPT, max_tokens=6, temperature=0, stop=[stop])[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    streamed = events(client, prompt=PROMPT, max_tokens=6, temperature=0, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]
    full = ask(client, prompt=" ".join(SYMBOLS[:13]), max_tokens=12, temperature=0)[1]
    assert full["choices"][0]["finish_reason"] == "length"
    assert full["usage"]["completion_tokens"] == 3, "the context has 16 positions, and 14 are the prompt's"


REFUSED = {
    "no prompt": ({}, "prompt", "prompt is missing"),
    "a number": ({"prompt": 3}, "prompt", "prompt must be a text, ids, or a list"),
    "nothing": ({"prompt": []}, "prompt", "that is not empty"),
    "mixed": ({"prompt": ["w1", 2]}, "prompt", "must hold texts or lists of ids, got 2"),
    "padding": ({"prompt": [5, 1, 6]}, "prompt", "prompt holds the id of padding, 1"),
    "padding in a text": ({"prompt": "w1 <pad> w2"}, "prompt", "prompt holds the id of padding, 1"),
    "a bool": ({"prompt": [5, True, 99]}, "prompt", "must hold ids, got True"),
    "unknown id": ({"prompt": [99]}, "prompt", "from 0 to 39, got 99"),
    "too many lines": ({"prompt": "\n" * 16}, "prompt", "the prompt has 16 line breaks, each of them a token, and"),
    "too long": ({"prompt": "w1 " * 16}, "prompt", "17 tokens (start symbol included), and the model's context has 16"),
    "surrogate": ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    "many prompts": ({"prompt": [[99]] * 10}, "prompt", "10 prompts: at most 9 in a request"),
    "unknown key": ({"prompt": "w1", "tools": []}, "tools", "unknown key 'tools'"),
    "best_of": ({"prompt": "w1", "best_of": 3}, "best_of", "best_of is not available here"),
    "penalty": ({"prompt": "w1", "presence_penalty": 1.5}, "presence_penalty", "not available here"),
    "n": ({"prompt": "w1", "n": 9}, "n", "n must be from 1 to 8, got 9"),
    "greedy texts": ({"prompt": "w1", "n": 2, "temperature": 0}, "n", "would all be the same"),
    "tokens": ({"prompt": "w1", "max_tokens": 13}, "max_tokens", "from 0 to 12, got 13"),
    "no tokens": ({"prompt": "w1", "max_tokens": 0}, "max_tokens", "needs echo"),
    "half a token": ({"prompt": "w1", "max_tokens": 1.5}, "max_tokens", "must be a whole number, got 1.5"),
    "temperature": ({"prompt": "w1", "temperature": -1}, "temperature", "temperature must be 0 or from"),
    "hot": ({"prompt": "w1", "temperature": 10**400}, "temperature", "temperature is too large"),
    "text": ({"prompt": "w1", "temperature": "hot"}, "temperature", "temperature must be a number, got 'hot'"),
    "top_p": ({"prompt": "w1", "top_p": 0}, "top_p", "top_p must be in (0, 1]"),
    "logprobs": ({"prompt": "w1", "logprobs": 6}, "logprobs", "logprobs must be from 0 to 5, got 6"),
    "no logprobs": ({"prompt": "w1", "logprobs": -1}, "logprobs", "logprobs must be from 0 to 5, got -1"),
    "half a key": ({"prompt": "w1", "\ud800": 1}, "\\ud800", "unknown key '\\ud800'"),
    "no number": ({"prompt": "w1", "best_of": True}, "best_of", "best_of is not available here"),
    "no stream": ({"prompt": "w1", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    "usage": (
        {"prompt": "w1", "stream": True, "stream_options": {"include_usage": "yes"}},
        "include_usage",
        "include_usage must be true or false",
    ),
    "stops": ({"prompt": "w1", "stop": list("abcde")}, "stop", "stop has 5 texts: at most 4"),
    "empty stop": ({"prompt": "w1", "stop": ""}, "stop", "must not be empty"),
    "stop": ({"prompt": "w1", "stop": 3}, "stop", "stop must be a text or a list of texts, got 3"),
    "flag": ({"prompt": "w1", "stream": "yes"}, "stream", "stream must be true or false"),
    "echo": ({"prompt": "w1", "stream": True, "echo": True}, "stream", "stream and echo cannot be combined"),
    "options": ({"prompt": "w1", "stream_options": {"x": 1}}, "stream_options", "may only have include_usage"),
}


def test_as_many_texts_as_are_asked_for_are_the_best_of_them(client):
    body = {"prompt": "w1", "n": 2, "seed": 1, "max_tokens": 2}
    answers = [client.post("/v1/completions", json={**body, **more}) for more in ({}, {"best_of": 2}, {"best_of": 3})]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(client, name):
    body, key, words = REFUSED[name]
    answer = client.post("/v1/completions", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", key)
    assert words in error["message"]


def test_other_errors(client):
    for content, words in ((b"{", "is not JSON"), (b"[]", "must be a JSON object"), (b"[" * 10**5, "is not JSON")):
        answer = client.post("/v1/completions", content=content)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    answer = client.post("/v1/completions", content=b" " * (MOST_BYTES + 1))
    assert answer.status_code == 400 and "more than 4,194,304 bytes" in answer.json()["error"]["message"]
    status, found = ask(client, model="gpt", prompt="w1")
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    assert ask(client, model="", prompt="w1")[0] == 404
    assert "use /v1/completions" in client.post("/v1/chat/completions", json={}).json()["error"]["message"]
    assert client.get("/nothing").status_code == 404 and client.get("/v1/completions").status_code == 405


def test_a_client_that_leaves_within_its_request(model):
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    with application(model) as app:
        asyncio.run(app(scope, receive, send))  # no error, which uvicorn would log with its traceback
    assert sent[0]["status"] == 499


def test_a_key_is_asked_for(model):
    with application(model, api_key="secret") as app, TestClient(app) as client:
        assert client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            for answer in (client.get("/v1/models", headers=headers), client.post("/v1/completions", headers=headers)):
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer"):
            assert client.get("/v1/models", headers={"Authorization": f"{scheme} secret"}).status_code == 200


def test_a_full_queue_says_so(model, monkeypatch):
    with application(model, most_waiting=1) as app, TestClient(app) as client:
        answer = client.post("/v1/completions", json={"prompt": ["w1", "w2"], "max_tokens": 1})
        assert answer.status_code == 200, "nobody waits before them"

        def full(engine, jobs):
            raise BusyError(f"1 prompts are waiting, and {len(jobs)} more would exceed 1: try later")

        monkeypatch.setattr(Engine, "submit", full)
        answer = client.post("/v1/completions", json={"prompt": ["w1", "w2"]})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert "2 more would exceed 1" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def address(model):
    """The address of a real server."""
    with application(model) as app:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        started, startup = threading.Event(), server.startup

        async def told(sockets=None):
            await startup(sockets=sockets)
            started.set()

        server.startup = told
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert started.wait(SECONDS)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join(SECONDS)


def test_the_official_client(address, model):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client:
        assert [found.id for found in client.models.list()] == ["tiny"]
        found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=1)
        assert found.choices[0].text == model.generate(PROMPT, 5, greedy=True)
        assert len(found.choices[0].logprobs.token_logprobs) == found.usage.completion_tokens == 5
        stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == found.choices[0].text
        with pytest.raises(openai.BadRequestError, match="context has 16"):
            client.completions.create(model="tiny", prompt="w1 " * 20)
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            client.completions.create(model="other", prompt="w1")


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_place(address, model, monkeypatch, streams):
    openai = pytest.importorskip("openai")
    jobs, goes_on, project = [], threading.Event(), model.decoder.project

    def waits(hidden):
        assert goes_on.wait(SECONDS)
        return project(hidden)

    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda engine, found: (jobs.extend(found), submit(engine, found)))
    monkeypatch.setattr(model.decoder, "project", waits)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=1, max_retries=0)
    with client, pytest.raises(openai.APITimeoutError):
        for _ in client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, stream=streams):
            pass
    end = time.monotonic() + SECONDS
    while not jobs[0].is_cancelled and time.monotonic() < end:
        time.sleep(0.01)
    goes_on.set()
    assert jobs[0].is_cancelled


@pytest.mark.slow
def test_the_page_in_a_browser(address, model):
    sync_api = pytest.importorskip("playwright.sync_api")
    with chromium() as window:
        page = window.new_page()
        page.set_default_timeout(SECONDS * 1000)
        sync_api.expect.set_options(timeout=SECONDS * 1000)
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        sync_api.expect(page.locator("#model")).to_have_text("tiny, context of 16 tokens")
        sync_api.expect(page.locator("#max_tokens")).to_have_value("12")
        page.fill("#prompt", PROMPT)
        page.fill("#max_tokens", "5")
        page.fill("#temperature", "0")
        page.keyboard.press("Control+Enter")
        sync_api.expect(page.locator("#say")).to_contain_text("5 tokens in")
        assert page.inner_text("#out") == PROMPT + model.generate(PROMPT, 5, greedy=True)
        page.fill("#max_tokens", "99")
        page.click("#write")
        sync_api.expect(page.locator("#say")).to_contain_text("from 0 to 12, got 99")
        assert not errors


def test_the_command(checkpoint, tmp_path):
    """Also when another file is copied over the checkpoint meanwhile."""
    own = shutil.copytree(checkpoint.parent, tmp_path / "own") / checkpoint.name
    command = [sys.executable, "-m", "smlp", "serve", str(own), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        watch = threading.Timer(SECONDS, process.kill)
        try:
            watch.start()
            line = process.stdout.readline()
            found = re.search(r"at http://127\.0\.0\.1:(\d+)/", line)
            assert found, line + process.stderr.read()
            own.write_bytes(b"")
            words = json.dumps({"prompt": "w1", "max_tokens": 2}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{found[1]}/v1/completions", words)
            request.add_header("Content-Type", "application/json")
            assert json.load(urllib.request.urlopen(request, timeout=SECONDS))["choices"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0
        finally:
            watch.cancel()
            process.kill()
        assert process.stderr.read() == ""


def test_half_precision(checkpoint, monkeypatch):
    answers = []

    def answer(server, sockets):
        with TestClient(server.config.app) as client:
            body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
            answers.append(ask(client, **body)[1]["choices"][0]["logprobs"]["token_logprobs"])

    monkeypatch.setattr(uvicorn.Server, "run", answer)
    for dtype in ("fp32", "bf16"):
        assert main(["serve", str(checkpoint), "--port", "0", "--device", "cpu", "--dtype", dtype]) == 0
    exact, half = answers
    assert half != exact and half == pytest.approx(exact, rel=0.02)


def test_a_port_is_taken_before_the_model_is_loaded(checkpoint, capsys):
    with _listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert main(["serve", str(checkpoint), "--port", str(port)]) == 1
    assert f"--host 127.0.0.1 --port {port}: cannot listen there: Address already in use" in capsys.readouterr().err


def test_bad_options(checkpoint, tmp_path, capsys):
    encoder, _ = write_checkpoint(tmp_path, SYMBOLS, arch="gmlp_mlm_tiny", num_sparse_layers=0)
    for words, message in (
        (["nothing.pt"], "there is no checkpoint nothing.pt"),
        ([encoder], "smlp serve needs a language model"),
        ([checkpoint, "--host", "no.such.host.invalid"], "--host no.such.host.invalid --port 0: cannot listen there: "),
        ([checkpoint, "--max-texts", "0"], "--max-texts must be at least 1, got 0"),
        ([checkpoint, "--name", "two\nlines"], "--name must be one line of printable characters, got 'two\\nlines'"),
    ):
        assert main(["serve", *map(str, words), *([] if "--port" in words else ["--port", "0"])]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("key", ["abc\n", " abc", "schl\u00fcssel", "\udcff", "a\nb"])
def test_a_key_that_no_request_can_hold(checkpoint, key, monkeypatch, capsys):
    monkeypatch.setenv("SMLP_API_KEY", key)
    assert main(["serve", str(checkpoint), "--port", "0"]) == 1
    assert "SMLP_API_KEY must be printable ASCII without spaces or line ends" in capsys.readouterr().err


def test_a_name_is_text_whatever_the_folder_is_called():
    assert _name_of(Path("/models/caf\udce9/checkpoint_best.pt")) == "caf\\udce9"
    assert _name_of(Path("/models/caf\u00e9.safetensors")) == "caf\u00e9"


def test_a_server_without_descriptors_says_so_once_in_a_while(monkeypatch):
    now, full = [0.0], _Full()
    monkeypatch.setattr("smlp.cli.serve.time.monotonic", lambda: now[0])

    def shown(message, kind=OSError):
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), (kind, kind("x"), None))
        return full.filter(record), record.getMessage(), record.exc_info

    full_message = "no more connections can be opened: see ulimit -n"
    assert shown("socket.accept() out of system resource\nsocket: x") == (True, full_message, None)
    assert not shown("socket.accept() out of system resource")[0]
    assert shown("Task exception was never retrieved")[0]
    in_callback = "Exception in callback BaseSelectorEventLoop._start_serving(<function Server.startup"
    assert shown(in_callback)[0] and not shown(in_callback, ValueError)[0]
    now[0] = 61.0
    assert shown("socket.accept() out of system resource")[0]


def test_requests_that_the_end_cuts_off_leave_no_traceback():
    def record(error):
        return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "", (), (type(error), error, None))

    assert not _is_no_cancelled_request(record(asyncio.CancelledError()))
    assert _is_no_cancelled_request(record(ValueError()))
    assert _is_no_cancelled_request(logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "", (), None))
