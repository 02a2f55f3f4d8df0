"""All tiny architectures at matched FLOPs, on the same tokens in the same order: trained, evaluated, timed, one table.

    python scripts/compare_architectures.py --text kjv.txt --out runs/compare --updates 1000

Every 20th line of the text is held out. Every model is trained by fairseq-train with the same recipe and seed on the
same number of tokens; a run that is there is skipped and one that was stopped goes on. Beside the ten architectures,
gMLP-MoE is trained with four times the experts (smlp.txt, Table 7).

sMLP-partial and -leaky predict only what follows the prefix of a block. So that all models can be compared, the table
has the perplexity over those positions for every model, beside the one over all positions. The leaky model is also
scored without the tokens that it is to predict in sight.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import training_runs as tools
from training_runs import BATCH_SIZE, LOG_INTERVAL, TOKENS_PER_SAMPLE, TOKENS_PER_UPDATE

import smlp
from smlp.accounting.formula import flops_per_token, parameters
from smlp.checkpoint.load import LanguageModel
from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.evaluation.binarized import read_fairseq_tokens
from smlp.evaluation.blocks import block_log_probs, stepwise_log_probs
from smlp.evaluation.perplexity import measure_text
from smlp.nn.decoder import Decoder
from smlp.tokenizer import Vocabulary

HELD_OUT = 20
ARCHS = (
    "dense_lm_tiny", "gmlp_lm_tiny", "smlp_tiny", "smlp_partial_tiny", "smlp_leaky_tiny", "gmlp_moe_tiny",
    "gshard_lm_tiny", "switch_lm_tiny", "base_lm_tiny", "hash_lm_tiny",
)  # fmt: skip
MAX_SPREAD = 0.01
VALIDATIONS = 4
TIMED_UPDATES = 9
STEPWISE_BLOCKS = 16


COLUMNS = (
    "model", "per token, all positions", "per token, after the prefix", "per word, after the prefix",
    "forward MFLOPs per token, nominal", "realised / nominal", "dropped (over capacity)", "words per second",
    "peak memory (MiB)", "parameters (M)",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One model of the comparison."""

    name: str
    arch: str
    overrides: dict[str, int]

    def config(self, vocab_size: int) -> ModelConfig:
        """Its configuration, as fairseq-train builds it."""
        settings = {"vocab_size": vocab_size, "max_tokens": TOKENS_PER_SAMPLE, "dropout": 0.0}
        return smlp.preset(self.arch, **settings, **self.overrides)

    def options(self) -> list[str]:
        """Its options of fairseq-train beside ``--arch``."""
        return [word for key, value in self.overrides.items() for word in (f"--{key.replace('_', '-')}", str(value))]


RUNS = [Run(arch, arch, {}) for arch in ARCHS] + [Run("gmlp_moe_tiny, E=32", "gmlp_moe_tiny", {"num_experts": 32})]


def split_text(text: Path, folder: Path) -> None:
    """train.txt, and every 20th line as valid.txt (and test.txt, which the data tools want)."""
    try:
        lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"cannot read {text}: {error.strerror}") from None
    folder.mkdir(parents=True, exist_ok=True)
    held_out = lines[::HELD_OUT]
    kept = [line for number, line in enumerate(lines) if number % HELD_OUT]
    for name, part in (("train", kept), ("valid", held_out), ("test", held_out)):
        (folder / f"{name}.txt").write_text("".join(part), encoding="utf-8")


def check_flops(vocab_size: int) -> dict[str, float]:
    """Forward FLOPs per token of each model; those of the comparison must agree."""
    flops = {run.name: flops_per_token(run.config(vocab_size)) for run in RUNS}
    compared = [flops[arch] for arch in ARCHS]
    spread = max(compared) / min(compared) - 1
    if spread > MAX_SPREAD:
        raise UserError(f"forward FLOPs per token differ by {spread:.2%}, more than {MAX_SPREAD:.0%}: {flops}")
    print(
        f"      forward FLOPs per token: {min(compared) / 1e6:.3f} to {max(compared) / 1e6:.3f} M, spread {spread:.2%}"
    )
    return flops


def log_perplexities(model: LanguageModel, tokens: torch.Tensor) -> dict[str, float]:
    """Mean natural NLL per token: over all positions, and over those that every model predicts."""
    log_probs = block_log_probs(model.decoder, tokens).double()
    prefix = smlp.preset("smlp_partial", max_tokens=TOKENS_PER_SAMPLE).prefix_tokens
    after = torch.arange(len(tokens)) % TOKENS_PER_SAMPLE >= prefix
    return {"all": -float(log_probs.mean()), "after_prefix": -float(log_probs[after].mean())}


def stepwise_nll(model: LanguageModel, tokens: torch.Tensor) -> dict[str, float]:
    """Mean NLL of the first blocks after the prefix, in one pass and without later tokens in sight."""
    tokens = tokens[: STEPWISE_BLOCKS * TOKENS_PER_SAMPLE]
    inputs = torch.cat([torch.tensor([model.vocabulary.eos]), tokens[:-1]]).view(-1, TOKENS_PER_SAMPLE)
    prefix = model.decoder.config.prefix_tokens
    one_pass = block_log_probs(model.decoder, tokens).view(-1, TOKENS_PER_SAMPLE)[:, prefix:]
    stepwise = stepwise_log_probs(model.decoder, inputs, tokens.view(-1, TOKENS_PER_SAMPLE), first=prefix)
    return {"one_pass": -float(one_pass.double().mean()), "stepwise": -float(stepwise.double().mean())}


def time_updates(models: dict[str, Decoder], tokens: torch.Tensor) -> dict[str, float]:
    """Median seconds of an update (forward, backward, Adam) of each trained model on training text, interleaved."""
    optimizers = {name: torch.optim.Adam(model.train().parameters(), lr=1e-5) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(TIMED_UPDATES + 1):
        rows = tokens[number * TOKENS_PER_UPDATE :][: TOKENS_PER_UPDATE + 1]
        source, target = rows[:-1].view(BATCH_SIZE, -1), rows[1:]
        for name, model in models.items():
            start = time.perf_counter()
            output = model(source)
            loss = F.cross_entropy(output.logits.flatten(0, 1), target) + sum(output.aux_losses.values())
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if number > 0:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def routing_work(run: Path) -> dict[str, float]:
    """Means over the logged updates: work done beside the nominal, and the share of choices without a place."""
    lines = [json.loads(line) for line in (run / "router_health.jsonl").read_text().splitlines()]
    return {
        "realised": statistics.mean(line["work"]["ratio"] for line in lines),
        "dropped": statistics.mean(line["pooled"].get("drop_share_capacity", 0.0) for line in lines),
    }


def table(results: list[dict], words_per_token: float) -> str:
    """The table in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    for row in results:
        everything = "" if row["counts_prefix"] is False else f"{math.exp(row['nll']['all']):.2f}"
        after = row["nll"]["after_prefix"]
        lines.append(
            f"| {row['name']} | {everything} | {math.exp(after):.2f} | {math.exp(after / words_per_token):.1f} | "
            f"{row['flops'] / 1e6:.3f} | {row['realised']:.3f} | {row['dropped']:.1%} | "
            f"{row['words_per_second']:,.0f} | {row['peak_memory_mib']:,.0f} | {row['parameters'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="compare_architectures.py"
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file, a paragraph or verse a line")
    parser.add_argument("--out", type=Path, default=tools.ROOT / "runs" / "compare", help="default: runs/compare")
    parser.add_argument(
        "--updates", type=int, default=1000, help="of 1024 tokens, for each model (default: %(default)s)"
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="models trained at a time, sharing the cores")
    options = parser.parse_args()
    if options.updates < LOG_INTERVAL or options.jobs < 1:
        raise UserError(
            f"--updates must be at least {LOG_INTERVAL}, and --jobs 1, not {options.updates}, {options.jobs}"
        )
    out = options.out.resolve()
    text, data, logs = out / "text", out / "data", out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = {"text": str(options.text), "updates": options.updates, "vocab_size": options.vocab_size}
    tools.settle(out, settings, is_fresh=False)

    print("[1/5] text, vocabulary, binary files", flush=True)
    if not (data / "dict.txt").is_file():
        split_text(options.text, text)
        tools.make_data(text, out / "pieces", data, options.vocab_size, logs)
    vocab_size = len(Vocabulary.load(data / "dict.txt"))
    print(f"[2/5] {len(RUNS)} models, {options.updates} updates of {TOKENS_PER_UPDATE} tokens each")
    flops = check_flops(vocab_size)

    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.jobs))

    def train(run: Run) -> None:
        name = run.name.replace(", ", "_")
        log, alone = logs / f"train-{name}.log", options.jobs == 1
        trained = tools.train(
            run.name, run.arch, data, out / name, options.updates, VALIDATIONS, log, run.options(), alone
        )
        print(f"      {run.name}: {'trained' if trained else 'was trained, skipped'}", flush=True)

    print("[3/5] training through fairseq-train", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(train, RUNS))

    print("[4/5] evaluation", flush=True)
    tokens = torch.from_numpy(read_fairseq_tokens(data / "valid").tokens)
    words_per_token = measure_text(text / "valid.txt").num_words / len(tokens)
    results, decoders = [], {}
    for run in RUNS:
        folder = out / run.name.replace(", ", "_")
        model = smlp.load_pretrained(folder / "checkpoint_best.pt")
        decoders[run.name] = model.decoder
        nll = log_perplexities(model, tokens)
        prefix = model.decoder.config.prefix_tokens
        official = tools.eval_lm(run.name, data, folder, logs / f"eval-{run.name}.log")
        ours = nll["after_prefix" if prefix else "all"]
        if abs(official.total_nll / official.num_tokens - ours) > 1e-3:
            raise UserError(
                f"{run.name}: fairseq-eval-lm and block_log_probs disagree: {official} and {ours} per token"
            )
        row = {"name": run.name, "nll": nll, "counts_prefix": prefix == 0, "flops": flops[run.name]}
        row |= {"parameters": parameters(run.config(vocab_size)).total, **routing_work(folder)}
        row |= json.loads((folder / "usage.json").read_text())
        if prefix:
            row["stepwise"] = stepwise_nll(model, tokens)
        results.append(row)

    print("[5/5] timing, with nothing else running", flush=True)
    train_tokens = torch.from_numpy(read_fairseq_tokens(data / "train").tokens)
    seconds = time_updates(decoders, train_tokens)
    for row in results:
        row["words_per_second"] = TOKENS_PER_UPDATE * words_per_token / seconds[row["name"]]
    report = {
        "updates": options.updates,
        "tokens": options.updates * TOKENS_PER_UPDATE,
        "words_per_token": words_per_token,
    }
    report |= {"train_tokens": len(train_tokens), "valid_tokens": len(tokens)}
    (out / "result.json").write_text(json.dumps({**report, "results": results}, indent=2) + "\n")
    (out / "result.md").write_text(table(results, words_per_token) + "\n")
    print(f"\n{table(results, words_per_token)}\n")
    for row in results:
        if "stepwise" in row:
            seen, blind = (math.exp(row["stepwise"][key]) for key in ("one_pass", "stepwise"))
            print(
                f"{row['name']}: perplexity per token of the first {STEPWISE_BLOCKS} blocks {seen:.2f} in one pass, "
                f"{blind:.2f} without the tokens to be predicted in sight"
            )


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"smlp: error: {error}")
