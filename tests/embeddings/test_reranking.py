"""Rerankers: labels and candidates are those of the embedding model's ranking, and the script learns and resumes exactly."""

import json
import random

import numpy as np
import pytest
import train_reranker
from conftest import logits_of_modules, new_encoder, reranker_of_modules, run_main
from datasets import Dataset
from safetensors.torch import load_file
from scipy.special import expit
from sentence_transformers import CrossEncoder, SentenceTransformer

from neobert_hf.checkpoints import examine
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.embeddings import labelled_pairs, open_reranker, reranking_evaluator, reranking_loss
from neobert_hf.runs import default_learning_rate

TOPICS = ["fox", "dog", "house", "sea", "red", "warm", "old", "lazy"]
OTHERS = ["the", "quick", "brown", "over", "and", "then", "it", "in", "by", "a"]
ANSWERS = ["uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = train_wordpiece([" ".join([*TOPICS, *OTHERS, *ANSWERS])] * 9, vocab_size=120, model_max_length=32)
    sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=96)
    return str(new_encoder(tmp_path_factory.mktemp("new") / "bare", tokenizer, **sizes))


def pairs_of(count, seed=0):
    rng = random.Random(seed)
    texts = [" ".join(rng.choices([*TOPICS, *OTHERS], k=5)) for _ in range(2 * count)]
    return Dataset.from_dict({"anchor": texts[:count], "positive": texts[count:]})


def test_negatives_are_the_most_similar_other_documents(folder):
    model, pairs = SentenceTransformer(folder), pairs_of(30)
    labelled = labelled_pairs({"set": pairs}, model, num_negatives=3)["set"]
    similarity = model.similarity(model.encode_query(pairs["anchor"]), model.encode_document(pairs["positive"])).numpy()
    np.fill_diagonal(similarity, -2)
    expected = set(zip(pairs["anchor"], pairs["positive"], [1] * 30))
    for row, best in enumerate((-similarity).argsort()[:, :3]):
        expected |= {(pairs["anchor"][row], pairs["positive"][int(i)], 0) for i in best}
    assert set(zip(*(labelled[name] for name in labelled.column_names))) == expected
    weight = reranking_loss(open_reranker(folder), {"set": labelled}).pos_weight
    assert weight == 3  # 90 negatives for 30 positives
    assert labelled_pairs(pairs, model, num_negatives=3)["train"].to_dict() == labelled.to_dict()  # a single set
    with pytest.raises(ValueError, match=r"set already has negatives \(negative_1\); mine for sets of pairs only"):
        labelled_pairs({"set": pairs.add_column("negative_1", ["fox"] * 30)}, model, 3)
    with pytest.raises(ValueError, match="set has no document that is wrong for a question; give more pairs"):
        labelled_pairs({"set": pairs.select([0])}, model, 3)


def test_the_metrics_are_those_of_the_ranking_of_the_candidates(folder):
    model, reranker = SentenceTransformer(folder), open_reranker(folder)
    pairs, distractors = pairs_of(20), list(pairs_of(15, seed=1)["positive"])
    found = reranking_evaluator(pairs, distractors, model, "set", num_candidates=12)(reranker)
    documents = [*pairs["positive"], *distractors]
    similarity = model.similarity(model.encode_query(pairs["anchor"]), model.encode_document(documents)).numpy()
    gains = {"base_ndcg@10": [], "ndcg@10": []}
    for row, order in enumerate((-similarity).argsort()[:, :12]):
        candidates = [documents[i] for i in order]
        scores = reranker.predict([(pairs["anchor"][row], document) for document in candidates])
        for name, ranked in {"base_ndcg@10": range(12), "ndcg@10": (-scores).argsort()}.items():
            places = [place for place, i in enumerate(list(ranked)[:10], 1) if order[i] == row]
            gains[name].append(1 / np.log2(places[0] + 1) if places else 0)
    for name, values in gains.items():
        assert found[f"set_{name}"] == pytest.approx(np.mean(values), abs=1e-9), name


@pytest.mark.slow
def test_all_modules_of_a_reranker_are_trained_and_saved_and_a_run_resumes(folder, tmp_path):
    reranker_of_modules(folder).save_pretrained(str(tmp_path / "start"))
    pairs_of(48).to_csv(tmp_path / "faq.csv")
    models = ["--model_name_or_path", tmp_path / "start", "--embedding_model", folder]
    options = "--num_negatives 3 --held_out_share 0.2 --save_steps 2 --max_seq_length 8 --use_cpu"
    command = ["--train_files", tmp_path / "faq.csv", "--output_dir", tmp_path / "run", *models, *options.split()]
    run_main(train_reranker, *command)
    files = [f"{part}/model.safetensors" for part in (".", "2_Dense", "3_LayerNorm", "4_Dense")]
    start, end = ([load_file(tmp_path / name / file) for file in files] for name in ("start", "run"))
    assert not any(values.equal(new[name]) for old, new in zip(start, end) for name, values in old.items())
    reranker, pairs = open_reranker(str(tmp_path / "run")), [("the fox", "uno"), ("red " * 9, "dos " * 3)]
    expected = expit(logits_of_modules(tmp_path / "run", pairs, max_length=8))[:, 0]
    np.testing.assert_allclose(reranker.predict(pairs), expected, atol=2e-6)
    assert examine(tmp_path / "run")["findings"] == [] and reranker.max_seq_length == 8
    record = json.loads((tmp_path / "run/training.json").read_text())
    assert record["settings"]["learning_rate"] == default_learning_rate(reranker.config)
    newest = tmp_path / f"run/checkpoint-{record['settings']['steps']}"
    (newest / "manifest.json").rename(newest / "manifest.json.unfinished")
    run_main(train_reranker, *command)
    assert json.loads((tmp_path / "run/training.json").read_text()) == record
    for old, file in zip(end, files):
        assert all(values.equal(old[name]) for name, values in load_file(tmp_path / "run" / file).items())


@pytest.mark.slow
def test_the_script_learns_and_writes_a_card(folder, tmp_path, monkeypatch):
    """Each of eight words in a question has its own answer."""
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    rows = [{"Frage": f"{word} {other}", "Antwort": ANSWERS[i]} for other in OTHERS for i, word in enumerate(TOPICS)]
    Dataset.from_list(rows).to_csv(tmp_path / "faq.csv", index=False)

    def command(output_dir, *more):
        models = ["--model_name_or_path", folder, "--embedding_model", folder]
        options = "--num_negatives 7 --num_candidates 8 --num_train_epochs 24 --learning_rate 1e-3 --save_steps 100"
        models += [*options.split(), "--use_cpu"]
        return ["--train_files", tmp_path / "faq.csv", "--output_dir", output_dir, *models, *more]

    printed = run_main(train_reranker, *command(tmp_path / "run"))
    record = json.loads((tmp_path / "run/training.json").read_text())
    before, after = (record["scores"][0][time]["ndcg@10"] for time in ("before", "metrics"))
    base = record["scores"][0]["before"]["base_ndcg@10"]
    assert after > 0.7 > max(before, base)  # 0.5 is chance
    assert f"faq ndcg@10: {before:.4f} before the training, {after:.4f} after it" in printed
    assert f"faq: nDCG@10 {base:.4f} of the embedding model alone" in printed

    card, num_trained = (tmp_path / "run/README.md").read_text("utf-8"), 72  # of 80; 7 negatives each
    assert f"- faq.csv: {num_trained} rows\n" in card and f"found {7 * num_trained} wrong answers" in card
    assert card.count("| nDCG@10 |") == 1 and "base_" not in card
    assert CrossEncoder(str(tmp_path / "run")).predict([("the fox", "uno")]).shape == (1,)
