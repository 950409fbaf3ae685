"""The README tells the truth: its snippets run, its tables are those of the results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import CONFIG, random_weights, write_checkpoint

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[0])
def test_the_snippets_run(snippet, tokenizer, tmp_path):
    """With a tiny checkpoint in the published layout in place of the published one."""
    folder = write_checkpoint(tmp_path / "NeoBERT", random_weights(), vocab_size=CONFIG["vocab_size"])
    tokenizer.save_pretrained(folder)
    script = "import neobert_hf\n" + snippet.replace("chandar-lab/NeoBERT", str(folder)).replace(
        "runs/first", str(tmp_path / "run")
    )
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
    run = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_the_tables_are_rendered_from_the_results():
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks/render_tables.py", "--check"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
