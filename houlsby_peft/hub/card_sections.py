"""Keeps what people have written into a card when it is generated anew.

A card is cut into sections at its headings (of one or two #). Each generated section carries, under its heading, a
comment with a checksum of its text. On an update, a section that still has its checksum is replaced; any other section
was written or changed by hand, and stays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable


_MARK = re.compile(r"\n<!-- generated ([0-9a-f]{8}) -->\n")
_FENCE = re.compile(r"^ {0,3}(```|~~~)")
_HEADING = re.compile(r"^#{1,2} ")
# Stands in the templates that PEFT and the Hub write, which nobody has filled in.
_PLACEHOLDER = "[More Information Needed]"


def mark(body: str) -> str:
    """Put its checksum under the heading of each section of a generated body, so that `update` knows it again."""
    return _join(map(_marked, split(body)))


def update(new: str, old: str) -> str:
    """A new body, with the sections of an old one that were written or changed by hand.

    Args:
        new: a body that `mark` or `update` gave.
        old: the body that it replaces.

    Returns:
        The sections of `new`, where one that was changed by hand under the same heading in `old` takes its place, and
        each other section written by hand follows the section that it followed in `old`.
    """
    old = old.replace("\r\n", "\n")
    result = split(new)
    free = [_key(section) for section in result]  # None: taken by a section written by hand
    place = 0
    for section in split(old):
        key = _key(section)
        if key in free:
            place = free.index(key) + 1
            if not _is_untouched(section):
                result[place - 1], free[place - 1] = section, None
        elif not _is_untouched(section):
            result.insert(place, section)
            free.insert(place, None)
            place += 1
    return _join(result)


def is_template(text: str) -> bool:
    """Whether a card is a template of PEFT or the Hub that nobody has filled in."""
    return _PLACEHOLDER in text and not _MARK.search(text)


def split(body: str) -> list[str]:
    """The sections of a Markdown text, which joined give the text; what looks like a heading in code is none."""
    sections = [""]
    fence = ""
    for line in body.splitlines(keepends=True):
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1] == fence:
            fence = ""
        if _HEADING.match(line) and not fence:
            sections.append("")
        sections[-1] += line
    return [section for section in sections if section.strip()]


def _marked(section: str) -> str:
    heading, _, text = section.partition("\n")
    text = text.strip("\n")
    return f"{heading}\n\n<!-- generated {_checksum(heading, text)} -->\n\n{text}"


def _join(sections: Iterable[str]) -> str:
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def _is_untouched(section: str) -> bool:
    found = _MARK.search(section)
    if found is None:
        return False
    heading, text = section[: found.start()].strip("\n"), section[found.end() :].strip("\n")
    return found[1] == _checksum(heading, text)


def _key(section: str) -> str | None:
    """What names a section: its heading; there is one title, whatever its words."""
    heading = section.strip("\n").partition("\n")[0].strip()
    return "#" if heading.startswith("# ") else heading


def _checksum(heading: str, text: str) -> str:
    # Editors change the ends of lines; that is no edit.
    lines = [line.rstrip() for line in f"{heading}\n{text}".splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
