"""MTEB without a network: local tasks with the names of real tasks, and scores computed again by hand."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("mteb", reason="evaluating on MTEB needs mteb (pip install -e .[mteb])")

import evaluate_mteb
import mteb
import offline_tasks
from conftest import run_main
from contextual_embeddings import contextual_sentence_transformer, fit_context
from contextual_mteb import in_contexts
from datasets import Dataset, DatasetDict
from docstrings import Entry
from evaluation_report import mteb_tables
from glue import TASKS, load_task
from huggingface_hub import ModelCard
from mteb.abstasks import AbsTaskClassification, AbsTaskPairClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb_scores import CATEGORIES, INSTRUCTIONS, Score, averages, benchmark_tasks, evaluate, is_here, mteb_prompts
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from neobert_hf import best_dtype
from neobert_hf.embeddings import open_embedding_model, sentence_transformer

LEFT = [f"a text about {what}" for what in ("dogs", "red houses", "the old sea", "sleep", "jumping", "a fox")]
RIGHT = [f"{what} it is" for what in ("brown dog", "a house", "warm sea", "lazy", "quick fox", "red")]
GOLD = [5.0, 4.0, 3.5, 1.0, 2.0, 0.0]
SAME = [1, 1, 0, 0, 1, 0]


def metadata(name, kind, main_score):
    options = dict(description="local", eval_langs=["eng-Latn"], dataset={"path": "local/none", "revision": "v1"})
    return TaskMetadata(name=name, type=kind, main_score=main_score, **options)


class LocalSTS(AbsTaskSTS):
    metadata = metadata("STS12", "STS", "cosine_spearman")
    min_score, max_score = 0, 5

    def load_data(self, **kwargs):
        test = Dataset.from_dict({"sentence1": LEFT, "sentence2": RIGHT, "score": GOLD})
        self.dataset, self.data_loaded = DatasetDict(test=test), True


class LocalPairs(AbsTaskPairClassification):
    metadata = metadata("TwitterURLCorpus", "PairClassification", "max_ap")

    def load_data(self, **kwargs):
        test = Dataset.from_dict({"sentence1": LEFT, "sentence2": RIGHT, "labels": SAME})
        self.dataset, self.data_loaded = DatasetDict(test=test), True


class LocalRetrieval(AbsTaskRetrieval):
    metadata = metadata("SciFact", "Retrieval", "ndcg_at_10")

    def load_data(self, **kwargs):
        corpus = [f"d{i}" for i in range(len(RIGHT))]
        split = {
            "corpus": Dataset.from_dict({"id": corpus, "text": RIGHT, "title": [""] * len(RIGHT)}),
            "queries": Dataset.from_dict({"id": [f"q{i}" for i in range(len(LEFT))], "text": LEFT}),
            "relevant_docs": {f"q{i}": {f"d{i}": 1} for i in range(len(LEFT))},
            "top_ranked": None,
        }
        self.dataset, self.data_loaded = {"default": {"test": split}}, True


class LocalClassification(AbsTaskClassification):
    metadata = metadata("Banking77Classification", "Classification", "accuracy")

    def load_data(self, **kwargs):
        parts = {"train": LEFT, "test": RIGHT}
        rows = {name: Dataset.from_dict({"text": texts, "label": SAME}) for name, texts in parts.items()}
        self.dataset, self.data_loaded = DatasetDict(rows), True


def build(tmp_path, tokenizer, model, seed=0):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return sentence_transformer(str(tmp_path))


@pytest.fixture
def embedder(model, tokenizer, tmp_path):
    return build(tmp_path / "model", tokenizer, model)


def cosines(model, left, right):
    a, b = (model.encode(texts).astype(np.float64) for texts in (left, right))
    return (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)


def ndcg(model, queries, documents):
    """Of queries with one right document each, the one in their own row."""
    found = cosines(model, queries, documents)
    ranks = (found > np.diag(found)[:, None]).sum(1)
    return np.mean(1 / np.log2(ranks + 2))


def prompted(task, texts, side=""):
    return [mteb_prompts()[task + side] + text for text in texts]


def test_scores_equal_those_computed_by_hand_with_the_papers_instructions(embedder, tmp_path):
    scores = evaluate(embedder, [LocalSTS(), LocalPairs(), LocalRetrieval()], tmp_path / "results", "local/a")
    by_task = {score.task: score.score / 100 for score in scores}
    sts = np.diag(cosines(embedder, prompted("STS12", LEFT), prompted("STS12", RIGHT)))
    assert abs(by_task["STS12"] - spearmanr(sts, GOLD).statistic) < 1e-6
    pairs = np.diag(cosines(embedder, *(prompted("TwitterURLCorpus", texts) for texts in (LEFT, RIGHT))))
    # max_ap takes the best of four similarities
    assert by_task["TwitterURLCorpus"] >= average_precision_score(SAME, pairs) - 1e-6
    expected = ndcg(embedder, prompted("SciFact", LEFT, "-query"), prompted("SciFact", RIGHT, "-document"))
    assert abs(by_task["SciFact"] - expected) < 1e-4


def test_instructions_can_be_omitted_or_limited_to_queries(embedder, tmp_path):
    def sts(prompts):
        return evaluate(embedder, [LocalSTS()], tmp_path, "local/a", prompts)[0].score / 100

    assert abs(sts({}) - spearmanr(np.diag(cosines(embedder, LEFT, RIGHT)), GOLD).statistic) < 1e-6
    embedder.prompts = {"query": "the old sea ", "document": "by "}
    plain = evaluate(embedder, [LocalRetrieval()], tmp_path, "local/a", {})[0].score
    assert embedder.prompts == {"query": "the old sea ", "document": "by "}  # as before the evaluation
    embedder.prompts = {}
    assert evaluate(embedder, [LocalRetrieval()], tmp_path / "again", "local/a", {})[0].score == plain
    query_only = mteb_prompts("Task: {instruction}\n", "query")
    assert query_only["SciFact-document"] == "" and query_only["SciFact-query"].startswith("Task: Given a scientific")
    with pytest.raises(ValueError, match="does not contain"):
        mteb_prompts("no instruction")


def test_models_with_one_name_do_not_share_results(model, tokenizer, embedder, tmp_path, monkeypatch):
    """Both models have the name local/a; a second run of the first embeds nothing."""
    (first,) = evaluate(embedder, [LocalSTS()], tmp_path / "results", "local/a")
    other = build(tmp_path / "other", tokenizer, model, seed=1)
    evaluate(other, [LocalSTS()], tmp_path / "results", "local/a")
    assert len(list((tmp_path / "results").rglob("STS12.json"))) == 2
    monkeypatch.setattr(type(embedder), "encode", None)
    (again,) = evaluate(embedder, [LocalSTS()], tmp_path / "results", "local/a")
    assert abs(again.score - first.score) < 1e-2  # mteb keeps six digits
    for name in ("a", "a/", "a/b/c"):
        with pytest.raises(ValueError, match="organisation/name"):
            evaluate(embedder, [LocalSTS()], tmp_path / "results", name)


def test_the_instructions_cover_every_task_and_mteb_knows_each_name():
    names = {task.metadata.name for task in benchmark_tasks()}
    tasks = {task for group in yaml.safe_load(INSTRUCTIONS.read_text("utf-8")).values() for task in group}
    assert len(names) == 56 and names <= tasks
    subsets = {task.metadata.name for task in mteb.get_task("CQADupstackRetrieval").tasks}
    assert tasks - names == subsets
    prompts = mteb_prompts()
    for task in [*benchmark_tasks(), *mteb.get_task("CQADupstackRetrieval").tasks]:
        sides = ("-query", "-document") if task.metadata.type in ("Retrieval", "Reranking") else ("",)
        assert all(task.metadata.name + side in prompts for side in sides)


def test_averages_are_the_columns_of_table_4_and_missing_tasks_are_named():
    tasks = benchmark_tasks()
    rng = np.random.default_rng(0)
    scores = [Score(t.metadata.name, t.metadata.type, t.metadata.main_score, rng.uniform(0, 100), "") for t in tasks]
    means, missing = averages(scores)
    counts = {name: sum(t.metadata.type == kind for t in tasks) for name, kind in CATEGORIES.items()}
    assert counts == {"Class.": 12, "Clust.": 11, "PairClass.": 3, "Rerank.": 4, "Retriev.": 15, "STS": 10, "Summ.": 1}
    assert missing == [] and abs(sum(means[name] * counts[name] for name in counts) / 56 - means["Avg."]) < 1e-9
    without = [score for score in scores if score.task != "STS22"]
    means, missing = averages(without)
    assert missing == ["STS22"] and means["STS"] is None and means["Avg."] is None and means["Class."] is not None


WRONG_NAMES = {
    ("--tasks", "SciFacts"): r"SciFacts: not in MTEB\(eng, v1\); similar: SciFact",
    ("--tasks", "Nope"): r"Nope: not in MTEB\(eng, v1\); choose among Amazon.*STS12",
    ("--benchmark", "mteb(eng,v2)"): r"no benchmark 'mteb\(eng,v2\)'; similar: MTEB\(eng, v2\)",
    ("--benchmark", "NanoBEIR", "--tasks", "SciFact"): "SciFact: not in NanoBEIR; choose among .*NanoSciFactRetrieval",
    ("--models", "a/x", "b/x"): "2 models have the names local/x, local/x; give --model_names",
    ("--models", "a", "b", "--model_name", "local/x"): "2 models have the names local/x; give --model_names",
    ("--models", "a", "b", "--revision", "v1"): "--revision and --card belong to one model",
}


@pytest.mark.parametrize("words", WRONG_NAMES)
def test_a_wrong_name_is_refused_with_similar_ones_before_a_model_is_loaded(words, tmp_path, monkeypatch):
    monkeypatch.setenv("NEOBERT_TRACEBACK", "1")
    with pytest.raises(ValueError, match=WRONG_NAMES[words]):
        run_main(evaluate_mteb, "--model", "x", "--output_dir", tmp_path, *words)


def test_one_command_evaluates_several_models_also_without_the_missing_data(
    model, tokenizer, embedder, tmp_path, monkeypatch
):
    """The second model has prompts of its own; a rerun embeds nothing, and gives the same result."""
    other = build(tmp_path / "other", tokenizer, model, seed=1)
    other.prompts = {"query": "the old ", "document": "a "}
    other.save(str(tmp_path / "other"))
    local = mteb.Benchmark("LOCAL", [LocalSTS(), LocalRetrieval(), LocalClassification(), mteb.get_task("STS13")])
    monkeypatch.setattr(sys.modules["mteb.benchmarks.get_benchmark"], "_build_registry", lambda: {"LOCAL": local})
    words = ("--models", tmp_path / "model", tmp_path / "other", "mteb/baseline-random-encoder", "--dtype", "float32")
    results = []
    with monkeypatch.context() as patch:
        for _ in range(2):
            with pytest.raises(SystemExit, match="some scores are missing"):
                run_main(evaluate_mteb, *words, "--benchmark", "LOCAL", "--output_dir", tmp_path / "out")
            results.append(json.loads((tmp_path / "out/scores.json").read_text()))
            patch.setattr(type(embedder), "encode", None)
    assert results[0] == results[1]
    assert [row["prompts"] for row in results[0]["models"]] == ["the paper's", "the model's", "none"]
    for row in results[0]["models"]:
        assert row["missing"] == ["STS13"] and row["averages"]["STS"] is row["averages"]["Avg."] is None
        assert [score["task"] for score in row["scores"]] == ["STS12", "SciFact", "Banking77Classification"]
        assert row["without_score"].keys() == {"STS13"}
    means = results[0]["models"][1]["averages"]
    expected = ndcg(other, [f"the old {text}" for text in LEFT], [f"a {text}" for text in RIGHT])
    assert abs(means["Retriev."] - 100 * expected) < 1e-2
    report = mteb_tables(results[0])
    assert f"| {means['Class.']:.2f} " in report and report.count("\n- STS13: its data need the network") == 1


def test_results_of_other_data_or_another_split_do_not_count(embedder, tmp_path):
    class Changed(LocalSTS):
        metadata = LocalSTS.metadata.model_copy(update={"dataset": {"path": "local/none", "revision": "v2"}})

        def load_data(self, **kwargs):
            super().load_data()
            self.dataset = DatasetDict(test=self.dataset["test"].select(range(3)))

    first, changed = (evaluate(embedder, [task], tmp_path, "local/a") for task in (LocalSTS(), Changed()))
    assert changed[0].score != first[0].score
    (file,) = tmp_path.rglob("STS12.json")
    stored = json.loads(file.read_text())
    stored["scores"]["train"] = [stored["scores"]["test"][0] | {"main_score": 0.0}]  # of another benchmark
    file.write_text(json.dumps(stored))
    assert evaluate(embedder, [Changed()], tmp_path, "local/a")[0].score == pytest.approx(changed[0].score, abs=1e-3)


def test_the_offline_benchmark_reads_the_documentation_and_the_files_of_glue(embedder, tmp_path, monkeypatch):
    """Reranking has no score without its candidates, which mteb 2.26 does not find offline: it would search all documents."""
    rows = [Entry("time", "time.sleep", "", "Suspend."), Entry("builtins", "sorted", "", "A new list.")]
    monkeypatch.setattr(offline_tasks, "read_cached", lambda packages: rows)
    folder, reasons = Path(__file__).parent / "glue", {}
    tasks = offline_tasks.offline_benchmark(folder).tasks
    reranking = type("", (LocalRetrieval,), {"metadata": metadata("SciDocsRR", "Reranking", "map_at_1000")})()
    scores = evaluate(embedder, [*tasks, reranking], tmp_path, "local/a", {}, on_missing=reasons.__setitem__)
    assert [score.task for score in scores] == ["DocumentationQuestions", "STS-B", "SST-2"]
    assert "candidates of reranking" in reasons["SciDocsRR"]
    pairs = load_task(TASKS["stsb"], folder)["validation"]
    found = np.diag(cosines(embedder, list(pairs["sentence1"]), list(pairs["sentence2"])))
    assert abs(scores[1].score - 100 * spearmanr(found, pairs["label"]).statistic) < 1e-2
    assert all(map(is_here, tasks)) and not is_here(mteb.get_task("STS13"))


def test_the_card_gets_a_model_index_in_the_format_of_the_hub(tmp_path):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n# A model\n")
    score = Score("STS12", "STS", "cosine_spearman", 61.23456, "mteb/sts12-sts")
    evaluate_mteb.write_model_index(card, "local/a", [score])
    (result,) = ModelCard.load(card).data.eval_results
    assert (result.task_type, result.dataset_type, result.metric_type) == ("STS", "mteb/sts12-sts", "cosine_spearman")
    assert result.metric_value == 61.2346 and "# A model" in card.read_text()
    for more in (Score("SciFact", "Retrieval", "ndcg_at_10", 5.0, "mteb/scifact"), replace(score, score=70.0)):
        evaluate_mteb.write_model_index(card, "local/a", [more])
    values = {result.dataset_type: result.metric_value for result in ModelCard.load(card).data.eval_results}
    assert values == {"mteb/scifact": 5.0, "mteb/sts12-sts": 70.0}


def test_the_result_names_the_dtype_of_the_machine_and_the_revisions_of_the_data(embedder, tmp_path, monkeypatch):
    embedder.save(str(tmp_path / "saved"))
    monkeypatch.setattr(evaluate_mteb, "benchmark_tasks", lambda *names: [LocalSTS()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    used = []
    record = lambda *a, **k: used.append(k["model_kwargs"]["dtype"]) or open_embedding_model(*a, **k)  # noqa: E731
    monkeypatch.setattr(evaluate_mteb, "open_embedding_model", record)
    run_main(evaluate_mteb, "--model", tmp_path / "saved", "--output_dir", tmp_path / "out")
    result = json.loads((tmp_path / "out/scores.json").read_text())
    assert used == [best_dtype(torch.device("cpu"))] and result["dtype"] == str(used[0]).removeprefix("torch.")
    assert result["dataset_revisions"] == {"STS12": "v1"} and result["models"][0]["revision"] is None


CONTEXTS = {
    LocalRetrieval: (RIGHT, "SciFact-document"),  # the corpus
    LocalSTS: (LEFT + RIGHT, "STS12"),  # both columns
    LocalClassification: (LEFT, "Banking77Classification"),  # the training split
    LocalPairs: (LEFT, "TwitterURLCorpus"),  # the texts that are embedded first
}


@pytest.mark.parametrize("task", CONTEXTS)
def test_a_contextual_model_has_a_context_from_the_texts_of_each_task(task, embedder, tmp_path, monkeypatch):
    size = 4
    model = contextual_sentence_transformer(str(tmp_path / "model"), context_size=size)
    documents, prompt = CONTEXTS[task]
    before = fit_context(model, ["the old sea"] * size)
    expected = fit_context(model, documents, prompt=mteb_prompts()[prompt])
    model[0].model.set_context(before)
    used = []
    encode = model.encode

    def record(*args, **kwargs):
        if not kwargs.get("embeds_context"):
            used.append(model[0].model.context.clone())
        return encode(*args, **kwargs)

    for name in ("encode", "encode_query", "encode_document"):
        monkeypatch.setattr(model, name, record)
    tasks = [task()]
    with in_contexts(model, tasks) as wrapper_class:
        (score,) = evaluate(model, tasks, tmp_path / "results", "local/contextual", wrapper_class=wrapper_class)
    assert used and all(torch.equal(context, expected) for context in used)
    assert np.isfinite(score.score)
    assert torch.equal(model[0].model.context, before)  # the user's own context again
