"""The notebooks run from top to bottom without a warning, and the files that Colab opens are made from the scripts."""

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from oracle import CONFIG, random_weights, write_checkpoint

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
PAGE = Path(__file__).parents[2] / "docs/notebooks.md"
RUNS = [  # an export takes half a minute
    pytest.param(script, id=script.stem, marks=[pytest.mark.runtime] if script.stem == "export" else [])
    for script in SCRIPTS
]


@pytest.mark.parametrize("script", RUNS)
def test_a_notebook_runs_without_a_warning(script, tokenizer, tmp_path, monkeypatch):
    """In a kernel of its own; a tiny checkpoint replaces the published one, and pip installs nothing."""
    published = write_checkpoint(tmp_path / "NeoBERT", random_weights(), vocab_size=CONFIG["vocab_size"])
    tokenizer.save_pretrained(published)
    notebook = jupytext.read(script)
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("%pip")]
    for cell in notebook.cells:
        cell.source = cell.source.replace("chandar-lab/NeoBERT", str(published))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # Colab has the widgets of progress bars
    options = {"kernel_name": "python3", "startup_timeout": 600, "resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, **options).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "Warning" not in printed


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_the_file_that_colab_opens_is_made_from_the_script(script):
    """If it fails: jupytext --to ipynb --update examples/notebooks/*.py."""
    made, stored = jupytext.read(script), nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ]
    assert not any(cell.get("outputs") for cell in stored.cells)
    assert f"/examples/notebooks/{script.stem}.ipynb" in PAGE.read_text("utf-8")
