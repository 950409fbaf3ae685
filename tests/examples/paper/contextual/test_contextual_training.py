"""Contextual embeddings: batches of clusters, the loss against one graph, contexts of corpora, training."""

import json
import logging
import pickle
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("sentence_transformers", reason="embeddings need sentence-transformers (pip install -e .[embed])")

import train_contextual
from conftest import SENTENCE, run_main
from datasets import Dataset, DatasetDict
from launch import on_two_processes
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sklearn.metrics import adjusted_rand_score
from transformers.utils import is_faiss_available

from neobert_hf import (
    NeoBERTModel,
    contextual_sentence_transformer,
    fit_context,
    load_context,
    save_context,
    sentence_transformer,
)
from neobert_hf.embeddings import training_sets
from neobert_hf.embeddings.contextual import contextual_model
from neobert_hf.embeddings.contextual_batches import (
    ROW_COLUMN,
    ContextualBatchSampler,
    PairClusters,
    cluster_pairs,
    load_or_cluster,
    pack_clusters,
    unit_vectors,
)
from neobert_hf.embeddings.contextual_training import (
    ContextualArguments,
    ContextualRankingLoss,
    ContextualTrainingArguments,
    open_pairs,
    use_clusters,
)
from neobert_hf.embeddings.contrastive import ContrastiveTrainer
from neobert_hf.embeddings.retrieval import EvaluatorInContext, pairs_evaluator

SIZE = 4  # context vectors
WORDS = SENTENCE.split()
DOCUMENTS = [f"{a} {b}" for a, b in zip(WORDS, WORDS[3:])]
QUERIES = [f"the {document}" for document in DOCUMENTS]


@pytest.fixture(scope="module")
def folder(checkpoint, tokenizer, tmp_path_factory):
    """A bare NeoBERT with its tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    NeoBERTModel.from_pretrained(checkpoint).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def model(folder):
    """A contextual model in float64, in training mode, with dropout of context vectors."""
    options = {"context_size": SIZE, "context_dropout": 0.5, "model_kwargs": {"dtype": torch.float64}}
    torch.manual_seed(0)
    return contextual_sentence_transformer(folder, **options).train()


# ------------------------------------------------------------------------------------------------------------ batches


def planted_pairs(num_topics=6, of_topic=40, width=16, seed=0):
    """Unit vectors of pairs around the topic's query vector and its document vector, which differ; and the topics."""
    rng = np.random.default_rng(seed)
    topics = np.repeat(np.arange(num_topics), of_topic)
    sides = []
    for _ in range(2):
        vectors = rng.standard_normal((num_topics, width))[topics] + 0.3 * rng.standard_normal((len(topics), width))
        sides.append((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    return *sides, topics


BACKENDS = [
    False,
    pytest.param(
        True,
        marks=pytest.mark.skipif(not is_faiss_available(), reason="faiss is not installed (pip install faiss-cpu)"),
    ),
]


@pytest.mark.parametrize("use_faiss", BACKENDS)
def test_paired_k_means_finds_planted_topics_whichever_side_is_the_query(use_faiss):
    queries, documents, topics = planted_pairs()
    found = cluster_pairs(queries, documents, 12, use_faiss=use_faiss)  # a topic has two centroids, one for each order
    swapped = cluster_pairs(documents, queries, 12, use_faiss=use_faiss)
    assert adjusted_rand_score(topics, found) >= 0.9
    assert adjusted_rand_score(topics, swapped) >= 0.9


def test_clusters_depend_on_the_seed_only():
    queries, documents, _ = planted_pairs()
    first, second = (cluster_pairs(queries, documents, 12, seed=1, use_faiss=False) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, cluster_pairs(queries, documents, 12, seed=2, use_faiss=False))


@pytest.mark.parametrize("num_rows, batch_size", [(240, 7), (240, 240), (65, 64), (50, 1)])
def test_each_row_is_in_at_most_one_batch_of_exact_size(num_rows, batch_size):
    clusters = np.random.default_rng(0).integers(0, 9, num_rows)
    batches = pack_clusters(clusters, batch_size, 3)
    assert batches.shape == (num_rows // batch_size, batch_size)
    assert len(np.unique(batches)) == batches.size and batches.min() >= 0 and batches.max() < num_rows


def similarity_inside(batches, vectors):
    """Mean similarity of two different rows of a batch."""
    scores = np.stack([vectors[batch] @ vectors[batch].T for batch in batches])
    size = batches.shape[1]
    return (scores.sum() - len(batches) * size) / (len(batches) * size * (size - 1))


def test_packed_clusters_have_harder_negatives_than_random_batches():
    rng = np.random.default_rng(0)
    means = rng.standard_normal((50, 2))[
        rng.integers(0, 50, 400)
    ]  # in two dimensions, so that clusters have neighbours
    vectors = means + 0.05 * rng.standard_normal(means.shape)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    clusters = cluster_pairs(vectors.astype(np.float32), vectors.astype(np.float32), 50, use_faiss=False)
    random = rng.permutation(400).reshape(-1, 8)
    packed = pack_clusters(clusters, 8)
    assert similarity_inside(random, vectors) + 0.1 < similarity_inside(packed, vectors)


def clusters_of(sizes, seed=0):
    """Datasets with random clusters, rows numbered over all of them."""
    rng, first, datasets, rows = np.random.default_rng(seed), 0, {}, []
    for size in sizes:
        vectors = rng.standard_normal((size, 8)).astype(np.float32)
        datasets[first] = PairClusters(vectors, vectors, rng.integers(0, 5, size))
        rows.append(Dataset.from_dict({"query": ["q"] * size, ROW_COLUMN: range(first, first + size)}))
        first += size
    return datasets, rows


def test_epochs_have_other_batches_and_the_seed_determines_them():
    datasets, rows = clusters_of((40, 30))

    def epoch(number, seed=0):
        sampler = ContextualBatchSampler(rows[1], 7, seed=seed, datasets=datasets)
        sampler.set_epoch(number)
        batches = list(sampler)
        assert len(batches) == len(sampler) == 4 and all(len(set(batch)) == 7 for batch in batches)
        return batches

    assert epoch(0) == epoch(0) and epoch(0) != epoch(1) and epoch(0) != epoch(0, seed=1)
    assert {frozenset(batch) for batch in epoch(0)} != {frozenset(batch) for batch in epoch(1)}


def test_batches_of_two_datasets_never_mix(model, tmp_path):
    datasets, rows = clusters_of((40, 30))
    sets = DatasetDict({"a": rows[0], "b": rows[1]})
    seen = []

    class Recorder(ContextualRankingLoss):
        def forward(self, features, labels):
            seen.append(labels.tolist())
            return super().forward([features[0], features[0]], labels)

    training = ContextualTrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=10, warmup_steps=0, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
        batch_sampler=partial(ContextualBatchSampler, datasets=datasets),
    )  # fmt: skip
    ContrastiveTrainer(model, training, train_dataset=sets, loss=Recorder(model, datasets=datasets)).train()
    assert len(seen) == 14
    assert all(len({row >= 40 for row in batch}) == 1 for batch in seen)
    for epoch in (seen[:7], seen[7:]):
        assert len({row for batch in epoch for row in batch}) == 70


def test_duplicates_of_a_document_are_false_negatives_and_the_own_document_never_is():
    texts = ["fox", "dog", "fox", "house", "dog"]
    rng = np.random.default_rng(0)
    vectors = {text: rng.standard_normal(8) for text in texts}
    documents = np.stack([vectors[text] / np.linalg.norm(vectors[text]) for text in texts]).astype(np.float32)
    pairs = PairClusters(documents, documents, np.zeros(5, int))
    expected = np.array([[a == b and i != j for j, b in enumerate(texts)] for i, a in enumerate(texts)])
    assert np.array_equal(pairs.is_false_negative(np.arange(5)), expected)
    assert np.array_equal(pairs.is_false_negative(np.array([4, 1])), [[False, True], [True, False]])


def test_equal_texts_have_equal_vectors(folder):
    vectors = unit_vectors([*DOCUMENTS, *reversed(DOCUMENTS)], sentence_transformer(folder), batch_size=3)
    assert np.array_equal(vectors[: len(DOCUMENTS)], vectors[len(DOCUMENTS) :][::-1])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def make_clusters(folder_of_clusters, folder, **changes):
    rows = Dataset.from_dict({"query": QUERIES, "document": changes.pop("documents", DOCUMENTS)})
    options = dict(surrogate="mini", cluster_size=4, seed=0, load=lambda: sentence_transformer(folder)) | changes
    return load_or_cluster(folder_of_clusters, "pairs", rows, **options)


def test_clusters_are_made_once_and_read_afterwards(folder, tmp_path):
    made = make_clusters(tmp_path, folder)
    read = make_clusters(tmp_path, folder, load=None)  # the surrogate is not loaded again
    for name in ("queries", "documents", "clusters"):
        assert np.array_equal(getattr(made, name), getattr(read, name))
    assert len(np.unique(made.clusters)) > 1


def test_other_texts_and_settings_have_clusters_of_their_own(folder, tmp_path):
    changes = [{}, {"documents": DOCUMENTS[::-1]}, {"surrogate": "other"}, {"cluster_size": 5}, {"seed": 1}]
    assert len({make_clusters(tmp_path, folder, **change).file for change in changes}) == 5


def test_a_surrogate_that_was_trained_again_has_clusters_of_its_own(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "surrogate")
    rows = Dataset.from_dict({"query": QUERIES, "document": DOCUMENTS, ROW_COLUMN: range(len(QUERIES))})
    surrogate = str(tmp_path / "surrogate")
    arguments = ContextualArguments("x", train_files=["x"], surrogate_model=surrogate, cluster_size=4)
    training = ContextualTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    files = []
    for _ in range(2):
        (pairs,) = use_clusters(DatasetDict(pairs=rows), arguments, training).values()
        files.append(pairs.file)
        weights = tmp_path / "surrogate/model.safetensors"
        save_file({name: tensor + ("norm" in name) for name, tensor in load_file(weights).items()}, weights)
    assert files[0] != files[1]


def test_saved_training_arguments_hold_the_name_of_the_file_and_not_the_vectors(folder, tmp_path):
    pairs = make_clusters(tmp_path, folder)
    stored = pickle.dumps(partial(ContextualBatchSampler, datasets={0: pairs}))
    assert len(stored) < 1000
    assert np.array_equal(pickle.loads(stored).keywords["datasets"][0].queries, pairs.queries)
    alone = PairClusters(pairs.queries, pairs.documents, pairs.clusters)
    assert np.array_equal(pickle.loads(pickle.dumps(alone)).documents, pairs.documents)


def test_datasets_larger_than_a_shard_are_clustered_in_shards(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("neobert_hf.embeddings.contextual_batches.SHARD", 6)
    clusters = make_clusters(tmp_path, folder).clusters
    assert not set(clusters[:6]) & set(clusters[6:12])


# --------------------------------------------------------------------------------------------------------------- loss


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
    found = loss([model.preprocess(QUERIES[:SIZE]), model.preprocess(DOCUMENTS[:SIZE])])
    (3 * found).backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    assert set(gradients(model)) == set(wanted) == {name for name, _ in model.named_parameters()}
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("num_pairs", [2, 9])  # fewer and more than the documents of the context
def test_mini_batches_of_any_size_give_the_same_gradients_with_dropout_and_a_sampled_context(model, num_pairs):
    results = []
    for mini_batch_size in (1, 2, 100):
        model.zero_grad()
        torch.manual_seed(7)
        loss = ContextualRankingLoss(model, mini_batch_size=mini_batch_size)
        value = loss([model.preprocess(QUERIES[:num_pairs]), model.preprocess(DOCUMENTS[:num_pairs])])
        value.backward()
        results.append((value.item(), gradients(model)))
    for value, found in results[1:]:
        assert value == pytest.approx(results[0][0], abs=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, results[0][1][name], rtol=0, atol=1e-9, msg=name)


def test_the_second_pass_repeats_the_dropout_of_the_first_bitwise(model):
    seen = []
    hook = contextual_model(model).second_stage.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"].detach().clone()), with_kwargs=True
    )
    loss = ContextualRankingLoss(model, mini_batch_size=3)
    loss([model.preprocess(QUERIES[:6]), model.preprocess(DOCUMENTS[:6])]).backward()
    hook.remove()
    assert len(seen) == 8  # two columns of two mini-batches, twice
    for first, second in zip(seen[:4], seen[4:]):
        assert torch.equal(first, second)
    null = contextual_model(model).null_context.weight[0]
    dropped = [(part[:, :SIZE] == null).all(-1).double().mean().item() for part in seen[:4]]
    assert 0 < np.mean(dropped) < 1


def test_false_negatives_are_excluded_and_the_positive_never_is(model):
    contextual_model(model).config.context_dropout = 0.0
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((20, 8)).astype(np.float32)
    vectors[11], vectors[12] = vectors[10], vectors[10]  # rows 10 to 12 have the same document
    pairs = PairClusters(vectors, vectors, np.zeros(20, int))
    mask = np.zeros((SIZE, SIZE), bool)
    mask[:3, :3] = ~np.eye(3, dtype=bool)
    expected = one_graph(model, SIZE, mask)
    loss = ContextualRankingLoss(model, datasets={0: clusters_of((100,))[0][0], 100: pairs})
    features = [model.preprocess(QUERIES[:SIZE]), model.preprocess(DOCUMENTS[:SIZE])]
    assert loss(features, torch.tensor([110, 111, 112, 113])).item() == pytest.approx(expected.item(), abs=1e-12)
    assert one_graph(model, SIZE).item() != pytest.approx(expected.item(), abs=1e-3)


def test_the_number_of_texts_with_gradients_is_that_of_one_mini_batch(model):
    """Memory does not depend on the batch: every forward with gradients has at most a mini-batch, and its graph is freed."""
    sizes, graphs = [], []
    module = contextual_model(model)

    def record(_, args, kwargs, output):
        if torch.is_grad_enabled():
            sizes.append(len(output.last_hidden_state))
            graphs.append(output.last_hidden_state)

    hooks = [
        stage.register_forward_hook(record, with_kwargs=True) for stage in (module.first_stage, module.second_stage)
    ]
    ContextualRankingLoss(model, mini_batch_size=2)(
        [model.preprocess(QUERIES[:12]), model.preprocess(DOCUMENTS[:12])]
    ).backward()
    for hook in hooks:
        hook.remove()
    assert sizes == [2] * (6 + 6 + SIZE // 2)
    for state in graphs:
        with pytest.raises(RuntimeError, match="second time"):
            state.sum().backward()


def test_the_loss_in_evaluation_has_the_same_value_and_no_graph(model):
    contextual_model(model).config.context_dropout = 0.0
    loss = ContextualRankingLoss(model, mini_batch_size=2)
    features = [model.preprocess(QUERIES[:SIZE]), model.preprocess(DOCUMENTS[:SIZE])]
    with torch.no_grad():
        value = loss([dict(each) for each in features])
    assert not value.requires_grad and value.item() == pytest.approx(one_graph(model, SIZE).item(), abs=1e-12)


def test_a_frozen_first_stage_stays_and_the_second_has_its_gradients(model):
    module = contextual_model(model)
    features = [model.preprocess(QUERIES[:6]), model.preprocess(DOCUMENTS[:6])]
    torch.manual_seed(0)
    ContextualRankingLoss(model, mini_batch_size=4)([dict(each) for each in features]).backward()
    expected = module.second_stage.encoder.weight.grad.clone()
    model.zero_grad()
    for part in (module.first_stage, module.first_projection, module.context_norm):
        part.requires_grad_(False)
    torch.manual_seed(0)
    ContextualRankingLoss(model, mini_batch_size=4)(features).backward()
    assert module.first_stage.encoder.weight.grad is None
    torch.testing.assert_close(module.second_stage.encoder.weight.grad, expected, rtol=0, atol=1e-10)


def test_gradients_in_bf16_point_where_those_of_float32_point(folder):
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = contextual_sentence_transformer(
            folder, context_size=SIZE, model_kwargs={"dtype": torch.float32}
        ).train()
        loss = ContextualRankingLoss(model, temperature=0.5, mini_batch_size=3)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = loss([model.preprocess(QUERIES[:6]), model.preprocess(DOCUMENTS[:6])])
            value.backward()
        found.append(torch.cat([gradient.flatten() for gradient in gradients(model).values()]))
    assert F.cosine_similarity(*found, dim=0) > 0.99


def test_training_with_the_filter_keeps_duplicates_more_similar_than_training_without_it(folder):
    """Two pairs of each batch have almost the same document; without the filter each is pushed away from the other's query."""
    queries, documents = QUERIES[:6], [DOCUMENTS[0], f"{DOCUMENTS[0]} it", *DOCUMENTS[2:6]]
    vectors = np.eye(6, dtype=np.float32)
    vectors[1] = vectors[0]
    cosines = {}
    for datasets in (None, {0: PairClusters(vectors, vectors, np.zeros(6, int))}):
        torch.manual_seed(0)
        model = contextual_sentence_transformer(
            folder, context_size=SIZE, model_kwargs={"dtype": torch.float32}
        ).train()
        loss = ContextualRankingLoss(model, temperature=0.05, datasets=datasets)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(12):
            optimizer.zero_grad()
            loss([model.preprocess(queries), model.preprocess(documents)], torch.arange(6)).backward()
            optimizer.step()
        embeddings = model.eval().encode(documents[:2], convert_to_tensor=True)
        cosines[datasets is not None] = F.cosine_similarity(*embeddings, dim=0).item()
    assert cosines[True] > cosines[False] + 0.01


def test_clusters_without_row_numbers_are_refused(model):
    loss = ContextualRankingLoss(model, datasets={0: clusters_of((6,))[0][0]})
    with pytest.raises(ValueError, match="the dataset has no column 'label' of row numbers"):
        loss([model.preprocess(QUERIES[:2]), model.preprocess(DOCUMENTS[:2])], None)


def test_the_packed_rows_of_flash_attention_give_the_same_loss(model):
    """sentence-transformers packs a column into one row if flash attention is there."""
    contextual_model(model).config.context_dropout = 0.0
    columns = []
    for texts in (QUERIES[:SIZE], DOCUMENTS[:SIZE]):
        ids = model.tokenizer(texts)["input_ids"]
        ends = torch.tensor([0, *np.cumsum(list(map(len, ids)))])
        columns.append(
            {
                "input_ids": torch.tensor([[token for row in ids for token in row]]),
                "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends,
            }
        )
    found = ContextualRankingLoss(model, mini_batch_size=3)(columns)
    assert found.item() == pytest.approx(one_graph(model, SIZE).item(), abs=1e-12)


def test_three_columns_are_refused(model):
    features = [model.preprocess(DOCUMENTS[:2])] * 3
    with pytest.raises(ValueError, match="the batch has 3 columns; give a query and a document"):
        ContextualRankingLoss(model)(features)


# ---------------------------------------------------------------------------------------------------------------- use


def test_a_context_changes_the_embeddings_of_documents_and_queries_and_is_saved_with_the_model(model, tmp_path):
    model.eval()
    before = model.encode(DOCUMENTS)
    vectors = fit_context(model, DOCUMENTS, seed=1)
    inside = model.encode(DOCUMENTS)
    assert vectors.shape == (SIZE, 32) and np.abs(inside - before).max() > 1e-3
    model.save(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), model_kwargs={"dtype": torch.float64})
    assert np.array_equal(loaded.encode(DOCUMENTS), inside)
    assert np.array_equal(loaded.encode_query(QUERIES), model.encode_query(QUERIES))
    contextual_model(loaded).set_context(None)
    np.testing.assert_allclose(loaded.encode(DOCUMENTS), before, atol=1e-12)


def test_the_context_is_a_sample_of_the_corpus_by_seed(model):
    model.eval()
    alone = model.encode(DOCUMENTS, embeds_context=True, convert_to_tensor=True)
    first, again, other = (fit_context(model, DOCUMENTS, seed=seed, batch_size=3) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    rows = [int((alone - vector).norm(dim=-1).argmin()) for vector in first]
    assert len(set(rows)) == SIZE  # without replacement
    torch.testing.assert_close(alone[rows], first, rtol=0, atol=1e-10)


def test_context_vectors_can_be_made_and_set_without_this_package(model):
    model.eval()
    fit_context(model, DOCUMENTS[:SIZE])
    expected = model.encode(QUERIES)
    contextual_model(model).set_context(None)
    vectors = model.encode(DOCUMENTS[:SIZE], embeds_context=True, convert_to_tensor=True)
    model[0].model.set_context(vectors)
    np.testing.assert_allclose(model.encode(QUERIES), expected, atol=1e-10)


def test_a_model_with_truncated_embeddings_has_whole_context_vectors(model):
    model.truncate_dim = 8
    assert fit_context(model.eval(), DOCUMENTS).shape == (SIZE, 32)
    assert model.encode(QUERIES).shape == (len(QUERIES), 8)


def test_documents_of_the_context_have_the_document_prompt(folder):
    prompts = {"query": "the ", "document": "a "}
    model = contextual_sentence_transformer(folder, prompts=prompts, context_size=SIZE)
    vectors = fit_context(model, DOCUMENTS)
    model.prompts = {}
    torch.testing.assert_close(vectors, fit_context(model, [f"a {text}" for text in DOCUMENTS]), rtol=0, atol=1e-5)


def test_a_small_corpus_is_sampled_with_replacement_and_a_warning(model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("neobert_hf"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    vectors = fit_context(model.eval(), ["fox", "dog"])
    assert vectors.shape == (SIZE, 32)
    assert "The corpus has 2 documents, fewer than the 4 of the context" in caplog.text


def test_a_context_of_another_size_changes_the_model_and_warns(model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("neobert_hf"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert fit_context(model.eval(), iter(DOCUMENTS), num_documents=7).shape == (7, 32)
    assert "The context now has 7 documents; this model was trained with 4" in caplog.text
    assert model.encode(DOCUMENTS).shape == (len(DOCUMENTS), 32)
    assert fit_context(model, DOCUMENTS).shape == (SIZE, 32)  # the number in training again


def test_a_corpus_is_not_empty_and_no_string(model):
    for corpus in ([], "one text"):
        with pytest.raises(ValueError, match="corpus must be a list of at least one document"):
            fit_context(model, corpus)


def test_a_context_file_belongs_to_its_first_stage(model, folder, tmp_path):
    file = tmp_path / "corpus.safetensors"
    model.eval()
    with pytest.raises(ValueError, match="the model has no context to save; call fit_context first"):
        save_context(model, file)
    fit_context(model, DOCUMENTS)
    expected = model.encode(QUERIES)
    save_context(model, file)
    fit_context(model, DOCUMENTS, seed=5)
    load_context(model, file)
    np.testing.assert_allclose(model.encode(QUERIES), expected, atol=1e-5)  # the file is fp32

    for dtype in (torch.float16, torch.bfloat16):  # roundings of the same weights
        other = contextual_sentence_transformer(folder, context_size=SIZE, model_kwargs={"dtype": torch.float32})
        contextual_model(other).load_state_dict(contextual_model(model).state_dict())
        load_context(other.to(dtype), file)

    with torch.no_grad():
        contextual_model(model).first_stage.layer_norm.weight.add_(0.1)
    with pytest.raises(
        ValueError, match=r"which differs in the weights of the first stage \(compared in torch.bfloat16\); fit"
    ):
        load_context(model, file)


@pytest.mark.parametrize(
    "name, change",
    [
        ("norm_eps", {"norm_eps": 1e-4}),
        ("rope_parameters", {"rope_theta": 500.0}),
        ("num_attention_heads", {"num_attention_heads": 2}),
        ("document_prompt", {"prompts": {"document": "a "}}),
    ],
)
def test_a_context_file_belongs_to_its_settings(model, tmp_path, name, change):
    """The weights are the same, and the context vectors are not."""
    vectors = fit_context(model.eval(), DOCUMENTS)
    save_context(model, tmp_path / "corpus.safetensors")
    contextual_model(model).set_context(None)
    model.save(str(tmp_path / "model"))
    options = change if "prompts" in change else {"config_kwargs": change}
    other = SentenceTransformer(str(tmp_path / "model"), model_kwargs={"dtype": torch.float64}, **options)
    with pytest.raises(ValueError, match=f"holds no context of this model, which differs in {name}; fit a new"):
        load_context(other, tmp_path / "corpus.safetensors")
    assert not contextual_model(other).config.has_context
    assert not torch.equal(fit_context(other, DOCUMENTS), vectors)


def test_other_files_are_no_contexts(model, tmp_path):
    save_file({"other": np.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="holds no context of this model"):
        load_context(model, tmp_path / "a.safetensors")


def test_the_error_for_a_damaged_file_of_clusters_or_context_names_the_file_and_the_way_out(model, folder, tmp_path):
    clusters = Path(make_clusters(tmp_path, folder).file)
    clusters.write_bytes(clusters.read_bytes()[:-9])
    with pytest.raises(OSError, match=rf"{clusters.name} cannot be read .*remove it, and it will be made again"):
        make_clusters(tmp_path, folder)
    fit_context(model, DOCUMENTS)
    context = tmp_path / "context.safetensors"
    save_context(model, context)
    context.write_bytes(context.read_bytes()[:-9])
    with pytest.raises(OSError, match=r"context\.safetensors cannot be read .*fit a new context with fit_context"):
        load_context(model, context)


def test_a_plain_model_has_no_context(folder):
    with pytest.raises(ValueError, match="runs a NeoBERTModel, which reads no context; build one with"):
        fit_context(sentence_transformer(folder), DOCUMENTS)


def test_a_model_of_another_kind_or_size_is_refused(folder, model, tmp_path):
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(ValueError, match="has the model type bert, not neobert"):
        contextual_sentence_transformer(str(tmp_path / "bert"))
    model.save(str(tmp_path / "contextual"))
    with pytest.raises(
        ValueError, match=r"is a contextual model; open it with neobert_hf.contextual_sentence_transformer"
    ):
        sentence_transformer(str(tmp_path / "contextual"))
    with pytest.raises(ValueError, match="context_size=60 and num_soft_prompt_tokens=8 leave no position for a text"):
        contextual_sentence_transformer(folder, context_size=60)
    model.save(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match="context_size=9 differs from the 4 of"):
        contextual_sentence_transformer(str(tmp_path / "saved"), context_size=9)
    same = contextual_sentence_transformer(str(tmp_path / "saved"), context_size=SIZE, context_dropout=None)
    assert contextual_model(same).config.context_dropout == 0.5


def test_a_saved_model_keeps_prompts_length_and_context(model, tmp_path):
    model.prompts, model.max_seq_length = {"query": "the ", "document": ""}, 20
    fit_context(model, DOCUMENTS)
    model.save(str(tmp_path))
    loaded = contextual_sentence_transformer(str(tmp_path))
    assert loaded.prompts == model.prompts and loaded.max_seq_length == 20
    assert contextual_model(loaded).config.has_context
    contextual_model(model).save_pretrained(tmp_path / "bare")
    model.tokenizer.save_pretrained(tmp_path / "bare")
    bare = contextual_sentence_transformer(
        str(tmp_path / "bare"), {"query": "a "}, model_kwargs={"dtype": torch.float64}
    )
    np.testing.assert_allclose(bare.eval().encode(QUERIES), model.eval().encode(QUERIES), atol=1e-10)


def test_a_saved_folder_has_stock_modules_only(model, tmp_path):
    model.save(str(tmp_path))
    (module,) = json.loads((tmp_path / "modules.json").read_text())
    assert module["type"].startswith("sentence_transformers.")


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


# ----------------------------------------------------------------------------------------------------------- training


@pytest.fixture
def command(folder, tmp_path):
    """Command line of the example: two datasets of pairs, the bare model as its own surrogate."""
    rng = np.random.default_rng(0)
    files = []
    for name, count in {"large": 40, "small": 12}.items():
        rows = [{"q": " ".join(rng.choice(WORDS, 3)), "d": " ".join(rng.choice(WORDS, 6))} for _ in range(count)]
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text("\n".join(map(json.dumps, rows)))
    options = dict(
        model_name_or_path=folder,
        surrogate_model=folder,
        validation_files=files[1],
        clusters_dir=tmp_path / "clusters",
        context_size=4,
        context_dropout=0,
        max_steps=6,
        save_steps=3,
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
    state = json.loads(max(Path(folder).glob("checkpoint-*/trainer_state.json")).read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def test_training_lowers_the_loss_and_the_second_stage_of_the_recipe_starts_from_the_first(command, tmp_path):
    printed = run_main(train_contextual, *command(tmp_path / "first", max_steps=24, save_steps=24))
    losses = list(losses_of(tmp_path / "first").values())
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    summary = json.loads(Path(tmp_path, "first", "training_summary.json").read_text())
    assert summary["context_size"] == 4 and 0 < summary["after"]["small_cosine_ndcg@10"] <= 1
    assert "large: 40 pairs" in printed and len(list((tmp_path / "clusters").iterdir())) == 2

    changes = dict(model_name_or_path=tmp_path / "first", batches="random", clusters_dir=tmp_path / "none")
    run_main(train_contextual, *command(tmp_path / "second", max_steps=1, learning_rate=0, **changes))
    assert not (tmp_path / "none").exists()
    first, model = (SentenceTransformer(str(tmp_path / name)) for name in ("first", "second"))
    for name, parameter in first.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter)
    assert model.prompts == {"query": "search_query: ", "document": "search_document: "}
    assert fit_context(model, DOCUMENTS).shape == (4, 32)


def test_an_interrupted_training_resumes_exactly(command, tmp_path):
    changes = dict(context_size=3, context_dropout=0.3)  # the context is a random sample of the batch
    run_main(train_contextual, *command(tmp_path / "whole", **changes))
    expected = losses_of(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole" / "checkpoint-6")
    run_main(train_contextual, *command(tmp_path / "whole", **changes), "--resume_from_checkpoint", "last")
    assert losses_of(tmp_path / "whole") == expected


def test_two_processes_train_like_one_with_two_accumulation_steps(command, tmp_path):
    changes = dict(max_steps=5, save_steps=5)
    run_main(train_contextual, *command(tmp_path / "one", **changes, gradient_accumulation_steps=2))
    on_two_processes(train_contextual.__file__, *command(tmp_path / "two", **changes))
    alone, both = (SentenceTransformer(str(tmp_path / name)) for name in ("one", "two"))
    start = SentenceTransformer(command("")[command("").index("--model_name_or_path") + 1])
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(dict(both.named_parameters())[name], parameter, rtol=0, atol=2e-5, msg=name)
    assert (alone[0].model.second_stage.encoder.weight - start[0].model.encoder.weight).abs().max() > 1e-3


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


def test_triplets_and_equal_names_are_refused(tmp_path):
    file = tmp_path / "triplets.jsonl"
    file.write_text(json.dumps({"q": "a", "p": "b", "n": "c"}))
    with pytest.raises(ValueError, match="triplets has the columns anchor, positive, negative_1; give pairs"):
        open_pairs(ContextualArguments("model", train_files=[str(file)]), 1)
    with pytest.raises(ValueError, match="two files have the name triplets"):
        open_pairs(ContextualArguments("model", train_files=[str(file), str(file)]), 1)


def test_the_stages_of_the_paper_are_read_by_source(monkeypatch):
    parts = {"x": ("ac", "df"), "y": ("b", "e"), "small": ("", "")}
    unsupervised = {
        name: Dataset.from_dict({"query": list(q), "document": list(d), "dataset": [name] * len(q)})
        for name, (q, d) in parts.items()
    }
    supervised = DatasetDict({"nq": Dataset.from_dict({"query": ["a"], "pos": [["b", "c"]], "neg": [["d"]]})})
    hub = {
        "nomic-ai/nomic-embed-unsupervised-data": DatasetDict(unsupervised),
        "cfli/bge-full-data": supervised,
    }
    monkeypatch.setattr(training_sets, "load_dataset", hub.__getitem__)
    sets = open_pairs(ContextualArguments("model", stage="unsupervised"), 1)
    assert {name: rows.to_dict() for name, rows in sets.items()} == {
        "x": {"query": ["a", "c"], "document": ["d", "f"], ROW_COLUMN: [0, 1]},
        "y": {"query": ["b"], "document": ["e"], ROW_COLUMN: [2]},
    }
    (rows,) = open_pairs(ContextualArguments("model", stage="supervised"), 1).values()
    assert rows.to_dict() == {"query": ["a"], "document": ["b"], ROW_COLUMN: [0]}


def test_the_defaults_are_those_of_the_paper(tmp_path):
    training = ContextualTrainingArguments(str(tmp_path), use_cpu=True)
    values = (
        training.learning_rate,
        training.warmup_steps,
        training.num_train_epochs,
        training.per_device_train_batch_size,
    )
    assert values == (5e-5, 1000, 3, 512)
    assert (training.lr_scheduler_type, training.weight_decay) == ("linear", 0)
