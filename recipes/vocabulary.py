"""The words of the generated minimal pairs: by kind, inflected, and split so that no split shares a content word."""

import random
from dataclasses import dataclass


# Regular words only, so that three rules inflect them all (no doubled consonants, no irregular plural or past), and
# no word in two kinds. They may be read as another part of speech, which the sentences around them rule out.
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
    """A noun in one number: `text` is its form, `plural` its number."""

    text: str
    plural: bool


@dataclass
class Vocabulary:
    """The words of one split, with the generator of random numbers that picks among them."""

    words: dict[str, list[str]]
    rng: random.Random

    def pick(self, kind: str) -> str:
        """A word of the kind, uninflected."""
        return self.rng.choice(self.words[kind])

    def noun(self, *kinds: str, plural: bool | None = None) -> Noun:
        """A noun of one of the kinds, in the number asked for or, for None, in either with even odds."""
        plural = self.flip() if plural is None else plural
        text = self.pick(self.rng.choice(kinds))
        return Noun(add_s(text) if plural else text, plural)

    def flip(self) -> bool:
        """True or False with even odds."""
        return self.rng.random() < 0.5


def split_words(rng: random.Random) -> dict[str, dict[str, list[str]]]:
    """Deals every kind's words to the splits by SHARES: {split: {kind: words}}, no word in two splits."""
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
    """The plural of a noun or the third person of a verb."""
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def add_ed(verb: str) -> str:
    """The past and the past participle."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + ("d" if verb.endswith("e") else "ed")


def add_ing(verb: str) -> str:
    """The present participle."""
    return (verb[:-1] if verb.endswith("e") else verb) + "ing"
