"""The schemes in which tags mark entities, all of which are read as IOB2.

An entity begins with B, S (single), U (unit) or W (whole), and goes on with I, M (middle), E (end)
or L (last): IOB1, IOB2, IOBES, BILOU, BMES and BMEWO.
"""

import re
from collections.abc import Iterable, Sequence

from common.edge import log
from houlsby_peft.serving.tagging import find_entities


_TAG = re.compile(r"(?P<prefix>[BIESLUMW])(?P<sign>[-_])(?P<kind>.+)", re.DOTALL)
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
    return tag == "O" or _TAG.fullmatch(tag) is not None


def kinds_of(tags: Iterable[str]) -> set[str]:
    """Return the kinds of entities that tags of a scheme have."""
    return {match["kind"] for match in map(_TAG.fullmatch, tags) if match}


def find_scheme(tags: Iterable[str]) -> str | None:
    """Return the scheme of some tags; None if they mark no entities, as parts of speech."""
    names = set(tags)
    matches = [_TAG.fullmatch(tag) for tag in names - {"O"}]
    prefixes = {match["prefix"] for match in matches if match}
    if not prefixes or None in matches:
        return None
    for scheme, letters in _SCHEMES.items():
        if prefixes <= letters:
            return scheme
    return None


def is_iob(tags: Iterable[str]) -> bool:
    """Return whether tags are those of IOB1 or IOB2, which have the same names."""
    names = set(tags)
    are_written_so = all(tag == "O" or tag[1:2] == "-" for tag in names)
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
        match = _TAG.fullmatch(tag)
        if match is None:
            in_iob.append(tag)
        else:
            prefix = "I" if match["prefix"] in _INSIDE else "B"
            in_iob.append(f"{prefix}-{match['kind']}")
    converted = ["O"] * len(tags)
    for kind, first, last in find_entities(in_iob):
        converted[first : last + 1] = [f"B-{kind}", *[f"I-{kind}"] * (last - first)]
    return converted
