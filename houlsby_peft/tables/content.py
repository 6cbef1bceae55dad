"""What a file holds, whatever its name says: its format, its compression and its encoding."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import AdapterError


SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods")
WRITTEN = (".csv", ".tsv", ".jsonl", ".xlsx")
FORMATS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", *SPREADSHEETS)

# The first bytes of compressed files, and what opens these files.
_COMPRESSIONS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
_ZIP = b"PK\x03\x04"
# The first bytes of formats that are known by them, and the format's usual extension.
_SIGNATURES = {b"PAR1": ".parquet", b"\xd0\xcf\x11\xe0": ".xls"}
# The files in a zip archive that make it a spreadsheet.
_SHEETS = {"xl/workbook.xml": ".xlsx", "xl/workbook.bin": ".xlsb", "content.xml": ".ods"}
# Other extensions of these formats.
OTHER_NAMES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".tab": ".tsv", ".pq": ".parquet"}
# The usual encodings of files that are not UTF-8, for Latin letters, Cyrillic, Greek, Hebrew,
# Arabic, Thai, Chinese, Japanese and Korean.
_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp874"),
    *("gb18030", "big5", "cp932", "euc_jp", "cp949"),
)
# Bytes from which an encoding is guessed.
_SAMPLED = 200_000


def without_compression(path: Path) -> Path:
    """Return a path without the extension of a compression: `a.csv` for `a.csv.gz`."""
    return path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path


def find_format(path: Path, formats: Sequence[str] = FORMATS) -> str:
    """Return the format of a file, one of those given, by its extension.

    The first bytes of a file that exists come first, as programs export spreadsheets and archives
    under any name.
    """
    suffix = without_compression(path).suffix.lower()
    if path.is_file():
        suffix = _find_signature(path) or suffix
    suffix = OTHER_NAMES.get(suffix, suffix)
    if suffix not in formats:
        raise AdapterError(
            f"A table must be a file that ends in {', '.join(formats)}; got {path.name}."
        )
    return suffix


def _find_signature(path: Path) -> str | None:
    """Return the format that the first bytes of a file tell, as its extension; None if none."""
    start = _read_start(path)
    for signature, suffix in _SIGNATURES.items():
        if start.startswith(signature):
            return suffix
    if not start.startswith(_ZIP) or not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        return _find_sheets(archive) or Path(_only_file(path, archive)).suffix.lower()


def _find_sheets(archive: zipfile.ZipFile) -> str | None:
    """Return the format of a zip archive that is a spreadsheet; None for other archives."""
    for name, suffix in _SHEETS.items():
        if name in archive.namelist():
            return suffix
    return None


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)


def _only_file(path: Path, archive: zipfile.ZipFile) -> str:
    """Return the name of the one file in a zip archive."""
    names = []
    for name in archive.namelist():
        # macOS adds files of its own.
        if not name.endswith("/") and not name.startswith("__MACOSX/"):
            names.append(name)
    if len(names) != 1:
        raise AdapterError(
            f"{path} must hold one file, it holds {', '.join(names[:5]) or 'none'}. Unpack it, and "
            "give the file or the folder."
        )
    return names[0]


def open_content(path: Path) -> BinaryIO:
    """Open a file for reading; of a compressed one, what is inside."""
    start = _read_start(path)
    for signature, open_compressed in _COMPRESSIONS.items():
        if start.startswith(signature):
            return open_compressed(path)  # type: ignore[no-any-return]
    if start.startswith(_ZIP) and zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        if _find_sheets(archive) is None:
            return archive.open(_only_file(path, archive))  # type: ignore[return-value]
    return path.open("rb")


def read_text(path: Path, encoding: str | None = None) -> str:
    """Return the text of a file in an encoding, by default the one that `find_encoding` returns."""
    encoding = encoding or find_encoding(path)
    with open_content(path) as file:
        content = file.read()
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise AdapterError(
            f"{path}, line {line}: it is not {encoding}. Name the encoding of the file with "
            "--encoding."
        ) from error


def find_encoding(path: Path) -> str:
    """Return the encoding of a text file.

    It is "utf-8", with a byte order mark "utf-8-sig" or "utf-16", or the one that
    charset-normalizer finds. Western and other Latin alphabets cannot be told apart safely: they
    count as "cp1252", that of Western Windows. A file that is UTF-8 for the most part, but not all
    of it, is refused.
    """
    lines_of_utf8 = 0
    lines_of_others = []
    with open_content(path) as file:
        start = file.read(_SAMPLED)
        encoding = _find_mark(start)
        if encoding is not None:
            return encoding
        file.seek(0)
        for number, line in enumerate(file, start=1):
            try:
                is_ascii = len(line.decode()) == len(line)
            except UnicodeDecodeError:
                lines_of_others.append(number)
            else:
                lines_of_utf8 += not is_ascii
    if 0 < len(lines_of_others) <= lines_of_utf8:
        raise AdapterError(
            f"{path}: line {lines_of_others[0]} is not UTF-8 like the rest. Correct this line."
        )
    return _guess_encoding(start) if lines_of_others else "utf-8"


def _find_mark(start: bytes) -> str | None:
    """Return the encoding that a byte order mark, or the zeros of UTF-16, tell; None if none."""
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    # In UTF-16, half of the bytes of Latin letters, digits and separators are zero.
    for encoding, high_bytes in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if high_bytes.count(0) > len(start) / 8:
            return encoding
    return None


def _guess_encoding(start: bytes) -> str:
    from charset_normalizer import from_bytes

    guess = from_bytes(start, cp_isolation=list(_ENCODINGS)).best()
    if guess is None or _most_common_alphabet(str(guess)) == "LATIN":
        return "cp1252"
    return guess.encoding


def _most_common_alphabet(text: str) -> str:
    """Return the alphabet of most letters beyond ASCII, as Unicode calls it, such as "CYRILLIC"."""
    alphabets: Counter[str] = Counter()
    for letter in text:
        if letter.isalpha() and not letter.isascii():
            alphabets[unicodedata.name(letter, "").partition(" ")[0]] += 1
    return max(alphabets, key=alphabets.__getitem__, default="LATIN")
