"""Time of an update, models in turn: ``python -m smlp.experiments.speed OUT ROUNDS`` writes ``speed.json``.

Runs that share a machine slow each other down, and a machine's speed changes from day to day. So the trained models
take turns at a few updates on the same training text; medians over the rounds can be compared with each other. The
first update of a turn is not counted: it finds the caches full of the other models' weights, which slows down large
models most and does not happen in training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smlp.checkpoint.load import load_pretrained
from smlp.costs.profiled import training_loss
from smlp.errors import UserError
from smlp.experiments.folder import DONE, Folder, RunFolder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.spec import option_words
from smlp.fairseq_compat.startup import KeptMemory, keep_freed_memory
from smlp.launch.environment import environment
from smlp.nn.decoder import Decoder
from smlp.nn.encoder import Encoder
from smlp.text.binarized import read_fairseq_tokens

HOW = (
    "forward, backward and Adam in a plain loop, models in turn, some updates each of which the first is not counted, "
    "with no run of the experiment at the same time"
)
#: updates of a model's turn, of which the first is not counted
UPDATES_IN_TURN = 4
_LEARNING_RATE = 1e-5  # so small that routing hardly changes


def dtype_of(words: Sequence[str]) -> torch.dtype:
    """Return the dtype that these fairseq-train options select."""
    if "--bf16" in words or "--memory-efficient-bf16" in words:
        return torch.bfloat16
    if "--fp16" in words or "--memory-efficient-fp16" in words:
        return torch.float16
    return torch.float32


def dtype_of_run(run: RunFolder, recipe: Sequence[str]) -> torch.dtype:
    """Return the dtype that a run was trained in; one of an older version has no record, but its model's recipe."""
    made_with = run.state().get("made_with")
    return dtype_of(recipe if made_with is None else option_words(made_with))


class TimedUpdates:
    """Timed updates of one model in a plain loop, without fairseq.

    With 16 bits, weights and moments are kept in 32 bits as well, as in fairseq's training.

    Args:
        model: a decoder or an encoder; its weights change.
        device: on which it computes.
        dtype: in which it computes; losses are float32.
        learning_rate: of Adam.
    """

    def __init__(self, model: Decoder | Encoder, device: str, dtype: torch.dtype, learning_rate: float) -> None:
        self.model, self.device = model.to(device, dtype).train(), device
        self.weights = list(self.model.parameters())
        #: parameters for Adam, in float32: squared gradients would underflow in float16
        self.masters = (
            [weight.detach().float().requires_grad_() for weight in self.weights] if dtype.itemsize == 2 else []
        )
        # in one kernel, as in training (smlp/fairseq_compat/adam.py)
        self.optimizer = torch.optim.Adam(self.masters or self.weights, lr=learning_rate, fused=True)
        #: seconds of each update
        self.seconds: list[float] = []

    def update(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Do one update with batches of tokens (B, T) and their targets."""
        start = time.perf_counter()
        for source_BT, target_BT in batches:
            training_loss(self.model, source_BT, target_BT).backward()
        for master, weight in zip(self.masters, self.weights, strict=False):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)


def time_models(folder: Folder, rounds: int, kept_memory: KeptMemory | None = None) -> dict[str, Any]:
    """Return what ``speed.json`` holds.

    Args:
        folder: of an experiment with trained models.
        rounds: turns of each model that count.
        kept_memory: of this process, if it keeps freed memory.

    Raises:
        UserError: data or a checkpoint cannot be read.
    """
    experiment, data = read_json(folder.experiment), read_json(folder.data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_size, width = experiment["batch_size"], experiment["tokens_per_sample"]
    tokens = torch.from_numpy(read_fairseq_tokens(Path(data["data"].split(":")[0]) / "train").tokens)
    models = {
        model["name"]: TimedUpdates(
            load_pretrained(run.last_checkpoint()).core, device, dtype_of_run(run, model["recipe"]), _LEARNING_RATE
        )
        for model in experiment["models"]
        if (run := _trained(folder, model, experiment)) is not None
    }
    began, computed = time.perf_counter(), time.process_time()
    stretch, num_updates = batch_size * width, (rounds + 1) * UPDATES_IN_TURN
    places = torch.arange(num_updates * stretch + 1)
    text = tokens[places % len(tokens)].to(device)  # repeats a shorter text
    batches = [
        (text[first : first + stretch], text[first + 1 : first + 1 + stretch])
        for first in range(0, num_updates * stretch, stretch)
    ]
    for first in range(0, num_updates, UPDATES_IN_TURN):
        for model in models.values():
            for source, target in batches[first : first + UPDATES_IN_TURN]:
                model.update([(source.view(batch_size, width), target.view(batch_size, width))])
            if kept_memory is not None:
                kept_memory.after_update()
    return {
        "models": {
            name: {"seconds_per_update": _of_turns(model.seconds)[1:], "tokens_per_update": batch_size * width}
            for name, model in models.items()
        },
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "how": HOW,
        "core_share": (time.process_time() - computed) / (time.perf_counter() - began) / torch.get_num_threads(),
        "environment": environment(),
    }


def _of_turns(seconds: Sequence[float]) -> list[float]:
    """Return the mean time of an update in each turn, its first update aside."""
    turns = (seconds[first + 1 : first + UPDATES_IN_TURN] for first in range(0, len(seconds), UPDATES_IN_TURN))
    return [sum(turn) / len(turn) for turn in turns]


def _trained(folder: Folder, model: dict[str, Any], experiment: dict[str, Any]) -> RunFolder | None:
    """Return the run of the first seed that is done; None for a model without one."""
    runs = (folder.run(f"runs/{model['folder']}-s{seed}") for seed in experiment["seeds"])
    return next((run for run in runs if run.state()["state"] == DONE), None)


def main(words: list[str]) -> None:
    """Run with the arguments OUT and ROUNDS."""
    out, rounds = words
    kept_memory = None if torch.cuda.is_available() else keep_freed_memory()  # as in training
    folder = Folder(Path(out))
    write_json(folder.speed, time_models(folder, int(rounds), kept_memory))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"smlp: error: {error}")
