"""Namespaces whose names are imported when they are used: optional packages, and torch, are needed only then."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable, Callable, list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Its names stand once, in the imports below `if TYPE_CHECKING:`, where editors and type checkers read them too.

    Args:
        package: Its name.
        file: Its `__init__.py`. No module of the package has the name of what it gives: it would hide it.
    """
    module_of = {}
    for block in ast.parse(Path(file).read_text("utf-8")).body:
        if not isinstance(block, ast.If) or ast.unparse(block.test) != "TYPE_CHECKING":
            continue
        for node in block.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                module_of |= {name.name: "." * node.level + node.module for name in node.names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    names = sorted(module_of)
    return get, lambda: names, names
