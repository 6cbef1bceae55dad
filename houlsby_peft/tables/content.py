"""The content of a file, whatever its name says: unpacked, and decoded."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import unicodedata
import zipfile
import zlib
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

from ..errors import AdapterError, shortened


# The first bytes of compressed files, and what opens these files.
_COMPRESSIONS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
_ZIP = b"PK\x03\x04"
_MOST_UNPACKED = 2**30
# The usual encodings of files that are not UTF-8, for Latin letters, Cyrillic, Greek, Hebrew,
# Arabic, Thai, Chinese, Japanese and Korean.
_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp874"),
    *("gb18030", "big5", "cp932", "euc_jp", "cp949"),
)
_SAMPLED = 200_000  # bytes from which an encoding is guessed


def suffix_of(path: Path) -> str:
    """Return the extension of a path in lower case, without that of a compression: `.csv` for
    `a.CSV.gz`.
    """
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def read_content(path: Path) -> bytes:
    """Return the bytes of a file; of a compressed one, what is inside."""
    if path.exists() and not path.is_file():  # a device or a pipe might never end
        raise AdapterError(f"{path} must be a file.")
    with path.open("rb") as file:
        start = file.read(8)
    try:
        if start.startswith(_ZIP) and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
                if {"xl/workbook.xml", "xl/workbook.bin", "content.xml"} & {*archive.namelist()}:
                    content = path.read_bytes()  # a spreadsheet
                elif unpacked <= _MOST_UNPACKED:
                    content = archive.read(_only_file(path, archive))
        else:
            for signature, open_compressed in _COMPRESSIONS.items():
                if start.startswith(signature):
                    with open_compressed(path) as file:
                        content = file.read(_MOST_UNPACKED + 1)
                    unpacked = len(content)
                    break
            else:
                return path.read_bytes()
    except (EOFError, OSError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as e:
        raise AdapterError(f"{path} cannot be unpacked: {shortened(str(e))}.") from e
    if unpacked > _MOST_UNPACKED:
        raise AdapterError(f"{path} unpacks to more than 1 GB. Unpack it before.")
    return content


def _only_file(path: Path, archive: zipfile.ZipFile) -> str:
    """Return the name of the one file in an archive, beside those that macOS adds."""
    names = []
    for name in archive.namelist():
        if not name.endswith("/") and not name.startswith("__MACOSX/"):
            names.append(name)
    if len(names) != 1:
        raise AdapterError(
            f"{path} must hold one file, it holds {', '.join(names[:5]) or 'none'}. Unpack it, and "
            "give the file or the folder."
        )
    return names[0]


def read_text(path: Path, encoding: str | None = None) -> str:
    """Return the text of a file in an encoding, by default the one that `find_encoding` returns."""
    return decode(path, read_content(path), encoding)[0]


def decode(path: Path, content: bytes, encoding: str | None = None) -> tuple[str, str]:
    """Return the text of a file's content, and its encoding."""
    encoding = encoding or find_encoding(path, content)
    try:
        return content.decode(encoding), encoding
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise AdapterError(
            f"{path}, line {line}: it is not {encoding}. Name the encoding of the file with "
            "--encoding."
        ) from error


def find_encoding(path: Path, content: bytes) -> str:
    """Return the encoding of a text.

    It is "utf-8", with a byte order mark "utf-8-sig" or "utf-16", or the one that
    charset-normalizer finds. Western and other Latin alphabets cannot be told apart safely: they
    count as "cp1252", that of Western Windows. A text that is UTF-8 for the most part, but not all
    of it, is refused.
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
    lines_of_utf8, lines_of_others = 0, []
    for number, line in enumerate(BytesIO(content), start=1):
        try:
            lines_of_utf8 += len(line.decode()) < len(line)
        except UnicodeDecodeError:
            lines_of_others.append(number)
    if not lines_of_others:
        return "utf-8"
    if len(lines_of_others) <= lines_of_utf8:
        raise AdapterError(
            f"{path}: line {lines_of_others[0]} is not UTF-8 like the rest. Correct this line."
        )
    from charset_normalizer import from_bytes

    guess = from_bytes(start, cp_isolation=list(_ENCODINGS)).best()
    alphabets: Counter[str] = Counter()
    for letter in str(guess or ""):
        if letter.isalpha() and not letter.isascii():
            alphabets[unicodedata.name(letter, "").partition(" ")[0]] += 1
    if guess is None or max(alphabets, key=alphabets.__getitem__, default="LATIN") == "LATIN":
        return "cp1252"
    return guess.encoding
