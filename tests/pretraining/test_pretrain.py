"""`pretrain`: both phases, all kinds of text and tokenizers; documents that are held out were never trained on."""

import pickle
import shutil
from itertools import islice
from types import SimpleNamespace

import pretrain_mlm
import pytest
import torch
from conftest import SENTENCE, run_main
from pretraining_runs import QUIET, RECIPES_OF_PAPER, SIZES, SMALL, command, losses_of, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from neobert_cli import commands as neobert_cli
from neobert_hf import PackedMLMCollator
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.files.json_files import read_json_object
from neobert_hf.files.output import write_json
from neobert_hf.pretraining import run_rows
from neobert_hf.pretraining.arguments import CorpusArguments, PretrainingArguments
from neobert_hf.pretraining.training import check_start

REPEAT = ("--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "1")  # which change no weights


def arguments(folder, **changes):
    return PretrainingArguments(**{**dict(output_dir=str(folder), tokens_per_step=512), **SIZES, **QUIET, **changes})


@pytest.mark.slow
@pytest.mark.compat
def test_both_phases_run_and_auto_model_loads_the_result(corpus, tmp_path):
    first = run(corpus, tmp_path / "one", eval_strategy="steps", eval_steps=6, report_to=None)
    phase_2 = dict(phase=2, init_from=tmp_path / "one", warmup_steps=None, config_overrides=None)
    second = run(corpus, tmp_path / "two", **phase_2, max_steps=6, max_length=64, longer_than=[24, 40])
    assert second[1] < first[1] - 0.5  # phase 2 starts from the model of phase 1
    summary = read_json_object(tmp_path / "two/training_summary.json")
    assert summary["phase"] == 2 and summary["recipe"]["mixture"] == [0.2, 0.4, 0.4]
    assert summary["steps"] == 6 and 0 < summary["eval_masked_accuracy"] <= 1
    record = read_json_object(tmp_path / "two/training.json")
    assert record["source"] is None and record["rows"] == {"train.jsonl": 600}
    assert record["scores"][0]["metrics"]["masked_accuracy"] == summary["eval_masked_accuracy"]
    assert record["scores"][0]["trivial"]["masked_accuracy"] == summary["eval_trivial_masked_accuracy"] > 0
    told = {"phase": 2, "schedule": "constant", "mask_rate": "0.2", "longer_than": "24, 40", "init_from": "one"}
    told |= {"train_files": "train.jsonl", "steps": 6, "num_tokens": summary["num_tokens"], "precision": "fp32"}
    assert told.items() <= record["settings"].items()
    assert list(tmp_path.glob("one/**/events.out.tfevents*"))  # TensorBoard is the default
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "two")
    assert model.config.max_position_embeddings == 64 and not model.config.sparse_prediction
    with pytest.raises(ValueError, match="none of the 600 documents is left to pack; lower longer_than"):
        run(corpus, tmp_path / "three", **phase_2, max_steps=6, longer_than=[24, 4000])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7, "mask_rate": [0.4, 0.1], "mask_rate_shares": [0.3, 0.7], "optimizer": "muon", "schedule": "wsd"},
        dict(streaming=True, text_column="body", bf16=True, random_replace_prob=0.1, mask_replace_prob=0.8),
        dict(validation_files=None, num_held_out=20, long_documents="chunk", max_length=16, optim="sgd"),
    ],
)
def test_the_recorded_recipe_alone_repeats_ten_steps_bit_for_bit(corpus, tmp_path, changes):
    file, first, again = tmp_path / "text.jsonl", tmp_path / "first", tmp_path / "again"
    column = changes.get("text_column", "text")
    file.write_text((corpus / "train.jsonl").read_text().replace('"text"', f'"{column}"'))
    more = {"train_files": [file], "documents_dir": tmp_path / "documents", "save_steps": 100}
    more["validation_files"] = None if column != "text" else corpus / "held_out.jsonl"
    printed = run_main(pretrain_mlm, *command(corpus, first, **{**more, "max_steps": 10, **changes}))
    card, settings = (first / "README.md").read_text(), read_json_object(first / "training.json")["settings"]
    assert str(file) in printed and str(tmp_path) not in card and "falcon" not in printed + card
    assert "bert-base" not in printed
    if changes.get("optimizer") == "muon":
        assert settings.items() >= {"optimizer": "muon", "schedule": "wsd", "decay_from": 9}.items()
        assert "| mask\\_rate | 0.4, 0.1 |" in card
    run_main(pretrain_mlm, *REPEAT, "--recipe", first / "recipe.yaml", "--output_dir", again)
    assert losses_of(first) == losses_of(again) and len(losses_of(again)) == 10
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "recipe.yaml").read_bytes() == (again / "recipe.yaml").read_bytes()


@pytest.mark.slow
def test_m3_trains_with_a_bpe_tokenizer_that_has_no_mask_token_on_text_that_was_tokenized_before(corpus, tmp_path):
    """LLaMA's tokenizer has no mask, padding or separator token, and adds one token at the start."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    bpe.train_from_iterator([SENTENCE] * 20, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "bpe")
    names = ("--output_dir", tmp_path / "documents", "--tokenizer_name", tmp_path / "bpe")
    run_main(neobert_cli, "tokenize", *names, "--files", corpus / "train.jsonl")
    names = dict(tokenizer_name=tmp_path / "bpe", documents_dir=tmp_path / "documents")
    names["recipe"] = RECIPES_OF_PAPER / "m3.yaml"
    losses = run(corpus, tmp_path / "run", **names)
    assert losses[12] < losses[1] - 0.5
    saved = AutoTokenizer.from_pretrained(tmp_path / "run")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run")
    assert saved.mask_token == "[MASK]" and saved.pad_token == "[PAD]"
    assert model.config.vocab_size == len(saved) and model.config.pad_token_id == saved.pad_token_id


def test_a_resume_with_other_values_is_refused(corpus, tmp_path):
    run(corpus, tmp_path / "run", max_steps=4)
    assert read_json_object(tmp_path / "run/training_summary.json")["optim"].startswith("adamw_torch")
    train_wordpiece(["other words to learn from"] * 9, vocab_size=64).save_pretrained(tmp_path / "other")
    for changes, message in (
        ({"learning_rate": 1e-3}, "belongs to another run: recipe."),
        ({"config_overrides": SMALL.replace("=96", "=128")}, "belongs to another run: config."),
        ({"streaming": True}, "belongs to another run: data."),
        ({"optim": "sgd"}, "belongs to another run: optim was adamw_torch(_fused)? and is sgd"),
        ({"optim_args": "amsgrad=True"}, "belongs to another run: optim_args was None and is amsgrad=True"),
        ({"tokenizer_name": tmp_path / "other"}, "tokenizer.sha256 was"),
    ):
        with pytest.raises(ValueError, match=message):
            run(corpus, tmp_path / "run", **dict(max_steps=4) | changes)


@pytest.mark.slow
def test_a_stored_plan_and_a_new_plan_give_the_same_losses_and_a_refused_run_makes_no_plan(corpus, tmp_path):
    options = dict(documents_dir=tmp_path / "documents", max_steps=8)
    losses = run(corpus, tmp_path / "one", **options)
    (plan,) = (tmp_path / "documents/plans").iterdir()
    made = plan.stat().st_mtime_ns
    assert run(corpus, tmp_path / "two", **options) == losses and plan.stat().st_mtime_ns == made
    shutil.rmtree(plan)
    shutil.rmtree(tmp_path / "two/checkpoint-8")
    assert run(corpus, tmp_path / "two", **options) == losses and plan.exists()
    with pytest.raises(ValueError, match="belongs to another run: seed was"):
        run(corpus, tmp_path / "two", **options, seed=5)
    assert len(list((tmp_path / "documents/plans").iterdir())) == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_stream_yields_all_rows_in_another_process(corpus, tokenizer, tmp_path, num_workers):
    """A DataLoader that spawns its workers pickles the stream."""
    data = CorpusArguments(train_files=[str(corpus / f"{x}.jsonl") for x in ("train", "held_out")], streaming=True)
    training = arguments(tmp_path, dataloader_num_workers=num_workers)
    stream, _ = run_rows.open_stream(data, training, tokenizer)
    again = pickle.loads(pickle.dumps(stream))
    assert list(islice(again, 5)) == list(islice(stream, 5))
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    assert sum(1 for _ in loader) == training.max_steps * training.rows_per_step


def test_more_workers_than_files_of_a_stream_are_refused(corpus, tokenizer, tmp_path):
    """`datasets` stops the workers without a file, and the run would end before its last step."""
    data = CorpusArguments(train_files=[str(corpus / "train.jsonl")], streaming=True)
    with pytest.raises(ValueError, match="dataloader_num_workers=3 is above num_shards=1"):
        run_rows.open_stream(data, arguments(tmp_path, dataloader_num_workers=3), tokenizer)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_is_masked_at_the_rate_of_its_step(corpus, tokenizer, tmp_path, streaming):
    """Three steps of 40 rows with 2,400 tokens or more each; 0.04 is more than three standard deviations of a share of 0.2."""
    files = [str(corpus / "train.jsonl")]
    options = dict(streaming=streaming, num_processes=1, num_held_out=20)
    data = CorpusArguments(train_files=files, documents_dir=str(tmp_path / "documents"), **options)
    training = arguments(tmp_path, max_steps=3, tokens_per_step=64 * 40, warmup_steps=0, mask_rate=[0.5, 0.2, 0.05])
    drawn = list(run_rows.open_text(data, training, tokenizer).pack()[0])
    collator, ends = PackedMLMCollator(tokenizer), torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])
    for step, rate in enumerate(training.mask_rate):
        batch = [collator([row]) for row in drawn[40 * step : 40 * step + 40]]
        masked = torch.cat([(row["labels"] != -100).flatten() for row in batch])
        special = torch.cat([torch.isin(row["input_ids"], ends).flatten() for row in batch])
        assert abs(masked[~special].float().mean() - rate) < 0.04


def test_one_process_of_a_machine_compares_tokenized_text_with_its_files(corpus, tokenizer, tmp_path, monkeypatch):
    data = CorpusArguments(train_files=[str(corpus / "train.jsonl")], num_processes=1)
    training, opened = arguments(tmp_path), []

    def open_documents(process, num_processes, folder=tmp_path / "documents"):
        numbers = dict(world_size=num_processes, process_index=process, local_process_index=process)
        values = SimpleNamespace(**numbers, max_length=training.max_length, to_recipe=training.to_recipe)
        return run_rows._open_documents(data, values, tokenizer, data.train_files, folder)

    written, open_corpus = open_documents(0, 1), run_rows.open_corpus
    monkeypatch.setattr(run_rows, "open_corpus", lambda *args: opened.append(1) or open_corpus(*args))
    assert [len(open_documents(process, 3)) for process in (0, 1, 2)] == [len(written)] * 3
    assert len(opened) == 1
    with pytest.raises(ValueError, match="tokenize before you start several processes"):
        open_documents(1, 3, tmp_path / "none")


@pytest.mark.slow
def test_phase_2_without_validation_files_holds_out_the_documents_of_phase_1_or_is_refused(corpus, tmp_path):
    options = dict(validation_files=None, num_held_out=20, documents_dir=tmp_path / "rows", max_steps=2, warmup_steps=0)
    run(corpus, tmp_path / "one", **options)
    options |= dict(phase=2, init_from=tmp_path / "one", warmup_steps=None, config_overrides=None, longer_than=[8, 16])
    with pytest.raises(ValueError, match=r"cannot start from .*may have used the documents that are held out here;"):
        run(corpus, tmp_path / "two", **options, seed=5)
    assert len(run(corpus, tmp_path / "two", **options)) == 2


SECOND = {"seed": 1, "data": {"num_documents": 9}, "held_out": {"files": [], "num_held_out": 4}}
SECOND |= {"recipe": {"architecture": "neobert"}, "tokenizer_sha256": "a"}
HELD_OUT = "its training may have used the documents that are held out here"
STARTS = {
    "the same run": ({}, {}, None),
    "more held out, of which the first are the same": ({"held_out": {"files": [], "num_held_out": 5}}, {}, None),
    "fewer held out": ({"held_out": {"files": [], "num_held_out": 3}}, {}, HELD_OUT),
    "validation files": ({"held_out": {"files": ["a.txt"], "num_held_out": 4}}, {}, HELD_OUT),
    "a stream": ({"data": {"files": []}}, {}, HELD_OUT),
    "another seed": ({"seed": 2}, {}, HELD_OUT),
    "another seed and files to evaluate on": ({"seed": 2}, {"draws_held_out": False}, None),
    "a tokenizer": ({"tokenizer_sha256": "b"}, {}, "its tokenizer is another, with 30 tokens, and this one has 30"),
    "a larger tokenizer": ({}, {"num_tokens": 31}, "its tokenizer is another, with 30 tokens, and this one has 31"),
    "another architecture": ({}, {"model_type": "bert"}, "its architecture is bert; give the recipe of phase 1"),
}


@pytest.mark.parametrize("place", ["run.json", "training_summary.json", "checkpoint-8"])
@pytest.mark.parametrize("name", STARTS)
def test_phase_2_starts_only_from_a_model_that_fits(tmp_path, caplog, place, name):
    first, given, reason = STARTS[name]
    given = {"model_type": "neobert", "num_tokens": 30, "draws_held_out": True} | given
    model = SimpleNamespace(config=SimpleNamespace(model_type=given.pop("model_type"), vocab_size=30))
    write_json(tmp_path / ("run.json" if place == "checkpoint-8" else place), SECOND | first)
    init_from = str(tmp_path / place if place == "checkpoint-8" else tmp_path)
    if reason is None:
        check_start(init_from, model, run=SECOND, **given)
    else:
        with pytest.raises(ValueError, match=f"phase 2 cannot start from {init_from}: {reason}"):
            check_start(init_from, model, run=SECOND, **given)
    assert not caplog.records


def test_phase_2_of_a_model_without_a_run_warns_that_held_out_documents_may_have_been_trained_on(tmp_path, caplog):
    model = SimpleNamespace(config=SimpleNamespace(model_type="neobert", vocab_size=30))
    check_start(str(tmp_path), model, 30, SECOND, draws_held_out=True)
    assert "holds no run.json: its training may have used the documents that are held out here" in caplog.text
