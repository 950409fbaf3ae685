"""Contrastive training: shares and order of the sampler, the loss against its formula, mined negatives."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import train_contrastive
from conftest import SENTENCE, files_of_pairs, flags, losses_of, run_main
from datasets import Dataset, DatasetDict
from launch import on_two_processes
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler
from torch.utils.data import ConcatDataset, RandomSampler
from transformers import AutoTokenizer

from neobert_hf import NeoBERTModel, embeddings
from neobert_hf.embeddings import train_contrastive as train_on_pairs
from neobert_hf.embeddings.contrastive import WeightedBatchSampler
from neobert_hf.runs import lock_run

SIZES = (6400, 1600, 100)


def stream(sizes=SIZES, seed=0, epoch=0, batch_size=4, **options):
    """Build the sampler as the trainer does: its children share one generator."""
    datasets = [Dataset.from_dict({"anchor": [f"{i} {j}" for j in range(size)]}) for i, size in enumerate(sizes)]
    generator = torch.Generator()
    samplers = [RandomSampler(dataset, generator=generator) for dataset in datasets]
    more = {"drop_last": True, "generator": generator, "seed": seed}
    children = [DefaultBatchSampler(sampler, batch_size, **more) for sampler in samplers]
    sampler = WeightedBatchSampler(ConcatDataset(datasets), children, generator, seed, **options)
    sampler.set_epoch(epoch)
    return sampler


def datasets_of(batches, sizes=SIZES):
    """Return the dataset of each batch; fail for a batch from two datasets."""
    ends = np.cumsum(sizes)
    found = [set(np.searchsorted(ends, batch, side="right").tolist()) for batch in batches]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


@pytest.mark.parametrize("given", [None, [1, 0, 3]])
def test_datasets_are_drawn_in_proportion_to_the_square_root_of_their_sizes_or_to_weights(given):
    num_batches = 2000
    counts = Counter(datasets_of(stream(num_batches=num_batches, weights=given)))
    weights = np.array(given or np.sqrt(SIZES))
    for dataset, share in enumerate(weights / weights.sum()):
        sigma = np.sqrt(num_batches * share * (1 - share))
        assert abs(counts[dataset] - num_batches * share) <= 3 * sigma


def test_an_exhausted_dataset_restarts_in_a_new_order_and_each_pass_has_each_row_once():
    batches = list(stream(sizes=(40, 8), num_batches=60, weights=[1, 1]))
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
    drawn = datasets_of(stream(num_batches=300, weights=[1, 1, 1], group=3))
    assert all(len(set(drawn[i : i + 3])) == 1 for i in range(0, 300, 3))
    assert len(set(drawn)) == 3


def no_duplicates(texts):
    dataset = Dataset.from_dict({"anchor": texts})
    child = NoDuplicatesBatchSampler(dataset, batch_size=4, drop_last=True, generator=torch.Generator(), seed=0)
    return WeightedBatchSampler(ConcatDataset([dataset]), [child], num_batches=40)


def test_batches_have_no_text_twice_and_a_dataset_without_such_a_batch_is_refused(tmp_path):
    assert all(len({"aabbccdd"[row] for row in batch}) == 4 for batch in no_duplicates(list("aabbccdd")))
    with pytest.raises(ValueError, match="8 rows has no batch of 4 rows without duplicate texts"):
        list(no_duplicates(["same"] * 8))
    with pytest.raises(ValueError, match="a dataset of 3 rows has fewer rows than the batch size 4"):
        stream(num_batches=4, sizes=(100, 3))
    training = embeddings.ContrastiveTrainingArguments(str(tmp_path), max_steps=-1, num_train_epochs=1, use_cpu=True)
    with pytest.raises(ValueError, match="max_steps=-1, but sampled datasets have no epochs; give at least 1 step"):
        embeddings.set_sampling(training)


QUESTIONS = ["the quick", "old sea", "a house", "it sleeps"]
ANSWERS = ["brown fox jumps over", "by", "warm red house by old sea and then", "lazy dog"]
NEGATIVES = ["dog", "fox and", "the sea is by a house", "jumps"]


def gradients_of(folder, unpad=True, columns=(QUESTIONS, ANSWERS, NEGATIVES), **options):
    encoder = embeddings.sentence_transformer(folder).double()
    encoder[0].model.config.unpad_inputs = unpad
    encoder.train()
    loss = embeddings.contrastive_loss(encoder, **options)([encoder.preprocess(list(texts)) for texts in columns], None)
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


@pytest.mark.parametrize("options", [dict(mini_batch_size=1), dict(unpad=False), dict(mini_batch_size=3, unpad=False)])
def test_caching_and_padding_do_not_change_the_gradients(folder, options):
    loss, gradients = gradients_of(folder)
    other, others = gradients_of(folder, **options)
    assert abs(loss - other) < 1e-10 and gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-9, atol=1e-10)


QUIET = dict(warmup_steps=10, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True)
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeio"]


def test_after_a_training_in_bf16_the_model_has_the_vectors_of_the_saved_one(folder, tmp_path):
    model = embeddings.sentence_transformer(folder)
    pairs = Dataset.from_dict({"anchor": SYLLABLES[:8], "positive": SYLLABLES[8:16]})
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "bf16": True}
    train_on_pairs(model, pairs, embeddings.ContrastiveTrainingArguments(str(tmp_path / "run"), **options, **QUIET))
    saved = SentenceTransformer(str(tmp_path / "run"), trust_remote_code=True)
    np.testing.assert_allclose(model.encode(SYLLABLES), saved.encode(SYLLABLES), atol=1e-6)


def test_a_single_set_is_a_set_and_a_single_path_a_path(folder, tmp_path):
    pairs = Dataset.from_dict({"anchor": SYLLABLES[:8], "positive": SYLLABLES[8:16]})
    training = embeddings.ContrastiveTrainingArguments(
        str(tmp_path / "one"), max_steps=1, per_device_train_batch_size=4, **QUIET
    )
    (score,) = train_on_pairs(embeddings.sentence_transformer(folder), pairs, training, held_out=pairs)
    assert record_of(tmp_path / "one")["rows"] == {"train": 8} and score["dataset"] == "held_out"
    assert embeddings.hold_out(pairs, 0.5, 0)[1]["train"].num_rows == 4
    arguments = embeddings.ContrastiveArguments(train_files="a.csv", validation_files=Path("b.csv"))
    assert (arguments.train_files, arguments.validation_files) == (["a.csv"], ["b.csv"])
    (tmp_path / "one.csv").write_text("q,d\na,b\n")
    assert list(embeddings.read_sets_of_pairs(tmp_path / "one.csv")) == ["one"]


@pytest.fixture
def command(folder, tmp_path):
    files = files_of_pairs(tmp_path, large=90, small=12)
    options = dict(
        model_name_or_path=folder, validation_files=files[1], max_steps=12, save_steps=4, per_device_train_batch_size=4,
        learning_rate=1e-3, warmup_steps=2, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip

    def build(output_dir, **changes):
        return flags({"train_files": files, **options, "output_dir": output_dir, **changes})

    return build


def record_of(folder):
    return json.loads(Path(folder, "training.json").read_text("utf-8"))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_losses_as_an_uninterrupted_one(command, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    run_main(train_contrastive, *command(tmp_path / "whole"))
    whole = losses_of(tmp_path / "whole")
    assert len(whole) == 12
    train_step = embeddings.ContrastiveTrainer.training_step

    def interrupted_step(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(trainer, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="143"):
        patch.setattr(embeddings.ContrastiveTrainer, "training_step", interrupted_step)
        run_main(train_contrastive, *command(tmp_path / "part"))
    assert not (tmp_path / "part/model.safetensors").exists()
    others = {"temperature": 0.1, "warmup_steps": 3, "optim": "sgd", "optim_args": "amsgrad=True"}
    for name, value in others.items():  # another run is refused
        other = command(tmp_path / "part", **{name: value})
        with pytest.raises(ValueError, match=name):
            run_main(train_contrastive, *other)
    large = tmp_path / "large.jsonl"
    content = large.read_text()
    large.write_text(content.replace("fox", "dog"))  # other texts under the same names, as many as before
    with pytest.raises(ValueError, match=r"belongs to another run: sha256\."):
        run_main(train_contrastive, *command(tmp_path / "part"))
    large.write_text(content)
    run_main(train_contrastive, *command(tmp_path / "part"))
    assert losses_of(tmp_path / "part") == whole
    records = [record_of(tmp_path / name) for name in ("part", "whole")]
    assert records[0] == records[1] and records[0]["scores"][0]["before"] != records[0]["scores"][0]["metrics"]
    assert SentenceTransformer(str(tmp_path / "part")).encode("fox").shape == (32,)
    (tmp_path / "part/checkpoint-8/scheduler.pt").unlink()
    for step in (3, 4, 12):
        shutil.rmtree(tmp_path / f"part/checkpoint-{step}")
    with pytest.raises(FileExistsError, match="part holds checkpoint-8 of a training from which this run cannot"):
        run_main(train_contrastive, *command(tmp_path / "part"))
    with lock_run(tmp_path / "part"), pytest.raises(ValueError, match="another process writes to"):
        run_main(train_contrastive, *command(tmp_path / "part"))


def test_without_validation_files_a_tenth_is_held_out_and_the_record_and_card_have_no_texts(command, tmp_path):
    run = tmp_path / "run"
    options = dict(license="cc-by-4.0", hub_model_id="org/name", validation_files=None)
    printed = run_main(train_contrastive, *command(run, max_steps=2, save_steps=2, **options))
    assert "large: 81 rows of anchor, positive" in printed and "large: 9 pairs to evaluate on" in printed
    assert "small: 12 rows" in printed  # one row would be held out, and a ranking of one document says nothing
    record = record_of(run)
    assert record["rows"] == {"large.jsonl": 81, "small.jsonl": 12} and record["license"] == "cc-by-4.0"
    assert record["settings"] | {"steps": 2, "batch_size": 4, "learning_rate": 1e-3} == record["settings"]
    (score,) = record["scores"]
    before, after = (score[time]["cosine_ndcg@10"] for time in ("before", "metrics"))
    assert score["dataset"] == "large" and score["before"].keys() == score["metrics"].keys()
    assert f"large cosine_ndcg@10: {before:.4f} before the training, {after:.4f} after it" in printed
    text = (run / "README.md").read_text("utf-8")
    rows = [json.loads(line) for line in (tmp_path / "large.jsonl").read_text().splitlines()]
    assert not any(value in text for row in rows for value in row.values())
    assert str(tmp_path) not in text and not list(run.glob("checkpoint-*/README.md"))


@pytest.mark.slow
def test_two_processes_with_shared_negatives_give_the_loss_curve_of_one_process(command, tmp_path):
    """Two batches of 4 with shared negatives equal one batch of 8; both batches of a group come from one dataset."""
    changes = dict(max_steps=6, save_steps=6, bf16="false")
    run_main(train_contrastive, *command(tmp_path / "one", per_device_train_batch_size=8, **changes))
    changes |= dict(per_device_train_batch_size=4, gather_across_devices=True)
    on_two_processes(train_contrastive.__file__, *command(tmp_path / "two", **changes))
    alone, shared = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert len(alone) == 6
    np.testing.assert_allclose(list(shared.values()), list(alone.values()), atol=1e-4)


@pytest.mark.parametrize("corpus_prompt", ["the red ", None])
def test_mined_negatives_are_the_nearest_other_documents_with_the_prompts(folder, corpus_prompt):
    rng = np.random.default_rng(0)
    questions, answers = ([" ".join(rng.choice(SENTENCE.split(), 5)) for _ in range(20)] for _ in range(2))
    model = embeddings.sentence_transformer(folder)
    pairs = Dataset.from_dict({"anchor": questions, "positive": answers})
    mined = embeddings.mine_negatives(DatasetDict(some=pairs), model, 2, "the red ", corpus_prompt)
    queries, documents = model.encode(questions, prompt="the red "), model.encode(answers, prompt=corpus_prompt)
    scores = model.similarity(queries, documents).numpy()
    np.fill_diagonal(scores, -2)
    rows = {row["anchor"]: (row["negative_1"], row["negative_2"]) for row in mined["some"]}
    assert rows == {text: tuple(answers[i] for i in (-row).argsort()[:2]) for text, row in zip(questions, scores)}
    with pytest.raises(ValueError, match="some already has negatives"):
        embeddings.mine_negatives(mined, model, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(), "there are no data; give train_files"),
        (dict(train_files=["a.jsonl", "x/a.jsonl"]), "two files have the name a"),
        (dict(held_out_share=1.0), "held_out_share=1.0 is not a share; give 0 for no evaluation, or a number below 1"),
        (dict(temperature=0.0), "temperature=0.0 is not above 0"),
        (dict(max_seq_length=2), "max_seq_length=2 leaves no token"),
    ],
)
def test_arguments_that_contradict_each_other_or_have_no_result_are_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    for file in ("a.jsonl", "x/a.jsonl"):
        Path(file).write_text('{"q": "a", "d": "b"}\n')
    with pytest.raises(ValueError, match=message):
        embeddings.open_sets(embeddings.ContrastiveArguments("model", **changes), 0)
