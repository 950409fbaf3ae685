"""Contrastive training: shares and order of the sampler, the loss against its formula, effect of the instructions."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip(
    "sentence_transformers", reason="contrastive training needs sentence-transformers (pip install -e .[embed])"
)

import train_contrastive
from conftest import SENTENCE, largest_file, run_main
from datasets import Dataset, DatasetDict
from huggingface_hub import ModelCard
from launch import on_two_processes
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler
from torch.utils.data import ConcatDataset, RandomSampler
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTModel, sentence_transformer
from neobert_hf.embeddings import contrastive, training_sets
from neobert_hf.embeddings.contrastive import (
    ContrastiveArguments,
    ContrastiveTrainer,
    ContrastiveTrainingArguments,
    SizeExponentBatchSampler,
    column_prompts,
    contrastive_loss,
    mine_negatives,
    open_training_sets,
    set_sampling,
)
from neobert_hf.embeddings.instructions import TRAINING_INSTRUCTIONS
from neobert_hf.embeddings.training_sets import TRAINING_SETS, hold_out, load_training_set, read_pairs
from neobert_hf.files.wordpiece import train_wordpiece
from neobert_hf.runs.folders import lock_run

SIZES = (6400, 1600, 100)


def stream(sizes=SIZES, seed=0, epoch=0, batch_size=4, **options):
    """Build the sampler as the trainer does: its children share one generator."""
    datasets = [Dataset.from_dict({"anchor": [f"{i} {j}" for j in range(size)]}) for i, size in enumerate(sizes)]
    generator = torch.Generator()
    children = [
        DefaultBatchSampler(
            RandomSampler(dataset, generator=generator), batch_size, drop_last=True, generator=generator, seed=seed
        )
        for dataset in datasets
    ]
    sampler = SizeExponentBatchSampler(ConcatDataset(datasets), children, generator, seed, **options)
    sampler.set_epoch(epoch)
    return sampler


def datasets_of(batches, sizes=SIZES):
    """Return the dataset of each batch; fail for a batch from two datasets."""
    ends = np.cumsum(sizes)
    found = [set(np.searchsorted(ends, batch, side="right").tolist()) for batch in batches]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_datasets_are_drawn_in_proportion_to_size_to_the_exponent(exponent):
    num_batches = 2000
    counts = Counter(datasets_of(stream(num_batches=num_batches, exponent=exponent)))
    weights = np.array(SIZES, float) ** exponent
    for dataset, share in enumerate(weights / weights.sum()):
        sigma = np.sqrt(num_batches * share * (1 - share))
        assert abs(counts[dataset] - num_batches * share) < 3 * sigma


def test_weights_determine_the_share_of_each_dataset_instead_of_its_size():
    counts = Counter(datasets_of(stream(num_batches=2000, weights=[1, 0, 3])))
    assert counts[1] == 0 and 0.7 < counts[2] / 2000 < 0.8


def test_an_exhausted_dataset_restarts_in_a_new_order_and_each_pass_has_each_row_once():
    batches = list(stream(sizes=(40, 8), num_batches=60, exponent=0.0))
    small = [batch for batch, dataset in zip(batches, datasets_of(batches, (40, 8))) if dataset == 1]
    passes = [[row for batch in small[i : i + 2] for row in batch] for i in range(0, len(small) - 1, 2)]
    assert len(passes) > 5
    assert all(sorted(rows) == list(range(40, 48)) for rows in passes)
    assert len(set(map(tuple, passes))) == len(passes)


def test_the_stream_depends_only_on_seed_and_epoch_so_a_resumed_run_continues_it():
    whole = list(stream(num_batches=200))
    again = stream(num_batches=200)
    assert list(again) == whole == list(again)
    rest = iter(stream(num_batches=200))
    for _ in range(120):  # as accelerate does when a run resumes
        next(rest)
    assert list(rest) == whole[120:]
    assert list(stream(num_batches=200, seed=1)) != whole != list(stream(num_batches=200, epoch=1))


def test_a_group_of_batches_comes_from_one_dataset():
    drawn = datasets_of(stream(num_batches=300, exponent=0.0, group=3))
    assert all(len(set(drawn[i : i + 3])) == 1 for i in range(0, 300, 3))
    assert len(set(drawn)) == 3


def test_the_sampler_accepts_batch_samplers_without_duplicates():
    datasets = [Dataset.from_dict({"anchor": list("aabbccdd")}), Dataset.from_dict({"anchor": list("efghijkl")})]
    children = [
        NoDuplicatesBatchSampler(d, batch_size=4, drop_last=True, generator=torch.Generator(), seed=0) for d in datasets
    ]
    both = ConcatDataset(datasets)
    for batch in SizeExponentBatchSampler(both, children, num_batches=40):
        assert len({both[row]["anchor"] for row in batch}) == 4


def test_a_dataset_of_duplicates_is_refused_instead_of_an_endless_loop():
    dataset = Dataset.from_dict({"anchor": ["same"] * 8})
    child = NoDuplicatesBatchSampler(dataset, batch_size=4, drop_last=True, generator=torch.Generator(), seed=0)
    with pytest.raises(ValueError, match="8 rows has no batch of 4 rows without duplicate texts"):
        list(SizeExponentBatchSampler(ConcatDataset([dataset]), [child], num_batches=2))


def test_a_dataset_smaller_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="a dataset of 3 rows has fewer rows than the batch size 4"):
        stream(num_batches=4, sizes=(100, 3))


def test_a_number_of_epochs_is_refused(tmp_path):
    training = ContrastiveTrainingArguments(str(tmp_path), max_steps=-1, num_train_epochs=1, use_cpu=True)
    with pytest.raises(
        ValueError, match="max_steps=-1, but a run over sampled datasets has no epochs; give --max_steps"
    ):
        set_sampling(training, 0.5)


# --- The loss -----------------------------------------------------------------------------------------------------

QUESTIONS = ["the quick", "old sea", "a house", "it sleeps"]
ANSWERS = ["brown fox jumps over", "by", "warm red house by old sea and then", "lazy dog"]
NEGATIVES = ["dog", "fox and", "the sea is by a house", "jumps"]


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    return str(tmp_path / "bare")


def gradients_of(folder, unpad=True, columns=(QUESTIONS, ANSWERS, NEGATIVES), **options):
    """Loss and every gradient of one batch in float64."""
    encoder = sentence_transformer(folder).double()
    encoder[0].model.config.unpad_inputs = unpad
    encoder.train()
    loss = contrastive_loss(encoder, **options)([encoder.preprocess(list(texts)) for texts in columns], None)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def test_loss_and_gradients_equal_the_formula_of_the_paper(folder):
    """Section 5.2.1: -log(exp(s+ / tau) / (exp(s+ / tau) + sum over the other documents of exp(s- / tau)))."""
    found, gradients = gradients_of(folder)
    model, tokenizer = NeoBERTModel.from_pretrained(folder).double().eval(), AutoTokenizer.from_pretrained(folder)

    def embed(texts):
        rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
        return torch.stack([row / (row @ row).sqrt() for row in rows])

    exponentials = (embed(QUESTIONS) @ embed([*ANSWERS, *NEGATIVES]).T / 0.07).exp()
    expected = -(exponentials.diagonal() / exponentials.sum(1)).log().mean()
    expected.backward()
    assert abs(found - expected.item()) < 1e-10
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[f"0.model.{name}"], parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [dict(mini_batch_size=1), dict(mini_batch_size=3), dict(unpad=False), dict(mini_batch_size=3, unpad=False)],
)
def test_caching_and_padding_do_not_change_the_gradients(folder, options):
    loss, gradients = gradients_of(folder)
    other, others = gradients_of(folder, **options)
    assert abs(loss - other) < 1e-10 and gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-9, atol=1e-10)


# --- Training -----------------------------------------------------------------------------------------------------


QUIET = dict(warmup_steps=10, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True)


def small_model(folder, tokenizer):
    torch.manual_seed(0)
    config = NeoBERTConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96
    )
    NeoBERTModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_instructions_decide_between_two_targets_of_one_question(tmp_path):
    """Each question has one target for each instruction, from the same words; without instructions recall is at most one half."""
    words = [a + b for a in "bdfgklmnprst" for b in "aeio"]
    questions, targets = words[:16], {"first": words[16:32], "second": words[17:32] + words[16:17]}
    tokenizer = train_wordpiece([" ".join([*words, *targets])] * 3, vocab_size=200, model_max_length=32)
    for name, answers in targets.items():
        lines = [json.dumps({"query": word, "document": answer}) for word, answer in zip(questions, answers)]
        Path(tmp_path, f"{name}.jsonl").write_text("\n".join(lines))
    Path(tmp_path, "instructions.json").write_text(json.dumps({name: name for name in targets}))
    files = [str(tmp_path / f"{name}.jsonl") for name in targets]
    options = dict(train_files=files, instruction_sides="query", instructions=str(tmp_path / "instructions.json"))
    arguments = ContrastiveArguments(small_model(tmp_path / "bare", tokenizer), **options)
    training = ContrastiveTrainingArguments(
        str(tmp_path / "run"), max_steps=150, per_device_train_batch_size=16, learning_rate=2e-3, **QUIET
    )
    set_sampling(training, arguments.sampling_exponent)
    model = sentence_transformer(arguments.model_name_or_path)
    sets, prompts = open_training_sets(arguments)
    training.prompts = column_prompts(sets, prompts, "query")
    SentenceTransformerTrainer(model, training, train_dataset=sets, loss=contrastive_loss(model)).train()

    documents = targets["first"]
    expected = [documents.index(answer) for answers in targets.values() for answer in answers]
    texts = [f"{name} {word}" for name in targets for word in questions]
    found = model.encode(texts, normalize_embeddings=True) @ model.encode(documents, normalize_embeddings=True).T
    assert np.mean(found.argmax(1) == np.array(expected)) >= 0.95


@pytest.fixture
def command(folder, tmp_path):
    rng = np.random.default_rng(0)
    words = SENTENCE.split()
    files = []
    for name, count in {"large": 90, "small": 12}.items():
        rows = [{"q": " ".join(rng.choice(words, 3)), "d": " ".join(rng.choice(words, 6))} for _ in range(count)]
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text("\n".join(map(json.dumps, rows)))
    options = dict(
        model_name_or_path=folder,
        validation_files=files[1],
        max_steps=12,
        save_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        warmup_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )

    def build(output_dir, **changes):
        flags = {**options, "output_dir": output_dir, **changes}
        parts = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
        return ["--train_files", *files, *parts]

    return build


def losses_of(folder):
    (last,) = [max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))]
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def test_a_resumed_run_has_the_same_losses_as_an_uninterrupted_one(command, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run_main(train_contrastive, *command(tmp_path / "whole"))
    whole = losses_of(tmp_path / "whole")
    assert len(whole) == 12
    train_step = ContrastiveTrainer.training_step

    def interrupted_step(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        patch.setattr(ContrastiveTrainer, "training_step", interrupted_step)
        run_main(train_contrastive, *command(tmp_path / "part"))
    assert not (tmp_path / "part/model.safetensors").exists()
    others = {"temperature": 0.1, "warmup_steps": 3, "optim": "sgd", "optim_args": "amsgrad=True"}
    for name, value in others.items():  # another run is refused
        other = command(tmp_path / "part", resume_from_checkpoint="last", **{name: value})
        with pytest.raises(ValueError, match=name):
            run_main(train_contrastive, *other)
    run_main(train_contrastive, *command(tmp_path / "part", resume_from_checkpoint="last"))
    assert losses_of(tmp_path / "part") == whole
    summaries = [json.loads((tmp_path / name / "training_summary.json").read_text()) for name in ("part", "whole")]
    assert summaries[0] == summaries[1] and summaries[0]["before"] != summaries[0]["after"]
    assert SentenceTransformer(str(tmp_path / "part")).encode("fox").shape == (32,)
    (tmp_path / "part/checkpoint-8/scheduler.pt").unlink()
    for step in (3, 4, 12):
        shutil.rmtree(tmp_path / f"part/checkpoint-{step}")
    with pytest.raises(
        FileNotFoundError, match=r"checkpoint-8 lacks scheduler.pt; give --resume_inexactly to resume from it"
    ):
        run_main(train_contrastive, *command(tmp_path / "part", resume_from_checkpoint="last"))
    with lock_run(tmp_path / "part"), pytest.raises(ValueError, match="another process writes to"):
        run_main(train_contrastive, *command(tmp_path / "part"))


def test_without_validation_files_a_tenth_of_the_train_files_is_held_out_and_evaluated(command, tmp_path):
    arguments = command(tmp_path / "run", max_steps=2, save_steps=2)
    start = arguments.index("--validation_files")
    printed = run_main(train_contrastive, *arguments[:start], *arguments[start + 2 :])
    assert "large: 81 rows of anchor, positive" in printed and "large: 9 pairs to evaluate on" in printed
    assert "small: 12 rows" in printed  # one row would be held out, and a ranking of one document says nothing
    summary = json.loads((tmp_path / "run/training_summary.json").read_text())
    assert summary["num_rows"] == 81 + 12 and summary["before"].keys() == summary["after"].keys()
    assert {name.split("_cosine")[0] for name in summary["before"]} == {"large"}
    before, after = (summary[time]["large_cosine_ndcg@10"] for time in ("before", "after"))
    assert f"large_cosine_ndcg@10: {before:.4f} before the training, {after:.4f} after it" in printed


def test_the_card_of_a_training_has_its_scores_and_no_texts_and_a_resume_keeps_an_edited_one(command, tmp_path):
    run = tmp_path / "run"
    run_main(train_contrastive, *command(run, max_steps=2, save_steps=2, license="cc-by-4.0", hub_model_id="org/name"))
    text = (run / "README.md").read_text("utf-8")
    data = ModelCard(text).data
    after = json.loads((run / "training_summary.json").read_text())["after"]
    scores = {result.metric_type: result.metric_value for result in data.eval_results}
    assert scores["cosine_ndcg@10"] == round(after["small_cosine_ndcg@10"], 4) and data.license == "cc-by-4.0"
    assert 'SentenceTransformer("org/name", trust_remote_code=True)' in text and "- small.jsonl: 12 rows" in text
    rows = [json.loads(line) for line in (tmp_path / "large.jsonl").read_text().splitlines()]
    assert not any(value in text for row in rows for value in row.values()) and len(text) < 20_000
    assert str(tmp_path) not in text and not list(run.glob("checkpoint-*/README.md"))
    (run / "README.md").write_text(f"{text}my words", "utf-8")
    options = dict(license="cc-by-4.0", hub_model_id="org/name", resume_from_checkpoint="last")
    run_main(train_contrastive, *command(run, max_steps=2, save_steps=2, **options))
    assert (run / "README.md").read_text("utf-8") == f"{text}my words"


def test_held_out_rows_are_a_share_by_the_seed_and_never_trained():
    rows = Dataset.from_dict({"anchor": [f"question {i}" for i in range(50)], "positive": [str(i) for i in range(50)]})

    def divided(seed, share=0.2):
        training, held_out = hold_out({"set": rows}, share, seed)
        return list(training["set"]["anchor"]), list(held_out["set"]["anchor"])

    training, held_out = divided(0)
    assert len(held_out) == 10 and sorted(training + held_out) == sorted(rows["anchor"])
    assert divided(0) == (training, held_out) != divided(1)
    training, held_out = hold_out({"set": rows}, 0, 0)
    assert len(training["set"]) == 50 and not held_out
    many = Dataset.from_dict({"anchor": ["a"] * 20_000, "positive": ["b"] * 20_000})
    assert len(hold_out({"set": many}, 0.1, 0)[1]["set"]) == 1000


def test_a_resume_on_changed_texts_with_the_same_names_and_counts_is_refused(command, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    instructions = tmp_path / "instructions.json"
    instructions.write_text(json.dumps({"small": "the fox", "large": "a house"}))
    changes = dict(instructions=instructions, max_steps=2, save_steps=1, warmup_steps=0)
    run_main(train_contrastive, *command(tmp_path / "run", **changes))
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    for file, old, new in ((tmp_path / "large.jsonl", "fox", "dog"), (instructions, "house", "mouse")):
        content = file.read_text()
        file.write_text(content.replace(old, new))
        with pytest.raises(ValueError, match="belongs to another run: sha256 was"):
            run_main(train_contrastive, *command(tmp_path / "run", resume_from_checkpoint="last", **changes))
        file.write_text(content)
    run_main(train_contrastive, *command(tmp_path / "run", resume_from_checkpoint="last", **changes))


def test_the_error_for_a_full_disk_at_the_last_save_is_one_line(command, tmp_path, monkeypatch):
    save = train_contrastive.ContrastiveTrainer.save_model

    def save_on_a_full_disk(*args):
        with largest_file(1000):
            save(*args)

    monkeypatch.setattr(train_contrastive.ContrastiveTrainer, "save_model", save_on_a_full_disk)
    with pytest.raises(SystemExit, match="run could not be written; earlier checkpoints") as ended:
        run_main(train_contrastive, *command(tmp_path / "run", max_steps=1, save_strategy="no"))
    assert "\n" not in ended.value.code


def test_two_processes_with_shared_negatives_give_the_loss_curve_of_one_process(command, tmp_path):
    """Two batches of 4 with shared negatives equal one batch of 8; both batches of a group come from one dataset."""
    run_main(train_contrastive, *command(tmp_path / "one", per_device_train_batch_size=8, max_steps=6, save_steps=6))
    changes = dict(per_device_train_batch_size=4, max_steps=6, save_steps=6, gather_across_devices=True)
    on_two_processes(train_contrastive.__file__, *command(tmp_path / "two", **changes))
    alone, shared = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert len(alone) == 6
    np.testing.assert_allclose(list(shared.values()), list(alone.values()), atol=1e-4)


def test_mined_negatives_and_gradient_caching_run_through_the_example(command, tmp_path):
    Path(tmp_path, "instructions.json").write_text(json.dumps({"small": "the fox", "large": "a house"}))
    changes = dict(instructions=tmp_path / "instructions.json", num_mined_negatives=2, mini_batch_size=2, max_steps=3)
    printed = run_main(train_contrastive, *command(tmp_path / "run", **changes))
    assert "12 rows of anchor, positive, negative_1, negative_2; prompt 'the fox '" in printed


def test_hard_negatives_improve_ranking_against_texts_outside_the_batches(tmp_path):
    """The doubled question is closer to the question than the answer is; it occurs in training only as a negative."""
    words = [a + b for a in "bdfgklmnprst" for b in "aeio"]
    questions, answers = words[:24], words[24:]
    tokenizer = train_wordpiece([" ".join(words)] * 3, vocab_size=200, model_max_length=32)
    confusers = [f"{question} {question}" for question in questions]
    shares = []
    for columns in ({}, {"negative": confusers}):
        model = sentence_transformer(small_model(tmp_path / "bare", tokenizer))
        training = ContrastiveTrainingArguments(
            str(tmp_path / "run"), max_steps=100, per_device_train_batch_size=12, learning_rate=2e-3, **QUIET
        )
        rows = Dataset.from_dict({"query": questions, "positive": answers, **columns})
        SentenceTransformerTrainer(model, training, train_dataset=rows, loss=contrastive_loss(model)).train()
        texts = (questions, answers, confusers)
        query, right, wrong = (model.encode(each, normalize_embeddings=True) for each in texts)
        shares.append(float(np.mean((query * right).sum(1) > (query * wrong).sum(1))))
    assert shares[1] >= shares[0] + 0.2


def test_mined_negatives_have_the_same_instruction_as_the_answers(folder, monkeypatch):
    asked = {}

    def mine(rows, model, **options):
        asked.update(options)
        return rows.add_column("negative_1", rows["positive"]).add_column("negative_2", rows["positive"])

    monkeypatch.setattr(contrastive, "mine_hard_negatives", mine)
    pairs = Dataset.from_dict({"anchor": ["a", "b"], "positive": ["c", "d"]})
    sets = mine_negatives(DatasetDict(some=pairs), {"some": "Find: "}, None, 2)
    assert asked["query_prompt"] == asked["corpus_prompt"] == "Find: "
    assert column_prompts(sets, {"some": "Find: "})["some"] == dict.fromkeys(
        ["anchor", "positive", "negative_1", "negative_2"], "Find: "
    )
    mine_negatives(DatasetDict(some=pairs), {"some": "Find: "}, None, 2, "query")
    assert asked["query_prompt"] == "Find: " and asked["corpus_prompt"] is None
    assert column_prompts(sets, {"some": "Find: "}, "query") == {"some": {"anchor": "Find: "}}
    with pytest.raises(ValueError, match="some already has negatives"):
        mine_negatives(sets, {}, None, 2)


# --- Files and the Hub --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"q": "a", "d": "b"}\n\n{"q": "a"}\n', "line 3: .* is not a row of at least two columns"),
        ('{"q": "a", "d": "b"}\n{"q": "a", "e": "b"}\n', "line 2: .* the same in all lines"),
        ('{"q": "a", "d": null}\n', "line 1: d is None"),
        ('{"q": "a", "d": "  "}\n', "line 1: .* has an empty text"),
        ('["a", "b"]\n', "item 1: .* is not a row"),
        ("", "a.jsonl is empty"),
    ],
)
def test_the_error_for_an_invalid_line_of_pairs_names_its_number(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / "a.jsonl")


def test_every_kind_of_file_gives_the_same_pairs(tmp_path):
    rows = {"label": ["a, b", "c"], "score": ['d "e"', "f\ng"], "hard": ["h", "i"]}
    dataset = Dataset.from_dict(rows)
    dataset.to_json(tmp_path / "a.jsonl")
    dataset.to_csv(tmp_path / "a.csv", index=False)
    dataset.to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        read = read_pairs(tmp_path / name)
        assert read.column_names == [
            "anchor",
            "positive",
            "negative_1",
        ]  # "label" and "score" would not be read as texts
        assert list(read.to_dict().values()) == list(rows.values())


# One row of each Hub dataset as its card shows it, and the expected texts.
QUORA = {"set": {"query": "q", "pos": ["p", "p2"], "neg": ["n", "n2"]}}
HUB = {
    "ALLNLI": ({"anchor": "a", "positive": "p", "negative": "n"}, ["a", "p", "n"]),
    "AMAZONQA": ({"query": "q", "pos": ["p", "p2"]}, ["q", "p"]),
    "CONCURRENTQA": (
        {"question": "q", "pos_paras": [{"text": "p"}], "neg_paras": [{"text": f"n{i}"} for i in range(6)]},
        ["q", "p", "n0", "n1", "n2", "n3"],
    ),
    "MEDMCQA": ({"question": "q", "exp": "why", "subject_name": "Anatomy"}, ["q", "why"]),
    "PAQ": ({"set": ["q", "p"]}, ["q", "p"]),
    "QQP": (QUORA, ["q", "p", "n"]),
    "SENTENCECOMP": ({"set": ["a long one", "short"]}, ["short", "a long one"]),
    "STS12": ({"sentence1": "a", "sentence2": "b", "score": 4.2}, ["a", "b"]),
}


@pytest.mark.parametrize("name", HUB)
def test_rows_of_the_papers_sets_become_texts(monkeypatch, name):
    row, expected = HUB[name]
    asked = []

    def load(path, config=None, split=None):
        asked.append((path, config, split))
        return Dataset.from_list([row])

    monkeypatch.setattr(training_sets, "load_dataset", load)
    (found,) = load_training_set(name).to_list()
    assert list(found.values()) == expected
    assert list(found)[:2] == ["anchor", "positive"]
    assert asked == [(TRAINING_SETS[name].path, TRAINING_SETS[name].configs[0], "train")]


def test_rows_are_filtered_as_the_paper_describes(monkeypatch):
    """The filter of STS scores in the authors' code had no effect; this filter has one."""
    rows = [{"sentence1": "a", "sentence2": "b", "score": s} for s in (4.0, 4.5, 1.0)]
    monkeypatch.setattr(training_sets, "load_dataset", lambda *a, **k: Dataset.from_list(rows))
    assert len(load_training_set("STSBENCHMARK")) == 1
    rows[:] = [QUORA, {"set": {"query": "q", "pos": ["p"], "neg": []}}]
    assert len(load_training_set("QQP")) == 1  # the second row has no negative


def test_pairs_of_ids_become_pairs_of_texts(monkeypatch):
    parts = {
        "default": {"query-id": ["q1", "q2", "q1"], "corpus-id": ["d1", "gone", "d2"], "score": [1.0, 1.0, 0.0]},
        "queries": {"_id": ["q1", "q2"], "text": ["one?", "two?"]},
        "corpus": {"_id": ["d2", "d1"], "title": ["", ""], "text": ["two.", "one."]},
    }
    monkeypatch.setattr(training_sets, "load_dataset", lambda path, name, split: Dataset.from_dict(parts[name]))
    assert load_training_set("FEVER").to_list() == [{"anchor": "one?", "positive": "one."}]


def test_labelled_texts_are_paired_within_their_class(monkeypatch):
    names = ["Anatomy"] * 4 + ["Surgery"] * 3 + ["Dental"]
    options = {f"op{letter}": [f"{letter}"] * 8 for letter in "abcd"}
    rows = {
        "question": [f"{name} {i}" for i, name in enumerate(names)],
        "subject_name": names,
        "cop": [1] * 8,
    } | options
    monkeypatch.setattr(training_sets, "load_dataset", lambda *a, **k: Dataset.from_dict(rows))
    triplets = load_training_set("MEDMCQA_CLUST").to_list()
    assert len(triplets) == 7  # the only dental question has no positive
    for triplet in triplets:
        anchor, positive, negative = (text.split()[0] for text in triplet.values())
        assert (
            triplet["anchor"].endswith(" b")
            and anchor == positive != negative
            and triplet["anchor"] != triplet["positive"]
        )


def test_the_error_for_an_unknown_or_changed_set_names_it(monkeypatch):
    with pytest.raises(ValueError, match="unknown training set NOPE; the paper's sets are AGNEWS"):
        ContrastiveArguments("model", training_sets=["NOPE"])
    monkeypatch.setattr(training_sets, "load_dataset", lambda *a, **k: Dataset.from_list([{"headline": "a"}]))
    with pytest.raises(
        ValueError,
        match=r"AGNEWS: sentence-transformers/agnews has the columns headline and not the expected ones \('title'\)",
    ):
        load_training_set("AGNEWS")


def test_every_set_of_table_7_is_available():
    assert list(TRAINING_SETS) == list(TRAINING_INSTRUCTIONS) and len(TRAINING_SETS) == 22


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(train_files=["a.jsonl", "x/a.jsonl"]), "two files have the name a"),
        (dict(train_files=["a.jsonl"], training_sets=["PAQ"]), "not both"),
        (dict(training_sets=["PAQ"], instructions="i.json"), "belongs to --train_files"),
        (dict(train_files=["a.jsonl"], instructions="a.json", instruction_template="x"), "does not contain"),
        (dict(held_out_share=1.0), "held_out_share=1.0 is not a share; give 0 for no evaluation, or a number below 1"),
        (dict(temperature=0.0), "temperature=0.0 is not above 0"),
        (dict(max_seq_length=2), "max_seq_length=2 leaves no token"),
        (dict(training_sets=["PAQ"], instruction_template="x"), "does not contain"),  # before anything is downloaded
        (dict(train_files=["a.jsonl"], instructions="i.json"), "other is not a set; the sets are a"),
    ],
)
def test_arguments_that_contradict_each_other_or_have_no_result_are_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    for file in ("a.jsonl", "x/a.jsonl"):
        Path(file).write_text('{"q": "a", "d": "b"}\n')
    Path("a.json").write_text('{"a": "Find it."}')
    Path("i.json").write_text('{"other": "Find it."}')
    with pytest.raises(ValueError, match=message):
        open_training_sets(ContrastiveArguments("model", **changes))
