"""A trained model's loss on held-out text: ``python -m smlp.experiments.scores OUT RUN`` writes ``scores.json``.

Perplexities of all models can only be compared on positions that every model predicts: sMLP-partial and -leaky leave
out the first positions of each block, which choose experts. So the loss is given over all positions and over those
after the longest prefix of any model of the experiment.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

from smlp.checkpoint.load import load_pretrained
from smlp.checkpoint.opened import open_checkpoint
from smlp.config import unflatten
from smlp.config.settings import DTYPES
from smlp.errors import UserError
from smlp.evaluation.curves import curve_of, log_records
from smlp.evaluation.masked import masked_nll
from smlp.evaluation.scoring import block_log_probs
from smlp.experiments.folder import Folder, RunFolder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.spec import MASKED
from smlp.experiments.speed import dtype_of_run
from smlp.inference.masked import MaskedLanguageModel
from smlp.text.binarized import read_fairseq_tokens

#: largest difference from fairseq's own validation, in nats per token; fairseq rounds losses to 0.001 bits
AGREEMENT = 2e-3
#: the same for training, and therefore validation, in 16 bits
HALF_AGREEMENT = 2e-2


def score_run(folder: Folder, run: RunFolder, device: str | None = None) -> dict[str, Any]:
    """Return what ``scores.json`` of a run holds.

    Raises:
        UserError: checkpoint or data are missing or damaged, or the result differs from fairseq's last validation.
    """
    experiment, data = read_json(folder.experiment), read_json(folder.data)
    prefix = max(unflatten(model["config"]).prefix_tokens for model in experiment["models"])
    num_updates = updates_of(run.last_checkpoint())
    if num_updates != experiment["updates"]:
        raise UserError(
            f"{run.last_checkpoint()} is of update {num_updates}, not of update {experiment['updates']}, the run's last"
        )
    words = next(model["recipe"] for model in experiment["models"] if model["name"] == run.state()["model"])
    precision = experiment.get("evaluation_dtype", "fp32")
    dtype = getattr(torch, DTYPES[precision])
    tolerance = AGREEMENT if dtype == dtype_of_run(run, words) == torch.float32 else HALF_AGREEMENT
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    score = _masked_scores if experiment.get("task") == MASKED else _scores
    model = load_pretrained(run.last_checkpoint()).to(device, dtype)
    subsets = score(model, experiment, data, run, prefix)
    for subset, own in subsets.items():
        if subset == experiment["evaluation_subsets"][0]:
            check_agreement(run, subset, num_updates, own["nll_own"], tolerance)
        del own["nll_own"]
    return {
        "subsets": subsets,
        "prefix": prefix,
        "checkpoint": run.last_checkpoint().name,
        "num_updates": num_updates,
        "dtype": precision,
    }


def _scores(model: Any, experiment: Any, data: Any, run: RunFolder, prefix: int) -> dict[str, dict[str, Any]]:
    """Return the losses of next tokens, by subset."""
    decoder = model.decoder
    own_prefix, width = decoder.config.prefix_tokens, decoder.config.max_tokens
    subsets = {}
    for subset in experiment["evaluation_subsets"]:
        tokens = torch.from_numpy(read_fairseq_tokens(Path(data["data"].split(":")[0]) / subset).tokens)
        log_probs = block_log_probs(decoder, tokens).double()
        position = torch.arange(len(tokens)) % width
        subsets[subset] = {
            "nll_all": None if own_prefix else _mean_nll(log_probs),
            "nll_after_prefix": _mean_nll(log_probs[position >= prefix]),
            "nll_own": _mean_nll(log_probs[position >= own_prefix]),
            "tokens": len(tokens),
            "words": data["splits"][subset]["words"],
        }
    return subsets


def _masked_scores(model: Any, experiment: Any, data: Any, run: RunFolder, prefix: int) -> dict[str, dict[str, Any]]:
    """Return the losses of masked tokens, by subset; there are none per word."""
    assert isinstance(model, MaskedLanguageModel), "it was trained on masked tokens"
    options = open_checkpoint(run.last_checkpoint()).state["cfg"]["task"]
    subsets = {}
    for subset in experiment["evaluation_subsets"]:
        nll, count = masked_nll(model, options, data["data"].split(":")[0], subset, 4 * experiment["batch_size"])
        subsets[subset] = {"nll_all": nll, "nll_after_prefix": nll, "nll_own": nll, "tokens": count, "words": None}
    return subsets


def updates_of(checkpoint: Path) -> int:
    """Return the update that a checkpoint was saved after."""
    return int(open_checkpoint(checkpoint).state["optimizer_history"][-1]["num_updates"])


def check_agreement(run: RunFolder, subset: str, num_updates: int, nll: float, tolerance: float) -> None:
    """Compare a loss with the training's validation on it after its last update, unless the run had diverged by then.

    Raises:
        UserError: they differ by more than the tolerance.
    """
    valid = curve_of(log_records(run.log), run.path.name, subset).valid
    said = {point.num_updates: point.bits * math.log(2) for point in valid}.get(num_updates)
    if said is not None and abs(said - nll) > tolerance:
        raise UserError(
            f"{run.path}: {nll:.4f} nats per token on {subset}, but the last validation in training, after update "
            f"{num_updates}, gave {said:.4f}"
        )


def _mean_nll(log_probs: torch.Tensor) -> float:
    return -float(log_probs.mean())


def main(words: list[str]) -> None:
    """Run with the arguments OUT and RUN, the folder of a run in OUT."""
    out, name = words
    run = Folder(Path(out)).run(name)
    write_json(run.scores, score_run(Folder(Path(out)), run))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"smlp: error: {error}")
