"""Minimal pairs of grammatical and ungrammatical English, written on the spot: the data of a run without any data.

Each pair is one sentence and the same sentence with one word in the wrong form; a model must say which is which from
the sentence alone. The pairs follow the idea of BLiMP (Warstadt et al. 2020, arXiv 1912.00582) with templates and
words of this file's own. Two properties keep the task honest:

- no content word of one split occurs in another, so that what is learned is the rule, not the words;
- within a phenomenon every form occurs in right and wrong sentences alike (singular and plural, he and him, ...), so
  that no single word gives the answer away: what counts is how two words go together.
"""

import random
from collections.abc import Callable

from datasets import Dataset, DatasetDict
from vocabulary import Noun, Vocabulary, add_ed, add_ing, add_s, split_words


LABELS = ("unacceptable", "acceptable")  # as in CoLA
PAIRS_PER_PHENOMENON = {"train": 200, "validation": 50, "test": 50}

# A phenomenon returns the sentence as words, the place of the word that is changed, and the wrong word for it.
Phenomenon = Callable[[Vocabulary], tuple[list[str], int, str]]


def verb_agreement(words: Vocabulary) -> tuple[list[str], int, str]:
    """the pilot gladly helps/help the nurses"""
    subject, verb = words.noun("person"), words.pick("meet")
    right, wrong = _agree(subject, add_s(verb), verb)
    return ["the", subject.text, words.pick("manner"), right, "the", words.noun("person").text], 3, wrong


def verb_agreement_across_phrase(words: Vocabulary) -> tuple[list[str], int, str]:
    """the pilot near the castles helps/help the nurse"""
    subject, verb = words.noun("person"), words.pick("meet")
    right, wrong = _agree(subject, add_s(verb), verb)
    phrase = ["near", "the", words.noun("place").text]
    return ["the", subject.text, *phrase, right, "the", words.noun("person").text], 5, wrong


def verb_agreement_across_clause(words: Vocabulary) -> tuple[list[str], int, str]:
    """the pilot that the nurses admired is/are tired"""
    subject = words.noun("person")
    right, wrong = _agree(subject, *words.rng.choice([("is", "are"), ("was", "were"), ("seems", "seem")]))
    clause = ["that", "the", words.noun("person").text, add_ed(words.pick("meet"))]
    return ["the", subject.text, *clause, right, words.pick("mood")], 6, wrong


def existential_agreement(words: Vocabulary) -> tuple[list[str], int, str]:
    """there was/were no chair near the castle"""
    thing = words.noun("thing")
    right, wrong = _agree(thing, *words.rng.choice([("is", "are"), ("was", "were")]))
    return ["there", right, "no", words.pick("look"), thing.text, "near", "the", words.noun("place").text], 1, wrong


def determiner_noun(words: Vocabulary) -> tuple[list[str], int, str]:
    """the pilot cleaned this/these chair"""
    thing = words.noun("thing")
    right, wrong = _agree(thing, *words.rng.choice([("this", "these"), ("that", "those")]))
    return ["the", words.noun("person").text, add_ed(words.pick("handle")), right, thing.text], 3, wrong


def determiner_adjective_noun(words: Vocabulary) -> tuple[list[str], int, str]:
    """the pilot cleaned this/these shiny wooden chair"""
    thing = words.noun("thing")
    right, wrong = _agree(thing, *words.rng.choice([("this", "these"), ("that", "those")]))
    adjectives = words.rng.sample(words.words["look"], 2)
    return ["the", words.noun("person").text, add_ed(words.pick("handle")), right, *adjectives, thing.text], 3, wrong


def reflexive_number(words: Vocabulary) -> tuple[list[str], int, str]:
    """the kings secretly praised themselves/himself"""
    kind, singular = words.rng.choice([("man", "himself"), ("woman", "herself")])
    subject = words.noun(kind)
    right, wrong = _agree(subject, singular, "themselves")
    return ["the", subject.text, words.pick("manner"), add_ed(words.pick("meet")), right], 4, wrong


def reflexive_gender(words: Vocabulary) -> tuple[list[str], int, str]:
    """the king secretly praised himself/herself"""
    kind, right, wrong = words.rng.choice([("man", "himself", "herself"), ("woman", "herself", "himself")])
    subject = words.noun(kind, plural=False)
    return ["the", subject.text, words.pick("manner"), add_ed(words.pick("meet")), right], 4, wrong


def reflexive_across_phrase(words: Vocabulary) -> tuple[list[str], int, str]:
    """the king behind the pilots praised himself/themselves"""
    kind, singular = words.rng.choice([("man", "himself"), ("woman", "herself")])
    subject = words.noun(kind)
    right, wrong = _agree(subject, singular, "themselves")
    phrase = ["behind", "the", words.noun("person").text]
    return ["the", subject.text, *phrase, add_ed(words.pick("meet")), right], 6, wrong


def verb_form(words: Vocabulary) -> tuple[list[str], int, str]:
    """the pilot has cleaned/cleaning the chair"""
    subject, verb = words.noun("person"), words.pick("handle")
    forms = {"base": verb, "past": add_ed(verb), "ing": add_ing(verb)}
    auxiliary, form = words.rng.choice([(("will", "will"), "base"), (("has", "have"), "past"), (("is", "are"), "ing")])
    wrong = words.rng.choice([other for other in forms if other != form])
    start = ["the", subject.text, _agree(subject, *auxiliary)[0]]
    return [*start, forms[form], "the", words.noun("thing").text], 3, forms[wrong]


def pronoun_case(words: Vocabulary) -> tuple[list[str], int, str]:
    """she/her helped the pilot, the pilot helped her/she"""
    subject, object_ = words.rng.choice([("he", "him"), ("she", "her"), ("they", "them"), ("we", "us")])
    other, verb = ["the", words.noun("person").text], [words.pick("manner"), add_ed(words.pick("meet"))]
    if words.flip():
        return [subject, *verb, *other], 0, object_
    return [*other, *verb, object_], 4, subject


PHENOMENA: dict[str, Phenomenon] = {
    phenomenon.__name__: phenomenon
    for phenomenon in (
        verb_agreement,
        verb_agreement_across_phrase,
        verb_agreement_across_clause,
        existential_agreement,
        determiner_noun,
        determiner_adjective_noun,
        reflexive_number,
        reflexive_gender,
        reflexive_across_phrase,
        verb_form,
        pronoun_case,
    )
}


def minimal_pairs(seed: int = 0) -> DatasetDict:
    """Generates the splits train, validation and test.

    Columns: sentence; label (1 acceptable, 0 not); phenomenon; pair (number of the pair within its split, the same
    for its two sentences). Every sentence is distinct, half of them are acceptable, all phenomena have as many pairs,
    and the two sentences of a pair follow each other. The same seed gives the same words per split and the same rows.
    """
    rng = random.Random(seed)
    splits = split_words(rng)
    return DatasetDict(
        {split: _rows(Vocabulary(words, rng), PAIRS_PER_PHENOMENON[split]) for split, words in splits.items()}
    )


def _rows(words: Vocabulary, pairs_per_phenomenon: int) -> Dataset:
    pairs: dict[str, tuple[str, str]] = {}  # right sentence: (wrong sentence, phenomenon)
    for name, phenomenon in PHENOMENA.items():
        enough = len(pairs) + pairs_per_phenomenon
        while len(pairs) < enough:
            sentence, place, wrong_word = phenomenon(words)
            wrong = [*sentence[:place], wrong_word, *sentence[place + 1 :]]
            pairs.setdefault(_spell(sentence), (_spell(wrong), name))
    shuffled = words.rng.sample(list(pairs.items()), len(pairs))
    return Dataset.from_list(
        [
            {"sentence": sentence, "label": label, "phenomenon": name, "pair": pair}
            for pair, (right, (wrong, name)) in enumerate(shuffled)
            for sentence, label in ((right, 1), (wrong, 0))
        ]
    )


def _agree(noun: Noun, singular: str, plural: str) -> tuple[str, str]:
    """The form that agrees with the noun, then the one that does not."""
    return (plural, singular) if noun.plural else (singular, plural)


def _spell(words: list[str]) -> str:
    return " ".join(words).capitalize() + "."
