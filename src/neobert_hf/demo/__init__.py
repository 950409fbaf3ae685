"""The demo: documentation of installed packages, and search in it."""
