"""Prompts of the six zero-shot tasks, written out by hand for each set of templates."""

import pytest

from smlp.errors import UserError
from smlp.evaluation.zeroshot.readers import (
    CopaItem,
    HellaSwagItem,
    PiqaItem,
    RecordItem,
    StoryClozeItem,
    WinograndeItem,
)
from smlp.evaluation.zeroshot.templates import TEMPLATES, _without_brackets, draw_shots, example

COPA = CopaItem("0", "My body cast a shadow. ", ("The sun was rising.", "I sat."), "cause", 1)
PIQA = PiqaItem("0", " Boil it? ", ("Heat it.", " Cool it. "), 0)
STORY = StoryClozeItem("0", ("One.", "Two.", "Three.", "Four."), ("Good.", "Bad."), 0)
SCHEMA = WinograndeItem("0", "Ann thanked Bea as _ had helped .", ("Ann", "Bea Lee"), 1)
ENDINGS = ("eats.", "eats.", "eats.", ", and  [x] goes.")
SCENE = HellaSwagItem("0", "Making  a cake", "Pops are  shown. [title] Mix", "the Chef [step]", ENDINGS, 3)
PASSAGE = "Al Gore met Bo.\n@highlight\nGore spoke\n@highlight\nBo left"
NEWS = RecordItem("0", PASSAGE, "And @placeholder's dog", ("Gore", "Bo", "Al Gore"), ("Al Gore", "Gore"))


def texts(item, templates):
    """Contexts and continuations, each pair once."""
    return [(choice.context, choice.continuation) for choice in example(item, templates).choices]


@pytest.mark.parametrize("templates", ["fair", "gpt3"])
def test_copa(templates):
    context = "My body cast a shadow because"
    assert texts(COPA, templates) == [(context, " the sun was rising."), (context, " I sat.")]
    effect = CopaItem("0", "It rained!", ("Icy roads", "It's wet."), "effect", 0)
    assert texts(effect, templates) == [("It rained! so", " icy roads"), ("It rained! so", " it's wet.")]


def test_copa_of_the_harness_has_two_spaces_and_lowers_one_letter():
    context = "My body cast a shadow because"
    assert texts(COPA, "lm-eval") == [(context, "  the sun was rising."), (context, "  i sat.")]
    effect = CopaItem("0", "It rained!", ("ICY roads", "It's wet."), "effect", 0)
    assert texts(effect, "lm-eval")[0] == ("It rained therefore", "  iCY roads")


@pytest.mark.parametrize("templates", ["fair", "gpt3"])
def test_piqa_keeps_solutions_as_they_are(templates):
    assert texts(PIQA, templates) == [("Boil it?", " Heat it."), ("Boil it?", "  Cool it. ")]


def test_piqa_of_the_harness():
    context = "Question:  Boil it? \nAnswer:"
    assert texts(PIQA, "lm-eval") == [(context, " Heat it."), (context, "  Cool it. ")]


@pytest.mark.parametrize("templates", TEMPLATES)
def test_storycloze(templates):
    assert texts(STORY, templates) == [("One. Two. Three. Four.", " Good."), ("One. Two. Three. Four.", " Bad.")]


def test_winogrande_with_the_option_in_the_scored_text():
    assert texts(SCHEMA, "fair") == [
        ("Ann thanked Bea as", " Ann had helped ."),
        ("Ann thanked Bea as", " Bea Lee had helped ."),
    ]
    first = WinograndeItem("0", "_ helped.", ("Ann", "Bea"), 0)
    assert texts(first, "fair")[0] == ("", "Ann helped.")


@pytest.mark.parametrize("templates", ["gpt3", "lm-eval"])
def test_winogrande_by_partial_evaluation(templates):
    assert texts(SCHEMA, templates) == [
        ("Ann thanked Bea as Ann", " had helped ."),
        ("Ann thanked Bea as Bea Lee", " had helped ."),
    ]
    assert [choice.alone for choice in example(SCHEMA, templates).choices] == ["Ann", "Bea Lee"]
    possessive = WinograndeItem("0", "It was _'s dog. ", ("Ann", "Bea"), 0)
    expected = {"gpt3": "'s dog. ", "lm-eval": " 's dog."}
    assert texts(possessive, templates)[0] == ("It was Ann", expected[templates])


@pytest.mark.parametrize("templates", ["fair", "gpt3"])
def test_hellaswag_keeps_brackets_and_raises_one_letter(templates):
    context = "Making a cake: Pops are shown. [title] Mix The Chef [step]"
    assert texts(SCENE, templates)[2:] == [(context, " eats."), (context, " , and  [x] goes.")]
    finished = HellaSwagItem("0", "Cake", "A man sits.", "", ("eats.",) * 4, 0)
    assert texts(finished, templates)[0] == ("Cake: A man sits.", " eats.")


def test_hellaswag_of_the_harness_has_no_brackets():
    # what stands in brackets goes, "[title]" becomes a full stop, the second clause loses its capitals
    context = "Making a cake: Pops are shown.. Mix The chef"
    assert texts(SCENE, "lm-eval")[2:] == [(context, "  eats."), (context, "  , and  goes.")]


def test_many_brackets_of_hellaswag_take_no_time():
    assert _without_brackets("a [b]\n[c [d] e\nf]" + "[" * 1_000_000) == "a \n e\nf]" + "[" * 1_000_000


def test_record_in_one_sentence():
    passage = "Al Gore met Bo.\n\nGore spoke\n\nBo left And"
    assert texts(NEWS, "fair") == [(passage, f" {name}'s dog") for name in ("Gore", "Bo", "Al Gore")]
    assert example(NEWS).gold == (0, 2)


def test_record_as_one_more_highlight():
    context = "Al Gore met Bo.\n- Gore spoke\n- Bo left"
    assert texts(NEWS, "gpt3") == [(context, f"\n- And {name}'s dog") for name in ("Gore", "Bo", "Al Gore")]


def test_record_of_the_harness_is_sorted():
    context = "Al Gore met Bo.\n\n  - Gore spoke.\n  - Bo left."
    assert texts(NEWS, "lm-eval") == [(context, f"\n   - And {name}'s dog") for name in ("Al Gore", "Bo", "Gore")]
    assert example(NEWS, "lm-eval").gold == (0, 2)


@pytest.mark.parametrize("templates", TEMPLATES)
@pytest.mark.parametrize("item", [COPA, PIQA, STORY, SCHEMA, SCENE, NEWS], ids=lambda item: type(item).__name__)
def test_all_sets_have_all_tasks(item, templates):
    written = example(item, templates)
    assert written.id == "0" and all(choice.context == choice.context.rstrip() for choice in written.choices)
    if not isinstance(item, RecordItem):
        assert written.gold == (item.gold,)


def test_solved_examples_differ_also_where_records_have_no_ids():
    """Readers number those, so that a line that is repeated has another id."""
    pool = [CopaItem(str(number), "It rained.", ("Wet.", "Dry."), "effect", 0) for number in range(4)]
    pool.append(CopaItem("4", "It snowed.", ("White.", "Black."), "effect", 0))
    assert len(set(draw_shots(pool, [COPA], 2, seed=1, templates="fair"))) == 2
    with pytest.raises(UserError, match="has 2 that are not among those scored"):
        draw_shots(pool, [COPA], 3, seed=1, templates="fair")
