"""A saved or an exported folder, opened to predict, for `neobert serve` and `neobert predict`. An export needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..checkpoints.saved_model import SavedModel
from ..data.lengths import Truncation, beginning, fact_of_truncated, plain_tokenizer
from ..finetuning.scores import scores_of
from .onnx_model import OnnxModel, Text, with_prompt

BATCH_SIZE = 32


@dataclass
class Predictor:
    """An open model. The kind of the model, `saved.kind`, decides which functions it has; the others are None.

    Args:
        saved: What the folder holds.
        vectors: Returns the (N, D) embeddings of N texts, of length 1.
        logits_of_batch: Returns the (N, C) logits of a batch of N texts or pairs of texts.
        entities: Returns the entities of texts of any length, as of `EntityFinder`.
        tags: Returns the tags of rows of words, as of `tag_columns`.
        answers: Returns the answer to each pair of a question and a text, as of `best_answers`.
        tokenizer: Tokenizer of the model; None if it reads texts of any length.
        max_length: Number of tokens that the model reads.
        prompt: What the model puts before each text, or before the first text of a pair.
    """

    saved: SavedModel
    vectors: Any = None
    logits_of_batch: Any = None
    entities: Any = None
    tags: Any = None
    answers: Any = None
    tokenizer: Any = None
    max_length: int = sys.maxsize
    prompt: str = ""

    @cached_property
    def _plain(self) -> Tokenizer:
        return plain_tokenizer(self.tokenizer)  # the model's own one truncates and pads

    def logits(self, inputs: Sequence[Text]) -> np.ndarray:
        """Return the (N, C) logits of N texts or pairs of texts; those of similar length share a batch."""
        order = sorted(range(len(inputs)), key=lambda number: -len("".join(inputs[number])))
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(order), BATCH_SIZE):
            numbers = order[start : start + BATCH_SIZE]
            found |= zip(numbers, self.logits_of_batch([inputs[number] for number in numbers]))
        return np.stack([found[number] for number in range(len(inputs))])

    def labels(self, inputs: Sequence[Text], is_raw: bool = False) -> list[list[dict[str, Any]]]:
        """Return for each text or pair its labels, the best first, as dicts of `label` and `score`; a raw score is a logit."""
        scores = self.logits(inputs)
        if not is_raw:
            scores = scores_of(scores, self.saved.score_type)
        found = []
        for row in scores.tolist():
            labels = [{"label": name, "score": score} for name, score in zip(self.saved.labels, row)]
            found.append(sorted(labels, key=lambda label: -label["score"]))
        return found

    def prepare(self, inputs: Sequence[Text], truncation: Truncation) -> tuple[Sequence[Text], str, int]:
        """Return texts or pairs for the model, what `fact_of_truncated` says of them, and the number of tokens that it reads.

        Of a text far beyond what the model reads, only the part that `beginning` returns is counted, and returned.
        """
        if not self.tokenizer:
            return inputs, "", 0
        inputs = [self._beginning(each) for each in inputs]
        lengths = list(map(len, self._plain.encode_batch([with_prompt(self.prompt, each) for each in inputs])))
        lost = [max(length - self.max_length, 0) for length in lengths]
        fact = fact_of_truncated(lost, len(lengths), self.max_length, truncation)
        return inputs, fact, sum(lengths) - sum(lost)

    def _beginning(self, each: Text) -> Text:
        if isinstance(each, str):
            return beginning(each, self.tokenizer, self.max_length)
        first, second = (beginning(text, self.tokenizer, self.max_length) for text in each)
        return first, second


class Together:
    """A function of a list whose calls by several threads are computed together, because a model is faster on a batch.

    The thread that begins computes what all others wait for, so nobody waits for a batch to fill.

    Args:
        run: Returns a list or an array with a result for each element of a list.
    """

    def __init__(self, run: Callable[[list], Any]):
        self.run = run
        self.lock = Lock()
        self.waiting: SimpleQueue[tuple[Sequence, Future]] = SimpleQueue()

    def __call__(self, inputs: Sequence) -> Any:
        """Return `run(inputs)`."""
        future: Future = Future()
        self.waiting.put((inputs, future))
        with self.lock:
            if not future.done():
                self._compute([self.waiting.get() for _ in range(self.waiting.qsize())])
        return future.result()

    def _compute(self, calls: Sequence[tuple[Sequence, Future]]) -> None:
        try:
            found = self.run([each for inputs, _ in calls for each in inputs])
        except Exception as error:
            if len(calls) == 1:
                calls[0][1].set_exception(error)
                return
            for call in calls:  # only one of them may be at fault
                self._compute([call])
            return
        end = 0
        for inputs, future in calls:
            start, end = end, end + len(inputs)
            future.set_result(found[start:end])


def open_folder(
    folder: str | Path,
    dtype: str | None = None,
    runtime: str | None = None,
    num_threads: int | None = None,
    is_shared: bool = False,
) -> Predictor:
    """Open the model of a folder.

    Args:
        folder: Folder that a training saved, or that `export_model` wrote.
        dtype: Of an exported folder, as of `OnnxModel`.
        runtime: The same. Default: the first one whose files it has.
        num_threads: Threads that compute a batch. Default: all.
        is_shared: Whether several threads use the model at the same time.

    Raises:
        ValueError: It is no folder, an option is not for it, or as of `SavedModel.check` and `OnnxModel`.
        OSError: A file is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one that a training saved, or that `neobert export` wrote")
    saved = SavedModel(folder)
    if saved.graph:
        saved.check_export()
    if saved.kind not in ("vector", "classes", "score", "tags", "spans"):
        name = saved.library or saved.architecture or "model without a head"
        kinds = "an embedding model, a classifier, a tagger, a reranker or a model that answers questions"
        raise ValueError(f"{folder} holds a {name}; give the folder of {kinds}")
    if saved.graph:
        runtime = runtime or ("onnxruntime" if (folder / "onnx").is_dir() else "openvino")
        return _of_export(OnnxModel(folder, dtype or "fp32", runtime, num_threads, is_shared))
    if dtype or runtime:
        raise ValueError(f"{folder} is not exported, and --dtype and --runtime are for exported folders; omit them")
    from transformers.utils.logging import disable_progress_bar

    from ..checkpoints.registration import register

    register()
    disable_progress_bar()
    saved.check()
    saved.check_head()
    if num_threads:
        import torch

        torch.set_num_threads(num_threads)
    predictor = _of_modules(saved) if saved.library else _of_head(saved)
    if is_shared:  # torch computes one batch at a time
        for name in ("vectors", "logits", "entities", "answers"):
            if run := getattr(predictor, name):
                setattr(predictor, name, Together(run))
    return predictor


def _of_export(model: OnnxModel) -> Predictor:
    """An exported model. Requests share it, and a thread computes each of them."""
    if model.saved.kind == "tags":
        return Predictor(model.saved, entities=model.predict, tags=model.tag_words)
    if model.saved.kind == "spans":
        return Predictor(model.saved, answers=lambda pairs: [model.answer(*pair) for pair in pairs])
    predictor = Predictor(model.saved, tokenizer=model.tokenizer, max_length=model.max_length)
    predictor.prompt = model.prompts.get(model.default_prompt_name or "", "")
    predictor.vectors = partial(model.encode, normalize_embeddings=True, truncation="off")

    def logits(inputs: Sequence[Text]) -> np.ndarray:
        return model([with_prompt(predictor.prompt, each) for each in inputs], "off")["logits"]

    predictor.logits_of_batch = logits
    return predictor


def _of_modules(saved: SavedModel) -> Predictor:
    """A model of sentence-transformers: it embeds texts, or reads pairs."""
    from sentence_transformers import CrossEncoder
    from torch.nn import Identity

    from ..checkpoints.embedding_models import longest_input, open_embedding_model, prompt_of

    if saved.library == "CrossEncoder":
        saved.load_tokenizer()  # which refuses that of another model
        model = CrossEncoder(saved.source)
    else:
        model = open_embedding_model(saved.source)
    predictor = Predictor(
        saved,
        tokenizer=model.tokenizer,
        max_length=longest_input(model) or sys.maxsize,
        prompt=prompt_of(model),
    )
    if saved.library != "CrossEncoder":
        predictor.vectors = partial(model.encode, normalize_embeddings=True)

    def logits(inputs: Sequence[Text]) -> np.ndarray:
        if str in map(type, inputs):
            raise ValueError("the model reads pairs of texts; give two texts in place of one")
        return model.predict(inputs, activation_fn=Identity()).reshape(len(inputs), -1)

    predictor.logits_of_batch = logits
    return predictor


def _of_head(saved: SavedModel) -> Predictor:
    """A model of transformers: a classifier, a tagger, or one that answers questions."""
    import torch

    from ..finetuning import Classifier, QuestionAnswerer, Tagger

    if saved.kind == "spans":
        answerer = QuestionAnswerer(saved.source, verbose=False)
        return Predictor(saved, answers=lambda pairs: answerer.predict(*zip(*pairs)))
    if saved.kind == "tags":
        tagger = Tagger(saved.source, verbose=False)

        def tags(words: Sequence[Sequence[str]]) -> list[dict]:
            return tagger.prediction_rows(tagger.outputs(words), [{}] * len(words))

        return Predictor(saved, entities=tagger.find_entities, tags=tags)
    classifier = Classifier(saved.source, verbose=False)
    tokenizer, model = classifier.tokenizer, classifier.model_.eval()
    longest = min(tokenizer.model_max_length, model.config.max_position_embeddings)

    @torch.inference_mode()
    def logits(inputs: Sequence[Text]) -> np.ndarray:
        rows = [[each] if isinstance(each, str) else each for each in inputs]
        batch = tokenizer.pad(
            [tokenizer(*row, truncation=True, max_length=longest) for row in rows], return_tensors="pt"
        )
        return model(**batch.to(model.device)).logits.float().cpu().numpy()

    return Predictor(saved, logits_of_batch=logits, tokenizer=tokenizer, max_length=longest)
