"""The corpus from docstrings: what is read, what counts as English, and that no text stands in two splits."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data_prep import python_docs
from data_prep.corpus import Document, assert_disjoint
from data_prep.docstrings import docstrings, source_files, text_blocks
from data_prep.prose import plain_text, prose
from data_prep.python_docs import SourceTree, deduplicated, near_duplicate_key, paragraphs_of
from smlp.errors import UserError

NUMPYDOC = """
Compute the weighted average along the specified axis of the array.

The result has ``float64`` precision, see :func:`~pack.mod.precision` and [1]_ for the
*exact* rules that hold here.

Parameters
----------
weights : array_like, optional
    An array of weights that belong to the values in the first argument.
axis : int

Returns
-------
average : ndarray
    The average is returned as an array of the same type as the input.

Notes
-----
.. note:: This is only a note about the way in which the weights are used.

The following identity does not hold for any weights of the array::

    average = sum(weights * values)

.. math:: a = b

+-----+-----+
| one | two |
+-----+-----+

References
----------
.. [1] Somebody wrote this in a book about the average of the weights.

Examples
--------
The example shows that the average is the same as the mean.

>>> average([1, 2])
1.5
"""

GOOGLE = """Applies the function to all of the inputs that it is given.

Args:
    inputs (list of int, optional): The inputs to which the function is to be applied.
        They are read only once in the order in which they stand.
    other: short

Returns:
    A list of the outputs in the same order as the inputs.

Example::

    This is a sentence of code and is not to be kept at all.

The text goes on after the example and this is to be kept.
"""


def cleaned(text: str) -> tuple[str, ...]:
    return paragraphs_of([text.strip("\n")], Counter())


def test_numpydoc_sections_leave_only_sentences():
    assert cleaned(NUMPYDOC) == (
        "Compute the weighted average along the specified axis of the array.",
        "The result has float64 precision, see precision and for the exact rules that hold here.",
        "An array of weights that belong to the values in the first argument.",
        "The average is returned as an array of the same type as the input.",
        "This is only a note about the way in which the weights are used.",
    )


def test_google_sections_lose_names_types_and_examples():
    assert cleaned(GOOGLE) == (
        "Applies the function to all of the inputs that it is given.",
        "The inputs to which the function is to be applied. They are read only once in the order in which they stand.",
        "A list of the outputs in the same order as the inputs.",
        "The text goes on after the example and this is to be kept.",
    )


def test_literal_blocks_and_doctests_are_left_out_whatever_they_say():
    text = "Look at the block::\n\n  It is a literal.\n\n  It goes on.\n\nAfter it.\n>>> f()\nIts output.\n\nThe end."
    removed = Counter()
    assert text_blocks(text, removed) == ["Look at the block:", "After it.", "The end."]
    assert removed["lines: code block or dropped section"] == 2


def test_bullets_and_fields_become_paragraphs_of_their_own():
    text = (
        "- The first item is one of the things in the list.\n"
        "- The second item is another of the things\n  in the list.\n"
        "\n:param x: This is the number that is to be added to it.\n:type x: int\n"
    )
    assert cleaned(text) == (
        "The first item is one of the things in the list.",
        "The second item is another of the things in the list.",
        "This is the number that is to be added to it.",
    )


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("the axis along which the sum of the values is taken.", "no capital"),
        ("The axis along which the sum of the values is taken", "no full stop"),
        ("The sum of the values is taken when a = b for the axis.", "code or formula"),
        ("The value is given by {value} and is the sum of the values.", "code or formula"),
        ("Use np.sum, np.max2, np.min_x and the np.prod_y of it.", "identifiers"),
        ("Die Summe aller Werte entlang einer Achse wird berechnet.", "few function words"),
        ("The sum (of the values that are on the axis is taken.", "unbalanced brackets"),
        ("The sum of the values is näher to the axis of it.", "not ASCII"),
    ],
)
def test_no_english_sentence_is_dropped_with_its_reason(sentence, rule):
    removed = Counter()
    assert prose(sentence, removed) == ""
    assert removed == {f"sentences: {rule}": 1}


def test_a_bad_sentence_does_not_take_its_neighbours_along():
    text = "Short one of x = y. The sum of the values on the axis is returned to the caller."
    assert prose(text, Counter()) == "The sum of the values on the axis is returned to the caller."


def test_inline_markup_goes_and_words_stay():
    assert plain_text("See :class:`.Axes`, :ref:`the guide <guide>`, `a link <http://x>`_ and **all** *args `x`") == (
        "See Axes, the guide, a link and all *args x"
    )
    assert plain_text("x**y and z**y stay") == "x**y and z**y stay"
    assert plain_text("the `name' of ‘it’") == "the 'name' of 'it'"


def test_docstrings_are_found_in_definitions_and_in_setters_only():
    source = b'''"""Module."""
add_newdoc("numpy", "sin", """
    First line.

    Second line.
    """)
add_docstr(f, r"""Docs of {f}.
""".format(**common))
other("""Not
documentation.""")
if True:
    class A:
        """Class."""
        x = 1
        """Not a docstring
        that Python knows."""
        async def f(self):
            """Method."""
try:
    pass
except ImportError:
    pass
else:
    def g(): """Function."""
'''
    assert docstrings(source) == [
        "Module.",
        "First line.\n\nSecond line.",
        "Docs of {f}.",
        "Class.",
        "Method.",
        "Function.",
    ]
    assert docstrings(b'"""x"""\nprint "python 2"') == []
    deep = b'"""x"""\nif a: pass\n' + b"elif a: pass\n" * 1500 + b'else:\n    def f(): """Function."""\n'
    assert docstrings(deep) == ["x", "Function."]
    assert docstrings(b'"""x"""\n' + b"-" * 100_000 + b"1") == []


def test_tests_and_vendored_folders_are_not_read(tmp_path):
    (tmp_path / ".#lost.py").symlink_to(tmp_path / "nowhere")
    for name in ("b.py", "a/x.py", "a/tests/t.py", "a/_vendor/v.py", "a/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)] == ["b.py", "a/x.py"]


def test_duplicates_go_across_documents_and_the_first_stays():
    one = "The first of 10 paragraphs says that it is the first."
    near = "the FIRST of 99 paragraphs, says that it is the first!"
    long = "One two three four five six seven eight nine ten eleven twelve."
    longer = "One two three four five six seven eight nine ten eleven twelve. And then."
    removed = Counter()
    documents = [
        Document("a", (one, long, "Too short for runs.")),
        Document("b", (near, one, "too short - for runs")),
        Document("c", (longer, "Something else.")),
    ]
    assert deduplicated(documents, removed) == [documents[0], Document("c", ("Something else.",))]
    assert removed == {"paragraphs: exact duplicate": 1, "paragraphs: near duplicate": 3}


def test_disjointness_is_asserted_by_key():
    splits = {"train": [Document("a", ("The text 1.",))], "valid": [Document("b", ("the text 2",))], "test": []}
    assert_disjoint(splits, str)
    with pytest.raises(AssertionError, match="occurs in both train and valid"):
        assert_disjoint(splits, near_duplicate_key)


def words(number: int) -> str:
    """Eleven words that no other number shares a run of eight with."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    letters = "".join(chr(ord("a") + int(digit, 16)) for digit in digest)
    return "The " + " of the ".join(letters[start : start + 10] for start in range(0, 40, 10)) + " is here."


@pytest.fixture
def package(tmp_path) -> SourceTree:
    """120 packages of two modules, four paragraphs each; one paragraph stands in all of them."""
    root = tmp_path / "pkg"
    for index in range(120):
        folder = root / f"p{index:03d}"
        folder.mkdir(parents=True)
        for module in range(2):
            own = "\n\n".join(words(index * 10 + module * 4 + line) for line in range(3))
            (folder / f"m{module}.py").write_text(
                f'"""{own}\n\nThis is the paragraph that stands in all of them.\n"""\n'
            )
    return SourceTree("pkg", "1.0", root, "pkg")


def test_split_is_by_package_disjoint_and_repeatable(package, tmp_path, monkeypatch):
    monkeypatch.setattr(python_docs, "read_topics", lambda removed: [])
    manifest = python_docs.build(tmp_path / "one", [package])
    python_docs.build(tmp_path / "two", [package])
    texts = {}
    for name in ("train", "valid", "test"):
        content = (tmp_path / "one" / f"{name}.txt").read_text()
        assert content == (tmp_path / "two" / f"{name}.txt").read_text()
        texts[name] = {line for line in content.split("\n") if line}
        assert manifest["splits"][name]["paragraphs"] == len(texts[name])
        assert manifest["splits"][name]["words"] == sum(len(line.split()) for line in texts[name])
    assert not texts["train"] & texts["valid"] and not texts["train"] & texts["test"]
    assert not texts["valid"] & texts["test"]
    total = sum(counts["words"] for counts in manifest["splits"].values())
    for name in ("valid", "test"):
        assert 0.04 < manifest["splits"][name]["words"] / total < 0.06
    # A package's paragraphs are all in one split.
    for index in range(120):
        homes = {
            name
            for name, lines in texts.items()
            for module in range(2)
            for line in range(3)
            if words(index * 10 + module * 4 + line) in lines
        }
        assert len(homes) == 1
    assert manifest["removed"]["paragraphs: exact duplicate"] == 239
    assert json.loads((tmp_path / "one" / "manifest.json").read_text()) == manifest


def test_large_groups_are_never_held_out():
    # 200 small groups and one that holds half of all words, which its hash would put into valid before all others.
    documents = [Document(f"g{index}", (words(index),)) for index in range(200)]
    first = min(hashlib.sha256(document.group.encode()).digest() for document in documents)
    names = (f"large{index}" for index in range(100_000))
    large = next(name for name in names if hashlib.sha256(name.encode()).digest() < first)
    documents.append(Document(large, tuple(words(1000 + index) for index in range(200))))
    splits = python_docs.split_by_group(documents)
    assert documents[-1] in splits["train"]
    assert len(splits["valid"]) == len(splits["test"]) == 18  # 4.5 % of 400 paragraphs of equal length


def test_too_little_text_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(python_docs, "read_topics", lambda removed: [])
    (tmp_path / "m.py").write_text('"""This is the only one of the paragraphs."""')
    with pytest.raises(UserError, match="1 sources hold too little text"):
        python_docs.build(tmp_path / "out", [SourceTree("x", "1", tmp_path, "x")])


def test_topics_of_this_interpreter_are_english():
    documents = python_docs.read_topics(Counter())
    assert len(documents) > 50 and len({document.group for document in documents}) == len(documents)
    assert sum(document.num_words for document in documents) > 10_000


def test_installed_packages_are_found_without_importing_them():
    script = (
        "import sys; from data_prep.python_docs import find_sources; names = [s.name for s in find_sources()];"
        "assert {'python', 'numpy', 'torch'} <= set(names), names; assert 'torch' not in sys.modules;"
        "assert 'numpy' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=root)


def test_block_reader_counts_what_it_takes_away():
    removed = Counter()
    text_blocks(NUMPYDOC.strip("\n"), removed)
    assert removed["lines: section header"] == 5
    assert removed["lines: parameter line"] == 3
    assert removed["lines: table"] == 1 and removed["lines: directive"] == 1
