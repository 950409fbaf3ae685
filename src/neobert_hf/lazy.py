"""Namespaces whose names are imported when they are used: optional packages, and torch, are needed only then."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, names_of: Mapping[str, Sequence[str]]) -> tuple[Callable, Callable, list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Its name.
        names_of: Public names by module. A module must not have a name of its own among them: it would hide it.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{module_of[name]}", package), name)

    names = sorted(module_of)
    return get, lambda: names, names
