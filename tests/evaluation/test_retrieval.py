"""Retrieval metrics equal those computed by hand; pairs from documentation; paraphrased questions."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    "sentence_transformers", reason="retrieval embeds by sentence-transformers (pip install -e .[embed])"
)

from conftest import SENTENCE
from corpus import retrieval_pairs, training_pairs
from datasets import Dataset
from docstrings import Entry

from neobert_hf import NeoBERTForMaskedLM, sentence_transformer
from neobert_hf.evaluation.retrieval import pairs_evaluator, pairs_evaluators

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from paraphrase import Paraphraser


def test_validation_files_of_one_name_are_refused_since_their_metrics_would_have_one_name(tmp_path):
    files = [tmp_path / name / "dev.jsonl" for name in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"query": "a fox", "document": "it jumps"}\n')
    with pytest.raises(ValueError, match=r"a.dev\.jsonl and .*b.dev\.jsonl have one name"):
        pairs_evaluators(map(str, files))
    assert [each.name for each in pairs_evaluators([str(files[0])])] == ["dev"]


def test_the_metrics_equal_those_computed_from_the_ranks(checkpoint, tokenizer, tmp_path):
    NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = sentence_transformer(str(tmp_path))
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(SENTENCE.split(), 5)) for _ in range(80)]
    pairs = Dataset.from_dict({"question": texts[:30], "answer": texts[30:60]})
    found = pairs_evaluator(pairs, "some", distractors=texts[60:])(model)
    vectors = model.encode(texts, normalize_embeddings=True)
    scores = vectors[:30] @ vectors[30:].T
    ranks = (scores > scores[np.arange(30), np.arange(30), None]).sum(1) + 1
    expected = {
        "recall@1": np.mean(ranks == 1),
        "recall@10": np.mean(ranks <= 10),
        "mrr@10": np.mean(np.where(ranks <= 10, 1 / ranks, 0)),
        "ndcg@10": np.mean(np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0)),
    }
    assert len(set(ranks)) > 10
    for name, value in expected.items():
        assert abs(found[f"some_cosine_{name}"] - value) < 1e-9, name


def test_the_query_is_the_first_sentence_and_the_document_does_not_contain_it():
    rest = "It does so by reading, and what it has read is given back to the caller."
    entries = [
        Entry("a", "a.read", "(file)", f"Read a whole file.\n\n{rest}"),
        Entry("a", "a.Thing", "", f"A thing that is used.  {rest}"),
        Entry("a", "a.short", "()", f"Too short. {rest}"),
        Entry("a", "a.alone", "()", "This sentence stands alone, without any rest."),
        Entry("b", "b.twin", "(x)", f"The same in two.\n\n{rest} One."),
        Entry("b", "b.twin2", "(x)", f"The  same in two. {rest} Two."),
    ]
    assert retrieval_pairs(entries) == [
        {"query": "Read a whole file.", "document": f"a.read(file)\n{rest}"},
        {"query": "A thing that is used.", "document": f"a.Thing\n{rest}"},
    ]
    named = training_pairs(entries)[2:]
    assert [pair["query"] for pair in named] == ["a.read(file)", "a.short()", "a.alone()", "b.twin(x)", "b.twin2(x)"]
    assert named[0]["document"] == entries[0].text
    assert json.loads(json.dumps(named)) == named


@pytest.fixture
def wordnet(tmp_path):
    """A small WordNet: two verbs and two adjectives with one sense each, a noun, and an adverb without a synonym."""
    verb = "00000000 30 v 02 compute 0 work_out 0 000 | find\n"
    (tmp_path / "data.verb").write_text(verb)
    (tmp_path / "data.adj").write_text("00000000 00 a 02 quick 0 fast(p) 0 000 | quick\n")
    (tmp_path / "data.adv").write_text("00000000 02 r 01 often 0 000 | often\n")
    senses = ["compute%2:31:00:: 00000000 1 9", "string%1:06:00:: 00000004 1 5", "quick%3:00:00:: 00000000 1 2"]
    senses += ["often%4:02:00:: 00000000 1 3", "work_out%2:31:00:: 00000000 1 1"]
    (tmp_path / "index.sense").write_text("\n".join(senses) + "\n")
    return tmp_path


def test_a_paraphrase_replaces_words_but_keeps_terms_and_identifiers(wordnet):
    rephrase = Paraphraser(wordnet)
    assert rephrase("Computes a quick string often.") == "works out a fast string often."
    assert (
        rephrase("Call `compute` or np.compute(x), compute_all too.")
        == "Call `compute` or np.compute(x), compute_all too."
    )


def test_an_index_of_another_wordnet_is_refused(wordnet):
    (wordnet / "index.sense").write_text("compute%2:31:00:: 00000001 1 9\n")
    with pytest.raises(ValueError, match="not of one WordNet"):
        Paraphraser(wordnet)
