"""One check or measurement of ``scripts/gpu/steps.py``: python scripts/gpu/checks.py NAME --device DEVICE --out DIR.

Every check compares the device with float64 or with the CPU, ends with one line that says what it found, and with
status 0, 1 (wrong) or 3 (it needs a GPU or a package that is not there).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import smlp
from smlp.config.presets import PRESETS
from smlp.evaluation.curves import read_training_log
from smlp.ops import causal_spatial_projection, expert_feed_forward
from smlp.ops.fast_paths import FUSED_DTYPES, reference_ops, runs_triton
from smlp.ops.tolerances import SHARE, largest_share

SKIPPED = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UPDATES = 20
#: sequences, tokens, heads and width of timed projections, and how often each is repeated
LAUNCHED = [
    *((16, 1024, heads, 2048 // heads) for heads in (1, 16)),
    *((16, 1024, 32, 32), (16, 1024, 4, 256), (8, 2048, 1, 2048), (16, 512, 1, 2048), (16, 256, 1, 2048)),
    *((2, 1024, 1, 2048), (64, 128, 1, 384)),
]
REPLAYS = 20
#: largest relative difference of a loss between device and CPU, float32, over the first updates and over all
FIRST_AGREEMENT, AGREEMENT = 1e-4, 2e-2
SMALL = {"vocab_size": 200, "max_tokens": 64, "embed_dim": 64, "ffn_dim": 128, "dropout": 0.0}
TRAINING = shlex.split(
    "--task language_modeling --tokens-per-sample 128 --batch-size 8 --optimizer adam --lr 2e-3 --clip-norm 1.0 "
    "--dropout 0 --no-epoch-checkpoints --log-format json --log-interval 1 --num-workers 0 --seed 1"
)


class Skipped(Exception):
    """The check needs something that is not there."""


class Wrong(Exception):
    """The check found a difference."""


def kernels(device: str, out: Path) -> str:
    """Compare the causal spatial projection, outputs and every gradient, in each dtype with float64."""
    worst: dict[str, float] = {}
    for dtype, (tokens, heads, width), gated in itertools.product(
        DTYPES, [(128, 1, 96), (257, 3, 33), (512, 16, 64), (1024, 32, 32)], (False, True)
    ):
        inputs = _drawn(device, dtype, (2, tokens, heads, width), (heads, tokens, tokens), (heads, tokens))
        inputs[1] = (inputs[1].detach() / tokens).requires_grad_()
        if gated:
            inputs += _drawn(device, dtype, (2, tokens, heads, width))
        name = str(dtype).removeprefix("torch.")
        ours = _by_kernels if runs_triton(torch.device(device)) and dtype in FUSED_DTYPES else None
        share = _share(lambda *given: causal_spatial_projection(*given[:3], 0, *given[3:]), inputs, dtype, device, ours)
        worst[name] = max(worst.get(name, 0.0), share)
    used = "Triton" if runs_triton(torch.device(device)) else "torch"
    return f"{used}; largest share of the allowed difference: {_shown(worst)}"


def experts(device: str, out: Path) -> str:
    """Compare the experts' networks with equal and unequal loads, outputs and every gradient, with float64."""
    worst: dict[str, float] = {}
    for dtype, counts in itertools.product(DTYPES, ([64] * 8, [100, 0, 3, 1, 200, 64, 80, 64])):
        width, hidden, number = 64, 256, len(counts)
        shapes = ((width,), (width,), (hidden, width), (hidden,), (width, hidden), (width,))
        x, *weights = _drawn(device, dtype, (sum(counts), width), *((number, *shape) for shape in shapes))
        weights = [(weight.detach() / 8).requires_grad_() for weight in weights]

        def feed_forward(x: Tensor, gain: Tensor, offset: Tensor, *rest: Tensor, counts: list[int] = counts) -> Tensor:
            return expert_feed_forward(x, counts, (gain, offset), *rest)

        name = str(dtype).removeprefix("torch.")
        share = _share(feed_forward, [x, *weights], dtype, device, roundings=4)
        worst[name] = max(worst.get(name, 0.0), share)
    return f"largest share of the allowed difference: {_shown(worst)}"


def losses(device: str, out: Path) -> str:
    """Compare the losses of 20 updates of every tiny language model and encoder, in float32, with the CPU's."""
    archs = [arch for arch in PRESETS if arch.endswith("_tiny")]
    report: dict[str, list[float]] = {}
    far = {}
    for arch in archs:
        here, there = (_losses_of(arch, place) for place in (device, "cpu"))
        shares = [abs(a - b) / abs(b) for a, b in zip(here, there, strict=True)]
        report[arch] = here
        if max(shares[:3]) > FIRST_AGREEMENT or max(shares) > AGREEMENT or not here[-1] < here[0]:
            far[arch] = f"{max(shares[:3]):.1e}, {max(shares):.1e}"
    (out / "losses.json").write_text(json.dumps(report) + "\n")
    if far:
        raise Wrong(f"of {len(archs)} architectures differ (first three updates, all): {far}")
    return f"{len(archs)} architectures agree with the CPU"


def syncs(device: str, out: Path) -> str:
    """Count how often the CPU waits for the GPU in the forward pass of a block of each router."""
    _needs_gpu(device)
    found = {}
    for arch in ("smlp_tiny", "switch_lm_tiny", "gshard_lm_tiny", "hash_lm_tiny", "base_lm_tiny"):
        model = smlp.build(arch, **SMALL).to(device).eval()
        tokens_Bn = torch.randint(4, 200, (8, 64), device=device)
        with torch.no_grad():
            model(tokens_Bn)  # first use
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    model(tokens_Bn)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found[arch] = sum("synchroniz" in str(warning.message) for warning in caught)
    (out / "syncs.json").write_text(json.dumps(found) + "\n")
    return f"waits for the GPU in a forward pass: {found}"


def precision(device: str, out: Path) -> str:
    """Compare the loss after 30 updates in bf16 and, on a GPU, fp16 through fairseq with that of float32."""
    kinds = {"fp32": [], "bf16": ["--bf16"], **({"fp16": ["--fp16"]} if device == "cuda" else {})}
    runs = list(itertools.product(("smlp_tiny", "gmlp_lm_tiny", "switch_lm_tiny"), kinds))
    _data(out)
    with ThreadPool(max((os.cpu_count() or 1) // 2, 1)) as pool:  # of processes
        losses = pool.starmap(
            lambda arch, kind: _trained(out, f"precision-{arch}-{kind}", device, arch, 30, kinds[kind])[-1], runs
        )
    final = {f"{arch} {kind}": loss for (arch, kind), loss in zip(runs, losses, strict=True)}
    far = {
        name: f"{loss:.3f}"
        for name, loss in final.items()
        if abs(loss - final[f"{name.split()[0]} fp32"]) > 0.05 * final[f"{name.split()[0]} fp32"]
    }
    if far:
        raise Wrong(f"further than 5 % from float32: {far}")
    return f"{len(final)} runs within 5 % of float32"


def recomputation(device: str, out: Path) -> str:
    """Check that ``--checkpoint-activations`` through fairseq gives the same losses."""
    plain, again = (
        _trained(out, f"recomputation-{len(more)}", device, "smlp_tiny", 8, more)
        for more in ([], ["--checkpoint-activations"])
    )
    worst = max(abs(a - b) / b for a, b in zip(plain, again, strict=True))
    if worst > 1e-3:
        raise Wrong(f"losses differ by {worst:.1e}")
    return f"losses within {worst:.1e}"


def resume(device: str, out: Path) -> str:
    """Compare a run that stops after 6 of 12 updates and resumes with one that does not stop."""
    whole = _trained(out, "resume-whole", device, "smlp_tiny", 12, [])
    _trained(out, "resume-parts", device, "smlp_tiny", 6, ["--lr-scheduler", "fixed"])
    parts = _trained(out, "resume-parts", device, "smlp_tiny", 12, [], is_fresh=False)
    worst = max(abs(a - b) / a for a, b in zip(whole, parts, strict=True))
    if worst > 1e-3:
        raise Wrong(f"losses differ by {worst:.1e}")
    return f"losses within {worst:.1e}"


def fully_sharded(device: str, out: Path) -> str:
    """Train a dense model on two GPUs with ``--ddp-backend fully_sharded`` of fairscale."""
    _needs_gpu(device, 2)
    losses = _trained(out, "fully-sharded", device, "gmlp_lm_tiny", 8, ["--ddp-backend", "fully_sharded"])
    return f"losses {losses[0]:.3f} to {losses[-1]:.3f}"


def launches(device: str, out: Path) -> str:
    """Time a gated projection, forward and backward, by each choice of launch settings and by torch.

    The times are the GPU's own, of a recorded graph. They say which settings to keep in ``smlp/ops/triton_spatial.py``,
    and from how many multiplications on the kernel is worth choosing (``FUSED_MULTIPLICATIONS``). On a CPU, Triton's
    interpreter runs one small size.
    """
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    if importlib.util.find_spec("triton") is None:
        raise Skipped("needs Triton")
    from smlp.ops.triton_spatial import NUM_CHOICES, FusedProjection, prescribed

    sizes, dtype = LAUNCHED, torch.bfloat16
    if device == "cpu":
        sizes, dtype = [(1, 16, 1, 16)], torch.float32
    rows = []
    for num_seqs, tokens, heads, width in sizes:
        x, gate = _drawn(device, dtype, *2 * [(num_seqs, tokens, heads, width)])
        weight, bias = _drawn(device, dtype, (heads, tokens, tokens), (heads, tokens))
        given, grad = (x, weight, bias, gate), torch.ones_like(x)

        def by_torch(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
            with reference_ops():
                return causal_spatial_projection(x, weight, bias, 0, gate)

        def seconds(project: Callable[..., Tensor], given: Any = given, grad: Tensor = grad) -> float:
            return _recorded_seconds(lambda: torch.autograd.grad(project(*given), given, grad), device)

        row = {"sequences": num_seqs, "tokens": tokens, "heads": heads, "width": width, "torch": seconds(by_torch)}
        for number in range(NUM_CHOICES):
            with prescribed(number):
                row[f"choice {number}"] = seconds(FusedProjection.apply)
        row["chosen"] = seconds(FusedProjection.apply)
        rows.append(row)
        print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
        (out / "launches.json").write_text(json.dumps(rows, indent=1) + "\n")
    return (
        f"the kernel is faster than torch in {sum(row['chosen'] < row['torch'] for row in rows)} of {len(rows)} sizes"
    )


CHECKS: dict[str, Callable[[str, Path], str]] = {
    check.__name__: check
    for check in (kernels, experts, losses, syncs, precision, recomputation, resume, fully_sharded)
}
FIGURES: dict[str, Callable[[str, Path], str]] = {"launches": launches}


def _by_kernels(*given: Tensor) -> Tensor:
    """Return the causal spatial projection, of small sizes too, for which torch's products are chosen."""
    from smlp.ops.triton_spatial import FusedProjection

    return FusedProjection.apply(*given, *[None] * (4 - len(given)))


def _needs_gpu(device: str, number: int = 1) -> None:
    if device != "cuda" or torch.cuda.device_count() < number:
        raise Skipped("needs a GPU" if number == 1 else f"needs {number} GPUs")


def _drawn(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return normal numbers; the same on each device."""
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def _share(
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    dtype: torch.dtype,
    device: str,
    ours: Callable[..., Tensor] | None = None,
    roundings: int = 1,
) -> float:
    """Return the largest difference from float64 over the allowed one, of the output and of every gradient.

    Args:
        function: the operation; in float64, its reference.
        inputs: of both, in ``dtype``.
        dtype, device: of the inputs.
        ours: what computes the same as ``function``, by default itself.
        roundings: how often numbers are rounded between input and output, in units of one product.

    Raises:
        Wrong: it is above 1.
    """
    exact = [one.detach().double().requires_grad_() for one in inputs]
    got = (ours or function)(*inputs)
    (grad,) = _drawn(device, dtype, tuple(got.shape))
    with reference_ops():
        want = function(*exact)
        wanted = torch.autograd.grad(want, exact, grad.detach().double())
    given = torch.autograd.grad(got, inputs, grad.detach())
    allowed = roundings * SHARE[dtype]
    pairs = [(got, want), *zip(given, wanted, strict=True)]
    share = max(largest_share(a.detach(), b.detach()) for a, b in pairs) / allowed
    if not share <= 1:
        raise Wrong(f"{dtype}, shapes {[tuple(one.shape) for one in inputs]}: {share:.2f} of the allowed difference")
    return share


def _losses_of(arch: str, device: str) -> list[float]:
    """Return the losses of some updates of a small model on fixed tokens."""
    torch.manual_seed(0)
    # random numbers, which decide about second experts, are others on a GPU
    more = {"second_expert": "all"} if arch.startswith("gshard") else {}
    model = smlp.build(arch, **SMALL, **more).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(UPDATES):
        # tokens that are easy to predict, so that every model learns something
        first_B1 = torch.randint(4, 190, (8, 1), generator=generator)
        tokens_Bn = (4 + (first_B1 + torch.arange(SMALL["max_tokens"] + 1)) % 190).to(device)
        output = model(tokens_Bn[:, :-1])
        is_encoder = isinstance(output, Tensor)  # it sees all tokens: some of the next ones are among them
        logits_BnV, aux_losses = (output, {}) if is_encoder else (output.logits, output.aux_losses)
        loss = F.cross_entropy(logits_BnV.flatten(0, 1).float(), tokens_Bn[:, 1:].flatten())
        (loss + sum(aux_losses.values())).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def _recorded_seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds of a call: on a GPU those of a graph of its operations, without the time of their launches."""
    run()
    run()  # everything that is measured or compiled at first use
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph, (start, end) = torch.cuda.CUDAGraph(), (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        run()
    for number in range(REPLAYS + 2):
        if number == 2:
            start.record()
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS / 1e3


def _trained(
    out: Path, name: str, device: str, arch: str, updates: int, more: list[str], is_fresh: bool = True
) -> list[float]:
    """Train through fairseq's command line; return the losses of the updates."""
    if importlib.util.find_spec("fairseq") is None:
        raise Skipped("needs fairseq, which is not installed")
    folder = out / name
    if is_fresh:
        shutil.rmtree(folder, ignore_errors=True)
    place = ["--cpu"] if device == "cpu" else []
    words = [str(_data(out)), "--user-dir", str(Path(smlp.__file__).parent), *TRAINING, "--arch", arch, *place]
    words += ["--max-update", str(updates), "--save-dir", str(folder), "--log-file", str(folder / "train.log"), *more]
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-m", "fairseq_cli.train", *words], capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Wrong(f"{arch} {' '.join(more)}: status {done.returncode}: {last}")
    losses = [point.bits for point in read_training_log(folder / "train.log", name).train]
    if not all(map(math.isfinite, losses)):
        raise Wrong(f"{arch} {' '.join(more)}: a loss is not finite")
    return losses


def _data(out: Path) -> Path:
    """Make a little binary data, once."""
    from data_prep.binarize.shards import write_tokens

    folder = out / "data"
    if not (folder / "dict.txt").is_file():
        folder.mkdir(exist_ok=True)
        numbers = random.Random(0)
        for split, count in (("train", 400), ("valid", 20)):
            lines = [[*sorted(numbers.randrange(4, 104) for _ in range(127)), 2] for _ in range(count)]
            write_tokens(folder, split, np.concatenate(lines), np.full(count, 128), np.dtype(np.uint16))
        (folder / "dict.txt").write_text("".join(f"w{number} 1\n" for number in range(100)))
    return folder


def _shown(worst: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.2f}" for name, share in worst.items())


def main() -> int:
    """Run one check and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*CHECKS, *FIGURES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        print({**CHECKS, **FIGURES}[options.name](options.device, options.out))
    except (Wrong, smlp.UserError) as error:
        print(f"wrong: {error}")
        return 1
    except Skipped as error:
        print(f"skipped: {error}")
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
