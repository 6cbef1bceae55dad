"""The schemes in which tags mark entities, all of which are read as IOB2.

An entity begins with B, S (single), U (unit) or W (whole), and goes on with I, M (middle), E (end)
or L (last): IOB1, IOB2, IOBES, BILOU, BMES and BMEWO.
"""

import re
from collections.abc import Iterable, Sequence

from houlsby_peft.predict.tagging import find_entities
from run.edge import log


# The letter stands before the kind, as in B-PER, b-per and B_PER, or behind it, as in PER-B.
_BEFORE = re.compile(r"(?P<letter>[BIESLUMW])[-_](?P<kind>.+)", re.DOTALL | re.IGNORECASE)
_BEHIND = re.compile(r"(?P<kind>.+)[-_](?P<letter>[BIESLUMW])", re.DOTALL)
_SCHEMES = {
    "IOB": set("BI"),
    "IOBES": set("BIES"),
    "BILOU": set("BILU"),
    "BMES": set("BMES"),
    "BMEWO": set("BMEW"),
}
_INSIDE = set("IMEL")


def is_entity_tag(tag: str) -> bool:
    """Return whether a tag is one of a scheme for entities."""
    return tag in ("O", "o") or _read(tag) is not None


def kinds_of(tags: Iterable[str]) -> set[str]:
    """Return the kinds of entities that tags of a scheme have."""
    return {read[1] for read in map(_read, tags) if read is not None}


def _read(tag: str) -> tuple[str, str] | None:
    """Return the letter and the kind of an entity's tag; None for other tags."""
    match = _BEFORE.fullmatch(tag) or _BEHIND.fullmatch(tag)
    return (match["letter"].upper(), match["kind"]) if match else None


def inside_of(tag: str) -> str:
    """Return the tag of a further word of what a tag begins."""
    read = _read(tag)
    return tag if read is None else f"I-{read[1]}"


def find_scheme(tags: Iterable[str]) -> str | None:
    """Return the scheme of some tags; None if they mark no entities, as parts of speech."""
    tags_of_entities = set(tags) - {"O", "o"}
    letters = set()
    for tag in tags_of_entities:
        read = _read(tag)
        if read is None:
            return None
        letters.add(read[0])
    for scheme, letters_of_scheme in _SCHEMES.items():
        if letters and letters <= letters_of_scheme:
            return scheme
    return None


def is_iob(tags: Iterable[str]) -> bool:
    """Return whether tags are those of IOB1 or IOB2, which have the same names."""
    names = set(tags)
    are_written_so = all(tag == "O" or tag[:2] in ("B-", "I-") for tag in names)
    return find_scheme(names) == "IOB" and are_written_so


def as_iob2(sentences: Sequence[Sequence[str]], name: str) -> list[list[str]]:
    """Return the tags of the split `name` in IOB2; those that mark no entities stay as they are."""
    scheme = find_scheme(tag for tags in sentences for tag in tags)
    if scheme is None:
        return [list(tags) for tags in sentences]
    converted = [_convert(tags) for tags in sentences]
    if converted != [list(tags) for tags in sentences]:
        log(f"{name}: tags in {scheme}, read as IOB2")
    return converted


def _convert(tags: Sequence[str]) -> list[str]:
    """Return the tags of a sentence in IOB2, by the entities that they mark."""
    in_iob = []
    for tag in tags:
        read = _read(tag)
        if read is None:
            in_iob.append("O")
        else:
            letter, kind = read
            in_iob.append(f"{'I' if letter in _INSIDE else 'B'}-{kind}")
    converted = ["O"] * len(tags)
    for kind, first, last in find_entities(in_iob):
        converted[first : last + 1] = [f"B-{kind}", *[f"I-{kind}"] * (last - first)]
    return converted
