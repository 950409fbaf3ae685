"""Contextual embeddings: batches of clusters, the loss against one graph, contexts of corpora, training."""

import json
import pickle
import re
from functools import partial
from pathlib import Path

import contextual_training
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train_contextual
from conftest import SENTENCE, files_of_pairs, flags, json_lines, losses_of, run_main
from contextual_batches import (
    ROW_COLUMN,
    ContextualBatchSampler,
    PairClusters,
    cluster_pairs,
    load_or_cluster,
    pack_clusters,
    unit_vectors,
)
from contextual_embeddings import (
    EvaluatorInContext,
    contextual_model,
    contextual_sentence_transformer,
    fit_context,
    load_context,
    save_context,
)
from contextual_training import ContextualArguments, ContextualRankingLoss, ContextualTrainingArguments, open_pairs
from datasets import Dataset, DatasetDict
from launch import on_two_processes
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sklearn.metrics import adjusted_rand_score

from neobert_hf.embeddings import pairs_evaluator, sentence_transformer

SIZE = 4  # context vectors
WORDS = SENTENCE.split()
DOCUMENTS = [f"{a} {b}" for a, b in zip(WORDS, WORDS[3:])]
QUERIES = [f"the {document}" for document in DOCUMENTS]


@pytest.fixture
def model(folder):
    options = {"context_size": SIZE, "context_dropout": 0.5, "model_kwargs": {"dtype": torch.float64}}
    torch.manual_seed(0)
    return contextual_sentence_transformer(folder, **options).train()


def test_paired_k_means_finds_planted_topics_whichever_side_is_the_query_and_depends_on_the_seed_only():
    rng = np.random.default_rng(0)
    topics, sides = np.repeat(np.arange(6), 40), []
    for _ in range(2):  # around the topic's query vector and its document vector, which differ
        vectors = rng.standard_normal((6, 16))[topics] + 0.3 * rng.standard_normal((240, 16))
        sides.append((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    found = cluster_pairs(*sides, 12)  # a topic has two centroids, one for each order
    assert adjusted_rand_score(topics, found) >= 0.9
    assert adjusted_rand_score(topics, cluster_pairs(*sides[::-1], 12)) >= 0.9
    assert np.array_equal(found, cluster_pairs(*sides, 12)) and not np.array_equal(found, cluster_pairs(*sides, 12, 1))


@pytest.mark.parametrize("num_rows, batch_size", [(240, 7), (240, 240), (65, 64), (50, 1)])
def test_each_row_is_in_at_most_one_batch_of_exact_size(num_rows, batch_size):
    clusters = np.random.default_rng(0).integers(0, 9, num_rows)
    batches = pack_clusters(clusters, batch_size, 3)
    assert batches.shape == (num_rows // batch_size, batch_size)
    assert len(np.unique(batches)) == batches.size and batches.min() >= 0 and batches.max() < num_rows


def clusters_of(sizes):
    """Datasets with random clusters, rows numbered over all of them."""
    rng, first, datasets, rows = np.random.default_rng(0), 0, {}, []
    for size in sizes:
        vectors = rng.standard_normal((size, 8)).astype(np.float32)
        datasets[first] = PairClusters(vectors, vectors, rng.integers(0, 5, size))
        rows.append(Dataset.from_dict({"query": ["q"] * size, ROW_COLUMN: range(first, first + size)}))
        first += size
    return datasets, rows


def test_epochs_have_other_batches_and_the_seed_determines_them():
    datasets, rows = clusters_of((40, 30))

    def epoch(number, seed=0):
        sampler = ContextualBatchSampler(rows[1], 7, True, None, None, seed, datasets=datasets)
        sampler.set_epoch(number)
        batches = list(sampler)
        assert len(batches) == len(sampler) == 4 and all(len(set(batch)) == 7 for batch in batches)
        return batches

    assert epoch(0) == epoch(0) and epoch(0) != epoch(1) and epoch(0) != epoch(0, seed=1)
    assert {frozenset(batch) for batch in epoch(0)} != {frozenset(batch) for batch in epoch(1)}


def test_clusters_are_made_once_for_texts_and_settings_and_a_checkpoint_holds_the_name_of_their_file(folder, tmp_path):
    def clusters(documents=DOCUMENTS, surrogate="mini", cluster_size=4, seed=0, load=True):
        rows = Dataset.from_dict({"query": QUERIES, "document": documents})
        settings = [surrogate, cluster_size, seed]
        return load_or_cluster(tmp_path, "pairs", rows, settings, load and (lambda: sentence_transformer(folder)))

    made, read = clusters(), clusters(load=None)  # the surrogate is not loaded again
    for name in ("queries", "documents", "clusters"):
        assert np.array_equal(getattr(made, name), getattr(read, name))
    assert len(np.unique(made.clusters)) > 1
    vectors = unit_vectors([*DOCUMENTS, *reversed(DOCUMENTS)], sentence_transformer(folder))
    assert np.array_equal(vectors[: len(DOCUMENTS)], vectors[len(DOCUMENTS) :][::-1])  # of equal texts
    changes = ({"documents": DOCUMENTS[::-1]}, {"surrogate": "other"}, {"cluster_size": 5}, {"seed": 1})
    assert len({made.file, *(clusters(**change).file for change in changes)}) == 5
    stored = pickle.dumps(partial(ContextualBatchSampler, datasets={0: made}))
    assert len(stored) < 1000
    assert np.array_equal(pickle.loads(stored).keywords["datasets"][0].queries, made.queries)


def one_graph(model, num_pairs, mask=None, temperature=0.02):
    """The loss in one graph without caching, with the formula written out; the context is all documents."""
    module = contextual_model(model)
    queries, documents = model.preprocess(QUERIES[:num_pairs]), model.preprocess(DOCUMENTS[:num_pairs])

    def run(features, **more):
        return module(features["input_ids"], features["attention_mask"], **more).sentence_embedding

    context = run(documents, embeds_context=True)
    q, d = (F.normalize(run(side, dataset_embeddings=context), dim=-1) for side in (queries, documents))
    scores = q @ d.T / temperature
    if mask is not None:
        scores = scores.masked_fill(torch.from_numpy(mask), -torch.inf)
    return -(scores.diagonal() - scores.logsumexp(-1)).mean()


def pairs(model, number):
    return [model.preprocess(QUERIES[:number]), model.preprocess(DOCUMENTS[:number])]


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("mini_batch_size", [1, 3, SIZE, 100])
def test_loss_and_gradients_of_two_stage_caching_are_those_of_one_graph(model, mini_batch_size):
    contextual_model(model).config.context_dropout = 0.0
    expected = one_graph(model, SIZE)
    (3 * expected).backward()
    wanted = gradients(model)
    model.zero_grad()
    loss = ContextualRankingLoss(model, mini_batch_size=mini_batch_size)
    found = loss(pairs(model, SIZE))
    (3 * found).backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    assert set(gradients(model)) == set(wanted) == {name for name, _ in model.named_parameters()}
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-9, msg=name)
    with torch.no_grad():
        value = loss(pairs(model, SIZE))
    assert not value.requires_grad and value.item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("num_pairs", [2, 9])  # fewer and more than the documents of the context
def test_mini_batches_of_any_size_give_the_same_gradients_with_dropout_and_a_sampled_context(model, num_pairs):
    results = []
    for mini_batch_size in (1, 2, 100):
        model.zero_grad()
        torch.manual_seed(7)
        value = ContextualRankingLoss(model, mini_batch_size=mini_batch_size)(pairs(model, num_pairs))
        value.backward()
        results.append((value.item(), gradients(model)))
    for value, found in results[1:]:
        assert value == pytest.approx(results[0][0], abs=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, results[0][1][name], rtol=0, atol=1e-9, msg=name)


def test_false_negatives_are_excluded_and_the_positive_never_is(model):
    contextual_model(model).config.context_dropout = 0.0
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((20, 8)).astype(np.float32)
    vectors[11], vectors[12] = vectors[10], vectors[10]  # rows 10 to 12 have the same document
    clusters = PairClusters(vectors, vectors, np.zeros(20, int))
    mask = np.zeros((SIZE, SIZE), bool)
    mask[:3, :3] = ~np.eye(3, dtype=bool)
    expected = one_graph(model, SIZE, mask)
    loss = ContextualRankingLoss(model, datasets={0: clusters_of((100,))[0][0], 100: clusters})
    found = loss(pairs(model, SIZE), torch.tensor([110, 111, 112, 113]))
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    assert one_graph(model, SIZE).item() != pytest.approx(expected.item(), abs=1e-3)


def test_the_number_of_texts_with_gradients_is_that_of_one_mini_batch_and_each_graph_is_freed(model):
    sizes, graphs = [], []
    module = contextual_model(model)

    def record(_, args, kwargs, output):
        if torch.is_grad_enabled():
            sizes.append(len(output.last_hidden_state))
            graphs.append(output.last_hidden_state)

    for stage in (module.first_stage, module.second_stage):
        stage.register_forward_hook(record, with_kwargs=True)
    ContextualRankingLoss(model, mini_batch_size=2)(pairs(model, 12)).backward()
    assert sizes == [2] * (6 + 6 + SIZE // 2)
    for state in graphs:
        with pytest.raises(RuntimeError, match="second time"):
            state.sum().backward()


def test_a_context_changes_the_embeddings_of_documents_and_queries_and_is_saved_with_the_model(model, tmp_path):
    model.eval()
    model.prompts, model.max_seq_length = {"query": "the ", "document": ""}, 20
    before = model.encode(DOCUMENTS)
    vectors = fit_context(model, DOCUMENTS, seed=1)
    inside = model.encode(DOCUMENTS)
    assert vectors.shape == (SIZE, 32) and np.abs(inside - before).max() > 1e-3
    model.save(str(tmp_path / "saved"))
    options = {"model_kwargs": {"dtype": torch.float64}}
    plain = SentenceTransformer(str(tmp_path / "saved"), **options)
    for loaded in (plain, contextual_sentence_transformer(str(tmp_path / "saved"), **options)):
        assert loaded.prompts == model.prompts and loaded.max_seq_length == 20
        assert np.array_equal(loaded.encode(DOCUMENTS), inside)
        assert np.array_equal(loaded.encode_query(QUERIES), model.encode_query(QUERIES))
    contextual_model(plain).set_context(None)
    np.testing.assert_allclose(plain.encode(DOCUMENTS), before, atol=1e-12)
    (module,) = json.loads((tmp_path / "saved/modules.json").read_text())
    assert module["type"].startswith("sentence_transformers.")  # stock modules only


def test_the_context_is_a_sample_of_the_corpus_by_seed(model):
    model.eval()
    model.truncate_dim = 8  # context vectors stay whole
    first, again, other = (fit_context(model, DOCUMENTS, seed=seed, batch_size=3) for seed in (0, 0, 1))
    model.truncate_dim = None
    alone = model.encode(DOCUMENTS, embeds_context=True, convert_to_tensor=True)
    assert torch.equal(first, again) and not torch.equal(first, other)
    rows = [int((alone - vector).norm(dim=-1).argmin()) for vector in first]
    assert len(set(rows)) == SIZE  # without replacement
    torch.testing.assert_close(alone[rows], first, rtol=0, atol=1e-10)
    assert fit_context(model, ["fox", "dog"], num_documents=7).shape == (7, 32)  # with replacement
    assert fit_context(model, DOCUMENTS).shape == (SIZE, 32)  # the number in training again


def test_documents_of_the_context_have_the_document_prompt(folder):
    prompts = {"query": "the ", "document": "a "}
    model = contextual_sentence_transformer(folder, prompts=prompts, context_size=SIZE)
    vectors = fit_context(model, DOCUMENTS)
    model.prompts = {}
    torch.testing.assert_close(vectors, fit_context(model, [f"a {text}" for text in DOCUMENTS]), rtol=0, atol=1e-5)


def test_a_context_file_belongs_to_its_first_stage_its_settings_and_its_prompt(model, tmp_path):
    file = tmp_path / "corpus.safetensors"
    model.eval()
    fit_context(model, DOCUMENTS)
    expected = model.encode(QUERIES)
    save_context(model, file)
    fit_context(model, DOCUMENTS, seed=5)
    load_context(model, file)
    np.testing.assert_allclose(model.encode(QUERIES), expected, atol=1e-5)  # the file is fp32
    contextual_model(model).set_context(None)
    model.save(str(tmp_path / "model"))
    load_context(SentenceTransformer(str(tmp_path / "model"), model_kwargs={"dtype": torch.bfloat16}), file)
    changes = ({"rope_theta": 500.0}, {"norm_eps": 1e-4}, {"num_attention_heads": 2})
    others = [SentenceTransformer(str(tmp_path / "model"), config_kwargs=change) for change in changes]
    others.append(SentenceTransformer(str(tmp_path / "model"), prompts={"document": "a "}))
    with torch.no_grad():
        contextual_model(model).first_stage.layer_norm.weight.add_(0.1)
    for other in (*others, model):
        with pytest.raises(ValueError, match="holds no context of this model"):
            load_context(other, file)
        assert not contextual_model(other).config.has_context


def test_the_evaluator_embeds_in_the_context_of_its_own_documents_and_restores_the_models(model):
    rows = Dataset.from_dict({"query": QUERIES, "document": DOCUMENTS})
    evaluator = EvaluatorInContext(pairs_evaluator(rows, "words"))
    found = evaluator(model.eval())["words_cosine_ndcg@10"]
    assert not contextual_model(model).config.has_context
    own = fit_context(model, ["fox"] * SIZE)
    assert evaluator(model)["words_cosine_ndcg@10"] == pytest.approx(found)
    assert torch.equal(contextual_model(model).context, own)
    fit_context(model, DOCUMENTS)
    assert pairs_evaluator(rows, "words")(model)["words_cosine_ndcg@10"] == pytest.approx(found)


def test_what_has_no_result_is_refused(model, folder, tmp_path):
    model.save(str(tmp_path / "saved"))
    save_file({"other": np.zeros(2)}, tmp_path / "a.safetensors")
    triplets = json_lines(tmp_path / "triplets.jsonl", [{"q": "a", "p": "b", "n": "c"}])
    arguments = ContextualArguments("model", train_files=[str(triplets)])
    cases = {
        "the batch has 4 columns; give pairs": lambda: ContextualRankingLoss(model)(pairs(model, 2) * 2),
        "triplets has the columns anchor, positive, negative_1; give pairs": lambda: open_pairs(arguments, 1),
        "corpus must be a list of at least one document": lambda: fit_context(model, "one text"),
        "corpus must be a list": lambda: fit_context(model, []),
        "reads no context; build one": lambda: fit_context(sentence_transformer(folder), DOCUMENTS),
        "the model has no context to save": lambda: save_context(model, tmp_path / "b"),
        "holds no context of this model": lambda: load_context(model, tmp_path / "a.safetensors"),
        "leave no position for a text": lambda: contextual_sentence_transformer(folder, context_size=60),
        "has the model type contextual_neobert, not neobert": lambda: sentence_transformer(str(tmp_path / "saved")),
        "contextual already": lambda: contextual_sentence_transformer(str(tmp_path / "saved"), context_size=9),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_the_snippets_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = Path(train_contextual.__file__).with_name("README.md").read_text("utf-8")
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})
    assert Path("runs/contextual/contextual_neobert.py").is_file() and Path("documentation.safetensors").is_file()


@pytest.fixture
def command(folder, tmp_path):
    """Command line of the script: two datasets of pairs, the bare model as its own surrogate."""
    files = files_of_pairs(tmp_path, large=40, small=12)
    options = dict(
        model_name_or_path=folder, surrogate_model=folder, validation_files=files[1], clusters_dir=tmp_path / "clusters",
        context_size=4, context_dropout=0, max_steps=6, save_steps=3, per_device_train_batch_size=4, learning_rate=1e-3,
        warmup_steps=2, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip

    def build(output_dir, **changes):
        return flags({"train_files": files, **options, "output_dir": output_dir, **changes})

    return build


@pytest.mark.slow
def test_training_lowers_the_loss_and_the_second_stage_starts_from_the_first(command, tmp_path, monkeypatch):
    batches, forward = [], ContextualRankingLoss.forward
    watched = lambda *args: batches.append(args[2].tolist()) or forward(*args)  # noqa: E731
    monkeypatch.setattr(ContextualRankingLoss, "forward", watched)
    printed = run_main(train_contextual, *command(tmp_path / "first", max_steps=24, save_steps=24))
    losses = list(losses_of(tmp_path / "first").values())
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    assert len(batches) == 24 and all(len({row >= 40 for row in batch}) == 1 for batch in batches)  # never mixed
    record = json.loads(Path(tmp_path, "first", "training.json").read_text())
    assert record["settings"]["context_size"] == 4 and 0 < record["scores"][0]["metrics"]["cosine_ndcg@10"] <= 1
    assert "large: 40 pairs" in printed and len(list((tmp_path / "clusters").iterdir())) == 2

    changes = dict(model_name_or_path=tmp_path / "first", batches="random", clusters_dir=tmp_path / "none")
    run_main(train_contextual, *command(tmp_path / "second", max_steps=1, learning_rate=0, **changes))
    assert not (tmp_path / "none").exists()
    first, model = (SentenceTransformer(str(tmp_path / name)) for name in ("first", "second"))
    for name, parameter in first.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter)
    assert model.prompts == {"query": "search_query: ", "document": "search_document: "}
    assert fit_context(model, DOCUMENTS).shape == (4, 32)


@pytest.mark.slow
def test_two_processes_train_like_one_with_two_accumulation_steps(command, tmp_path):
    changes = dict(max_steps=5, save_steps=5)
    run_main(train_contextual, *command(tmp_path / "one", **changes, gradient_accumulation_steps=2))
    on_two_processes(train_contextual.__file__, *command(tmp_path / "two", **changes))
    alone, both = (SentenceTransformer(str(tmp_path / name)) for name in ("one", "two"))
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(dict(both.named_parameters())[name], parameter, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stage": "supervised"}, "give either --train_files or --stage"),
        ({"temperature": -0.02}, "temperature=-0.02 is not above 0"),
        ({"max_seq_length": 2}, "max_seq_length=2 leaves no token"),
        ({"batches": "sorted"}, "invalid choice: 'sorted'"),
        ({"per_device_train_batch_size": 13}, "small has 12 rows, fewer than the batch size 13; remove the file"),
    ],
)
def test_a_wrong_command_line_is_refused(changes, message, command, tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        run_main(train_contextual, *command(tmp_path / "run", **changes))
    assert message in f"{raised.value} {capsys.readouterr().err}"


def test_the_stages_of_the_paper_are_read_by_source(monkeypatch):
    parts = {"x": ("ac", "df"), "y": ("b", "e"), "small": ("", "")}
    unsupervised = {
        name: Dataset.from_dict({"query": list(q), "document": list(d), "dataset": [name] * len(q)})
        for name, (q, d) in parts.items()
    }
    supervised = DatasetDict({"nq": Dataset.from_dict({"query": ["a"], "pos": [["b", "c"]], "neg": [["d"]]})})
    hub = {"nomic-ai/nomic-embed-unsupervised-data": DatasetDict(unsupervised), "cfli/bge-full-data": supervised}
    monkeypatch.setattr(contextual_training, "load_dataset", hub.__getitem__)
    sets = open_pairs(ContextualArguments("model", stage="unsupervised"), 1)
    assert {name: rows.to_dict() for name, rows in sets.items()} == {
        "x": {"query": ["a", "c"], "document": ["d", "f"], ROW_COLUMN: [0, 1]},
        "y": {"query": ["b"], "document": ["e"], ROW_COLUMN: [2]},
    }
    (rows,) = open_pairs(ContextualArguments("model", stage="supervised"), 1).values()
    assert rows.to_dict() == {"query": ["a"], "document": ["b"], ROW_COLUMN: [0]}


def test_the_defaults_are_those_of_the_paper(tmp_path):
    training = ContextualTrainingArguments(str(tmp_path), use_cpu=True)
    values = training.learning_rate, training.warmup_steps, training.num_train_epochs
    assert (*values, training.per_device_train_batch_size) == (5e-5, 1000, 3, 512)
    assert (training.lr_scheduler_type, training.weight_decay) == ("linear", 0)
