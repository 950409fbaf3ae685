"""Sphinx settings of the documentation: Markdown pages, and an API reference from the docstrings."""

import importlib.metadata

project = "neobert_hf"
author = "the authors of neobert_hf"
release = importlib.metadata.version("neobert_hf")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"neobert_hf {release}"

myst_heading_anchors = 3  # links to headings work as on GitHub

default_role = "literal"  # docstrings write code between single backticks, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_custom_sections = ["Source"]
napoleon_use_rtype = False
