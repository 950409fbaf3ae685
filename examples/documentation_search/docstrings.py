"""The documentation of Python as entries: `read` imports modules in a clean Python process and reads their docstrings.

The clean process runs this file as a script without site-packages (`-I -S`), so the file imports the standard library only.
"""

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType

# fmt: off
LEFT_OUT = {  # modules of the standard library that are skipped, with their submodules
    "antigravity", "this", "turtledemo", "idlelib", "site", "sitecustomize", "readline", "rlcompleter",  # have side effects
    "posix", "nt", "posixpath", "ntpath", "genericpath", "nturl2path",  # `os`, `os.path`, `urllib.request` have the same
    "sre_compile", "sre_constants", "sre_parse", "opcode", "pyexpat", "macpath",  # internal, without an underscore
    "distutils", "lib2to3", "ensurepip", "msilib", "imp", "pydoc_data",  # not meant for users
}
# fmt: on
LEFT_OUT_BELOW = {"test", "tests", "testing", "idle_test"}  # at any depth
SIGNATURE_LINE = re.compile(r"(?:\w+\.)?(\w+)(\(.*\)(?: -+> [\w ]+)?)\n")  # "copy.copy(x) -> a copy", a line by itself
UNDERLINE = re.compile(r"^([*=~^-])\1{2,}\n", re.MULTILINE)  # below a heading of reStructuredText
PLAIN_DEFAULTS = (type(None), bool, int, float, str, bytes)  # another default may show an address or the environment


@dataclass(frozen=True)
class Entry:
    """One object of Python, or one topic of `help()`.

    Attributes:
        package: Top-level package or module; "builtins" for builtins and "python" for topics.
        name: Name of the object, without "builtins", or the topic.
        signature: Parameters of a function; often "" for other objects.
        text: Dedented docstring; "" for a class or function without one that the `__all__` of a module lists.
        module: Module to import; "" for topics.
        qualname: Name inside the module, as Python's `__qualname__`; "" for a module or a topic.
        mentions: Number of modules of the standard library whose code has every part of the name as a global, an attribute or
            an import: os and remove for `os.remove`. For a method of a builtin class only the last part counts, since code
            calls it without the class. 0 for topics and other packages.
    """

    package: str
    name: str
    signature: str
    text: str
    module: str = ""
    qualname: str = ""
    mentions: int = 0

    @property
    def full_text(self) -> str:
        """Name, signature and docstring: the input of a model."""
        return f"{self.name}{self.signature}\n{self.text}"


def words_of(text: str) -> str:
    """Split identifiers into words: `readLine` and `read_line` become "read Line" and "read line"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"[_.]", " ", text))


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text into its first sentence, on one line, and the rest; without a full stop, split after the first paragraph."""
    paragraph = re.split(r"\n\s*\n", text, maxsplit=1)[0]
    found = re.match(r".+?[.!?](?=\s|$)", paragraph, re.DOTALL)
    end = found.end() if found else len(paragraph)
    return " ".join(text[:end].split()), text[end:].strip()


def views(entry: Entry) -> list[str]:
    """Return the texts of an entry that the search embeds: name and first sentence, and name and rest if there is a rest.

    An everyday question resembles the first sentence alone more than the whole text, and a question about a detail the rest.
    """
    name = words_of(entry.name)
    return [f"{name}\n{part}" for part in first_sentence(entry.text) if part] or [name]


def read(packages: tuple[str, ...] = ("python",)) -> list[Entry]:
    """Read the documentation of packages and modules: "json", "os.path", "numpy"; "python" is the standard library.

    A process of its own imports them. Of the standard library it reads all public modules, of another package those that are
    loaded by its import.

    Raises:
        ValueError: A package has no documentation in this Python.
        RuntimeError: The process failed.
    """
    command = [sys.executable, "-I", "-S", "-B", __file__]
    entries = []
    for package in packages:
        job = json.dumps({"package": package, "path": sys.path})
        with tempfile.TemporaryDirectory() as folder:  # imported modules cannot write into the caller's folder
            done = subprocess.run(command, input=job, capture_output=True, text=True, encoding="utf-8", cwd=folder)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise RuntimeError(f"reading {package} failed: {reason[-1]}")
        rows = json.loads(done.stdout)
        if not rows:
            raise ValueError(f"{package} has no documentation in this Python; is it installed, and spelled like this?")
        entries += [Entry(*row) for row in rows]
    return entries


def standard_library() -> list[Entry]:
    """Return the objects of the standard library, each once, with the modules that mention them."""
    names = [name for name in sorted(sys.stdlib_module_names) if name not in LEFT_OUT and not name.startswith("_")]
    modules = _imported([*names, "os.path"])
    mentioned = [_names_in(code) for code in map(_code_of, modules.values()) if code]
    counted = []
    for entry in entries_of(modules):
        parts = entry.name.split(".")
        needed = set(parts[-1:] if entry.package == "builtins" else parts)
        counted.append(dataclasses.replace(entry, mentions=sum(needed <= names for names in mentioned)))
    return counted


def language_topics() -> list[Entry]:
    """Return the topics of `help()`, without the lines of punctuation under their headings."""
    from pydoc_data.topics import topics

    unique = {}
    for topic, text in sorted(topics.items()):
        text = re.sub(r"\n{3,}", "\n\n", textwrap.dedent(UNDERLINE.sub("", text))).strip()
        unique.setdefault(text, topic)  # "else" and "if" are one chapter
    return [Entry("python", topic, "", text) for text, topic in unique.items()]


def entries_of(modules: dict[str, ModuleType]) -> list[Entry]:
    """Return the objects that modules offer, each once, under its public name, sorted by name.

    A name is public if no part of it begins with an underscore and its module exports it: by `__all__`, or, without `__all__`, by
    defining it or by importing it from a submodule or a private module. Builtins have names without a module (`sorted`,
    `list.append`). If one text has several public names, the order of preference is: the object's own `__name__`, the fewest
    parts, the shortest.
    """
    offered = {name: list(_offered(name, module)) for name, module in modules.items()}
    public_classes = {id(thing) for things in offered.values() for name, thing in things if not _is_alias(thing, name)}
    best: dict[str | int, tuple[tuple, Entry]] = {}
    for module_name, module in modules.items():
        top, prefix = module_name.split(".")[0], "" if module_name == "builtins" else f"{module_name}."
        text = _own_docstring(module)
        found = [(False, module, Entry(top, module_name, "", text, module_name))] if text else []
        for name, thing in offered[module_name]:
            for is_alias, qualname, member in _with_members(thing, name, public_classes):
                signature, text = _signature(member, qualname.rpartition(".")[2], _own_docstring(member))
                entry = Entry(top, prefix + qualname, signature, text, module_name, qualname)
                # only what an `__all__` lists has an entry without a docstring, such as `csv.DictReader`
                is_listed = "__all__" in vars(module) and member is thing
                if text or (is_listed and (inspect.isclass(thing) or inspect.isroutine(thing))):
                    found.append((is_alias, member, entry))
        for is_alias, thing, entry in found:
            rank = (is_alias, entry.name.count("."), len(entry.name), entry.name)
            key = entry.text or id(thing)
            if key not in best or rank < best[key][0]:
                best[key] = (rank, entry)
    return sorted((entry for _, entry in best.values()), key=lambda entry: entry.name)


def _imported(names: list[str]) -> dict[str, ModuleType]:
    """Import modules and their public submodules, and leave out what cannot be imported on this machine."""
    modules = {}
    for name in (pending := list(names)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of deprecated modules
                modules[name] = importlib.import_module(name)
        except (Exception, SystemExit):  # the module is for another operating system or lacks a library
            continue
        if name != "encodings":  # has a module for each encoding
            for _, below, _ in pkgutil.iter_modules(getattr(modules[name], "__path__", ())):
                if not below.startswith("_") and below not in LEFT_OUT_BELOW:
                    pending.append(f"{name}.{below}")
    return modules


def _loaded_by(package: str) -> dict[str, ModuleType]:
    """Import a package, and return its public modules that this import has loaded too."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        return {}
    names = [name for name in sorted(sys.modules) if f"{name}.".startswith(f"{package}.")]
    return {name: sys.modules[name] for name in names if not any(part.startswith("_") for part in name.split("."))}


def _offered(module_name: str, module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the public names of a module, except names of modules, with their objects."""
    declared = vars(module).get("__all__")
    for name in sorted(set(vars(module) if declared is None else declared)):
        try:
            thing = getattr(module, name, None)
            owner, _ = (getattr(thing, part, None) for part in ("__module__", "__name__"))
        except Exception:  # something that is made at first use, and cannot be made on this machine
            continue
        if name.startswith("_") or thing is None or inspect.ismodule(thing):
            continue
        is_own = not isinstance(owner, str) or f"{owner}.".startswith((f"{module_name}.", "_"))
        if declared is not None or module_name == "builtins" or is_own:
            yield name, thing


def _with_members(thing: object, name: str, public_classes: set[int]) -> Iterator[tuple[bool, str, object]]:
    """Yield an object and the public members of a class, each with whether its name is an alias, and its `__qualname__`."""
    is_alias = _is_alias(thing, name.rpartition(".")[2])
    yield is_alias, name, thing
    if inspect.isclass(thing) and not is_alias:
        # members of bases without a public name count as members of the class: `_socket.socket` defines `socket.socket.connect`
        bases = [base for base in thing.__mro__ if base is thing or id(base) not in public_classes]
        members = {member: value for base in reversed(bases) for member, value in vars(base).items()}
        for member, value in sorted(members.items()):
            is_method = inspect.isroutine(value) or isinstance(value, (classmethod, staticmethod))
            if not member.startswith("_") and (is_method or inspect.isdatadescriptor(value)):
                yield from _with_members(getattr(value, "__func__", value), f"{name}.{member}", public_classes)


def _is_alias(thing: object, name: str) -> bool:
    own = getattr(thing, "__name__", name)
    return isinstance(own, str) and own != name  # polars.element() returns an expression for every attribute


def _own_docstring(thing: object) -> str:
    """Return the dedented docstring of the object itself, not of its type or a base; for a class also that of `__init__`."""
    if inspect.isclass(thing):
        initializer = vars(thing).get("__init__")
        text = ("__doc__" in vars(thing) and thing.__doc__) or (inspect.isfunction(initializer) and initializer.__doc__)
    else:
        text = getattr(thing, "__doc__", None)
        if isinstance(text, str) and not inspect.isroutine(thing) and text == type(thing).__doc__:
            return ""
    return inspect.cleandoc(text) if isinstance(text, str) else ""


def _signature(thing: object, name: str, text: str) -> tuple[str, str]:
    """Return the parameters of a function, and the docstring without first lines that only repeat the signature.

    For a class, and for a function whose parameters `inspect` does not know, the parameters come from the first such line. The
    text is "" if it has one word, or if it is that of the field of a named tuple, which is generated.
    """
    signature = ""
    while (line := SIGNATURE_LINE.match(text)) and line[1] == name:
        signature, text = signature or line[2], text[line.end() :].lstrip()
    if len(text.split()) < 2 or text.startswith("Alias for field number"):
        text = ""
    if not inspect.isroutine(thing):
        return signature, text
    try:
        found = inspect.signature(thing)
        shown = [
            p if p.default is p.empty or type(p.default) in PLAIN_DEFAULTS else p.replace(default=...)
            for p in found.parameters.values()
        ]
        found = found.replace(parameters=shown, return_annotation=found.empty)
        return str(found).replace("Ellipsis", "..."), text
    except (
        Exception
    ):  # ValueError: no signature. Others: the signature of a function in C cannot be evaluated (`curses`)
        return signature, text


def _names_in(code: CodeType) -> set[str]:
    """Return the globals, the attributes and the parts of imported names in code; local variables do not count."""
    names = {part for name in code.co_names for part in name.split(".")}
    return names.union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _code_of(module: ModuleType) -> CodeType | None:
    """Return the code of a module, from the file that Python caches; None if it is not written in Python."""
    spec = getattr(module, "__spec__", None)
    return spec.loader.get_code(spec.name) if spec and hasattr(spec.loader, "get_code") else None


def main() -> None:
    """Read a package and the paths of the caller as JSON from standard input, and print the entries as JSON."""
    job = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards what modules print on import
    if job["package"] == "python":
        entries = language_topics() + standard_library()
    else:
        sys.path += job["path"]
        entries = entries_of(_loaded_by(job["package"]))
    json.dump([dataclasses.astuple(entry) for entry in entries], output)
    output.close()


if __name__ == "__main__":
    main()
