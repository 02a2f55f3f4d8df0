"""Checkpoints of training with experts spread over ranks: read on any other layout, whole at every moment."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from layouts import command, same, saved
from recording import updates_of
from running import USER_DIR

import smlp
from smlp.errors import UserError

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


def train(run_fairseq_many, *cases) -> list:
    """Runs training; all must succeed."""
    runs = run_fairseq_many(list(cases))
    for run in runs:
        assert run.rc == 0, str(run)
    return runs


def case(data, save_dir, world, group_size, updates, *more, arch="smlp_partial", **keys) -> dict:
    """Training up to some number of updates in a save-dir."""
    save_dir.mkdir(exist_ok=True)
    made = command(data, arch, world, group_size, "--save-dir", save_dir, "--max-update", updates, *more)
    return {**made, **keys}


@pytest.fixture(scope="module")
def spread(tiny_data, tmp_path_factory, run_fairseq_many):
    """A save-dir of four ranks with an expert each, after five updates."""
    folder = tmp_path_factory.mktemp("spread") / "run"
    train(run_fairseq_many, case(tiny_data, folder, 4, 4, 5))
    return folder


@pytest.fixture
def own_spread(spread, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(spread, tmp_path / "run")


def test_training_goes_on_with_any_other_number_of_ranks(tiny_data, spread, own_spread, tmp_path, run_fairseq_many):
    straight = tmp_path / "straight"
    train(run_fairseq_many, case(tiny_data, straight, 1, 1, 10, record=str(straight)))
    want = updates_of(straight, 1)[5:]
    got = []
    for world, group_size, updates in [(2, 2, 6), (1, 1, 7), (4, 4, 8), (4, 1, 9), (4, 2, 10)]:
        folder = tmp_path / f"to {updates}"
        folder.mkdir()
        train(run_fairseq_many, case(tiny_data, own_spread, world, group_size, updates, record=str(folder)))
        got += updates_of(folder, world)
        parts = list(own_spread.glob("experts/*/*.pt"))
        assert len(parts) == (group_size if group_size > 1 else 0), parts  # none of an earlier checkpoint
    assert len(got) == len(want) == 5
    for ours, theirs in zip(got, want, strict=True):
        for key in ("loss", "norm", "sample_size"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
    ends = saved(own_spread), saved(straight)
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[1].items():
        same(ends[0][name], tensor, name, 1e-5)


def test_one_process_scores_it_as_it_scores_that_of_one_rank(spread, tiny_data, tmp_path, run_fairseq_many):
    one = tmp_path / "one"
    train(run_fairseq_many, case(tiny_data, one, 1, 1, 5))
    files = [folder / "checkpoint_last.pt" for folder in (spread, one)]
    settings = ["--user-dir", USER_DIR, "--tokens-per-sample", 16, "--batch-size", 4]
    runs = train(
        run_fairseq_many, *({"tool": "eval_lm", "args": [tiny_data, "--path", file, *settings]} for file in files)
    )
    asked = {"tool": "eval_lm", "args": [tiny_data, "--path", files[0], *settings, "--distributed-world-size", 2]}
    (refused,) = run_fairseq_many([asked])
    assert refused.rc == 1 and "scores in one process" in refused.stderr
    pattern = re.compile(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)")
    scores = [pattern.search(run.stderr + run.stdout).groups() for run in runs]
    assert scores[0] == scores[1]
    ids = torch.randint(4, 50, (3, 16), generator=torch.Generator().manual_seed(0))
    logits = [smlp.load_pretrained(file, dictionary=tiny_data / "dict.txt")(ids).logits for file in files]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_validation_over_ranks_with_other_numbers_of_batches(spread, tiny_data, run_fairseq_many):
    """fairseq-validate on two ranks, one of which has a batch less: the perplexity of one rank."""
    args = [tiny_data, "--user-dir", USER_DIR, "--path", spread / "checkpoint_last.pt", "--task", "language_modeling"]
    args += ["--batch-size", 10, "--tokens-per-sample", 16, "--required-batch-size-multiple", 1]
    shared = ["--distributed-world-size", 2]
    cases = [
        {"tool": "validate", "args": args},
        {"tool": "validate", "args": [*args, *shared], "ranks": 2},
        {"tool": "validate", "args": [*args, *shared, "--batch-size", 100], "ranks": 2},
    ]
    one, two, too_few = run_fairseq_many(cases)
    assert one.rc == two.rc == 0, one.stderr + two.stderr
    found = [re.search(r"valid on 'valid' subset \| loss ([\d.]+) .*ppl ([\d.]+)", run.stdout) for run in (one, two)]
    assert found[0].groups() == found[1].groups()
    assert too_few.rc == 1 and "validation has fewer batches than ranks" in too_few.stderr


@pytest.mark.slow
def test_restore_file_finetuning_and_resets(spread, tiny_data, tmp_path, run_fairseq_many):
    last = spread / "checkpoint_last.pt"
    ways = {
        "restore": ["--restore-file", last],
        "finetune": ["--finetune-from-model", last],
        "reset": [
            "--restore-file",
            last,
            *(f"--reset-{w}" for w in ("optimizer", "dataloader", "meters", "lr-scheduler")),
        ],
    }
    cases = [case(tiny_data, tmp_path / name, 2, 2, 6, *way, record=str(tmp_path / name)) for name, way in ways.items()]
    train(run_fairseq_many, *cases)
    updates = {name: updates_of(tmp_path / name, 2) for name in ways}
    assert {name: len(of) for name, of in updates.items()} == {"restore": 1, "finetune": 6, "reset": 6}
    assert updates["finetune"][0]["loss"] == updates["reset"][0]["loss"]
    # Adam's moments came along: the same first gradients make another step than in a new optimizer
    moments = [saved(tmp_path / name) for name in ("restore", "finetune")]
    assert any(not torch.allclose(moments[0][key], moments[1][key]) for key in moments[0] if key.endswith("exp_avg_sq"))


def test_parts_go_with_their_checkpoints(tiny_data, tmp_path, run_fairseq_many):
    folder = tmp_path / "kept"
    keep = ["--save-interval-updates", 1, "--keep-interval-updates", 2, "--keep-last-epochs", 1]
    made = case(tiny_data, folder, 2, 2, 8, *keep)
    made["args"] = [a for a in made["args"] if a not in ("--no-epoch-checkpoints", "--disable-validation")]
    train(run_fairseq_many, made)
    names = sorted(path.name for path in folder.glob("*.pt"))
    assert names == [
        "checkpoint2.pt",
        "checkpoint_3_7.pt",
        "checkpoint_3_8.pt",
        "checkpoint_best.pt",
        "checkpoint_last.pt",
    ]
    states = {path.parent.name.split("_")[1] for path in folder.glob("experts/*/*.pt")}
    assert {"6", "7", "8"} <= states <= {"6", "7", "8", *(str(n) for n in range(8))}
    for name in names:
        model = smlp.load_pretrained(folder / name, dictionary=tiny_data / "dict.txt")
        assert model(torch.full((1, 8), 5)).logits.isfinite().all()
    used = {part["file"] for name in names for part in torch.load(folder / name)["smlp_experts"]["parts"]}
    assert used == {str(path.relative_to(folder)) for path in folder.glob("experts/*/*.pt")}


def damage(folder, how: str) -> str:
    """Spoils the part with expert 2; returns its name."""
    (part,) = folder.glob("experts/*/experts_2-2.pt")
    if how == "missing":
        part.unlink()
    elif how == "truncated":
        part.write_bytes(part.read_bytes()[:-100])
    else:
        content = part.read_bytes()
        (folder,) = folder.glob("experts/update_*")
        token = folder.name.rpartition("_")[2].encode()
        assert content.count(token) == 1
        part.write_bytes(content.replace(token, b"0000dead"))
    return part.name


@pytest.mark.parametrize("how", ["missing", "truncated", "foreign"])
def test_a_spoilt_part_is_named_on_every_way_in(how, tiny_data, own_spread, run_fairseq_many):
    name = damage(own_spread, how)
    with pytest.raises(UserError, match=re.escape(name)):
        smlp.load_pretrained(own_spread / "checkpoint_last.pt", dictionary=tiny_data / "dict.txt")
    before = sorted(own_spread.rglob("*"))
    score = [tiny_data, "--user-dir", USER_DIR, "--path", own_spread / "checkpoint_last.pt", "--tokens-per-sample", 16]
    runs = run_fairseq_many([case(tiny_data, own_spread, 4, 4, 6), {"tool": "eval_lm", "args": score}])
    for run in runs:
        assert run.rc == 1 and name in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert all(code == 1 and seconds < 30 for code, seconds, _ in runs[0].ranks)
    assert sorted(own_spread.rglob("*")) == before


SAVING = "smlp.fairseq_compat.expert_saving"
MOMENTS = {
    "before a part": (1, f"{SAVING}:write_part", 1),
    "after its part": (1, "torch.distributed:all_gather_object", 2),
    "before the index": (0, "fairseq.checkpoint_utils:torch_persistent_save", 1),
    "before the copy": (0, "smlp.fairseq_compat.saving:copy_whole", 1),
    "before unused parts go": (0, f"{SAVING}:remove_unused_parts", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_saving(moment, tiny_data, own_spread, tmp_path, run_fairseq_many):
    """Training goes on from a whole checkpoint, the one before or the new one, and ends where it would have ended."""
    rank, place, call = MOMENTS[moment]
    fault = {"rank": rank, "place": place, "call": call, "how": "kill"}
    more = ["--save-interval-updates", 1]
    (run,) = run_fairseq_many([case(tiny_data, own_spread, 2, 2, 7, *more, fault=fault, timeout=40)])
    assert run.ranks[rank][0] == -9, run.stderr
    code, seconds, message = run.ranks[1 - rank]
    assert code == 1 and seconds < 30 and "smlp: error" in message.strip().splitlines()[-1], message
    assert saved(own_spread)
    again = tmp_path / "again"
    again.mkdir()
    train(run_fairseq_many, case(tiny_data, own_spread, 2, 2, 7, record=str(again)))
    assert len(updates_of(again, 2)) in (1, 2)
    used = {part["file"] for part in torch.load(own_spread / "checkpoint_last.pt")["smlp_experts"]["parts"]}
    for path in own_spread.glob("checkpoint_*_*.pt"):
        used |= {part["file"] for part in torch.load(path)["smlp_experts"]["parts"]}
    assert used == {str(path.relative_to(own_spread)) for path in own_spread.glob("experts/*/*.pt")}


def test_a_full_disk_on_one_rank_ends_all_with_its_message(tiny_data, own_spread, run_fairseq_many):
    fault = {"rank": 3, "place": "smlp.files:renamed_when_whole", "how": "full"}
    (run,) = run_fairseq_many([case(tiny_data, own_spread, 4, 4, 6, fault=fault, timeout=40)])
    for code, seconds, message in run.ranks:
        last = message.strip().splitlines()[-1]
        assert code == 1 and seconds < 30 and "rank 3" in last and "No space left on device" in last, message
        assert "Traceback" not in message and "rank 0 could not save" not in message
    assert saved(own_spread)


def test_the_index_is_plain(spread):
    state = torch.load(spread / "checkpoint_last.pt")
    index = json.loads(json.dumps(state["smlp_experts"]))
    assert (index["num_experts"], index["world_size"], index["group_size"]) == (4, 4, 4)
    assert [part["expert_ids"] for part in index["parts"]] == [[0], [1], [2], [3]]
    assert not any(".experts." in name for name in state["model"])
