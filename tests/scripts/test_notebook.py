"""The cells of the notebook in examples/, one after the other, on a tiny checkpoint where it expects one."""

import json

from running import REPOSITORY
from tiny_checkpoints import write_checkpoint

NOTEBOOK = json.loads((REPOSITORY / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
WORDS = [
    "The",
    "the",
    "function",
    "returns",
    "a",
    "list.",
    "List",
    "To",
    "open",
    "file,",
    "call",
    "open.",
    "of",
    "strings.",
]


def test_it_was_executed():
    """Its outputs are those of its cells, in order, without errors and without names of a machine's folders."""
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "execute_result", "display_data"}
    printed = json.dumps([cell["outputs"] for cell in cells])
    assert len(printed) < 100_000 and "/home" not in printed and str(REPOSITORY) not in printed


def test_every_cell_runs(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "runs" / "quickstart" / "smlp_hash_tiny", WORDS, max_tokens=32)
    monkeypatch.chdir(tmp_path)
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    names, printed = {}, []
    for cell in cells:
        exec(compile(cell, "notebook", "exec"), names)
        printed.append(capsys.readouterr().out)
    assert len(printed) == 10 and all(printed), printed
    assert "The function returns a list." in printed[1]
    assert float(printed[8].rsplit(maxsplit=1)[1]) < 1e-4
    assert "(tMoE)" in printed[9] and "(sMoE)" not in printed[9]
