"""The loss of a masked language model on held-out text, over the same masked tokens as in every validation.

Letters: ``M`` masked tokens of a batch, ``V`` vocabulary.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from smlp.inference.masked import MaskedLanguageModel


@torch.inference_mode()
def masked_nll(
    model: MaskedLanguageModel, options: Mapping[str, Any], data: str, subset: str, batch_size: int = 64
) -> tuple[float, int]:
    """Return the mean negative log-likelihood of the masked tokens of a subset, in nats, and their number.

    fairseq's task cuts the text and draws the masks (:func:`smlp.fairseq_compat.data.held_out_masks`).

    Args:
        model: with the dictionary of the data.
        options: of the task ``masked_lm``, as a checkpoint has them.
        data: folder of binary data.
        subset: such as ``valid``.
        batch_size: texts at a time.

    Raises:
        UserError: the data are missing or damaged.
    """
    from smlp.fairseq_compat.command_line import load_plugin

    load_plugin()
    from fairseq.tasks.masked_lm import MaskedLMTask

    task = MaskedLMTask.setup_task(argparse.Namespace(**{**options, "data": data}))
    task.load_dataset(subset)
    dataset, device = task.datasets[subset], model.encoder.embedding.weight.device
    dataset.set_epoch(1)  # as fairseq does for every validation; the masks depend on it
    total, count = 0.0, 0
    order = dataset.ordered_indices()  # by length: little is padded
    for start in range(0, len(order), batch_size):
        sample = dataset.collater([dataset[int(index)] for index in order[start : start + batch_size]])
        target_Bn = sample["target"].to(device)
        masked_Bn = target_Bn != task.source_dictionary.pad()
        logits_MV = model(sample["net_input"]["src_tokens"].to(device), masked_Bn)
        total += float(F.cross_entropy(logits_MV.float(), target_Bn[masked_Bn], reduction="sum"))
        count += int(masked_Bn.sum())
    return total / count if count else math.nan, count
