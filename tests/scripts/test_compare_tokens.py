"""scripts/compare_tokens.py: which tokens repeat their context, and each group's part of a difference."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from running import REPOSITORY
from tiny_checkpoints import write_checkpoint

from smlp.errors import UserError
from smlp.evaluation.scoring import block_log_probs
from smlp.text.binarized import read_fairseq_tokens


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import compare_tokens

    return compare_tokens


def group_of(seen, token):
    """The slow reference: ``seen`` are the ids up to the position before the token."""
    for length in (3, 2, 1):
        ends = [end for end in range(length, len(seen)) if seen[end - length : end] == seen[len(seen) - length :]]
        if ends and len(seen) >= length:
            if seen[ends[-1]] == token:
                return 0 if length == 3 else 1
            if length == 3:
                return 2
            break
    return 3 if token in seen else 4


def test_groups_are_those_of_a_search(script):
    draws = np.random.default_rng(1)
    counts = np.zeros(5, dtype=int)
    for vocab_size in (2, 3, 5, 12, 200):
        for size in (1, 2, 3, 4, 40):
            ids = draws.integers(0, vocab_size, size + 1)
            expected = [group_of(ids[: i + 1].tolist(), ids[i + 1]) for i in range(size)]
            assert script.groups_of(ids[:-1], ids[1:]).tolist() == expected
            counts += np.bincount(expected, minlength=5)
    assert counts.min() > 5


def test_a_phrase_said_twice(script):
    ids = np.array([2, 10, 11, 12, 13, 20, 10, 11, 12, 13, 10, 11, 12, 30])
    found = script.groups_of(ids[:-1], ids[1:])
    assert found.tolist() == [4, 4, 4, 4, 4, 3, 1, 1, 0, 2, 1, 1, 2]


def checkpoints(data: Path, folder: Path, **models: int) -> dict[str, tuple[Path, object]]:
    words = [line.split()[0] for line in (data / "dict.txt").read_text().splitlines()]
    return {arch: write_checkpoint(folder / arch, words, arch, width) for arch, width in models.items()}


def test_parts_add_up_over_the_tokens_that_all_models_score(script, monkeypatch, capsys, tmp_path, tiny_data):
    """sMLP-partial does not score the first 6 of its 30 positions, so the gMLP is not asked for them either."""
    models = checkpoints(tiny_data, tmp_path, gmlp_lm_tiny=30, smlp_partial_tiny=30)
    monkeypatch.setattr(
        sys, "argv", ["compare_tokens.py", *(str(path) for path, _ in models.values()), "--data", str(tiny_data)]
    )
    script.main()
    lines = capsys.readouterr().out.splitlines()
    rows = {row[0]: row[1:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])}
    assert [*rows][-1] == "all" and set(rows) - {"tokens", "---", "all"} <= set(script.GROUPS)
    tokens = torch.from_numpy(read_fairseq_tokens(tiny_data / "test").tokens)
    scored = torch.arange(len(tokens)) % 30 >= 6
    means = [-float(block_log_probs(model, tokens)[scored].double().mean()) for _, model in models.values()]
    assert [float(value) for value in rows["all"][1:3]] == pytest.approx(means, abs=5e-4)
    found = [[float(value.rstrip("%")) for value in rows[name]] for name in script.GROUPS]
    share, *_, part = map(sum, zip(*found, strict=True))
    assert share == pytest.approx(100, abs=0.3)
    assert part == pytest.approx(means[1] - means[0], abs=3e-4) and abs(part) > 0.01


def test_other_contexts_are_refused(script, monkeypatch, tmp_path, tiny_data):
    models = checkpoints(tiny_data, tmp_path, gmlp_lm_tiny=30, dense_lm_tiny=20)
    paths = [str(path) for path, _ in models.values()]
    monkeypatch.setattr(sys, "argv", ["compare_tokens.py", *paths, "--data", str(tiny_data)])
    with pytest.raises(UserError, match=r"dense_lm_tiny/\S+ has a context of 20 tokens, \S+ one of 30"):
        script.main()
