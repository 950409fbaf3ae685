"""Docstrings and signatures: introspection of the standard library, parsing of other packages.

`documentation.py` runs this file as a script in a clean Python process (`-I -S`), so it imports the standard library only. It
reads a job as JSON from standard input and writes rows (`Row`) as JSON to standard output.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

MIN_CHARACTERS = 40  # a shorter docstring adds nothing to the name

# Modules of the standard library that are skipped, with their submodules.
LEFT_OUT = {
    *(
        "antigravity",
        "this",
        "turtledemo",
        "idlelib",
        "site",
        "sitecustomize",
        "readline",
        "rlcompleter",
    ),  # importing them has side effects
    *(
        "posix",
        "nt",
        "posixpath",
        "ntpath",
        "genericpath",
        "nturl2path",
    ),  # `os`, `os.path` and `urllib.request` document the same functions
    *(
        "sre_compile",
        "sre_constants",
        "sre_parse",
        "opcode",
        "pyexpat",
        "macpath",
    ),  # internal modules whose names have no underscore
    *("distutils", "lib2to3", "ensurepip", "msilib", "imp", "pydoc_data"),  # not meant for users
}
SIGNATURE_LINE = re.compile(r"(?:\w+\.)?(\w+)(\(.*\)(?: -+> [\w ]+)?)\n")  # "copy.copy(x) -> a copy", a line by itself
UNDERLINE = re.compile(r"^([*=~^-])\1{2,}\n", re.MULTILINE)  # below a heading of reStructuredText
LEFT_OUT_BELOW = {"test", "tests", "testing", "idle_test"}  # at any depth

# top-level package, name, signature, text, module to import ("" for topics), name in the module as __qualname__ ("" for a
# module); for the standard library also the number of modules that mention it
Row = tuple[str, str, str, str, str, str] | tuple[str, str, str, str, str, str, int]


def standard_library() -> list[Row]:
    """Return the objects of the standard library, each once, under its public name, sorted by name.

    A name is public if no part of it begins with an underscore and its module exports it: by `__all__`, or, without `__all__`, by
    defining it or by importing it from a submodule or a private module. Builtins have names without a module (`sorted`,
    `list.append`). If one text has several public names, the order of preference is: the object's own `__name__`, the fewest
    parts, the shortest. Modules that cannot be imported on this machine are skipped.

    A class or function without a docstring has the text "" if an `__all__` lists it, such as `csv.DictReader`, whose description
    is not in the source. Other objects without a docstring are left out.
    """
    modules = {}
    for name in _module_names():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of deprecated modules
                modules[name] = importlib.import_module(name)
        except (Exception, SystemExit):  # the module is for another operating system or lacks a library
            continue
    modules["os.path"] = os.path
    public_classes = {
        id(thing) for each in modules.items() for name, thing in _offered(*each) if not _is_alias(thing, name)
    }
    mentioned = [_names_in(code) for code in map(_code_of, modules.values()) if code]
    best: dict[str, tuple[tuple, tuple]] = {}  # by text
    for module_name, module in modules.items():
        rows = [((False, module_name.count("."), len(module_name)), (module_name, "", _own_docstring(module)))]
        for name, thing in _offered(module_name, module):
            qualified = name if module_name == "builtins" else f"{module_name}.{name}"
            rows += _described(thing, qualified, public_classes)
        for rank, (name, signature, text) in rows:
            if text and (text not in best or (*rank, name) < best[text][0]):
                qualname = "" if name == module_name else name.removeprefix(f"{module_name}.")
                row = (module_name.split(".")[0], name, signature, text, module_name, qualname)
                best[text] = ((*rank, name), row)
    rows = sorted([*(row for _, row in best.values()), *_undocumented(modules)], key=lambda row: row[1])
    # code calls a method of a builtin class without naming the class: `.append`, not `list.append`
    parts = [set(row[1].split(".")[-1 if row[0] == "builtins" else 0 :]) for row in rows]
    return [(*row, sum(each <= names for names in mentioned)) for row, each in zip(rows, parts)]


def language_topics() -> list[Row]:
    """Return the topics of `help()`, without the lines of punctuation under their headings."""
    from pydoc_data.topics import topics

    return [
        ("python", topic, "", re.sub(r"\n{3,}", "\n\n", textwrap.dedent(UNDERLINE.sub("", text))).strip(), "", "")
        for topic, text in sorted(topics.items())
    ]


def parsed(root: str, file: str) -> dict | None:
    """Return the documented objects of one source or stub file, or None if this Python version cannot parse it.

    Returns:
        `rows`, and what `reexports.py` needs to find public names: `module`, `is_package`, `is_stub`, and the result of
        `_bindings`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the parsed strings
            tree = ast.parse(Path(file).read_bytes())
        return _rows_and_bindings(tree, root, file)
    except (SyntaxError, ValueError, RecursionError, OSError):  # a sum of 900 terms is too deep for `ast.unparse`
        return None


def _rows_and_bindings(tree: ast.Module, root: str, file: str) -> dict:
    parts = Path(file).relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts).replace("-stubs", "", 1)
    if not module:
        return {"rows": []}
    rows = [
        (module.split(".")[0], name, signature, text, module, qualname)
        for name, signature, text, qualname in _docstrings(tree, module)
    ]
    bindings = _bindings(tree, module if is_package else module.rpartition(".")[0], file.endswith(".pyi"))
    return {"rows": rows, "module": module, "is_package": is_package, "is_stub": file.endswith(".pyi"), **bindings}


def _names_in(code: CodeType) -> set[str]:
    """Return the globals, the attributes and the parts of imported names in code; local variables do not count."""
    names = {part for name in code.co_names for part in name.split(".")}
    return names.union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _code_of(module: ModuleType) -> CodeType | None:
    """Return the code of a module, from the file that Python caches; None if it is not written in Python."""
    spec = getattr(module, "__spec__", None)
    return spec.loader.get_code(spec.name) if spec and hasattr(spec.loader, "get_code") else None


def _module_names() -> Iterator[str]:
    for name in sorted(sys.stdlib_module_names):
        if name not in LEFT_OUT and not name.startswith("_"):
            yield name
            yield from _submodule_names(name)


def _submodule_names(package: str) -> Iterator[str]:
    """Yield the public submodules of a package by listing its folder; skip `encodings`, which has a module for each encoding."""
    folder = Path(os.__file__).parent.joinpath(*package.split("."))
    if package == "encodings" or not folder.is_dir():
        return
    for file in sorted(folder.iterdir()):
        is_module = file.suffix == ".py" or (file / "__init__.py").is_file()
        if is_module and not file.stem.startswith("_") and file.stem not in LEFT_OUT_BELOW:
            yield f"{package}.{file.stem}"
            yield from _submodule_names(f"{package}.{file.stem}")


def _offered(module_name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the public names of a module, except names of modules, with their objects."""
    declared = getattr(module, "__all__", None)
    for name in sorted(set(vars(module) if declared is None else declared)):
        thing = getattr(module, name, None)
        if name.startswith("_") or thing is None or inspect.ismodule(thing):
            continue
        if declared is None and module_name != "builtins":
            owner = getattr(thing, "__module__", None) or module_name
            if not (owner == module_name or owner.startswith((f"{module_name}.", "_"))):
                continue
        yield name, thing


def _undocumented(modules: dict[str, ModuleType]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield the classes and functions without a docstring that an `__all__` lists, with "" as the text, each under one name."""
    found = []
    for module_name, module in modules.items():
        for name, thing in _offered(module_name, module) if hasattr(module, "__all__") else ():
            signature, text = _signature(thing, name, _own_docstring(thing))
            if (inspect.isclass(thing) or inspect.isroutine(thing)) and not _is_description(text):
                rank = (_is_alias(thing, name), module_name.count("."), len(f"{module_name}.{name}"))
                found.append(((*rank, module_name, name), signature or _constructor_parameters(thing), thing))
    found.sort(key=lambda each: each[0], reverse=True)  # the last one with an id stays, which has the smallest rank
    best = {id(thing): (*rank[-2:], signature) for rank, signature, thing in found}
    for module_name, name, signature in best.values():
        yield module_name.split(".")[0], f"{module_name}.{name}", signature, "", module_name, name


def _described(thing: object, name: str, public_classes: set[int]) -> Iterator[tuple[tuple, tuple[str, str, str]]]:
    """Yield rank and (name, signature, text) of an object and of the public members of a class; a smaller rank is better."""
    last_name = name.rpartition(".")[2]
    is_alias = _is_alias(thing, last_name)
    signature, text = _signature(thing, last_name, _own_docstring(thing))
    if _is_description(text):
        yield (is_alias, name.count("."), len(name)), (name, signature, text.encode("utf-8", "replace").decode())
    if inspect.isclass(thing) and not is_alias:
        # members of bases without a public name count as members of the class: `_socket.socket` defines `socket.socket.connect`
        bases = [base for base in thing.__mro__ if base is thing or id(base) not in public_classes]
        members = {member: value for base in reversed(bases) for member, value in vars(base).items()}
        for member, value in sorted(members.items()):
            if not member.startswith("_") and _is_member(value):
                value = getattr(value, "__func__", value)  # unwraps class methods and static methods
                yield from _described(value, f"{name}.{member}", public_classes)


def _is_description(text: str) -> bool:
    """Whether a docstring says more than one word; those of the fields of a named tuple are generated."""
    return len(text.split()) > 1 and not text.startswith("Alias for field number")


def _is_alias(thing: object, name: str) -> bool:
    return getattr(thing, "__name__", name) != name


def _is_member(value: object) -> bool:
    return inspect.isroutine(value) or inspect.isdatadescriptor(value) or isinstance(value, (classmethod, staticmethod))


def _own_docstring(thing: object) -> str:
    """Return the dedented docstring of the object itself, not of its type or a base; for a class also that of `__init__`."""
    if inspect.isclass(thing):
        initializer = vars(thing).get("__init__")
        text = ("__doc__" in vars(thing) and thing.__doc__) or (inspect.isfunction(initializer) and initializer.__doc__)
    else:
        text = getattr(thing, "__doc__", None)
        if not inspect.isroutine(thing) and text == type(thing).__doc__:
            return ""
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _signature(thing: object, name: str, text: str) -> tuple[str, str]:
    """Return the parameters of a function, and the docstring without first lines that only repeat the signature.

    For a class, and for a function whose parameters neither the source nor `inspect` gives, the parameters come from the first
    such line.
    """
    signature, rest = "", text
    while (line := SIGNATURE_LINE.match(rest)) and line[1] == name:
        signature, rest = signature or line[2], rest[line.end() :].lstrip()
    if not inspect.isroutine(thing):
        return signature, rest
    function = inspect.unwrap(thing)
    if hasattr(function, "__code__"):
        return _written_parameters(function) or signature, rest
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(inspect.signature(thing).replace(return_annotation=inspect.Signature.empty)), rest
    except Exception:
        # ValueError: no signature. Other errors: the text signature of C code cannot be evaluated (`curses`).
        return signature, rest


def _constructor_parameters(thing: object) -> str:
    """Return the parameters of a class whose `__init__` is written in Python; "" for other objects."""
    initializer = thing.__init__
    return _written_parameters(initializer.__get__(thing)) if inspect.isfunction(initializer) else ""


def _written_parameters(function: object) -> str:
    """Return the parameters as the source writes them; a default value may hold the environment (`cgi`) or vary between runs."""
    code = function.__code__
    if code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen"):
        return ""  # generated code
    arguments = _arguments_in(function.__globals__.get("__file__") or code.co_filename).get(code.co_firstlineno)
    if arguments is None:
        return ""
    written = ast.unparse(arguments)
    return f"({re.sub(r'^self(, )?', '', written)})" if inspect.ismethod(function) else f"({written})"


@functools.cache
def _arguments_in(file: str) -> dict[int, ast.arguments]:
    """Return the arguments of each function of a source file by its first line, which may be a decorator's."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found, pending = {}, [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[min(each.lineno for each in (*node.decorator_list, node))] = node.args
        pending += (each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr))
    return found


def _docstrings(node: ast.AST, name: str, qualname: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield name, signature, text and `__qualname__` of each documented object at and below the node."""
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    text = ast.get_docstring(node)
    if text and len(text) >= MIN_CHARACTERS:
        signature = f"({ast.unparse(node.args)})" if is_function else ""
        yield name, signature, text.encode("utf-8", "replace").decode(), qualname
    outer = f"{qualname}.<locals>." if is_function else f"{qualname}." if qualname else ""
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}", f"{outer}{child.name}")


def _bindings(tree: ast.Module, package: str, is_stub: bool) -> dict:
    """Return the names that a module binds, as its source says.

    Args:
        tree: Source of the module.
        package: Package that relative imports start from.
        is_stub: Whether the file is a stub. There, and below `if TYPE_CHECKING`, an import is for annotations only, unless it is
            `from a import *` or `from a import b as b` (PEP 484).

    Returns:
        `defined`: functions and classes. `classes`: for each class, the names of its bases and of its methods. `imported`: for
        each name, the module and the name there. `stars`: modules of `from module import *`. `hinted_stars`: those below
        `if TYPE_CHECKING`. `declared`: the names of `__all__`, or None if there is none or code computes it. `is_computed`:
        whether code computes it.
    """
    defined, classes, imported, stars, hinted_stars, declared, is_computed = [], {}, {}, [], [], None, False
    for node, is_typing in _statements(tree.body, is_stub):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.append(node.name)
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases if isinstance(base, (ast.Name, ast.Attribute))]
                members = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
                classes[node.name] = (bases, [each.name for each in node.body if isinstance(each, members)])
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*":
                    (hinted_stars if is_typing and not is_stub else stars).append(source)
                elif not is_typing or alias.asname == alias.name:
                    imported[alias.asname or alias.name] = (source, alias.name)
        elif isinstance(node, ast.Delete):
            for name in map(ast.unparse, node.targets):
                imported.pop(name, None)
        elif any(isinstance(each, ast.Name) and each.id == "__all__" for each in ast.walk(node)):
            try:
                declared = [*(declared or ()), *map(str, ast.literal_eval(node.value))]
            except (AttributeError, TypeError, ValueError):
                is_computed = True
    found = {"defined": defined, "classes": classes, "imported": imported, "stars": stars, "hinted_stars": hinted_stars}
    return {**found, "declared": None if is_computed else declared, "is_computed": is_computed}


def _statements(body: list[ast.stmt], is_typing: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements outside functions and classes, also those below `if`, and whether only type checkers read them."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With, ast.For)):
            is_checked = isinstance(node, ast.If) and ast.unparse(node.test) in (
                "TYPE_CHECKING",
                "typing.TYPE_CHECKING",
            )
            yield from _statements(node.body, is_typing or is_checked)
            for other in ("handlers", "orelse", "finalbody"):
                yield from _statements(getattr(node, other, []), is_typing)
        else:
            yield node, is_typing


def main() -> None:
    """Run the job from standard input: `{"files": [[root, file], ...]}`, or `{}` for the standard library and the topics."""
    job = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards what modules print on import
    if job:
        json.dump([parsed(root, file) for root, file in job["files"]], output)
    else:
        json.dump(language_topics() + standard_library(), output)
    output.close()


if __name__ == "__main__":
    main()
