"""Public names of the objects of a parsed package: where a public module offers what a private one defines.

Many packages define their functions in private modules: `numpy._core.fromnumeric.sort` is `numpy.sort` for users. `docstrings.py`
lists what each file defines and imports; this module follows the imports, without running any code of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from .docstrings import Row


def public_rows(files: Iterable[dict]) -> list[Row]:
    """Return the rows of the files of a package, with the module and the name under which users import each object.

    A public module offers a name that its `__all__` lists. Without `__all__`, or if code computes `__all__`, it offers what it
    defines, and what it imports from inside its own package; if it is not a package itself, what it imports from a private
    module beside it. `from a import *` offers nothing if code computes the `__all__` of `a`. No part of a public name begins with
    an underscore. If an object has several public names, the order of preference is: its own name, the fewest parts, the
    shortest. A method of a class without a public name gets the name that a public subclass inherits. An object without a public
    name keeps its module.

    Two cases of `from a import *` say less than what happens: below `if TYPE_CHECKING`, code binds the names in another way
    (`torch.add`); and the stub of a compiled module may list what the module hides. These names count as offered, except those of
    classes that have a public subclass: `torch._C.TensorBase`, the base of `torch.Tensor`.

    Args:
        files: Results of `docstrings.parsed`.
    """
    files = list(files)
    package = _Package(files)
    best: dict[tuple[str, str], tuple] = {}
    for module in package.modules:
        if is_public(module):
            offered = package.offered(module)
            for name in filter(is_public, offered | package.hinted(module)):
                origin = package.origin(module, name)
                if origin:
                    rank = (name not in offered, name != origin[1], module.count("."), len(module), module, name)
                    best[origin] = min(rank, best.get(origin, rank))
    heirs = package.subclasses()
    best = {place: rank for place, rank in best.items() if not (rank[0] and _public_heir(place, "", heirs, best))}
    rows = []
    for *row, module, qualname in chain.from_iterable(file["rows"] for file in files):
        top, dot, rest = qualname.partition(".")
        found = best.get((module, top)) or (rest and _public_heir((module, top), rest.partition(".")[0], heirs, best))
        if found:
            module, qualname = found[-2], f"{found[-1]}{dot}{rest}"
        rows.append((*row, module, qualname))
    return rows


def _public_heir(place: tuple[str, str], member: str, heirs: dict, best: dict) -> tuple | None:
    """The preferred public subclass that inherits the member, among the nearest ones."""
    nearest, seen = [place], set()
    while nearest:
        inheriting = [
            heir for each in nearest for heir, own in heirs.get(each, ()) if member not in own and heir not in seen
        ]
        if found := [best[heir] for heir in inheriting if heir in best]:
            return min(found)
        seen.update(inheriting)
        nearest = inheriting
    return None


def is_public(name: str) -> bool:
    """Whether every part of a dotted name is an identifier that does not begin with an underscore."""
    return all(part.isidentifier() and not part.startswith("_") for part in name.split("."))


class _Package:
    """What the modules of a package bind; a source and its stub count as one module."""

    def __init__(self, files: list[dict]) -> None:
        self.modules: dict[str, list[dict]] = {}
        for file in files:
            if "module" in file:
                self.modules.setdefault(file["module"], []).append(file)
        self._bound: dict[str, set[str]] = {}

    def offered(self, module: str) -> set[str]:
        """Names that a module offers to users."""
        declared, found = self._declared(module), set()
        if declared is not None:
            return declared
        for file in self.modules[module]:
            found.update(file["defined"])
            found.update(name for name, (source, _) in file["imported"].items() if _is_own(file, source))
            for source in file["stars"]:
                found |= self.bound(source) if _is_own(file, source) and not self._is_compiled(source) else set()
        return found

    def hinted(self, module: str) -> set[str]:
        """Names that a module may offer: those of `import *` below `if TYPE_CHECKING`, or from a compiled module."""
        found = set()
        for file in self.modules[module] if self._declared(module) is None else ():
            compiled = [each for each in file["stars"] if _is_own(file, each) and self._is_compiled(each)]
            found.update(*map(self.bound, file["hinted_stars"] + compiled))
        return found

    def bound(self, module: str) -> set[str]:
        """Names that `from module import *` binds."""
        if module not in self._bound:
            self._bound[module] = set()  # a cycle of imports ends here
            declared = self._declared(module)
            found = set() if declared is None else declared
            if declared is None:
                files = self.modules.get(module, ())
                for file in () if any(file["is_computed"] for file in files) else files:
                    found.update(file["defined"], file["imported"], *map(self.bound, file["stars"]))
            self._bound[module] = {name for name in found if declared is not None or not name.startswith("_")}
        return self._bound[module]

    def origin(self, module: str, name: str) -> tuple[str, str] | None:
        """The module that defines what `module` calls `name`, and its name there; None if no file of the package defines it."""
        seen, pending = set(), [(module, name)]
        while pending:
            module, name = place = pending.pop()
            if place in seen or module not in self.modules:
                continue
            seen.add(place)
            if any(name in file["defined"] for file in self.modules[module]):
                return place
            pending += self._sources(module, name)
        return None

    def subclasses(self) -> dict[tuple[str, str], list[tuple[tuple[str, str], set[str]]]]:
        """For each class, as module and name, its direct subclasses in the package, each with the names of its own methods."""
        found: dict = {}
        for module, files in self.modules.items():
            for name, (bases, own) in chain.from_iterable(file["classes"].items() for file in files):
                places = (tuple(base.rpartition(".")[::2]) if "." in base else (module, base) for base in bases)
                for origin in filter(None, (self.origin(*place) for place in places)):
                    found.setdefault(origin, []).append(((module, name), set(own)))
        return found

    def _sources(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        """Places to look at next, the last one first: an import by name counts before `import *`."""
        for file in self.modules[module]:
            stars = file["hinted_stars"] + file["stars"]
            yield from ((source, name) for source in stars if name in self.bound(source))
        for file in self.modules[module]:
            if name in file["imported"]:
                yield tuple(file["imported"][name])

    def _is_compiled(self, module: str) -> bool:
        return all(file["is_stub"] for file in self.modules.get(module, ()))

    def _declared(self, module: str) -> set[str] | None:
        lists = [file["declared"] for file in self.modules.get(module, ()) if file["declared"] is not None]
        return set(chain.from_iterable(lists)) if lists else None


def _is_own(file: dict, source: str) -> bool:
    """Whether a module without `__all__` offers what it imports from `source`."""
    module = file["module"]
    if file["is_package"]:
        return f"{source}.".startswith(f"{module}.")
    return source.startswith(f"{module.rpartition('.')[0]}._")
