"""Files with a word per line and its tags in columns, in the dialects in which people have them.

CoNLL-2003 has the word first and the tag last; CoNLL-U and GermEval have an index before the word.
Which columns are read is said in the log. A file that seems to have the tag first is refused.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from data.tag_dialects import inside_of, is_entity_tag, kinds_of
from houlsby_peft.tables import read_text
from run.edge import RecipeError, log
from run.run import WHERE


# The columns of CoNLL-U, from 1 on: the word, and its part of speech.
_CONLLU_FIELDS, _CONLLU_WORD, _CONLLU_TAG = 10, 2, 4
# Ranges of words that are one, and words that are not written, in CoNLL-U.
_NO_WORD = re.compile(r"\d+[-.]\d+")
_FEWEST_WORDS = 10  # by which columns are told apart


@dataclass
class _Sentence:
    """The fields of each word, and the line of the first one."""

    line: int
    words: list[list[str]]


def read_conll(
    path: Path,
    encoding: str | None = None,
    word_column: int | None = None,
    tag_column: int | None = None,
) -> Dataset:
    """Read sentences as lists of words and of tags; columns are counted from 1 on.

    An empty line ends a sentence. Marks between documents and comments are left out.
    """
    text = read_text(path, encoding)
    lines = [line for line in text.splitlines() if line.strip()]
    # A tab that divides most lines, as a word may then hold blanks.
    with_tab = sum("\t" in line for line in lines[:1000])
    separator = "\t" if with_tab > len(lines[:1000]) / 2 else None
    widths = Counter(len(line.split(separator)) for line in lines)
    width = widths.most_common(1)[0][0] if widths else 0
    sentences = list(_read_sentences(path, text, separator, width))
    if not sentences:
        raise RecipeError(f"{path} has no rows. Give a file with some.")
    word_index, tag_index, has_index = _find_columns(
        path, sentences, width, word_column, tag_column
    )
    rows = []
    for sentence in sentences:
        tokens, tags = [], []
        for fields in sentence.words:
            if has_index and _NO_WORD.fullmatch(fields[0]):
                continue
            # A word with blanks, as "New York", is several, of which predictions are made.
            for number, word in enumerate(fields[word_index].split()):
                tag = fields[tag_index]
                tokens.append(word)
                tags.append(inside_of(tag) if number else tag)
        rows.append({"tokens": tokens, "tags": tags, WHERE: f"line {sentence.line}"})
    return Dataset.from_list(rows)


def _read_sentences(
    path: Path, text: str, separator: str | None, width: int
) -> Iterator[_Sentence]:
    sentence = None
    # A line may hold the other characters that Python takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        fields = [field.strip() for field in line.strip("\r\n").split(separator)]
        is_end = not line.strip() or fields[0].startswith("-DOCSTART-")
        # Before a sentence, as `# id = 3` or GermEval's source.
        has_other_form = len(fields) != width or "=" in line or "://" in line
        is_comment = sentence is None and line.startswith("#") and has_other_form
        if is_end or is_comment:
            if sentence is not None:
                yield sentence
            sentence = None
            continue
        if len(fields) < max(2, width):
            raise RecipeError(
                f"{path}: line {number} must have {max(2, width)} columns, such as a word and a "
                f"tag, got {line.strip()[:50]!r}."
            )
        if sentence is None:
            sentence = _Sentence(number, [])
        sentence.words.append(fields)
    if sentence is not None:
        yield sentence


def _find_columns(
    path: Path,
    sentences: Sequence[_Sentence],
    width: int,
    word_column: int | None,
    tag_column: int | None,
) -> tuple[int, int, bool]:
    """Return the columns of words and of tags, from 0 on, and whether an index is before them.

    They are those that the user has named, or that the file tells; the log says which.
    """
    for name, column in (("word", word_column), ("tag", tag_column)):
        if column is not None and not 1 <= column <= width:
            raise RecipeError(
                f"--{name}_column must be from 1 to {width}, the columns of {path}; got {column}."
            )
    if width == 2 and word_column is None and tag_column is None:
        _check_order(path, sentences)
    has_index = width > 2 and _counts_up(sentences)
    word, tag = _find_usual_columns(sentences, width) if has_index else (1, width)
    word, tag = word_column or word, tag_column or tag
    if word == tag:
        raise RecipeError(f"{path}: --word_column and --tag_column must differ.")
    if width > 2 or word > 1:
        log(
            f"{path}: words from column {word} of {width}, tags from column {tag}; to choose "
            "others, give --word_column and --tag_column"
        )
    return word - 1, tag - 1, has_index


def _find_usual_columns(sentences: Sequence[_Sentence], width: int) -> tuple[int, int]:
    """Return the columns of words and of tags, from 1 on, of a file with an index before."""
    if width == _CONLLU_FIELDS:
        return _CONLLU_WORD, _CONLLU_TAG
    if width > 3 and _repeats_kinds(sentences, width):
        return 2, width - 1
    return 2, width


def _counts_up(sentences: Sequence[_Sentence]) -> bool:
    """Return whether the first column numbers the words of each sentence."""
    for sentence in sentences:
        numbers = [fields[0] for fields in sentence.words if not _NO_WORD.fullmatch(fields[0])]
        first = int(numbers[0]) if numbers and numbers[0].isdecimal() else -1
        if first not in (0, 1):
            return False
        if numbers != [str(number) for number in range(first, first + len(numbers))]:
            return False
    return True


def _repeats_kinds(sentences: Sequence[_Sentence], width: int) -> bool:
    """Return whether the last column has entities inside those of the one before, as in GermEval.

    The inner ones are fewer, and of the same kinds.
    """
    outer = _values(sentences, width - 2)
    inner = _values(sentences, width - 1)
    are_entities = all(map(is_entity_tag, (*outer, *inner)))
    return are_entities and kinds_of(inner) <= kinds_of(outer) and outer["O"] <= inner["O"]


def _check_order(path: Path, sentences: Sequence[_Sentence]) -> None:
    """Refuse two columns of which the second has more different values, as words have."""
    first, second = _values(sentences, 0), _values(sentences, 1)
    if first.total() >= _FEWEST_WORDS and len(second) > len(first):
        raise RecipeError(
            f"{path} has {len(first)} different values in its first column and {len(second)} in "
            "its second one, but a file has more words than tags. Say which is which: "
            "--word_column 2 --tag_column 1, or the reverse."
        )


def _values(sentences: Iterable[_Sentence], column: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(fields[column] for fields in sentence.words)
    return counts
