"""Arguments of pretraining: a value that would be wrong in silence is refused, on the command line with one line and status 2."""

import pretrain_mlm
import pytest
import torch
from conftest import run_main

from neobert_hf.pretraining.arguments import PretrainingArguments
from neobert_hf.runs import FineTuningArguments


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--recipe m3", "recipe='m3' is not one of paper, code, and no YAML file; recipe.yaml of a run is one"),
        ("--recipe none.yaml", "recipe='none.yaml' cannot be read"),
        ("--schedule cosine", "schedule='cosine' is not one of paper, code"),
        ("--batch_format paked", "batch_format='paked' is not one of packed, padded"),
        ("--architecture bert", "architecture='bert' is not one of neobert, roberta-prelayernorm"),
        ("--long_documents cut", "long_documents='cut' is not one of truncate, chunk"),
        ("--mask_rate 0", "mask_rate=(0.0,) is not above 0 and at most 1"),
        ("--mask_rate 0.3 1.5", "mask_rate=(0.3, 1.5) is not above 0 and at most 1"),
        ("--streaming --max_length 2", "max_length=2 leaves no token"),
        ("--row_tokens 0", "is not a multiple of row_tokens=0"),
        ("--per_device_train_batch_size 0", "is not a multiple of row_tokens=8192 x 0 rows"),
        ("--tokens_per_step -8192", "tokens_per_step=-8192 is not a multiple"),
        ("--mixture 0.5 0.5 0.5", "must sum to 1"),
        ("--max_steps 0", "max_steps at least 1"),
        ("--tokens_per_step 500", "tokens_per_step=500 is not a multiple of row_tokens=8192"),
        ("--gradient_accumulation_steps 3", "contradicts tokens_per_step=2097152, which requires 256"),
        ("--phase 2", "phase 2 requires init_from, phase 1 refuses it"),
        ("--phase 2 --init_from model --config_overrides hidden_size=64", "config_overrides has no effect in phase 2"),
        ("--lr_scheduler_type cosine", "lr_scheduler_type='cosine' has no effect"),
        ("--train_files a.txt --dataset_name b", "train_files and dataset_name are both given"),
        ("--streaming --long_documents chunk", "a stream truncates long documents"),
        ("--bogus 1", "--bogus"),
    ],
)
def test_an_invalid_command_line_ends_with_status_2_and_one_line(given, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run_main(pretrain_mlm, *given.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not list(tmp_path.iterdir())


def test_rows_that_would_count_twice_in_an_evaluation_by_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(PretrainingArguments, "world_size", 2)
    PretrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="per_device_eval_batch_size=2 with 2 processes; give 1"):
        PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=2)


@pytest.mark.parametrize("has_instructions", [False, True])
def test_bf16_follows_the_machine_unless_the_user_chooses(tmp_path, monkeypatch, has_instructions):
    monkeypatch.setenv("NEOBERT_CPU_BF16", str(int(has_instructions)))
    options = dict(output_dir=str(tmp_path), use_cpu=True)
    assert FineTuningArguments(**options).bf16 is PretrainingArguments(**options).bf16 is has_instructions
    assert FineTuningArguments(str(tmp_path), bf16=True).use_cpu is not torch.accelerator.is_available()
    assert not FineTuningArguments(**options, bf16=False).bf16
