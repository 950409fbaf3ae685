"""The README tells the truth: its snippets run, its tables are those of the results."""

import re
from pathlib import Path

import pytest
import render_tables
from conftest import run_main
from oracle import CONFIG, random_weights, write_checkpoint

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[0])
def test_the_snippets_run(snippet, tokenizer, tmp_path, monkeypatch):
    """With a tiny checkpoint in the published layout in place of the published one."""
    folder = write_checkpoint(tmp_path / "NeoBERT", random_weights(), vocab_size=CONFIG["vocab_size"])
    tokenizer.save_pretrained(folder)
    script = "import neobert_hf\n" + snippet.replace("chandar-lab/NeoBERT", str(folder)).replace(
        "runs/first", str(tmp_path / "run")
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})


def test_the_tables_are_rendered_from_the_results():
    run_main(render_tables, "--check")
