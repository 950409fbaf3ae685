"""Command lines of the examples: every number has bounds, and an invalid value ends with one line and status 2."""

import re
import runpy

import build
import build_mini
import distill_embeddings
import evaluate_mteb
import pretrain_mlm
import pytest
import train_contrastive
import use_saved_model
import verify
from distill_embeddings import DistillationArguments, DistillationTrainingArguments
from evaluate_mteb import MTEBArguments

from neobert_hf.embeddings.contrastive import ContrastiveArguments, ContrastiveTrainingArguments
from neobert_hf.pretraining.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.runs.commands import CommandParser

EXAMPLES = {
    pretrain_mlm: ((CorpusArguments, PretrainingArguments), []),
    train_contrastive: ((ContrastiveArguments, ContrastiveTrainingArguments), ["--model_name_or_path", "model"]),
    distill_embeddings: (
        (DistillationArguments, DistillationTrainingArguments),
        ["--model_name_or_path", "model", "--text_files", "a.jsonl"],
    ),
    evaluate_mteb: ((MTEBArguments,), ["--model", "model", "--output_dir", "out"]),
}
HUGE = ("1" + "0" * 17, "1e300", "inf", "nan")


def numbers_of(parser):
    """The flags that take numbers, each with the function that parses it."""
    for action in parser._actions:
        if action.option_strings and getattr(action.type, "__name__", "") in ("parse", "int", "float"):
            yield action.option_strings[0], action.type


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda module: module.__name__)
def test_every_number_has_bounds(example):
    classes, _ = EXAMPLES[example]
    flags = dict(numbers_of(CommandParser(classes)))
    assert len(flags) > (1 if example is evaluate_mteb else 20)
    for flag, read in flags.items():
        for text in (*HUGE, "", "x"):
            with pytest.raises(Exception, match=r"out of bounds|is not an? (integer|number)"):
                print(flag, read(text))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda module: module.__name__)
def test_zero_and_minus_one_are_accepted_or_refused_with_status_2(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    classes, given = EXAMPLES[example]
    parser = CommandParser(classes)
    for flag, _ in numbers_of(parser):
        for text in ("0", "-1"):
            try:
                parser.parse_args_into_dataclasses([*given, flag, text])
            except SystemExit as ended:
                assert ended.code == 2
                (error,) = capsys.readouterr().err.splitlines()
                assert ": error: " in error


@pytest.mark.parametrize(
    ("example", "given", "words"),
    [
        (pretrain_mlm, ["--row_tokens", "0"], "argument --row_tokens: 0 is out of bounds: at least 3"),
        (
            pretrain_mlm,
            ["--mlm_probability", "0"],
            "argument --mlm_probability: 0 is out of bounds: above 0, at most 1",
        ),
        (pretrain_mlm, ["--num_processes", "100000"], "100000 is out of bounds: at least 1, at most"),
        (pretrain_mlm, ["--label_smoothing_factor", "0.1"], "out of bounds"),
        (pretrain_mlm, ["--mixture", "0.5", "0.5", "-1"], "argument --mixture: -1 is out of bounds"),
        (pretrain_mlm, ["--longer_than", "0", "0"], "argument --longer_than: 0 is out of bounds"),
        (pretrain_mlm, ["--longer_than", "9", "3"], "the shorter one first"),
        (pretrain_mlm, ["--mask_replace_prob", "0.9", "--random_replace_prob", "0.2"], "sum to more than 1"),
        (pretrain_mlm, ["--sample_by", "page"], "sample_by='page' is not one of line, paragraph, document"),
        (pretrain_mlm, ["--long_documents", "error"], "long_documents='error' is not one of truncate, chunk"),
        (pretrain_mlm, ["--output_dir", ""], "an empty string"),
        (pretrain_mlm, ["--bogus", "1"], "--bogus"),
        (train_contrastive, ["--temperature", "0"], "argument --temperature: 0 is out of bounds"),
        (train_contrastive, ["--max_steps", "-1"], "argument --max_steps: -1 is out of bounds: at least 1"),
        (train_contrastive, ["--training_sets", "PAQ", "NOPE"], "unknown training set NOPE"),
        (train_contrastive, ["--pooling", "max"], "pooling='max' is not one of"),
        (train_contrastive, ["--instructions", "a.json"], "the paper's sets have their own"),
        (evaluate_mteb, ["--dtype", "int8"], "dtype='int8' is not one of"),
        (evaluate_mteb, ["--model_name", "mine"], "does not have the form organisation/name"),
        (evaluate_mteb, ["--batch_size", "0"], "argument --batch_size: 0 is out of bounds"),
    ],
)
def test_an_invalid_command_line_ends_with_status_2_and_names_the_rule(
    example, given, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", [example.__file__, *EXAMPLES[example][1], *given])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 2
    assert words in re.sub(r"/--[a-z-]+", "", capsys.readouterr().err)  # --max_steps/--max-steps
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "example", [*EXAMPLES, use_saved_model, build, build_mini, verify], ids=lambda module: module.__name__
)
def test_every_script_has_a_short_help_and_names_the_library_class_it_accepts(example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [example.__file__, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(example.__file__, run_name="__main__")
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "None" not in out and len(out.splitlines()) < 180
    library_class = {
        pretrain_mlm: "transformers.TrainingArguments",
        train_contrastive: "sentence_transformers.SentenceTransformerTrainingArguments",
        distill_embeddings: "sentence_transformers.SentenceTransformerTrainingArguments",
    }.get(example)
    assert ("are accepted too" in out) == (library_class is not None)
    assert library_class is None or f"All arguments of {library_class} are accepted too" in " ".join(out.split())
    assert "--ddp_timeout" not in out


def test_a_folder_without_a_saved_model_is_refused_with_the_command_that_saves_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [use_saved_model.__file__, str(tmp_path)])
    with pytest.raises(
        SystemExit, match=r"has no config\.json and no entries\.json; run examples/demo_documentation\.py"
    ):
        runpy.run_path(use_saved_model.__file__, run_name="__main__")


def test_rows_that_would_count_twice_in_an_evaluation_by_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(PretrainingArguments, "world_size", 2)
    PretrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="per_device_eval_batch_size=2 with 2 processes; give 1"):
        PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=2)


@pytest.mark.parametrize(
    "changes", [{"row_tokens": 0}, {"mlm_probability": 0.0}, {"max_steps": 0}, {"save_total_limit": 0}, {"seed": -1}]
)
def test_arguments_in_python_have_the_bounds_of_the_command_line(changes, tmp_path):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}=.* is out of bounds"):
        PretrainingArguments(output_dir=str(tmp_path), use_cpu=True, **changes)
