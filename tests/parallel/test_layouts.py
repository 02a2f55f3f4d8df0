"""Training with fairseq on any number of ranks is the same training.

One rank with --update-freq 4, two with 2 and four with 1, with all experts on every rank (P = 1) or spread over all
(P = W), for some also over half of them: the same losses, gradients, gradient norms, parameters and moments, for every
architecture. The corpus has 11 batches, so that the last update of an epoch has three: of four ranks one gets none, of
two ranks one gets a batch and then none.
"""

from __future__ import annotations

import pytest
from layouts import ARCHS, DENSE, UPDATES, WITH_STATE, command, same, saved
from recording import updates_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

TOLERANCE = 1e-5
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)]
IN_PAIRS = {"smlp": [(4, 2)], "switch_lm": [(4, 2)]}  # of all architectures: tests/parallel/test_parallel_models.py


# of the others, layer by layer in the default suite: tests/parallel/test_parallel_models.py
IN_DEFAULT_SUITE = ("smlp", "gshard_lm", *WITH_STATE)


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[] if arch in IN_DEFAULT_SUITE else pytest.mark.slow) for arch in ARCHS]
)
def test_every_layout_trains_the_same_model(arch, tiny_data, tmp_path, run_fairseq_many):
    layouts = [(1, 1), (2, 2)] if arch in WITH_STATE else [*LAYOUTS, *IN_PAIRS.get(arch, [])]
    layouts = layouts if ARCHS[arch] != DENSE else [(1, 1), (2, 1), (4, 1)]
    folders = {layout: tmp_path / f"W{layout[0]}P{layout[1]}" for layout in layouts}
    cases = []
    for (world, group_size), folder in folders.items():
        folder.mkdir()
        case = command(tiny_data, arch, world, group_size, "--save-dir", folder)
        cases.append({**case, "record": str(folder)})
    for layout, run in zip(layouts, run_fairseq_many(cases), strict=True):
        assert run.rc == 0, f"{layout}\n{run}"
    one_rank = folders.pop(layouts[0])
    want, want_saved = updates_of(one_rank, 1), saved(one_rank)
    sizes = [update["sample_size"] for update in want]
    assert len(sizes) == UPDATES and sizes[2] <= 0.75 * max(sizes)
    for (world, group_size), folder in folders.items():
        assert (folder / "experts").exists() == (group_size > 1)
        compare(folder, world, want, want_saved, f"{arch}, W={world}, P={group_size}")


@pytest.mark.parametrize(
    "settings",
    [
        ["--ddp-backend", "pytorch_ddp"],
        ["--checkpoint-activations"],
        ["--clip-norm", 0],
        ["--bf16"],
        ["--memory-efficient-bf16"],
        ["--optimizer", "sgd", "--momentum", 0.9],
    ],
    ids=lambda settings: " ".join(map(str, settings)),
)
def test_settings_of_the_trainer(settings, tiny_data, tmp_path, run_fairseq_many):
    """Against one rank with the same setting; with half precision to its rounding."""
    folders = {world: tmp_path / str(world) for world in (1, 2)}
    cases = []
    for world, folder in folders.items():
        folder.mkdir()
        own = [option for option in settings if world > 1 or settings[0] != "--ddp-backend"]
        case = command(tiny_data, "smlp", world, world, "--save-dir", folder, "--max-update", 3, *own)
        cases.append({**case, "record": str(folder)})
    for run in run_fairseq_many(cases):
        assert run.rc == 0, str(run)
    tolerance = 0.03 if "bf16" in settings[0] else TOLERANCE
    compare(folders[2], 2, updates_of(folders[1], 1), saved(folders[1]), str(settings), tolerance)


def compare(folder, world: int, want: list[dict], want_saved: dict, what: str, tolerance: float = TOLERANCE) -> None:
    """What a run recorded and saved is what another one did."""
    for number, (ours, theirs) in enumerate(zip(updates_of(folder, world), want, strict=True), 1):
        where = f"{what}, update {number}"
        assert ours["sample_size"] == theirs["sample_size"], where
        assert ours["num_tokens"] == theirs["num_tokens"], where
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance), where
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=tolerance), where
        assert ours["grads"].keys() == theirs["grads"].keys(), where
        for name, grad in theirs["grads"].items():
            same(ours["grads"][name], grad, f"{where}, gradient of {name}", tolerance)
    got = saved(folder)
    assert got.keys() == want_saved.keys()
    for name, tensor in want_saved.items():
        assert got[name].dtype == tensor.dtype, f"{what}, {name} at the end"
        same(got[name], tensor, f"{what}, {name} at the end", tolerance)
