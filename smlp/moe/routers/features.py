"""Routing of features: each feature of a sequence, seen as a vector over positions, chooses an expert.

Source: Yu et al., 2022, section 3.2.2 (equation 5) and appendix B (equation 6).

Letters: ``B`` sequences, ``H`` features, ``L`` positions that the router reads, ``E`` experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smlp.moe.routers.routing import gate_logits
from smlp.ops import balanced_assignments
from smlp.parallel.spans import ASSIGNMENT, stage


class FeatureRouter(nn.Module):
    """Scores ``v @ W_r`` of feature vectors, in float32; weight = softmax probability of the chosen expert.

    Args:
        num_positions: positions that W_r is built for: the prefix, or all T.
        num_experts: E.
    """

    def __init__(self, num_positions: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, num_positions))
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(num_positions**-0.5), num_positions**-0.5)

    def forward(self, v_BHL: Tensor, expert_BH: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts.

        Args:
            v_BHL: feature vectors over the positions read, (B, H, L); fewer than W_r has use its leading ones.
            expert_BH: a decision to keep to, (B, H); decided anew by default.

        Returns:
            Experts (B, H), their probabilities (B, H), and the scores (B, H, E).

        Raises:
            FloatingPointError: scores are NaN.
        """
        logits_BHE = gate_logits(v_BHL, self.weight[:, : v_BHL.size(2)])
        if expert_BH is None:
            with torch.no_grad(), stage(ASSIGNMENT):
                expert_BH = balanced_assignments(logits_BHE)
        probability_BH = logits_BHE.softmax(dim=2).gather(2, expert_BH.unsqueeze(2)).squeeze(2)
        return expert_BH, probability_BH, logits_BHE
