"""Run the Python snippets of a page, and compare what they print with what the page says."""

from __future__ import annotations

import ast
import contextlib
import io
import re


SNIPPET = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)


def run_snippets(text: str) -> dict[str, object]:
    """Run the snippets of a text in order; return what they define.

    As in a notebook, a snippet that ends in an expression prints its value. Trainers print their
    figures too, so only the end of what a snippet prints is compared.
    """
    names: dict[str, object] = {}
    for snippet in SNIPPET.finditer(text):
        body, printed = ast.parse(snippet["code"]).body, io.StringIO()
        last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), "snippet", "exec"), names)
            value = eval(compile(last, "snippet", "eval"), names) if last else None
            if value is not None:
                print(repr(value))
        if snippet["output"] is not None:
            assert printed.getvalue().endswith(snippet["output"]), (
                f"{snippet['code']}\nprinted {printed.getvalue()}"
            )
    return names
