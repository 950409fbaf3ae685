"""Command line of pretraining: an invalid value ends with one line and status 2."""

import pretrain_mlm
import pytest
from conftest import run_main

from neobert_hf.pretraining.arguments import PretrainingArguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--longer_than", "9", "3"], "the shorter one first"),
        (["--mask_replace_prob", "0.9", "--random_replace_prob", "0.2"], "sum to more than 1"),
        (["--sample_by", "page"], "page"),
        (["--output_dir", ""], "an argument is an empty string"),
        (["--bogus", "1"], "unknown argument --bogus"),
    ],
)
def test_an_invalid_command_line_ends_with_status_2_and_names_the_rule(given, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run_main(pretrain_mlm, *given)
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not list(tmp_path.iterdir())


def test_rows_that_would_count_twice_in_an_evaluation_by_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(PretrainingArguments, "world_size", 2)
    PretrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="per_device_eval_batch_size=2 with 2 processes; give 1"):
        PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=2)
