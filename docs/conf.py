"""Sphinx settings of the documentation: Markdown pages, and an API reference from the docstrings."""

import importlib.metadata

project = "neobert_hf"
author = "The neobert_hf authors"
copyright = f"2026, {author}"
release = importlib.metadata.version("neobert_hf")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"neobert_hf {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

copybutton_selector = "div:not(.highlight-text) > .highlight > pre"  # not beside what a command prints
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 3  # links to headings work as on GitHub

default_role = "literal"  # docstrings write code between single backticks, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {  # that scikit-learn adds
    "exclude-members": "set_fit_request, set_predict_request, set_predict_proba_request, set_score_request"
}
napoleon_custom_sections = ["Source"]
napoleon_use_rtype = False
