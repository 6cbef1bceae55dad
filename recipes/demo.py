"""Train an adapter without data and network: the packaged MiniLM learns to tell good English from
bad.

    python recipes/demo.py --use_cpu

The texts are generated minimal pairs: a sentence and the same sentence with one word in the wrong
form. They are written as files, on which text_classification.py trains; its flags work here as
well. The pairs follow the idea of BLiMP (Warstadt et al. 2020, arXiv 1912.00582) with their own
templates and words. Two properties keep the task honest:

- No content word of one split occurs in another, so the model must learn the rule, not the words.
- Within a phenomenon every form (singular and plural, he and him, ...) occurs in right and in wrong
  sentences, so no single word gives the answer away; only the combination of two words does.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from datasets import Dataset, DatasetDict

from run.arguments import MINILM, ClassifierArguments, EncoderArguments
from run.command import parse_command
from run.edge import end_with_one_line, log
from tasks.classification import ClassificationArguments, run


# The settings of the run without data. The papers' three learning rates are for far more steps. In
# this order both sentences of a pair are in one batch, where their difference shows best; shuffling
# or length grouping needs twice the steps.
DEFAULTS = {
    "output_dir": "runs/demo",
    "model_name": MINILM,
    "train_pooler": False,
    "learning_rate": 1e-3,
    "num_train_epochs": 4,
    "warmup_steps": 0.1,
    "train_sampling_strategy": "sequential",
}
LABELS = ("unacceptable", "acceptable")  # as in CoLA
SHARES = {"train": 0.6, "validation": 0.2, "test": 0.2}  # of the words
PAIRS_PER_PHENOMENON = {"train": 275, "validation": 50, "test": 50}

# Only regular words, so that two rules inflect them all (no doubled consonants, no irregular plural
# or past), and no word in two kinds. Some may be another part of speech elsewhere, which these
# sentences rule out.
WORDS = {
    "person": """
        teacher farmer doctor lawyer painter singer driver baker student pilot sailor soldier
        dentist author artist banker barber builder butcher cashier chemist clerk critic dancer
        designer director editor engineer florist gardener guard hunter inspector janitor jeweler
        journalist judge juror lecturer librarian manager mayor mechanic merchant miner minister
        musician neighbor nurse officer pharmacist philosopher photographer physicist plumber poet
        porter professor programmer referee reporter sculptor senator surgeon tailor tenant tourist
        trainer tutor visitor witness writer
    """,
    "man": """
        boy king prince uncle brother father son husband nephew waiter monk grandfather groom wizard
        duke emperor landlord butler
    """,
    "woman": """
        girl queen princess aunt sister mother daughter heroine niece waitress nun grandmother bride
        witch duchess empress landlady actress
    """,
    "meet": """
        admire advise annoy appreciate assist blame calm challenge comfort consult contact criticize
        deceive defend describe distract doubt embarrass encourage entertain envy follow frighten
        greet help ignore impress inspire insult interview irritate mention mock offend praise
        protect pity question recognize remember respect reward scare soothe support surprise tease
        thank threaten trust visit warn welcome
    """,
    "handle": """
        clean move paint repair borrow carry check cover damage deliver destroy discover display
        examine fix lift polish purchase push remove replace request return store touch want wash
        collect count order
    """,
    "thing": """
        chair lamp basket bottle bucket blanket mirror ladder hammer candle carpet drawer guitar
        helmet jacket kettle letter magazine notebook pencil pillow plate ribbon sandwich shovel
        spoon statue suitcase teapot towel trumpet umbrella vase violin wagon wallet
    """,
    "mood": """
        tired happy nervous angry polite famous honest lazy clever proud quiet rich strong sad shy
        brave busy careful cheerful friendly generous gentle greedy hungry jealous lonely loyal
        modest patient rude
    """,
    "manner": """
        gladly secretly openly kindly rarely usually briefly repeatedly frequently loudly silently
        bravely eagerly calmly cleverly foolishly honestly publicly privately wisely
    """,
}


@dataclass
class Vocabulary:
    """The words of one split, and the random number generator that chooses among them."""

    words: dict[str, list[str]]
    rng: random.Random

    def pick(self, kind: str) -> str:
        """Return a word of the kind, uninflected."""
        return self.rng.choice(self.words[kind])

    def noun(self, kind: str) -> tuple[str, bool]:
        """Return a noun in the singular or plural, with even odds, and whether it is the plural."""
        word = self.pick(kind)
        is_plural = self.rng.random() < 0.5
        return (add_s(word) if is_plural else word), is_plural

    def person(self) -> str:
        """Return a person or several, such as "the nurses"."""
        return f"the {self.noun('person')[0]}"

    def action(self) -> str:
        """Return what somebody did to somebody, such as "secretly praised"."""
        return f"{self.pick('manner')} {add_ed(self.pick('meet'))}"


def add_s(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def add_ed(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + ("d" if verb.endswith("e") else "ed")


# A phenomenon returns a sentence with a gap, the word that belongs there, and the wrong one.
Phenomenon = Callable[[Vocabulary], tuple[str, str, str]]


def verb_agreement_across_clause(words: Vocabulary) -> tuple[str, str, str]:
    """the pilot that the nurses admired is/are tired"""
    subject, is_plural = words.noun("person")
    clause = f"that {words.person()} {add_ed(words.pick('meet'))}"
    forms = words.rng.choice([("is", "are"), ("was", "were"), ("seems", "seem")])
    return f"the {subject} {clause} {{}} {words.pick('mood')}", *_agree(is_plural, *forms)


def determiner_noun(words: Vocabulary) -> tuple[str, str, str]:
    """the pilot cleaned this/these chair"""
    thing, is_plural = words.noun("thing")
    forms = words.rng.choice([("this", "these"), ("that", "those")])
    sentence = f"{words.person()} {add_ed(words.pick('handle'))} {{}} {thing}"
    return sentence, *_agree(is_plural, *forms)


def reflexive_gender(words: Vocabulary) -> tuple[str, str, str]:
    """the king secretly praised himself/herself"""
    kind, right, wrong = words.rng.choice(
        [("man", "himself", "herself"), ("woman", "herself", "himself")]
    )
    return f"the {words.pick(kind)} {words.action()} {{}}", right, wrong


def pronoun_case(words: Vocabulary) -> tuple[str, str, str]:
    """she/her helped the pilot, the pilot helped her/she"""
    subject, object_ = words.rng.choice(
        [("he", "him"), ("she", "her"), ("they", "them"), ("we", "us")]
    )
    if words.rng.random() < 0.5:
        return f"{{}} {words.action()} {words.person()}", subject, object_
    return f"{words.person()} {words.action()} {{}}", object_, subject


def _agree(is_plural: bool, singular: str, plural: str) -> tuple[str, str]:
    """Return the form that agrees with a noun, then the one that does not."""
    return (plural, singular) if is_plural else (singular, plural)


PHENOMENA: dict[str, Phenomenon] = {
    "verb_agreement_across_clause": verb_agreement_across_clause,
    "determiner_noun": determiner_noun,
    "reflexive_gender": reflexive_gender,
    "pronoun_case": pronoun_case,
}


def minimal_pairs(seed: int = 0) -> DatasetDict:
    """Generate the splits train, validation and test.

    The columns are sentence, label (1 acceptable, 0 not), phenomenon, and pair (the number of the
    pair within its split). All sentences are distinct, half of them are acceptable, all phenomena
    have equally many pairs, and the two sentences of a pair are neighbors. The same seed gives the
    same rows.
    """
    rng = random.Random(seed)
    shuffled = {}
    for kind, text in WORDS.items():
        words = text.split()
        shuffled[kind] = rng.sample(words, len(words))
    splits, start = {}, 0.0
    for split, share in SHARES.items():
        of_split = {}
        for kind, words in shuffled.items():
            first, end = round(start * len(words)), round((start + share) * len(words))
            of_split[kind] = words[first:end]
        splits[split] = _rows(Vocabulary(of_split, rng), PAIRS_PER_PHENOMENON[split])
        start += share
    return DatasetDict(splits)


def _rows(words: Vocabulary, pairs_per_phenomenon: int) -> Dataset:
    pairs: dict[str, tuple[str, str]] = {}  # right sentence: (wrong sentence, phenomenon)
    for name, phenomenon in PHENOMENA.items():
        enough = len(pairs) + pairs_per_phenomenon
        while len(pairs) < enough:
            sentence, *forms = phenomenon(words)
            right, wrong = (f"{sentence.format(form).capitalize()}." for form in forms)
            pairs.setdefault(right, (wrong, name))
    rows = []
    shuffled = words.rng.sample(list(pairs.items()), len(pairs))
    for pair, (right, (wrong, name)) in enumerate(shuffled):
        rows.append({"sentence": right, "label": 1, "phenomenon": name, "pair": pair})
        rows.append({"sentence": wrong, "label": 0, "phenomenon": name, "pair": pair})
    return Dataset.from_list(rows)


def main() -> None:
    """Write the sentences, train on them, and print the accuracy on each phenomenon."""
    command = parse_command(EncoderArguments, ClassifierArguments, more_defaults=lambda _: DEFAULTS)
    training, splits = command.training, minimal_pairs()
    folder = Path(training.output_dir, "minimal_pairs")
    with training.main_process_first():
        if training.process_index == 0:
            write(splits, folder)
    arguments = ClassificationArguments(
        **vars(command.arguments),
        data=str(folder),
        text_columns=["sentence"],
        label_columns=["label"],
    )
    results = run(command._replace(arguments=arguments))
    predictions = Path(training.output_dir, "predictions.csv")
    if "trainable_parameters" in results and predictions.exists():
        table = pd.read_csv(predictions)
        is_right = table["label"] == table["predicted"]
        phenomena = splits["test"].to_pandas()["phenomenon"]
        accuracies = is_right.groupby(phenomena).mean()
        log(explain(accuracies, splits, results["trainable_parameters"]))


def write(splits: DatasetDict, folder: Path) -> None:
    """Write a CSV file for each split, with the names of the labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        table = rows.to_pandas().replace({"label": dict(enumerate(LABELS))})
        table.to_csv(folder / f"{name}.csv", index=False)


def explain(accuracies: pd.Series, splits: DatasetDict, trainable: int) -> str:
    """Return what the run did, its test accuracies by phenomenon, and how to run a real task."""
    right, wrong = splits["test"][:2]["sentence"]
    count = sum(len(rows) for rows in splits.values())
    lines = []
    for name, accuracy in {**accuracies, "all": accuracies.mean()}.items():
        lines.append(f"  {name:<28}  {accuracy:>6.1%}")
    table = "\n".join(lines)
    recipe = "python recipes/text_classification.py"
    return f"""
This run wrote {count:,} English sentences in pairs, such as {right!r} and
{wrong!r}, and trained {trainable:,} parameters on a frozen encoder to tell right from wrong.
No content word of the test sentences is in the training sentences. Test accuracy (chance: 50%):
{table}

Your own texts, with this encoder:  {recipe} --data FILE.csv --model_name minilm
GLUE, from the Hub, with BERT-base: python recipes/glue.py --task mrpc"""


if __name__ == "__main__":
    end_with_one_line(main)
