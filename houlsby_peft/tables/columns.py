"""The usual names of text columns, and the columns of a table that hold its texts."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import AdapterError, shortened


# Usual names of text columns, in lower case. The first entry of which a table has all columns is
# used.
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "context"),
    ("query", "passage"),
    ("question", "sentence"),
    ("question", "answer"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence_a", "sentence_b"),
    ("#1 string", "#2 string"),
)
_SINGLE_TEXTS = (
    *("message", "body", "sentence", "content", "review", "comment", "description", "tweet"),
    *("utterance", "document", "abstract", "nachricht", "mitteilung", "beschreibung", "texto"),
    *("mensaje", "comentario", "texte", "commentaire", "testo", "messaggio", "commento"),
    *("mensagem", "tekst", "bericht", "文本", "内容", "评论", "テキスト", "本文", "текст"),
)
# Columns that may stand beside a longer text.
_TITLES = ("headline", "title", "subject", "betreff", "titel", "titre", "titulo", "sujet")
TEXT_COLUMNS: tuple[tuple[str, ...], ...] = (
    ("text", "text_pair"),
    ("text",),
    *_PAIRS,
    *((name,) for name in (*_SINGLE_TEXTS, *_TITLES)),
)
# Usual names of label columns, in lower case; the first that a table has is used.
LABEL_COLUMNS = (
    "label", "labels", "class", "category", "categories", "target", "tag", "tags", "topic",
    "sentiment", "intent", "emotion", "score", "rating", "stars",
    "kategorie", "klasse", "thema", "abteilung", "stimmung", "bewertung",
    "etiqueta", "categoria", "categoría", "clase", "tema", "sentimiento",
    "étiquette", "catégorie", "classe", "sujet", "etichetta", "rótulo", "categorie",
    "标签", "类别", "分类", "情感", "ラベル", "метка", "категория",
)  # fmt: skip
# One of them shows that a row is a header.
USUAL_NAMES = {
    *sum(TEXT_COLUMNS, ()),
    *LABEL_COLUMNS,
    *("id", "idx", "index", "date", "datum", "name", "answer", "split"),
}


def match_column(columns: Sequence[str], name: str) -> str | None:
    """Return the column of that name, or else the first whose name differs only in case and outer
    blanks, or None.
    """
    if name in columns:
        return name
    for column in columns:
        if column.strip().lower() == name.strip().lower():
            return column
    return None


def is_title(column: str) -> bool:
    """Return whether a column has the usual name of titles, which may stand beside the texts."""
    return column.strip().lower() in _TITLES


def find_text_columns(
    columns: Sequence[str],
    named: Sequence[str] | None = None,
    count: int | None = None,
    recorded: Sequence[str] | None = None,
) -> list[str]:
    """Return the columns of a table that hold the texts, one or two for pairs, or `count`.

    They are those that the user has named or, if the table has all of them, those recorded of an
    adapter's training; otherwise they are found by their usual names.
    """
    if named:
        candidates: Sequence[Sequence[str]] = [named]
    elif recorded:
        candidates = [recorded, *TEXT_COLUMNS]
    else:
        candidates = TEXT_COLUMNS
    for names in candidates:
        matches = [match_column(columns, name) for name in names]
        has_right_number = named or count in (None, len(names))
        if has_right_number and None not in matches:
            return matches  # type: ignore[return-value]
    rule = "The text needs a column of a usual name, such as text or message"
    if named:
        rule = f"The text needs a column {' and '.join(named)}"
    elif count == 2:
        rule = "A pair needs two columns of usual names, such as question and context"
    raise AdapterError(
        f"{rule}; the file has {shortened(', '.join(columns))}. Name it: --text_columns. If the "
        "first row is no header: --no_header."
    )


def check_number_of_texts(
    columns: Sequence[str], recorded: Sequence[str] | None, flag: str, adapter: str
) -> None:
    """Refuse to read single texts with an adapter that was trained on pairs, and the reverse;
    `flag` names columns.
    """
    if recorded is not None and len(columns) != len(recorded):
        kind = "pairs of texts" if len(recorded) == 2 else "single texts"
        names = " and ".join(shortened(repr(name)) for name in recorded)
        raise AdapterError(
            f"{adapter} must read {kind}, as it was trained on {names}; got {', '.join(columns)}. "
            f"See {flag}."
        )
