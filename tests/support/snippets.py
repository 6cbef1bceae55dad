"""Run the Python snippets of a page, and compare what they print with what the page says."""

from __future__ import annotations

import contextlib
import io
import re


SNIPPET = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)


def run_snippets(text: str) -> dict[str, object]:
    """Run the snippets of a text in order; return what they define.

    Trainers print their figures too, so only the end of what a snippet prints is compared.
    """
    names: dict[str, object] = {}
    for snippet in SNIPPET.finditer(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(snippet["code"], "snippet", "exec"), names)
        if snippet["output"] is not None:
            assert printed.getvalue().endswith(snippet["output"]), f"{snippet['code']}\nprinted {printed.getvalue()}"
    return names
