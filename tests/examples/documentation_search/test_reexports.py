"""Public names of parsed packages: found without running their code, and equal to what Python finds."""

import random
import subprocess
import sys
import sysconfig

import pytest

from neobert_hf.data.arrays import CACHE
from neobert_hf.demo.documentation import collect_documentation
from neobert_hf.demo.reexports import is_public

DOC = '"""{} what it does, in more than forty characters of text."""'
FILES = {
    "__init__.py": """
from ._core import make, _hidden, Heir
from ._core import make as produce
from ._core import temporary
del temporary
from ._thing import Thing
from .tools import *
from . import sub
from typing import TYPE_CHECKING
import json
from json import dumps
if TYPE_CHECKING:
    from ._core import Typed
    from ._core import Kept as Kept
    from ._c import *
try:
    from ._fast import quick
except ImportError:
    pass
""",
    "_core.py": """
def make():
    DOC
    def inside():
        DOC
class Typed:
    DOC
class Kept:
    DOC
    def method(self):
        DOC
    def _private(self):
        DOC
class _Base:
    DOC
    def shared(self):
        DOC
    def replaced(self):
        DOC
class _Middle(_Base):
    pass
class Heir(_Middle):
    def replaced(self): ...
def _hidden():
    DOC
def unused():
    DOC
def temporary():
    DOC
""",
    "_fast.pyi": "def quick() -> int:\n    DOC\n",
    "tools.py": """
from ._more import listed, unlisted
__all__ = ["listed", "own"]
__all__ += ["late"]
def own():
    DOC
def late():
    DOC
def left_out():
    DOC
""",
    "_more.py": "from .tools import own\nfrom ._more import *\ndef listed():\n    DOC\ndef unlisted():\n    DOC\n",
    "sub/__init__.py": "from ._computed import first\nfrom ._computed import *\nfrom .._more import unlisted as other\n",
    "sub/_computed.py": "__all__ = [name for name in dir() if name != 'not']\ndef first():\n    DOC\ndef second():\n    DOC\n",
    "_c.pyi": "class ThingBase:\n    DOC\n    def inherited(self):\n        DOC\ndef in_c():\n    DOC\n",
    "_thing.py": "import shop._c\nclass Thing(shop._c.ThingBase):\n    DOC\n",
    "sub/facade.py": "from ._computed import first as again\nfrom shop._more import unlisted\n",
}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Public names by name, of all entries and of the public ones."""
    for name, source in FILES.items():
        file = tmp_path / "site/shop" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        parts = source.split("DOC")
        file.write_text("".join(part + DOC.format(f"{name} {i}") for i, part in enumerate(parts[:-1])) + parts[-1])
    paths = sysconfig.get_paths() | dict.fromkeys(("purelib", "platlib"), str(tmp_path / "site"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    return lambda packages, public_api=False: {
        entry.name: entry.public_name for entry in collect_documentation(False, packages, None, public_api)
    }


PUBLIC = {
    "shop._core.make": "shop.make",  # its own name, rather than produce
    "shop._core.Kept": "shop.Kept",
    "shop._core.Kept.method": "shop.Kept.method",
    "shop._core._Base.shared": "shop.Heir.shared",
    "shop._fast.quick": "shop.quick",
    "shop._more.listed": "shop.listed",
    "shop.tools.own": "shop.own",
    "shop.tools.late": "shop.late",
    "shop.tools.left_out": "shop.tools.left_out",  # no private part: a user can import it, if not by `import *`
    "shop.sub._computed.first": "shop.sub.first",
    "shop._c.in_c": "shop.in_c",
    "shop._c.ThingBase.inherited": "shop.Thing.inherited",
    "shop._thing.Thing": "shop.Thing",
}


def test_an_object_of_a_private_module_gets_the_name_that_a_public_module_offers(shop):
    """`Typed` is for annotations only; `unlisted` is imported from outside the package `shop.sub`, and not in `__all__`."""
    names = shop(["shop"])
    assert PUBLIC.items() <= names.items()
    rest = {name: public for name, public in names.items() if name not in PUBLIC}
    assert set(rest) == {
        *("shop._core.make.inside", "shop._core.Typed", "shop._core.Kept._private", "shop._core._hidden"),
        *("shop._core.unused", "shop._more.unlisted", "shop._core._Base", "shop._core._Base.replaced"),
        *("shop.sub._computed.second", "shop._core.temporary", "shop._c.ThingBase"),
    }
    assert rest["shop._core.make.inside"] == "shop.make.<locals>.inside"
    assert not [public for public in rest.values() if is_public(public)]


def test_the_search_leaves_out_what_has_no_public_name_unless_the_package_is_named_by_its_private_part(shop):
    assert shop(["shop"], public_api=True) == PUBLIC
    assert {name for name in shop(None, public_api=True) if name.startswith("shop")} == set(PUBLIC)
    assert set(shop(["shop._core"], public_api=True)) == {
        *("shop._core.make", "shop._core.Typed", "shop._core.Kept", "shop._core.Kept.method", "shop._core.unused"),
        *("shop._core._Base.shared", "shop._core.temporary"),
    }


def run(script):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout


CHECK = """
import importlib
failed = []
for module, qualname in {places!r}:
    try:
        thing = importlib.import_module(module)
        for part in filter(None, qualname.split(".")):
            thing = getattr(thing, part)
    except ImportError:
        pass  # the module needs a library that is not installed
    except Exception as error:
        failed.append((module, qualname, repr(error)))
print(failed)
"""


@pytest.mark.parametrize("package", ["numpy", "torch", "tqdm"])
def test_python_finds_the_objects_of_an_installed_package_under_their_public_names(package):
    """Not every one: a module may delete a name, or replace it by another object, while it is imported."""
    entries = collect_documentation(False, [package], CACHE, public_api=True)
    entries = random.Random(0).sample(entries, min(200, len(entries)))
    failed = eval(run(CHECK.format(places=[(entry.module, entry.qualname) for entry in entries])))
    assert len(failed) <= 0.03 * len(entries), failed


def test_famous_functions_have_the_names_that_users_write():
    names = {entry.public_name for entry in collect_documentation(False, ["numpy"], CACHE, public_api=True)}
    assert {"numpy.sort", "numpy.linalg.norm", "numpy.fft.fft", "numpy.polynomial.Polynomial"} <= names
