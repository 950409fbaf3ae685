"""Pages: snippets run; tables match the stored results, and every named flag, file and function exists where the page says."""

import csv
import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
import result_tables
import tomllib
import torch
from conftest import run_main
from oracle import CONFIG, random_weights, write_checkpoint
from PIL import Image

import neobert_hf
from neobert_cli import commands as neobert_cli
from neobert_hf.model.backends_neobert import BACKENDS
from neobert_hf.model.machine_neobert import has_invariant_products
from neobert_hf.model.modeling_neobert import AUTO_CLASSES

ROOT = Path(__file__).parents[1]
PACKAGE = Path(neobert_hf.__file__).parent
README = ROOT / "README.md"
PROJECTS = [ROOT / f"examples/{name}/README.md" for name in ("paper", "upstream")]
SKILL = ROOT / "skills/neobert-hf/SKILL.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *PROJECTS, SKILL]
FIRST_PAGE = ROOT / "docs/first_model.md"  # its blocks depend on one another
PROGRAMS_PAGE = ROOT / "docs/other_programs.md"  # test_programs.py runs its blocks
SNIPPETS = [
    pytest.param(
        snippet,
        id=f"{page.stem}: {snippet.splitlines()[0]}",
        marks=pytest.mark.slow if re.search(r"(export_model|GridSearchCV)\(", snippet) else (),
    )
    for page in PAGES
    if page not in (FIRST_PAGE, PROGRAMS_PAGE)
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_snippets_run(snippet, tokenizer, tmp_path, monkeypatch):
    """A tiny checkpoint with the published tensor names replaces the published checkpoint."""
    if "batch_invariant=True" in snippet and not has_invariant_products(torch.float32):
        pytest.skip("this CPU has no products in float32 whose bits do not depend on the batch")
    folder = write_checkpoint(tmp_path / "NeoBERT", random_weights(), vocab_size=CONFIG["vocab_size"])
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    script = snippet.replace("chandar-lab/NeoBERT", str(folder))
    exec(compile(script, "snippet", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, FIRST_PAGE], ids=["README", "first_model"])
def test_the_blocks_of_a_first_page_run_in_an_empty_folder_with_the_wheel(page, installed, tokenizer, tmp_path):
    """In one shell, offline, as pasted; only the port and the published checkpoint are others, and pip installs nothing."""
    checkpoint = write_checkpoint(tmp_path / "NeoBERT", random_weights(), vocab_size=CONFIG["vocab_size"])
    tokenizer.save_pretrained(checkpoint)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    shell = [block if kind == "bash" else f"python - <<'END'\n{block}END\n" for kind, block in blocks]
    script = re.sub(r".*# needs the Hub\n", "", "".join(shell)).replace("chandar-lab/NeoBERT", str(checkpoint))
    script = re.sub(r"neobert serve [\w/]+", rf"\g<0> --port {port}", script)
    script = script.replace("localhost:8000", f"localhost:{port}")
    which = "python -c 'import neobert_hf.examples as found; print(found.__file__)'\n"
    start = "set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\npip() { true; }\n"
    (tmp_path / "page.sh").write_text(start + which + script)
    (tmp_path / "empty").mkdir()
    path = os.pathsep.join([str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(installed)}
    options = {"cwd": tmp_path / "empty", "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "../page.sh"], **options, check=False)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert done.stdout.startswith(str(installed))
    found = list(csv.DictReader((tmp_path / "empty/found.csv").open(encoding="utf-8")))
    num_right = sum(row["prediction"] == row["team"] for row in found)
    assert num_right > 7 and len(found) == 12  # 11 when the page was written; chance is 3
    assert (tmp_path / "empty/exported/onnx/model_quantized.onnx").is_file()
    if page == FIRST_PAGE:
        answers = json.loads(re.search(r"^\[\[.*?\]\]", done.stdout, re.MULTILINE)[0])
        assert [best["label"] for best, *_ in answers] == ["billing", "delivery"]


def shell_blocks(page):
    for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        yield re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.DOTALL | re.MULTILINE)


CARDS = [*(PACKAGE / "runs").glob("*.md"), PACKAGE / "mini/README.md"]
SOURCES = [
    file
    for name in ("src", "examples", "hub_upload", "benchmarks")
    for file in (ROOT / name).rglob("*.py")
    if file.parent.name != "tests"
]


def test_no_snippet_runs_the_code_of_a_repository_that_this_library_did_not_write():
    """A snippet imports the package, or a flag stands beside a folder that contains our code: in text, docstrings and code."""
    snippets = 0
    for file in [*PAGES, ROOT / "SECURITY.md", *CARDS, *SOURCES]:
        text = file.read_text("utf-8")
        for call in re.findall(r"\w+\([^`\n]*trust_remote_code=True", text):
            known = r'"runs/|"mini"|\((model|base)_id\)|\((path|folder)\b|refs/pr/N'  # the last is a pull request with our code
            assert re.search(known, call), f"{file}: {call} may load other code"
        for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            if re.search(r"\.from_pretrained\(|\b(pipeline|SentenceTransformer|CrossEncoder)\(", snippet):
                snippets += 1
                is_card = re.search(r'\(model_id\)|"mini"|refs/pr/N', snippet)  # of files that contain our code
                imports = re.search(r"^(import|from) neobert_hf\b", snippet, re.MULTILINE)
                assert is_card or imports, f"{file}: this needs import neobert_hf:\n{snippet}"
    assert snippets > 10


def commands_of(page):
    """The commands of this package in the page's bash blocks, each as (command, flags)."""
    for block in shell_blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["neobert"]:
                yield f"neobert {words[1]}", [word for word in words if word.startswith("--")]
            elif scripts := [i for i, each in enumerate(words) if re.fullmatch(r"\w+/.*\.py|neobert_hf\.exa.*", each)]:
                yield words[scripts[0]], [word for word in words[scripts[0] :] if word.startswith("--")]


COMMANDS = {(what, flag) for page in PAGES for what, flags in commands_of(page) for flag in ["", *flags]}
COMMANDS |= {(f"neobert {name}", "") for page in PAGES for name in re.findall(r"`neobert ([a-z-]+)", page.read_text())}
COMMANDS |= {(f"neobert {each.__name__.replace('_', '-')}", "") for each in neobert_cli.COMMANDS}
COMMANDS |= {(f"neobert {name}", "") for name in neobert_cli.SCRIPTS}


def wheel_files():
    """Files of the wheel by pyproject.toml, as they are installed."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    files = set()
    for package in settings["packages"]:
        inside = package.replace(".", "/")
        folder = ROOT / settings["package-dir"].get(package, f"src/{inside}")
        for pattern in ["*.py", *settings["package-data"].get(package, [])]:
            files |= {f"{inside}/{path}" for path in glob(pattern, root_dir=folder)}
    return files


WHEEL = wheel_files()
SCRIPTS = [file for name in ("benchmarks", "examples", "hub_upload") for file in (ROOT / name).rglob("*.py")]
UNSHIPPED = {file.name for file in SCRIPTS} - {Path(file).name for file in WHEEL}


def not_in_a_wheel(text, division=r"^(?=##)"):
    """What a text names and no wheel has, without sections that say "in a checkout"; the first may say so of the page."""
    sections = re.split(division, text, flags=re.MULTILINE)
    if re.search(r"\bpage\b[^.]*\bin\s+a\s+checkout", sections[0]):
        return []
    places = r"(?<![\w/.-])(?:benchmarks|examples|hub_upload|skills|src|tests)/[\w./-]*\w|(?:^|`)make [a-z-]+"
    found = []
    for section in sections:
        if not re.search(r"\bin\s+a\s+checkout", section, re.IGNORECASE):
            found += re.findall(places, section, re.MULTILINE)
            found += UNSHIPPED & {*re.findall(r"\b\w+\.py\b", section)}
        modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (neobert_hf[\w.]+)", section)]
        named = [*modules, *re.findall(r"\bneobert_hf/[\w/-]+\.\w+", section)]
        found += [name for name in named if name not in WHEEL]
    return found


@pytest.mark.parametrize("command", sorted({what for what, _ in COMMANDS}))
def test_the_flags_of_the_commands_exist(command):
    """The help of `neobert` and of each script names the flags that the pages use."""
    if command.startswith("neobert "):
        module, words = neobert_cli, command.split()[1:]
    else:
        module, words = importlib.import_module(re.split(r"[/.]", command.removesuffix(".py"))[-1]), []
    parts = run_main(module, *words, "--help")
    if not command.startswith(("benchmarks", "examples", "hub_upload")):
        assert not_in_a_wheel(parts, "\n\n") == []
    known = run_main(module, *words, "--help_all") if "--help_all" in parts else parts
    missing = [flag for what, flag in COMMANDS if what == command and not re.search(rf"{flag}\b", known)]
    assert not missing


STORED = sorted(result_tables.RESULTS.rglob("*.md"))


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_table_shows_the_stored_result(file):
    """If it fails: python benchmarks/result_tables.py."""
    assert file.read_text("utf-8") == result_tables.render(result_tables.read(result_tables.name_of(file))) + "\n"


@pytest.mark.parametrize("page", result_tables.PAGES, ids=lambda page: page.stem)
def test_the_tables_inside_a_page_show_the_stored_results(page):
    assert page.read_text("utf-8") == result_tables.with_blocks(page)


def test_the_figure_shows_the_stored_results():
    assert Image.open(result_tables.FIGURE).text["Source"] == result_tables.figure_hash()


def test_every_stored_table_is_on_a_page():
    """A page holds it, or the list of results links it. Those of sent GPUs are on no page yet."""
    text = "".join(map(Path.read_text, PAGES))
    assert "{include} ../benchmarks" not in text  # a bare path for whoever reads the page outside the site
    included = {*re.findall(r"<!-- table:(\S+) -->", text)} - {*result_tables.SUMMARIES}
    linked = re.findall(r"\]\(results/(.+?)\.md\)", (ROOT / "benchmarks/README.md").read_text("utf-8"))
    tables = {result_tables.name_of(file) for file in STORED}
    shown, of_ours = {*included, *linked}, {name for name in tables if not name.startswith("gpu/")}
    assert of_ours <= shown <= tables


def test_the_tables_of_loading_name_every_auto_class_and_every_backend():
    rows = re.findall(r"^\| `(\w+)` ", (ROOT / "docs/loading.md").read_text("utf-8"), re.MULTILINE)
    assert rows == [*AUTO_CLASSES, *BACKENDS]


def test_the_readme_has_at_most_900_words_without_its_tables():
    text = re.sub(r"<!-- table:.*?<!-- end -->", "", README.read_text("utf-8"), flags=re.DOTALL)
    assert len(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split()) <= 900


def test_the_architecture_page_names_functions_and_classes_that_exist():
    """The page has ten questions; the answer to each is a file and a name that this file defines."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    places = re.findall(r"^\| [^|]+\? \| `([^`]+)` \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(places) >= 10
    for file, name in places:
        source = (PACKAGE / file).read_text("utf-8")
        for part in name.split("."):
            assert re.search(rf"^ *(def|class) {part}\b|^{part}\b.* = ", source, re.MULTILINE), f"{file}: {name}"


def test_a_page_says_what_needs_a_checkout():
    pages = [README, SKILL, *(ROOT / "docs").glob("*.md")]
    assert {page.name: found for page in pages if (found := not_in_a_wheel(page.read_text("utf-8")))} == {}


def test_every_file_that_a_page_names_exists():
    """Paths are relative to the repository, the package or the folder of the page."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        named = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)|`((?:[\w-]+/)+[\w.-]+\.(?:py|sh|md|toml|yaml))`", text)
        for file in (linked or quoted for linked, quoted in named):
            exists = file in WHEEL or any((folder / file).exists() for folder in (ROOT, PACKAGE, page.parent))
            assert exists, f"{page.name} names {file}"


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs/index.md").read_text("utf-8")
    contents = set(re.search(r"```\{toctree\}\n:maxdepth: 1\n\n(.*?)```", index, re.DOTALL)[1].split())
    assert contents == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert not contents & {"search", "genindex"}  # Sphinx writes its own pages with these names over ours
