"""Entry point for tools that call setup.py; the metadata is in pyproject.toml, where pip, uv and GitHub read it."""

from setuptools import setup

setup()
