"""The benchmark NeoBERT(offline): three tasks for mteb whose data are in this repository, in Python, or in your folder of GLUE.

- DocumentationQuestions (retrieval): the everyday questions of `../documentation_search`, and the docstrings of this Python.
- STS-B (similarity) and SST-2 (classification by eight examples of each class): the original files of GLUE in `--data_dir`.

The revision of a dataset is a hash of its content: results for other data, as for another Python, are not taken for these.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from datasets import Dataset, DatasetDict
from glue import HUB_ID, TASKS, load_task
from mteb import Benchmark
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

sys.path.append(str(Path(__file__).parents[1] / "documentation_search"))
from everyday import everyday_questions
from search import read_cached

SEARCH = Path(__file__).parents[1] / "documentation_search"
OFFLINE = "NeoBERT(offline)"


def offline_benchmark(data_dir: str | Path | None = None) -> Benchmark:
    """Return the benchmark; its tasks read their data when they run.

    Args:
        data_dir: Folder with the folders STS-B and SST-2 of the original archives; None loads `nyu-mll/glue` from the Hub.
    """
    tasks = [_documentation_questions(), _glue_task("stsb", data_dir), _glue_task("sst2", data_dir)]
    return Benchmark(name=OFFLINE, tasks=tasks)


def _metadata(name: str, kind: str, main_score: str, path: str | Path, revision: str) -> TaskMetadata:
    dataset = {"path": str(path), "revision": revision}
    options = {"eval_langs": ["eng-Latn"], "main_score": main_score, "dataset": dataset}
    return TaskMetadata(name=name, description=__doc__, type=kind, modalities=["text"], **options)


def _documentation_questions() -> AbsTaskRetrieval:
    entries, questions = [(entry.name, entry.full_text) for entry in read_cached(["python"])], everyday_questions()
    content = json.dumps([entries, {question: sorted(names) for question, names in questions.items()}])
    revision = hashlib.sha256(content.encode()).hexdigest()[:16]

    class DocumentationQuestions(AbsTaskRetrieval):
        """A correct entry has one of the names that belong to the question; a question without one here is left out."""

        metadata = _metadata("DocumentationQuestions", "Retrieval", "ndcg_at_10", SEARCH, revision)

        def load_data(self, **kwargs):
            correct = {question: {str(i): 1 for i, (name, _) in enumerate(entries) if name in names}
                       for question, names in questions.items()}  # fmt: skip
            asked = [question for question in correct if correct[question]]
            corpus = [{"id": str(i), "title": "", "text": text} for i, (_, text) in enumerate(entries)]
            split = {
                "corpus": Dataset.from_list(corpus),
                "queries": Dataset.from_list([{"id": question, "text": question} for question in asked]),
                "relevant_docs": {question: correct[question] for question in asked},
                "top_ranked": None,
            }
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    return DocumentationQuestions()


def _glue_task(name: str, data_dir: str | Path | None) -> AbsTaskSTS | AbsTaskClassification:
    task = TASKS[name]
    folder = HUB_ID if data_dir is None else Path(data_dir, task.folder)
    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.?sv")):
        digest.update(file.read_bytes())
    of_task = task.folder, folder, "main" if data_dir is None else digest.hexdigest()[:16]

    class GlueSTS(AbsTaskSTS):
        """Pairs of the development file, with scores from 0 to 5."""

        metadata = _metadata(of_task[0], "STS", "cosine_spearman", *of_task[1:])
        min_score, max_score = 0, 5

        def load_data(self, **kwargs):
            pairs = load_task(task, data_dir)["validation"].rename_column("label", "score")
            self.dataset, self.data_loaded = DatasetDict(test=pairs), True

    class GlueClassification(AbsTaskClassification):
        """Texts of the development file; the classifier learns from mteb's samples of the training file."""

        metadata = _metadata(of_task[0], "Classification", "accuracy", *of_task[1:])

        def load_data(self, **kwargs):
            data = load_task(task, data_dir)
            data = DatasetDict(train=data["train"], test=data["validation"]).rename_column(task.texts[0], "text")
            self.dataset, self.data_loaded = data, True

    return GlueSTS() if task.classes is None else GlueClassification()
