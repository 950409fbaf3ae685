"""The description that an index shows: README.md, whose links to files lead nowhere there. pyproject.toml has all else."""

import re
from pathlib import Path

from setuptools import setup

PLACE = "Files in brackets are in `share/doc/neobert_hf`, in the folder of the environment that has this package."


def description() -> str:
    """README.md without pictures, and with the name of the installed file in place of a link to it."""
    text = Path(__file__).with_name("README.md").read_text("utf-8")
    text = re.sub(r"^!\[.*\n\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]+)\]\(\1\)", r"\1", text)
    text = re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)[^)]*\)", r"\1 (`\2`)", text)
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{PLACE}\n\n{rest}"


setup(long_description=description(), long_description_content_type="text/markdown")
