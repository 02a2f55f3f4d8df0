"""What a command imports before its first update (:mod:`smlp.fairseq_compat.startup`)."""

from running import run_python

PROGRAM = """
import sys
from smlp.fairseq_compat.command_line import load_plugin

load_plugin()
import torch
from fairseq.optim.adam import Adam  # as fairseq-train uses it

weight = torch.nn.Parameter(torch.ones(3))
optimizer = Adam([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
assert weight.grad is None and abs(weight[0].item() - 0.5) < 1e-6, weight
slow = ("torch._dynamo", "sklearn", "sklearn.metrics", "scipy.stats")
print([name for name in slow if name in sys.modules])

from fairseq.criterions.sentence_prediction import f1_score, pearsonr

print(f1_score([0, 1, 1], [0, 1, 1]), round(float(pearsonr([1, 2, 3], [2, 4, 6])[0]), 6))
import sklearn.metrics, scipy.stats

print(sklearn.metrics.f1_score.__module__.partition(".")[0], scipy.stats.norm.name)
"""


def test_what_takes_seconds_is_imported_when_it_is_used():
    done = run_python("-c", PROGRAM, timeout=60)
    assert done.rc == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "1.0 1.0", "sklearn norm"]
