"""Keeps what people have written into a card when the card is generated again.

A card is split into sections at its headings of one or two #. Each generated section carries a comment with a checksum
of its text below its heading. An update replaces the sections that still match their checksum. Any other section was
written or edited by hand and is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable


_MARK = re.compile(r"\n<!-- generated ([0-9a-f]{8}) -->\n")
_FENCE = re.compile(r" {0,3}(?P<fence>(?P<sign>`|~)(?P=sign){2,})(?P<rest>.*)")
_HEADING = re.compile(r"^#{1,2} ")
# In the templates of PEFT and the Hub, as long as nobody has filled them in.
_PLACEHOLDER = "[More Information Needed]"


def mark(body: str) -> str:
    """Add its checksum to each section of a generated body, so that `update` recognizes it."""
    return _join(map(_add_checksum, split(body)))


def update(new: str, old: str) -> str:
    """Insert the sections of an old body that were written or edited by hand into a new one.

    Args:
        new: A body from `mark` or `update`.
        old: The body that it replaces.

    Returns:
        The sections of `new`. A section that was edited by hand in `old` replaces the one with the same heading, and
        any other section written by hand follows the section that it followed in `old`.
    """
    result = split(new)
    open_headings = [_heading(section) for section in result]  # None: replaced or inserted by hand
    position = 0
    for section in split(old):
        heading = _heading(section)
        if heading in open_headings:
            position = open_headings.index(heading) + 1
            if not _is_generated(section):
                result[position - 1], open_headings[position - 1] = section, None
        elif not _is_generated(section):
            result.insert(position, section)
            open_headings.insert(position, None)
            position += 1
    return _join(result)


def drop_deleted(body: str, common: str, other: str) -> str:
    """Remove the sections that `other` has changed or deleted since both bodies were `common`.

    Only sections that were written or edited by hand are removed: those that were generated are replaced anyway.
    """
    kept, known = ({section.strip("\n") for section in split(text)} for text in (other, common))
    gone = {section for section in known - kept if not _is_generated(section)}
    return _join(section for section in split(body) if section.strip("\n") not in gone)


def is_template(text: str) -> bool:
    """Return whether a card is a template of PEFT or the Hub that nobody has filled in."""
    return _PLACEHOLDER in text and not _MARK.search(text)


def split(body: str) -> list[str]:
    """Split a Markdown text at its headings, but not inside code. The joined sections are the text with Unix lines."""
    sections = [""]
    fence = ""
    lines = re.findall(r"[^\n]*\n|[^\n]+", body.replace("\r\n", "\n"))  # str.splitlines knows further line ends
    for line in lines:
        found = _FENCE.match(line)
        if found and not fence:
            fence = found["fence"]
        elif found and found["fence"].startswith(fence) and not found["rest"].strip():
            fence = ""
        if _HEADING.match(line) and not fence:
            sections.append("")
        sections[-1] += line
    return [section for section in sections if section.strip()]


def _join(sections: Iterable[str]) -> str:
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def _heading(section: str) -> str | None:
    """Return what identifies a section: its heading. There is only one title, whatever its words."""
    heading = section.strip("\n").partition("\n")[0].strip()
    return "#" if heading.startswith("# ") else heading


def _add_checksum(section: str) -> str:
    heading, _, text = section.partition("\n")
    text = text.strip("\n")
    return f"{heading}\n\n<!-- generated {_checksum(heading, text)} -->\n\n{text}"


def _is_generated(section: str) -> bool:
    """Return whether a section was generated and has not been edited since."""
    found = _MARK.search(section)
    if found is None:
        return False
    heading, text = section[: found.start()].strip("\n"), section[found.end() :].strip("\n")
    return found[1] == _checksum(heading, text)


def _checksum(heading: str, text: str) -> str:
    # Editors change trailing whitespace, which is no edit.
    lines = [line.rstrip() for line in f"{heading}\n{text}".splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
