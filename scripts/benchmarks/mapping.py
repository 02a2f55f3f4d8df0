"""A model whose weights stay in its file of 3 GB against one whose weights are copied: own memory and time."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import smlp
from benchmarks.report import Row, compared
from benchmarks.settings import Settings
from smlp.checkpoint.export import export_of, prefix_of, write_export
from smlp.checkpoint.lazy import HeldTensor
from smlp.config.presets import preset
from smlp.nn.decoder import Decoder

SECTION = "Weights that stay in their file"
WIDTH, HIDDEN, VOCABULARY, EXPERTS, CONTEXT, TOKENS = 1024, 2048, 8192, 64, 128, 8


def rows(settings: Settings) -> Iterator[Row]:
    """Compare loading a model and reading a few tokens, each in a process of its own."""
    width, hidden, vocabulary, experts = settings.sized(WIDTH, HIDDEN, VOCABULARY, EXPERTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        _write(path, width, hidden, vocabulary, experts)
        what = f"smlp_hash, {experts} experts, a file of {path.stat().st_size / 2**20:.0f} MiB, {TOKENS} tokens"
        found = {}
        for mapped in (True, False):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found[mapped] = pool.submit(_load_and_read, path, mapped).result()
    (own, seconds), (copied, seconds_copied) = found[True], found[False]
    yield Row(SECTION, f"{what}, own memory", own, "copied", copied, "MiB", copied / own, 4.0)
    yield compared(SECTION, f"{what}, checksum included", seconds, "copied", seconds_copied)


def _write(path: Path, width: int, hidden: int, vocabulary: int, experts: int) -> None:
    """Write an export with random weights."""
    layers = {"num_dense_layers": 3, "num_sparse_layers": 3, "num_experts": experts}
    config = preset("smlp_hash", embed_dim=width, ffn_dim=hidden, max_tokens=CONTEXT, vocab_size=vocabulary, **layers)
    weights = {prefix_of(config) + name: HeldTensor(tensor) for name, tensor in Decoder(config).state_dict().items()}
    words = "".join(f"w{number} 1\n" for number in range(vocabulary - 4)).encode()
    files = {"dict.txt": HeldTensor(torch.frombuffer(bytearray(words), dtype=torch.uint8))}
    state = {"model": weights, "cfg": {"model": {"_name": "smlp_hash", "tokens_per_sample": CONTEXT}, "task": {}}}
    with path.open("wb") as file:
        write_export(file, export_of(state, config, 0, files), as_safetensors=True)


def _load_and_read(path: Path, mapped: bool) -> tuple[float, float]:
    """Return the most MiB of own memory, without pages of the file, that this added to the process; and seconds."""
    before, peak, is_done, start = _own(), 0.0, threading.Event(), time.perf_counter()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.001):
            peak = max(peak, _own())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = smlp.load_pretrained(path, mapped=mapped).decoder
        with torch.inference_mode():
            model(torch.arange(4, 4 + TOKENS).unsqueeze(0))
    finally:
        is_done.set()
        watcher.join()
    return peak - before, time.perf_counter() - start


def _own() -> float:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
