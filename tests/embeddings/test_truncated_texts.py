"""What sentence-transformers truncates without a word, each function of the library counts and says in a line."""

import re

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from neobert_hf import embeddings
from neobert_hf.checkpoints import embedding_models as models
from neobert_hf.data import lengths

LONGEST, PROMPT = 9, "the red "
QUESTIONS = [f"{word} fox" + " dog" * number for number, word in enumerate(("the", "quick", "old", "lazy", "warm"))]
ANSWERS = [f"{text} sea" for text in QUESTIONS[::-1]]
ROWS = Dataset.from_dict({"anchor": QUESTIONS, "positive": ANSWERS})
HELD_OUT = Dataset.from_dict({"anchor": QUESTIONS[3:], "positive": ["the old house by the red sea, it sleeps", "sea"]})
QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "max_steps": 1, "per_device_train_batch_size": 2}


@pytest.fixture
def retriever(folder):
    model = SentenceTransformer(folder)
    model.max_seq_length = LONGEST
    return model


def prompted(rows, sides):
    """The inputs of an embedding model for rows of questions and answers."""
    before = PROMPT if sides == "both" else ""
    return [(PROMPT + text,) for text in rows["anchor"]] + [(before + text,) for text in rows["positive"]]


def mine(sides, folder, retriever, tmp_path):
    embeddings.mine_negatives({"faq": ROWS}, retriever, 2, PROMPT, PROMPT if sides == "both" else None)
    return {"negatives of faq": prompted(ROWS, sides)}


def contrast(_, folder, retriever, tmp_path):
    training = embeddings.ContrastiveTrainingArguments(str(tmp_path / "run"), **QUIET)
    embeddings.train_contrastive(retriever, {"faq": ROWS}, training, held_out={"faq": HELD_OUT})
    texts = {"5 rows of faq": ROWS, "2 rows of faq": HELD_OUT}
    return {name: [(text,) for text in [*rows["anchor"], *rows["positive"]]] for name, rows in texts.items()}


def rerank(_, folder, retriever, tmp_path):
    training = embeddings.RerankerTrainingArguments(str(tmp_path / "run"), **QUIET)
    embeddings.train_reranker(
        embeddings.open_reranker(folder, LONGEST), {"faq": ROWS}, retriever, training, held_out={"test": HELD_OUT}
    )
    wrong = [(question, answer) for question in QUESTIONS for answer in ANSWERS]  # four for each question: all of them
    texts = {*HELD_OUT["anchor"], *HELD_OUT["positive"]} | set(ANSWERS)
    return {
        "negatives of faq": [(text,) for text in QUESTIONS + ANSWERS],
        "candidates of test": [(text,) for text in texts],
        "25 rows of faq": wrong,
        "2 rows of test": list(zip(*HELD_OUT.to_dict().values())),
    }


def search(_, folder, retriever, tmp_path):
    (tmp_path / "a.txt").write_text("the fox")
    documents = embeddings.DocumentSearch([str(tmp_path / "a.txt")], folder, LONGEST, cache=tmp_path / "cache")
    documents.encoder.prompts["query"] = PROMPT
    for question in (QUESTIONS[0], QUESTIONS[-1]):
        documents.search(question)
    documents.truncation = "off"  # without a line
    documents.search(QUESTIONS[-1])
    with pytest.raises(ValueError, match=r"^1 of 1 texts are truncated to 9 tokens, and \d tokens are lost; split"):
        embeddings.DocumentSearch(tmp_path / "a.txt", folder, LONGEST, truncation="error").search(
            "fox" + " dog" * LONGEST
        )
    return {"the question": [(PROMPT + QUESTIONS[-1],)]}


@pytest.mark.parametrize("job, sides", [(mine, "both"), (mine, "query"), (contrast, ""), (rerank, ""), (search, "")])
def test_texts_that_are_truncated_are_counted_and_said(job, sides, folder, retriever, tokenizer, tmp_path, caplog):
    """The oracle is the tokenizer itself, without truncation; each line comes once."""
    inputs_of = job(sides, folder, retriever, tmp_path)
    count_of = {what: sum(len(tokenizer(*x)["input_ids"]) > LONGEST for x in some) for what, some in inputs_of.items()}
    found = re.findall(rf"(.+): (\d+) of (\d+) texts are truncated to {LONGEST} tokens", "\n".join(caplog.messages))
    expected = [(what, str(count), str(len(inputs_of[what]))) for what, count in count_of.items() if count]
    assert sorted(found) == sorted(expected) != []


def test_of_very_many_texts_the_longest_are_counted_and_short_ones_are_not_tokenized(retriever, caplog, monkeypatch):
    monkeypatch.setattr(models, "MOST_COUNTED", 4)
    models.warn_of_truncated(retriever, "these", ["fox"] * 20 + ["the" + " dog" * LONGEST] * 3 + ["sea"] * 20)
    models.warn_of_truncated(retriever, "those", ["the" + " dog" * LONGEST] * 2 + ["fox"] * 2)
    lines = [line.partition(" are")[0] for line in caplog.messages]
    assert lines == ["these: at least 3 of 43 texts", "those: 2 of 4 texts"]
    monkeypatch.setattr(lengths, "plain_tokenizer", lambda _: pytest.fail("a short text is tokenized"))
    models.warn_of_truncated(retriever, "these", ["fox"] * 4)
