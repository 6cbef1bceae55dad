"""Synonyms from the files of WordNet's database.

They are those of Debian's wordnet-base or NLTK's corpora/wordnet. WordNet's manual pages wndb(5WN)
and cntlist(5WN) describe their format. NLTK's own reader would need its copy of the data, a
download that Debian's package makes unnecessary.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
# By the number after % in a sense's key; 5 are the adjectives that cluster around others.
_NUMBERS = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}


class WordNet:
    """The synonyms of words in their most frequent part of speech.

    Words are not reduced to their base form: a synonym can replace "film", but would have to be
    inflected to replace "films".
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # By lemma and part of speech: where its senses are in the file of data.
        self._senses: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for part in PARTS_OF_SPEECH:
            for line in _lines(folder / f"index.{part}"):
                # lemma, pos, synset_cnt, p_cnt, p_cnt symbols, sense_cnt, tagsense_cnt, offsets
                lemma, _, count, *fields = line.split()
                self._senses[lemma][part] = [int(offset) for offset in fields[-int(count) :]]
        # By lemma and part of speech: how often its senses are tagged.
        self._frequency: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for line in _lines(folder / "cntlist.rev"):
            key, _, count = line.split()
            lemma, _, sense = key.partition("%")
            self._frequency[lemma][_NUMBERS[sense[0]]] += int(count)

    def part_of_speech(self, word: str) -> str | None:
        """Return the word's most frequent part of speech in WordNet's tagged texts.

        For a word that does not occur there, it is the one with the most senses. It is None if
        WordNet does not have the word in this form.
        """
        senses = self._senses.get(word.lower(), {})
        frequency = self._frequency[word.lower()]
        return max(senses, key=lambda part: (frequency[part], len(senses[part])), default=None)

    def synonyms(self, word: str) -> list[str]:
        """Return the single words that share a sense with the word, by its senses' order.

        The senses are those of its part of speech.
        """
        lemma = word.lower()
        part = self.part_of_speech(word)
        if part is None:
            return []
        synonyms: dict[str, None] = {}  # without repetition
        for offset in self._senses[lemma][part]:
            for synonym in self._synset(part, offset):
                if synonym.lower() != lemma and synonym.isalpha():
                    synonyms[synonym] = None
        return list(synonyms)

    def _synset(self, part: str, offset: int) -> list[str]:
        """Return the words of one sense."""
        with (self._folder / f"data.{part}").open("rb") as file:
            file.seek(offset)
            # synset_offset, lex_filenum, ss_type, w_cnt (hexadecimal), then w_cnt times word and
            # lex_id
            fields = file.readline().decode().split()
        words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
        # Adjectives may end in a marker such as (p).
        return [word.partition("(")[0] for word in words]


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file without the licence, whose lines begin with blanks."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.startswith(" "):
                yield line
