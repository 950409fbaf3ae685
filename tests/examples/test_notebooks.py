"""The notebooks run from top to bottom without a warning, and the files that Colab opens are made from the scripts."""

import warnings
from pathlib import Path

import jupytext
import nbformat
import pytest
from oracle import CONFIG, random_weights, write_checkpoint

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
PAGE = Path(__file__).parents[2] / "docs/finetuning.md"
RUNS = [  # an export takes half a minute
    pytest.param(script, id=script.stem, marks=[pytest.mark.runtime] if script.stem == "export" else [])
    for script in SCRIPTS
]


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_a_notebook_runs_without_a_warning(script, tokenizer, tmp_path, monkeypatch, capfd):
    """As a script, in which `%pip` is a comment; a tiny checkpoint replaces the published one."""
    published = write_checkpoint(tmp_path / "NeoBERT", random_weights(), vocab_size=CONFIG["vocab_size"])
    tokenizer.save_pretrained(published)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    source = script.read_text("utf-8").replace("chandar-lab/NeoBERT", str(published))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # not shown in a notebook, if libraries cause it
        exec(compile(source, script, "exec"), {"__name__": "__main__"})
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)
def test_the_file_that_colab_opens_is_made_from_the_script(script):
    """If it fails: jupytext --to ipynb --update examples/notebooks/*.py."""
    made, stored = jupytext.read(script), nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    found, expected = ([(cell.cell_type, cell.source) for cell in each.cells] for each in (stored, made))
    assert found == expected
    assert not any(cell.get("outputs") for cell in stored.cells)
    assert '] @ git+https://github.com/OWNER/neobert_hf"' in stored.cells[1].source  # it is not on PyPI
    assert f"{script.stem}.ipynb" in PAGE.read_text("utf-8")
