"""Demo: collects the documentation of installed packages and searches it."""
