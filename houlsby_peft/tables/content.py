"""The content of a file, whatever its name says: unpacked, and decoded."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from ..errors import AdapterError, shortened


_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
_MOST_UNPACKED = 2**30
# The usual encodings of files that are not UTF-8, for Latin letters, Cyrillic, Greek, Hebrew,
# Arabic, Thai, Chinese, Japanese and Korean.
_ENCODINGS = [
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp874"),
    *("gb18030", "big5", "cp932", "euc_jp", "cp949"),
]
_SAMPLED = 200_000  # bytes by which an encoding is told
_DAMAGED = "\ufffd"  # what Python decodes in place of bytes that are not UTF-8
_FIRST_GREEK = "\u0370"  # the letters before it are Latin


def suffix_of(path: Path) -> str:
    """Return the extension of a path in lower case, without that of a compression: `.csv` for
    `a.CSV.gz`.
    """
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def read_content(path: Path) -> bytes:
    """Return the bytes of a file; of a compressed one, what is inside."""
    if path.exists() and not path.is_file():  # a device or a pipe might never end
        raise AdapterError(f"{path} must be a file.")
    content = path.read_bytes()
    for signature, unpack in _UNPACKED_BY.items():
        if not content.startswith(signature):
            continue
        try:
            with unpack(io.BytesIO(content)) as inner:
                content = inner.read(_MOST_UNPACKED + 1)
        except _UNPACKING_ERRORS as error:
            raise AdapterError(f"{path} cannot be unpacked: {shortened(str(error))}.") from error
        if len(content) > _MOST_UNPACKED:
            raise AdapterError(f"{path} unpacks to more than 1 GB. Unpack it before.")
    return content


def _open_only_file(packed: IO[bytes]) -> IO[bytes]:
    """Open the one file in an archive, beside those that macOS adds; a spreadsheet stays packed."""
    archive = zipfile.ZipFile(packed)
    names = [name for name in archive.namelist() if not name.endswith("/")]
    if {"xl/workbook.xml", "content.xml"} & {*names}:
        packed.seek(0)
        return packed
    names = [name for name in names if not name.startswith("__MACOSX/")]
    if len(names) != 1:
        listed = ", ".join(names[:5]) or "none"
        raise OSError(f"it must hold one file, it holds {listed}; unpack it and give the folder")
    return archive.open(names[0])


_UNPACKING_ERRORS = (
    *(EOFError, OSError, RuntimeError, zlib.error, lzma.LZMAError),
    zipfile.BadZipFile,
)
# What opens compressed files, by their first bytes.
_UNPACKED_BY: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"PK\x03\x04": _open_only_file,
}


def read_text(path: Path, encoding: str | None = None) -> str:
    """Return the text of a file in an encoding, by default the one that is found."""
    return decode(path, read_content(path), encoding)[0]


def decode(path: Path, content: bytes, encoding: str | None = None) -> tuple[str, str]:
    """Return the text of a file's content, and its encoding."""
    encoding = encoding or _find_encoding(path, content)
    try:
        return content.decode(encoding), encoding
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise AdapterError(
            f"{path}, line {line}: it is not {encoding}. Name the encoding with --encoding."
        ) from error


def _find_encoding(path: Path, content: bytes) -> str:
    """Return the encoding of a text: by a byte order mark, UTF-8, or what charset-normalizer finds.

    Western and other Latin alphabets cannot be told apart safely: they count as "cp1252", that of
    Western Windows. A text that is UTF-8 for the most part, but not all of it, is refused.
    """
    start = content[:_SAMPLED]
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # In UTF-16, half of the bytes of Latin letters, digits and separators are zero.
    for encoding, high_bytes in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if high_bytes.count(0) > len(start) / 8:
            return encoding
    text = content.decode(errors="replace")
    if text.encode() == content:
        return "utf-8"
    damaged = text.count(_DAMAGED)
    others = sum(not letter.isascii() for letter in text) - damaged
    if damaged <= others:
        line = text.count("\n", 0, text.index(_DAMAGED)) + 1
        raise AdapterError(f"{path}: line {line} is not UTF-8 like the rest. Correct this line.")
    from charset_normalizer import from_bytes

    guess = from_bytes(start, cp_isolation=_ENCODINGS).best()
    letters = [letter for letter in str(guess or "") if not letter.isascii() and letter.isalpha()]
    is_latin = 2 * sum(letter < _FIRST_GREEK for letter in letters) >= len(letters)
    return "cp1252" if guess is None or is_latin else guess.encoding
