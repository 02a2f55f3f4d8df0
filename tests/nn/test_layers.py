"""The core stands without fairseq, and imports point one way."""

import ast
import graphlib
import subprocess
import sys

from running import REPOSITORY

# The core from the bottom up: a file may import those of its entry (the longest that fits) and of entries before it.
ORDER = [
    "errors",
    "files",
    "config",
    "parallel",
    "ops",
    "launch",
    "costs.component",
    "costs.formula",
    "costs.memory",
    "nn.state",
    "nn.layers",
    "moe",
    "nn",
    "costs",
    "extend",
    "kinds",
]

WITHOUT_FAIRSEQ = """
import sys

for name in ("fairseq", "fairseq_cli", "omegaconf", "hydra"):
    sys.modules[name] = None  # importing it raises ImportError
import torch

import smlp
from smlp.checkpoint import load
from smlp.evaluation import curves, parity, perplexity, report
from smlp.evaluation.leak import leak_test, randomise
from smlp.text import binarized, ngram

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


def imports_of(nodes):
    """Names of modules that these nodes of a file import, those of imported functions too."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def files():
    """Every file of the package by the name of its module, with its syntax tree."""
    for path in sorted((REPOSITORY / "smlp").rglob("*.py")):
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def entry_of(module):
    """The place of a module in the order; None if it is not of the core."""
    found = [entry for entry in ORDER if f"{module}.".startswith(f"smlp.{entry}.")]
    return ORDER.index(max(found, key=len)) if found else None


def test_imports_of_the_core_point_one_way():
    seen = set()
    for name, tree in files():
        place = entry_of(name)
        if place is None:
            continue
        seen.add(place)
        for module in imports_of(ast.walk(tree)):
            assert module.split(".")[0] not in ("fairseq", "omegaconf", "hydra"), f"{name} imports {module}"
            if module.startswith("smlp."):
                assert (entry_of(module) or 0) <= place and entry_of(module) is not None, f"{name} imports {module}"
    assert seen == set(range(len(ORDER)))


def test_no_two_files_import_each_other():
    """Neither directly nor through others, when they are loaded."""
    trees = dict(files())
    sorter = graphlib.TopologicalSorter()
    for name, tree in trees.items():
        for module in imports_of(tree.body):
            module = module if module in trees else module.rpartition(".")[0]
            if module in trees and module != name:
                sorter.add(name, module)
    sorter.prepare()  # raises where there is a cycle
