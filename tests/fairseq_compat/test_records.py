"""``--data-order-file``: what each update was trained on, equal for all models and layouts, also after a stop;
``--update-times-file``: how long each one took; ``--environment-file``: where each start of a run was."""

import json
import os

import pytest
import torch
from running import USER_DIR

from smlp.errors import UserError
from smlp.fairseq_compat.records import UpdateRecord, check_record, digest, write_environment

PRIME, BASE = 2**31 - 1, 1_103_515_245
COMMON = [
    *("--user-dir", USER_DIR, "--task", "language_modeling", "--optimizer", "adam", "--lr", "1e-3", "--num-workers", 0),
    *("--no-epoch-checkpoints", "--tokens-per-sample", 24, "--batch-size", 4, "--disable-validation"),
    *("--embed-dim", 16, "--ffn-dim", 16, "--num-heads", 2, "--num-dense-layers", 1, "--dropout", 0),
]
UPDATES = 7
SPARSE = ["--arch", "smlp_tiny", "--num-sparse-layers", 1, "--num-experts", 2]


def slow_digest(rows, pad):
    """In Python's own integers, token by token."""
    total = 0
    for row in rows:
        one = sum(token * pow(BASE, place, PRIME) for place, token in enumerate(row) if token != pad) % PRIME
        total += one * one % PRIME
    return total % PRIME


def test_digest_against_python_integers():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 51200, (16, 1024), generator=generator)
    tokens[3, 900:] = 1
    assert int(digest(tokens, pad=1)) == slow_digest(tokens.tolist(), pad=1)


def test_digest_knows_sequences_but_not_their_order_or_padding():
    rows = torch.tensor([[5, 6, 7, 1], [8, 9, 10, 11]])
    same = torch.tensor([[8, 9, 10, 11, 1, 1], [5, 6, 7, 1, 1, 1]])
    assert digest(rows, pad=1) == digest(same, pad=1)
    for other in ([[6, 5, 7, 1], [8, 9, 10, 11]], [[5, 6, 7, 1], [8, 9, 10, 12]], [[8, 6, 7, 1], [5, 9, 10, 11]]):
        assert digest(torch.tensor(other), pad=1) != digest(rows, pad=1), other


@pytest.fixture(scope="module")
def records(tiny_data, tmp_path_factory, run_fairseq_many):
    """The lines of each run's files, by run: of the data's order, and of its environments."""
    folder = tmp_path_factory.mktemp("order")

    def case(name, *options, updates=UPDATES, file=True, **more):
        order = ["--data-order-file", folder / name / "order.jsonl"] if file else []
        order += ["--environment-file", folder / name / "environment.jsonl"] if file else []
        order += ["--update-times-file", folder / name / "times.jsonl"] if file else []
        args = [tiny_data, *COMMON, "--max-update", updates, "--save-dir", folder / name, *order, *options]
        return {"tool": "train", "args": args, **more}

    cases = {
        "gmlp": case("gmlp", "--arch", "gmlp_lm_tiny", "--seed", 3, "--update-freq", 2),
        "smlp": case("smlp", *SPARSE, "--seed", 3, "--update-freq", 2),
        "two ranks": case("two ranks", *SPARSE, "--seed", 3, ranks=2),
        "other seed": case("other seed", *SPARSE, "--seed", 4, "--update-freq", 2),
        "stopped": case("stopped", *SPARSE, "--seed", 3, "--update-freq", 2, updates=3),
        "off": case("off", *SPARSE, updates=2, file=False),
    }
    for result in run_fairseq_many(list(cases.values()), timeout=200):
        assert result.rc == 0, str(result)
    (result,) = run_fairseq_many([case("stopped", *SPARSE, "--seed", 3, "--update-freq", 2)])
    assert result.rc == 0, str(result)
    assert not list((folder / "off").glob("*.jsonl"))[1:], "only the router's record"
    return {
        name: [
            [json.loads(line) for line in (folder / name / f"{what}.jsonl").read_text().splitlines()]
            for what in ("order", "environment", "times")
        ]
        for name in cases
        if name != "off"
    }


@pytest.fixture
def orders(records):
    return {name: order for name, (order, _, _) in records.items()}


def test_every_model_and_layout_sees_the_same_tokens(orders):
    assert [line["update"] for line in orders["gmlp"]] == list(range(1, UPDATES + 1))
    assert len({line["digest"] for line in orders["gmlp"]}) == UPDATES
    assert orders["smlp"] == orders["gmlp"]
    assert orders["two ranks"] == orders["gmlp"]


def test_another_seed_is_another_order(orders):
    assert all(
        one["digest"] != other["digest"] for one, other in zip(orders["smlp"], orders["other seed"], strict=True)
    )


def test_a_run_that_was_stopped_repeats_and_skips_nothing(orders):
    assert orders["stopped"] == orders["smlp"]


def test_each_start_writes_down_where_it_is(records):
    environments = {name: lines for name, (_, lines, _) in records.items()}
    assert {name: len(lines) for name, lines in environments.items()} == {name: 1 for name in records} | {"stopped": 2}
    (line,), (two,) = environments["smlp"], environments["two ranks"]
    assert (line["world_size"], two["world_size"], line["gpu"], line["threads"]) == (1, 2, None, 1)
    assert line["torch"] == torch.__version__.split("+")[0] or line["torch"] == torch.__version__
    assert {"smlp", "fairseq", "python", "processor", "git", "plugins", "start"} <= set(line)
    assert environments["stopped"][0]["start"] <= environments["stopped"][1]["start"]


def test_each_update_has_its_time_and_tokens(records):
    for name, (_, _, times) in records.items():
        assert [line["update"] for line in times] == list(range(1, UPDATES + 1)), name
        assert all(line["seconds"] > 0 and line["data_seconds"] >= 0 for line in times), name
    tokens = [[line["tokens"] for line in records[name][2]] for name in ("smlp", "two ranks", "stopped")]
    assert tokens[0] == tokens[1] == tokens[2] and tokens[0][0] == 2 * 4 * 24


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "below a file"])
def test_what_is_no_file_for_records_is_named(tmp_path, kind, caplog):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    names = {"device": "/dev/zero", "pipe": "pipe", "folder": ".", "below a file": "file/x"}
    path = tmp_path / names[kind]
    with pytest.raises(UserError, match=r"--update-times-file .*(device|pipe|folder|Not a directory|File exists)"):
        check_record(path, "--update-times-file")
    UpdateRecord(str(path), "record").add(1)  # a file that became one of these meanwhile costs the record alone
    assert "no record from here on: cannot write" in caplog.text


@pytest.mark.parametrize("content", [b"suna mipi\n", b'{"version": 1}\n', b"PK\x03\x04"])
def test_a_file_of_another_kind_is_kept(tmp_path, content, caplog):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"--data-order-file .*file: a file of another kind exists already"):
        check_record(path, "--data-order-file")
    UpdateRecord(str(path), "record").add(1)
    assert path.read_bytes() == content and "no record from here on: cannot write" in caplog.text


def test_a_record_of_environments_is_no_record_of_updates(tmp_path):
    for content, option in (
        ('{"start": "2026", "world_size": 1}', "--data-order-file"),
        ('{"update": 1}', "--environment-file"),
    ):
        (tmp_path / "file").write_text(content + "\n")
        with pytest.raises(UserError, match=r"file: a file of another kind exists already"):
            check_record(tmp_path / "file", option)
    UpdateRecord(str(tmp_path / "file"), "record").add(2)
    assert len((tmp_path / "file").read_text().splitlines()) == 2


def test_records_of_a_run_need_files_of_their_own(tiny_data, tmp_path, run_fairseq_many):
    (tmp_path / "kept").write_text("suna mipi\n")
    args = [tiny_data, *COMMON, *SPARSE, "--max-update", 1]
    cases = [  # save-dirs differ, as the runs are at the same time
        ("one", "kept", "file of another kind"),
        ("two", "two/router_health.jsonl", "--update-times-file and --router-health-file both"),
    ]
    runs = run_fairseq_many(
        [
            {"tool": "train", "args": [*args, "--save-dir", tmp_path / save, "--update-times-file", tmp_path / name]}
            for save, name, _ in cases
        ]
    )
    for run, (_, _, said) in zip(runs, cases, strict=True):
        assert run.rc == 1 and said in run.stderr, str(run)
    assert (tmp_path / "kept").read_text() == "suna mipi\n"


@pytest.mark.parametrize("content", [b"", b'{"upd', b'{"update": 1, "digest": 5}\n{"update": 2,'])
def test_a_record_that_was_cut_goes_on(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    check_record(path, "--data-order-file")
    UpdateRecord(str(path), "record").add(2, digest=6)
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 2][b"5" not in content :]


def test_a_start_begins_a_line_behind_one_that_was_cut_off(tmp_path):
    path = tmp_path / "e.jsonl"
    for content in ("", '{"start": "2026-01-01", "world_'):
        path.write_text(content)
        for _ in range(2):
            write_environment(path, torch.device("cpu"), 1)
        lines = path.read_text().splitlines()
        assert lines[: len(lines) - 2] == [content] * bool(content)
        assert [json.loads(line)["world_size"] for line in lines[-2:]] == [1, 1]


def test_an_environment_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--environment-file .*file/e.jsonl cannot be written: "):
        write_environment(tmp_path / "file" / "e.jsonl", torch.device("cpu"), 1)
