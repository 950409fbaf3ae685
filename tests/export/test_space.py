"""The page for the browser: its folder, and what it does in headless Chromium. `make test-runtimes` installs what it needs."""

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import space
from conftest import run_main
from search import DocumentationIndex, read_cached

HERE = Path(__file__).parent / "node"
PACKAGES = ["os", "json", "textwrap"]
QUESTIONS = ["split a path into its folder and its file", "delete a folder", "turn a string into an object"]
QUESTIONS.append("indent some lines")
LARGEST = 25e6  # bytes of the folder

needs_npm = pytest.mark.skipif(not shutil.which("npm"), reason="needs Node.js with npm: make test-runtimes")
needs_browser = pytest.mark.skipif(
    not (HERE / "node_modules").exists() or not shutil.which("chromium"),
    reason="needs npm packages and chromium: make test-runtimes",
)


def test_the_policy_of_the_page_admits_its_own_host_only():
    policy = re.search(r'content="(default-src[^"]+)"', (space.PAGE / "index.html").read_text("utf-8"))[1]
    sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert sources.pop("script-src") == "'self' 'wasm-unsafe-eval'"
    assert sources["default-src"] == "'none'" and set(sources.values()) == {"'none'", "'self'"}


def test_an_output_folder_with_files_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        run_main(space, tmp_path)
    assert f"{tmp_path} holds notes.txt" in capsys.readouterr().err.splitlines()[-1]
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_without_npm_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="2"):
        run_main(space, tmp_path / "out")
    assert "npm is not installed" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("space") / "out"
    space.assemble(out, PACKAGES)
    return out


@pytest.mark.runtime
@needs_npm
def test_the_folder_is_a_static_space_whose_list_names_every_large_file(folder):
    assert "\nsdk: static\n" in (folder / "README.md").read_text("utf-8").split("---")[1]
    listed = {file["path"]: file["bytes"] for file in json.loads((folder / "files.json").read_text("utf-8"))}
    assert listed == {f"files/{file.name}": file.stat().st_size for file in (folder / "files").iterdir()}
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < LARGEST
    assert '"development"' not in (folder / "sw.js").read_text("utf-8")
    (entries,) = (json.loads(gzip.decompress(file.read_bytes())) for file in folder.glob("files/entries-*.json.gz"))
    assert len(entries["starts"]) == len(entries["entries"]) + 1


@pytest.mark.runtime
@needs_npm
@needs_browser
def test_the_page_does_in_chromium_what_its_own_tests_say(folder, tmp_path):
    index = DocumentationIndex(read_cached(PACKAGES))
    wanted = {question: [(entry.name, cosine) for entry, cosine in index.search(question, 1)] for question in QUESTIONS}
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    paths = {"FOLDER": str(folder), "WANTED": str(tmp_path / "wanted.json"), "CHROMIUM": shutil.which("chromium")}
    command = ["node", "--test", "--test-concurrency=1", "space.test.mjs"]
    done = subprocess.run(command, cwd=HERE, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
