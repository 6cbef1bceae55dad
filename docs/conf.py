"""Configuration of the site, which `make docs` builds strictly from the pages and docstrings."""

import inspect

import houlsby_peft


project = "houlsby_peft"
copyright = "the authors of houlsby_peft"
release = houlsby_peft.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"houlsby_peft {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Headings of the pages are link targets, as on GitHub.
myst_heading_anchors = 4
# Pages may name files outside docs/, which are links on GitHub and plain names here.
suppress_warnings = ["myst.xref_missing"]
# The notebook is shown with the outputs that it has; tests/test_docs.py runs it and compares them.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_use_rtype = False


def setup(app):
    """Show a name where its package exports it, without what it inherits from PyTorch and PEFT."""
    for name in houlsby_peft.__all__:
        found = getattr(houlsby_peft, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            found.__module__ = houlsby_peft.__name__
