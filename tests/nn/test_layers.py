"""The core stands without fairseq, and imports point one way."""

import ast
import subprocess
import sys

from running import REPOSITORY

# From the bottom of the package up: a part may import itself and those before it.
ORDER = [
    "errors",
    "files",
    "plugins",
    "settings",
    "registry",
    "own_settings",
    "config",
    "ignored_settings",
    "presets",
    "titles",
    "perplexity",
    "drawing",
    "context",
    "pytrees",
    "ops",
    "parallel",
    "launch",
    "environment",
    "moe",
    "nn",
    "accounting",
    "kinds",
    "tokenizer_files",
    "vocabulary",
    "tokenizer_kinds",
    "tokenizer",
    "generation",
    "scoring",
    "pretrained",
    "checkpoint",
    "evaluation",
    "plots",
    "zeroshot",
    "harness",
    "experiments",
]

WITHOUT_FAIRSEQ = """
import sys

for name in ("fairseq", "fairseq_cli", "omegaconf", "hydra"):
    sys.modules[name] = None  # importing it raises ImportError
import torch

import smlp
from smlp.checkpoint import load
from smlp.evaluation import binarized, curves, ngram, parity, perplexity, report
from smlp.evaluation.leak import leak_test, randomise

model = randomise(smlp.build("smlp_tiny", vocab_size=20, max_tokens=8, embed_dim=16, ffn_dim=16))
assert model(torch.randint(2, 20, (2, 8))).logits.shape == (2, 8, 20)
assert len(list(smlp.generate(model.eval(), [2], 5))) == 5
assert all(report.passed for report in leak_test(model))
assert smlp.ops.balanced_assignment(torch.randn(8, 4)).bincount().tolist() == [2, 2, 2, 2]
"""


def test_the_core_works_without_fairseq():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FAIRSEQ], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_cheap():
    code = "import sys, smlp; sys.exit('torch' in sys.modules or 'fairseq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60).returncode == 0


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_one_way():
    for rank, part in enumerate(ORDER):
        folder = REPOSITORY / "smlp" / part
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
        assert files
        for path in files:
            for module in imports_of(path):
                assert module.split(".")[0] not in ("fairseq", "omegaconf", "hydra"), f"{path} imports {module}"
                if module.startswith("smlp."):
                    assert module.split(".")[1] in ORDER[: rank + 1], f"{path} imports {module}"
