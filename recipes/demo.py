"""Train an adapter without data and network: the packaged MiniLM learns to tell good English from bad.

    python recipes/demo.py --use_cpu

The texts are generated minimal pairs: a sentence and the same sentence with one word in the wrong form. A model must
tell them apart from the sentence alone. They are written as files, on which text_classification.py trains; its flags
work here as well. The pairs follow the idea of BLiMP (Warstadt et al. 2020, arXiv 1912.00582) with their own templates
and words. Two properties keep the task honest:

- No content word of one split occurs in another, so the model must learn the rule, not the words.
- Within a phenomenon every form (singular and plural, he and him, ...) occurs in right and in wrong sentences, so no
  single word gives the answer away; only the combination of two words does.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from datasets import Dataset, DatasetDict

from common.arguments import (
    MINILM,
    ClassifierArguments,
    ClassifierMethodArguments,
    EncoderArguments,
    RecipeParser,
    RecipeTrainingArguments,
)
from common.classification import ClassificationArguments, run
from common.edge import end_with_one_line, log


# The settings of the run without data. The papers' three learning rates are for far more steps. In this order both
# sentences of a pair are in one batch, where their difference shows best; shuffling or length grouping needs twice the
# steps.
DEFAULTS = {
    "output_dir": "runs/demo",
    "model_name": MINILM,
    "train_pooler": False,
    "learning_rate": 1e-3,
    "num_train_epochs": 4,
    "train_sampling_strategy": "sequential",
}
LABELS = ("unacceptable", "acceptable")  # as in CoLA
PAIRS_PER_PHENOMENON = {"train": 275, "validation": 50, "test": 50}

# Only regular words, so that three rules inflect them all (no doubled consonants, no irregular plural or past), and no
# word in two kinds. Some may be another part of speech elsewhere, which these sentences rule out.
WORDS = {
    "person": """teacher farmer doctor lawyer painter singer driver baker student pilot sailor soldier dentist author
        artist banker barber builder butcher cashier chemist clerk critic dancer designer director editor engineer
        florist gardener guard hunter inspector janitor jeweler journalist judge juror lecturer librarian manager mayor
        mechanic merchant miner minister musician neighbor nurse officer pharmacist philosopher photographer physicist
        plumber poet porter professor programmer referee reporter sculptor senator surgeon tailor tenant tourist
        trainer tutor visitor witness writer""",
    "man": """boy king prince uncle brother father son husband nephew waiter monk grandfather groom wizard duke emperor
        landlord butler""",
    "woman": """girl queen princess aunt sister mother daughter heroine niece waitress nun grandmother bride witch
        duchess empress landlady actress""",
    "meet": """admire advise annoy appreciate assist blame calm challenge comfort consult contact criticize deceive
        defend describe distract doubt embarrass encourage entertain envy follow frighten greet help ignore impress
        inspire insult interview irritate mention mock offend praise protect pity question recognize remember respect
        reward scare soothe support surprise tease thank threaten trust visit warn welcome""",
    "handle": """clean move paint repair borrow carry check cover damage deliver destroy discover display examine fix
        lift polish purchase push remove replace request return store touch want wash collect count order""",
    "thing": """chair lamp basket bottle bucket blanket mirror ladder hammer candle carpet drawer guitar helmet jacket
        kettle letter magazine notebook pencil pillow plate ribbon sandwich shovel spoon statue suitcase teapot towel
        trumpet umbrella vase violin wagon wallet""",
    "place": """garden bridge river station church castle museum library market forest harbor hospital hotel kitchen
        office school theater tower village airport bakery cottage factory lake mountain park prison shop stadium
        tavern temple tent warehouse cabin fountain barn""",
    "mood": """tired happy nervous angry polite famous honest lazy clever proud quiet rich strong sad shy brave busy
        careful cheerful friendly generous gentle greedy hungry jealous lonely loyal modest patient rude""",
    "look": """broken cheap dirty expensive fancy fragile green heavy large narrow new old plain purple rare round
        rusty shiny small square strange tiny ugly useful wide wooden yellow blue black white""",
    "manner": """gladly secretly openly kindly rarely usually briefly repeatedly frequently loudly silently bravely
        eagerly calmly cleverly foolishly honestly publicly privately wisely""",
}
SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}


@dataclass(frozen=True)
class Noun:
    """A noun in the singular or plural: `text` is its form."""

    text: str
    plural: bool


@dataclass
class Vocabulary:
    """The words of one split, and the random number generator that chooses among them."""

    words: dict[str, list[str]]
    rng: random.Random

    def pick(self, kind: str) -> str:
        """Return a word of the kind, uninflected."""
        return self.rng.choice(self.words[kind])

    def noun(self, *kinds: str, plural: bool | None = None) -> Noun:
        """Return a noun of one of the kinds, in the given number or, for None, in either with even odds."""
        plural = self.flip() if plural is None else plural
        text = self.pick(self.rng.choice(kinds))
        return Noun(add_s(text) if plural else text, plural)

    def flip(self) -> bool:
        """Return True or False with even odds."""
        return self.rng.random() < 0.5


def split_words(rng: random.Random) -> dict[str, dict[str, list[str]]]:
    """Distribute the words of every kind over the splits by SHARES, as {split: {kind: words}}."""
    splits: dict[str, dict[str, list[str]]] = {split: {} for split in SHARES}
    for kind, text in WORDS.items():
        words = text.split()
        rng.shuffle(words)
        start, share = 0, 0.0
        for split in SHARES:
            share += SHARES[split]
            end = round(share * len(words))
            splits[split][kind] = words[start:end]
            start = end
    return splits


def add_s(word: str) -> str:
    """Return the plural of a noun or the third person of a verb."""
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def add_ed(verb: str) -> str:
    """Return the past and past participle of a verb."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + ("d" if verb.endswith("e") else "ed")


def add_ing(verb: str) -> str:
    """Return the present participle of a verb."""
    return (verb[:-1] if verb.endswith("e") else verb) + "ing"


# A phenomenon returns the sentence as words, the index of the word to replace, and the wrong word for it.
Phenomenon = Callable[[Vocabulary], tuple[list[str], int, str]]


def verb_agreement(words: Vocabulary) -> tuple[list[str], int, str]:
    """the pilot gladly helps/help the nurses"""
    subject, verb = words.noun("person"), words.pick("meet")
    right, wrong = _agree(subject, add_s(verb), verb)
    return ["the", subject.text, words.pick("manner"), right, "the", words.noun("person").text], 3, wrong


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
        verb_agreement_across_clause,
        existential_agreement,
        determiner_noun,
        reflexive_number,
        reflexive_gender,
        verb_form,
        pronoun_case,
    )
}


def minimal_pairs(seed: int = 0) -> DatasetDict:
    """Generate the splits train, validation and test.

    The columns are sentence, label (1 acceptable, 0 not), phenomenon, and pair (the number of the pair within its
    split). All sentences are distinct, half of them are acceptable, all phenomena have equally many pairs, and the two
    sentences of a pair are neighbors. The same seed gives the same rows.
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
            sentence, index, wrong_word = phenomenon(words)
            wrong = [*sentence[:index], wrong_word, *sentence[index + 1 :]]
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
    """Return the form that agrees with the noun, then the one that does not."""
    return (plural, singular) if noun.plural else (singular, plural)


def _spell(words: list[str]) -> str:
    return " ".join(words).capitalize() + "."


def main() -> None:
    """Write the sentences, train on them, and print the accuracy on each phenomenon."""
    groups = (EncoderArguments, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="python recipes/demo.py [flags]")
    encoder, method, adapter, training = parser.parse(more_defaults=lambda _: DEFAULTS)
    folder, splits = Path(training.output_dir, "minimal_pairs"), minimal_pairs()
    with training.main_process_first():
        if training.process_index == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for name, rows in splits.items():
                table = rows.to_pandas().replace({"label": dict(enumerate(LABELS))})
                table.to_csv(folder / f"{name}.csv", index=False)
    columns = {"text_columns": ["sentence"], "label_columns": ["label"]}
    results = run(ClassificationArguments(**vars(encoder), data=str(folder), **columns), method, adapter, training)
    predictions = Path(training.output_dir, "predictions.csv")
    if "trainable_parameters" in results and predictions.exists():
        table = pd.read_csv(predictions)
        right = (table["label"] == table["predicted"]).groupby(splits["test"].to_pandas()["phenomenon"]).mean()
        log(explain(right, splits, results["trainable_parameters"]))


def explain(right: pd.Series, splits: DatasetDict, trainable: int) -> str:
    """Return what the run did, its test accuracies by phenomenon, and how to run a real task."""
    sentences = splits["test"][:2]["sentence"]
    table = "\n".join(f"  {name:<28}  {score:>6.1%}" for name, score in {**right, "all": right.mean()}.items())
    return f"""
What this run did. Without data or network, it wrote {sum(map(len, splits.values())):,} English sentences, in pairs:
  {sentences[0]}
  {sentences[1]}
It trained {trainable:,} parameters (adapters, layer norms and head) on a frozen encoder to tell right from wrong.
The test sentences share no noun, verb, adjective or adverb with the training sentences.

Test accuracy (chance: 50%):
{table}

Your own texts, with this encoder:  python recipes/text_classification.py --data FILE.csv --model_name minilm
GLUE, from the Hub, with BERT-base: python recipes/glue.py --task mrpc"""


if __name__ == "__main__":
    end_with_one_line(main)
