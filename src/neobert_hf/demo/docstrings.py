"""Docstrings and signatures: of the standard library by introspection, of other packages by parsing.

`documentation.py` runs this file as a script, in a clean Python process (`-I -S`): it imports the standard library only. The job
stands as JSON on standard input, the rows (package, name, signature, text) as JSON on standard output.
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
from types import ModuleType

MIN_CHARACTERS = 40  # a shorter docstring in a source file says no more than the name

# Modules of the standard library that are left out, with all below them.
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
    ),  # act on import
    *(
        "posix",
        "nt",
        "posixpath",
        "ntpath",
        "genericpath",
        "nturl2path",
    ),  # `os`, `os.path` and `urllib.request` have it
    *("sre_compile", "sre_constants", "sre_parse", "opcode", "pyexpat", "macpath"),  # private twins by another name
    *("distutils", "lib2to3", "ensurepip", "msilib", "imp", "pydoc_data"),  # not for users
}
LEFT_OUT_BELOW = {"test", "tests", "testing", "idle_test"}  # wherever they stand

Row = tuple[str, str, str, str]  # top-level package, name, signature, text


def standard_library() -> list[Row]:
    """The documented things of the standard library, each once, under its public name, in the order of names.

    A name is public if no part of it begins with an underscore and its module offers it: by `__all__`, or, without one, by
    defining it or by taking it from below itself or from a private module. The names of builtins stand alone (`sorted`,
    `list.append`). Of several public names of one text the best is the one that the object gives itself, then the one with the
    fewest parts, then the shortest. Modules that cannot be imported on this machine are left out.
    """
    modules = {}
    for name in _module_names():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated modules
                modules[name] = importlib.import_module(name)
        except (Exception, SystemExit):  # of another operating system, or a library that it needs is missing
            continue
    modules["os.path"] = os.path
    public_classes = {
        id(thing) for each in modules.items() for name, thing in _offered(*each) if not _is_alias(thing, name)
    }
    best: dict[str, tuple[tuple, Row]] = {}  # by text
    for module_name, module in modules.items():
        rows = [((False, module_name.count("."), len(module_name)), (module_name, "", _own_docstring(module)))]
        for name, thing in _offered(module_name, module):
            qualified = name if module_name == "builtins" else f"{module_name}.{name}"
            rows += _described(thing, qualified, public_classes)
        for rank, (name, signature, text) in rows:
            if text and (text not in best or (*rank, name) < best[text][0]):
                best[text] = ((*rank, name), (module_name.split(".")[0], name, signature, text))
    return sorted((row for _, row in best.values()), key=lambda row: row[1])


def language_topics() -> list[Row]:
    """The topics of `help()`."""
    from pydoc_data.topics import topics

    return [
        ("python", topic, "", textwrap.dedent(re.sub(r"\n{3,}", "\n\n", text)).strip())
        for topic, text in sorted(topics.items())
    ]


def parsed(root: str, file: str) -> list[Row] | None:
    """The documented things of one source or stub, or None if it is not Python that this version can parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None
    parts = Path(file).relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    name = ".".join(parts).replace("-stubs", "", 1)
    return [(name.split(".")[0], *row) for row in _docstrings(tree, name)] if parts else []


def _module_names() -> Iterator[str]:
    for name in sorted(sys.stdlib_module_names):
        if name not in LEFT_OUT and not name.startswith("_"):
            yield name
            yield from _submodule_names(name)


def _submodule_names(package: str) -> Iterator[str]:
    """Public modules below a package, from its folder, without importing anything. `encodings` has one for each encoding."""
    folder = Path(os.__file__).parent.joinpath(*package.split("."))
    if package == "encodings" or not folder.is_dir():
        return
    for file in sorted(folder.iterdir()):
        is_module = file.suffix == ".py" or (file / "__init__.py").is_file()
        if is_module and not file.stem.startswith("_") and file.stem not in LEFT_OUT_BELOW:
            yield f"{package}.{file.stem}"
            yield from _submodule_names(f"{package}.{file.stem}")


def _offered(module_name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    """The public names of a module, without other modules, and what they stand for."""
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


def _described(thing: object, name: str, public_classes: set[int]) -> Iterator[tuple[tuple, tuple[str, str, str]]]:
    """Name, signature and text of a thing and of the public members of a class, each after its rank; smaller is better."""
    last_name = name.rpartition(".")[2]
    is_alias = _is_alias(thing, last_name)
    signature, text = _signature(thing, last_name, _own_docstring(thing))
    if len(text.split()) > 1 and not text.startswith("Alias for field number"):
        yield (is_alias, name.count("."), len(name)), (name, signature, text.encode("utf-8", "replace").decode())
    if inspect.isclass(thing) and not is_alias:
        # bases without a public name of their own count as the class itself: `socket.socket.connect` is of `_socket.socket`
        bases = [base for base in thing.__mro__ if base is thing or id(base) not in public_classes]
        members = {member: value for base in reversed(bases) for member, value in vars(base).items()}
        for member, value in sorted(members.items()):
            if not member.startswith("_") and _is_member(value):
                value = getattr(value, "__func__", value)  # of class methods and static methods
                yield from _described(value, f"{name}.{member}", public_classes)


def _is_alias(thing: object, name: str) -> bool:
    return getattr(thing, "__name__", name) != name


def _is_member(value: object) -> bool:
    return inspect.isroutine(value) or inspect.isdatadescriptor(value) or isinstance(value, (classmethod, staticmethod))


def _own_docstring(thing: object) -> str:
    """The docstring of a thing itself, dedented: not that of its type or of a base; a class may have it in `__init__`."""
    if inspect.isclass(thing):
        initializer = vars(thing).get("__init__")
        text = vars(thing).get("__doc__") or (inspect.isfunction(initializer) and initializer.__doc__)
    else:
        text = getattr(thing, "__doc__", None)
        if not inspect.isroutine(thing) and text == type(thing).__doc__:
            return ""
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _signature(thing: object, name: str, text: str) -> tuple[str, str]:
    """Parameters of a function, and the docstring without first lines that are no more than a signature.

    Where neither the source nor `inspect` has parameters, the first such line has them; so it does for a class.
    """
    line = rf"(?:\w+\.)?{re.escape(name)}(\(.*\)(?: -+> [\w ]+)?)\n"
    found = re.match(rf"(?:{line})+\s*(?=\S)", text)
    signature = re.match(line, text)[1] if found else ""
    rest = text[found.end() :] if found else text
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
        # ValueError where there is none; anything else from the text signature of C code that does not evaluate (`curses`)
        return signature, rest


def _written_parameters(function: object) -> str:
    """Parameters as the source has them: the value of a default may be the whole environment (`cgi`), or differ on every run."""
    code = function.__code__
    if code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen"):
        return ""  # generated
    arguments = _arguments_in(function.__globals__.get("__file__") or code.co_filename).get(code.co_firstlineno)
    if arguments is None:
        return ""
    written = ast.unparse(arguments)
    return f"({re.sub(r'^self(, )?', '', written)})" if inspect.ismethod(function) else f"({written})"


@functools.cache
def _arguments_in(file: str) -> dict[int, ast.arguments]:
    """The arguments of each function of a source by its first line, which may be that of a decorator."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {min(each.lineno for each in (*node.decorator_list, node)): node.args for node in functions}


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str, str]]:
    text = ast.get_docstring(node)
    if text and len(text) >= MIN_CHARACTERS:
        signature = f"({ast.unparse(node.args)})" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
        yield name, signature, text.encode("utf-8", "replace").decode()
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}")


def main() -> None:
    """Do the job on standard input: `{"files": [[root, file], ...]}`, or `{}` for the standard library and the topics."""
    job = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a module prints when it is imported
    if job:
        json.dump([parsed(root, file) for root, file in job["files"]], output)
    else:
        json.dump(language_topics() + standard_library(), output)
    output.close()


if __name__ == "__main__":
    main()
