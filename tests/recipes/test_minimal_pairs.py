"""The generated minimal pairs: balanced, distinct, reproducible, and without a word that gives the answer away."""

import random
from collections import Counter

import pytest

from tasks.minimal_pairs import (
    PAIRS_PER_PHENOMENON,
    PHENOMENA,
    WORDS,
    add_ed,
    add_ing,
    add_s,
    minimal_pairs,
    split_words,
)


SPLITS = ("train", "validation", "test")
_FUNCTION_WORDS = """the there no near behind that this these those is are was were seem seems has have will himself
    herself themselves he him she her they them we us"""
FUNCTION_WORDS = set(_FUNCTION_WORDS.split())


def words_of(sentence):
    return sentence.removesuffix(".").lower().split()


@pytest.fixture(scope="module")
def data():
    return minimal_pairs()


@pytest.fixture(scope="module")
def pairs(data):
    """{split: [(phenomenon, words of the right sentence, words of the wrong one)]}"""
    return {
        split: [
            (right["phenomenon"], words_of(right["sentence"]), words_of(wrong["sentence"]))
            for right, wrong in zip(rows[::2], rows[1::2], strict=True)
        ]
        for split, rows in ((split, data[split].to_list()) for split in SPLITS)
    }


def test_sizes_and_columns(data):
    assert {split: len(rows) for split, rows in data.items()} == {"train": 4400, "validation": 1100, "test": 1100}
    assert all(set(rows.column_names) == {"sentence", "label", "phenomenon", "pair"} for rows in data.values())


def test_every_sentence_is_distinct(data):
    sentences = [sentence for rows in data.values() for sentence in rows["sentence"]]
    assert len(set(sentences)) == len(sentences) == 6600


@pytest.mark.parametrize("split", SPLITS)
def test_every_phenomenon_is_balanced(data, split):
    count = Counter(zip(data[split]["phenomenon"], data[split]["label"], strict=True))
    assert count == {(name, label): PAIRS_PER_PHENOMENON[split] for name in PHENOMENA for label in (0, 1)}


@pytest.mark.parametrize("split", SPLITS)
def test_each_pair_is_a_right_and_a_wrong_sentence_of_one_phenomenon(data, split):
    rows = data[split].to_list()
    for right, wrong in zip(rows[::2], rows[1::2], strict=True):
        assert (right["label"], wrong["label"]) == (1, 0)
        assert right["pair"] == wrong["pair"]
        assert right["phenomenon"] == wrong["phenomenon"]
    assert len({row["pair"] for row in rows}) == len(rows) / 2


@pytest.mark.parametrize("split", SPLITS)
def test_the_sentences_of_a_pair_differ_in_one_word(pairs, split):
    for phenomenon, right, wrong in pairs[split]:
        assert len(right) == len(wrong)
        changed = [(a, b) for a, b in zip(right, wrong, strict=True) if a != b]
        assert len(changed) == 1, (phenomenon, right, wrong)


# What the changed word may be: the pairs of forms that each phenomenon is about.
_REFLEXIVES = {("himself", "themselves"), ("herself", "themselves")}
CHANGES = {
    "verb_agreement_across_clause": {("is", "are"), ("was", "were"), ("seems", "seem")},
    "existential_agreement": {("is", "are"), ("was", "were")},
    "determiner_noun": {("this", "these"), ("that", "those")},
    "determiner_adjective_noun": {("this", "these"), ("that", "those")},
    "reflexive_number": _REFLEXIVES,
    "reflexive_across_phrase": _REFLEXIVES,
    "reflexive_gender": {("himself", "herself")},
    "pronoun_case": {("he", "him"), ("she", "her"), ("they", "them"), ("we", "us")},
    "verb_agreement": {(add_s(verb), verb) for verb in WORDS["meet"].split()},
    "verb_agreement_across_phrase": {(add_s(verb), verb) for verb in WORDS["meet"].split()},
    "verb_form": {
        forms
        for verb in WORDS["handle"].split()
        for forms in ((verb, add_ed(verb)), (verb, add_ing(verb)), (add_ed(verb), add_ing(verb)))
    },
}


@pytest.mark.parametrize("phenomenon", PHENOMENA)
def test_only_the_intended_word_changes(pairs, phenomenon):
    seen = set()
    for name, right, wrong in pairs["train"]:
        if name == phenomenon:
            [change] = [(a, b) for a, b in zip(right, wrong, strict=True) if a != b]
            assert change in CHANGES[phenomenon] or change[::-1] in CHANGES[phenomenon]
            seen.add(change in CHANGES[phenomenon])
    assert seen == {True, False}, "one form is always the right one"


def test_no_content_word_is_in_two_splits(pairs):
    content = {
        split: {word for _, right, wrong in pairs[split] for word in (*right, *wrong)} - FUNCTION_WORDS
        for split in SPLITS
    }
    assert all(len(words) > 100 for words in content.values())
    assert not content["train"] & content["validation"]
    assert not content["train"] & content["test"]
    assert not content["validation"] & content["test"]


def test_no_word_of_the_vocabulary_is_of_two_kinds_or_two_lemmas():
    words = [word for text in WORDS.values() for word in text.split()]
    assert len(set(words)) == len(words)
    forms = Counter(form for word in words for form in {word, add_s(word), add_ed(word), add_ing(word)})
    assert {form for form, count in forms.items() if count > 1} == set()
    assert not set(words) & FUNCTION_WORDS


@pytest.mark.parametrize("split", SPLITS)
def test_function_words_do_not_give_the_answer_away(pairs, split):
    """Per phenomenon, no word shared by many sentences is mostly in right ones or mostly in wrong ones."""
    for phenomenon in PHENOMENA:
        right_count, wrong_count = Counter(), Counter()
        for name, right, wrong in pairs[split]:
            if name == phenomenon:
                right_count.update(set(right) & FUNCTION_WORDS)
                wrong_count.update(set(wrong) & FUNCTION_WORDS)
        for word in right_count | wrong_count:
            total = right_count[word] + wrong_count[word]
            if total >= PAIRS_PER_PHENOMENON[split] / 2:
                # Four standard deviations of a fair coin thrown `total` times.
                assert abs(right_count[word] - wrong_count[word]) <= 4 * total**0.5, (phenomenon, word)


def test_the_seed_decides(data):
    again, other = minimal_pairs(), minimal_pairs(seed=1)
    for split in SPLITS:
        assert again[split].to_dict() == data[split].to_dict()
        assert set(other[split]["sentence"]) != set(data[split]["sentence"])


def test_split_words_deals_every_word_once():
    splits = split_words(random.Random(3))
    for kind, text in WORDS.items():
        dealt = [word for split in SPLITS for word in splits[split][kind]]
        assert sorted(dealt) == sorted(text.split())
        assert all(len(splits[split][kind]) >= 3 for split in SPLITS)


@pytest.mark.parametrize(
    ("inflect", "forms"),
    [
        (add_s, {"visit": "visits", "envy": "envies", "boy": "boys", "witness": "witnesses", "bench": "benches"}),
        (add_ed, {"visit": "visited", "envy": "envied", "admire": "admired", "annoy": "annoyed"}),
        (add_ing, {"visit": "visiting", "envy": "envying", "move": "moving"}),
    ],
)
def test_inflection(inflect, forms):
    assert {word: inflect(word) for word in forms} == forms


def test_agreement_is_right(pairs):
    """Checked without the generator's own idea of number: the subject's ending, which is regular here."""
    plurals = {add_s(word) for kind in ("person", "man", "woman", "thing") for word in WORDS[kind].split()}
    for split in SPLITS:
        for phenomenon, right, _ in pairs[split]:
            if phenomenon.startswith("verb_agreement_across_clause"):
                assert (right[6] in {"are", "were", "seem"}) == (right[1] in plurals), right
            if phenomenon.startswith("verb_agreement_across_phrase"):
                assert right[5].endswith("s") != (right[1] in plurals) or right[5].endswith("ss"), right
            if phenomenon.startswith("determiner"):
                assert (right[3] in {"these", "those"}) == (right[-1] in plurals), right
            if phenomenon == "existential_agreement":
                assert (right[1] in {"are", "were"}) == (right[4] in plurals), right
            if phenomenon in {"reflexive_number", "reflexive_across_phrase"}:
                assert (right[-1] == "themselves") == (right[1] in plurals), right
