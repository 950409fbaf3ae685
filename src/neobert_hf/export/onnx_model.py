"""An exported folder on ONNX Runtime or OpenVINO, without torch and transformers.

`encode`, `encode_sparse` and `encode_multi_vector` are those of sentence-transformers; `predict` gives the results of the
pipelines of transformers.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..checkpoints.saved_model import SavedModel, read_object
from ..checkpoints.trust import check_vocabulary
from ..data.lengths import Truncation, fact_of_truncated, plain_tokenizer, tokens_lost
from ..finetuning.entities import EntityFinder
from ..finetuning.scores import scores_of, softmax, tag_columns
from ..finetuning.spans import MAX_ANSWER_TOKENS, best_answers
from ..finetuning.tags import MARKS

Text = str | tuple[str, str]
Texts = str | Iterable[str]
Inputs = Text | Iterable[Text]
Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], Arrays]  # inputs by name to outputs by name

OPENVINO = "openvino/openvino_model.xml"
# The file of each runtime and dtype. OpenVINO computes the file of float32 in bfloat16 where it is asked to.
FILES = {
    "onnxruntime": {"fp32": "onnx/model.onnx", "fp16": "onnx/model_fp16.onnx", "int8": "onnx/model_quantized.onnx"},
    "openvino": {"fp32": OPENVINO, "bf16": OPENVINO, "int8": "openvino/openvino_model_qint8_quantized.xml"},
}
QUERY = "query_0_SparseStaticEmbedding"  # folder of the weights of words in queries, named as in sentence-transformers


class OnnxModel:
    """A folder that `neobert export` wrote, on the CPU. Several threads may use one object at the same time.

    Taggers and models that answer questions read texts of any length, in windows. The other models truncate a text that is longer
    than `max_length` tokens, as sentence-transformers does; `truncation` says whether the methods warn of it ("warn"), refuse it
    ("error"), or do neither ("off"). In int8, ONNX Runtime rounds a batch by one scale, so the result of a text depends a little
    on the other texts of its batch.

    Args:
        folder: The exported folder.
        dtype: "fp32" or "int8"; ONNX Runtime also has "fp16", OpenVINO "bf16".
        runtime: "onnxruntime" or "openvino".
        num_threads: Number of threads that compute one batch. Default: one for each core; one, if OpenVINO is shared.
        is_shared: Whether batches of several threads are computed at the same time.

    Raises:
        ValueError: The runtime has no such dtype, or a file is damaged.
        FileNotFoundError: The folder lacks a file.
        ImportError: The runtime is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: str = "fp32",
        runtime: str = "onnxruntime",
        num_threads: int | None = None,
        is_shared: bool = False,
    ):
        if dtype not in FILES.get(runtime, {}):
            choices = "; ".join(f"{name} has {', '.join(files)}" for name, files in FILES.items())
            raise ValueError(f"runtime={runtime!r} has no dtype={dtype!r}; {choices}")
        self.folder, graph = Path(folder), FILES[runtime][dtype]
        if not (self.folder / graph).is_file():
            options = "whose options --to, --int8 and --fp16 choose the files"
            raise FileNotFoundError(f"{self.folder} has no file {graph}; write it by `neobert export`, {options}")
        self.saved = SavedModel(self.folder).check_export()
        self.config = self.saved.config
        self.labels = self.saved.labels
        settings = self.saved.settings
        self.prompts: dict[str, str] = settings.get("prompts", {})
        self.max_active_dims: int | None = settings.get("max_active_dims")
        self._readers: dict[str, OnnxModel] = {}
        self.default_prompt_name: str | None = settings.get("default_prompt_name")
        self.tokenizer = self._open_tokenizer()
        check_vocabulary(self.tokenizer.get_vocab(), 0, self.folder, self.config.get("vocab_size"))
        self.output_names, self._run = open_graph(self.folder / graph, dtype, num_threads, is_shared)

    def _open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which cuts and pads as the settings of the folder say."""
        self._whole: Tokenizer | None = None
        with _reading(self.folder / "tokenizer.json"):
            tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        settings = read_object(self.folder / "tokenizer_config.json")
        self.max_length: int = settings["model_max_length"]
        self.special_tokens = read_object(self.folder / "special_tokens_map.json")
        tokenizer.enable_truncation(self.max_length, direction=settings.get("truncation_side", "right"))
        # The mask hides padding, so any id serves a tokenizer without such a token.
        pad_id = self.config.get("pad_token_id") or 0
        tokenizer.enable_padding(direction=settings.get("padding_side", "right"), pad_id=pad_id)
        return tokenizer

    @cached_property
    def _find_entities(self) -> EntityFinder:
        division = self.config.get("word_division", MARKS)

        def compute(windows: Sequence[Encoding]) -> np.ndarray:
            return self._compute(windows)["logits"]

        unknown = self.special_tokens.get("unk_token", "")
        return EntityFinder(self.tokenizer, self.max_length, self.labels, compute, division, unknown)

    def __call__(self, texts: Inputs, truncation: Truncation = "warn") -> Arrays:
        """Return the outputs of the graph by name, of one batch of texts, padded to one length.

        Args:
            texts: A text, which is a batch of one, or several. A pair of texts is a tuple.
            truncation: "warn", "error" or "off", for texts that are longer than `max_length`; also of a tagger.

        Raises:
            TypeError: An element is no text.
            ValueError: A text is too long, and `truncation` is "error".
        """
        found = _texts_of(texts)
        self._tell_truncated(found, truncation)
        return self._compute(self.tokenizer.encode_batch(found))

    def _compute(self, encodings: Sequence[Encoding]) -> Arrays:
        ids = np.array([encoding.ids for encoding in encodings], dtype=np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64)
        return self._run({"input_ids": ids, "attention_mask": mask})

    def _tell_truncated(self, texts: Sequence[Text], truncation: Truncation, stacklevel: int = 3) -> None:
        """Warn of truncated texts, at the line of the caller."""
        if truncation == "off":
            return
        if self._whole is None:
            self._whole = plain_tokenizer(self.tokenizer)
        lost = tokens_lost(self._whole, self.max_length, texts)
        fact = fact_of_truncated(lost, len(texts), self.max_length, truncation)
        if fact:
            warnings.warn(f"{fact}; split long texts", stacklevel=stacklevel)

    def _read_output(
        self, name: str, read: Callable, texts: Sequence[Text], batch_size: int, truncation: Truncation
    ) -> list:
        """Return `read(row of the output, encoding, text)` for each text; texts of similar length share a batch."""
        if name not in self.output_names:
            has = ", ".join(self.output_names)
            raise ValueError(
                f"{self.folder} has the outputs {has}, and not {name}; encode, encode_sparse and encode_multi_vector need a "
                "model of their kind, predict a head, and a call of the model returns all outputs"
            )
        self._tell_truncated(texts, truncation, 4)  # before anything is computed
        order = sorted(range(len(texts)), key=lambda number: -len("".join(texts[number])))
        results = {}
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            encodings = self.tokenizer.encode_batch([texts[number] for number in numbers])
            for number, encoding, row in zip(numbers, encodings, self._compute(encodings)[name]):
                results[number] = read(row, encoding, texts[number])
        return [results[number] for number in range(len(texts))]

    def encode(
        self,
        texts: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        normalize_embeddings: bool = False,
        truncation: Truncation = "warn",
    ) -> np.ndarray:
        """Return the embeddings of texts, as `SentenceTransformer.encode` does.

        Args:
            texts: A text, or several: a list, an array, a column of a table.
            prompt_name: Name of the model's prompt that is put before each text; `prompts` has the names.
            prompt: A prompt, instead of a name.
            batch_size: Number of texts in a batch of the model.
            normalize_embeddings: Scale each embedding to length 1.
            truncation: "warn", "error" or "off", for texts that are longer than `max_length`.

        Returns:
            (D,) for one text, otherwise (number of texts, D), float32.

        Raises:
            ValueError: The graph has no embeddings, the model has no such prompt, or a text is refused because of its length.
            TypeError: An element is no text.
        """
        name = prompt_name or self.default_prompt_name
        if prompt is None and name is not None:
            if name not in self.prompts:
                raise ValueError(f"the model has no prompt {name!r}; choose from {', '.join(self.prompts) or '(none)'}")
            prompt = self.prompts[name]
        prompted = _prompted(texts, prompt)
        # The empty text gives the width of an empty result.
        rows = self._read_output("sentence_embedding", _row, prompted or [""], batch_size, truncation)
        vectors = np.stack(rows)
        if normalize_embeddings:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors[0] if isinstance(texts, str) else vectors[: len(prompted)]

    def encode_sparse(
        self, texts: Texts, is_query: bool = False, batch_size: int = 32, truncation: Truncation = "warn"
    ) -> Any:
        """Return the weights of words, as `SparseEncoder` does by `encode_document` or `encode_query`; needs SciPy.

        Args:
            texts: A text, or several.
            is_query: Whether they are queries, which have a prompt of their own, and perhaps weights without inference.
            batch_size: Number of texts in a batch of the model.
            truncation: As of `encode`; queries and documents can have lengths of their own.

        Returns:
            A `scipy.sparse.csr_array` (number of texts, V), float32, with one row for one text. The attribute `max_active_dims`
            is the number of the largest weights of a text that are kept, None for all.

        Raises:
            ValueError: The graph has no such weights, or a text is refused because of its length.
            TypeError: An element is no text.
        """
        from scipy.sparse import csr_array, vstack

        def read(row: np.ndarray, *_: Any) -> Any:
            if self.max_active_dims is not None:
                ranks = np.argsort(np.argsort(-np.abs(row)))
                row = np.where(ranks < self.max_active_dims, row, 0)
            return csr_array(row[None])

        reader, prompted = self._read_as(is_query, texts)
        rows = reader._read_output("sparse_embedding", read, prompted or [""], batch_size, truncation)
        return vstack(rows, format="csr")[: len(prompted)]

    def encode_multi_vector(
        self, texts: Texts, is_query: bool = False, batch_size: int = 32, truncation: Truncation = "warn"
    ) -> Any:
        """Return the vectors of tokens, as `MultiVectorEncoder` does by `encode_document` or `encode_query`.

        Args:
            texts: A text, or several.
            is_query: Whether they are queries, which have a prompt, a length and an expansion of their own.
            batch_size: Number of texts in a batch of the model.
            truncation: As of `encode`; queries and documents can have lengths of their own.

        Returns:
            (number of tokens, D) for one text, otherwise a list of such arrays, float32.

        Raises:
            ValueError: The graph has no such vectors, or a text is refused because of its length.
            TypeError: An element is no text.
        """
        reader, prompted = self._read_as(is_query, texts)
        found = reader._read_output("token_embeddings", _row, prompted, batch_size, truncation)
        return found[0] if isinstance(texts, str) else found

    def _read_as(self, is_query: bool, texts: Texts) -> tuple["OnnxModel", list[str]]:
        """Return this model as it reads queries or documents, and the texts with their prompt."""
        task = "query" if is_query else "document"
        if task not in self._readers:
            reader = copy(self)
            if is_query and (self.folder / QUERY).is_dir():
                reader._weigh_by_table()
            elif "token_embeddings" in self.output_names:
                reader._choose_tokens(task)
            self._readers[task] = reader
        return self._readers[task], _prompted(texts, self.prompts.get(task))

    def _weigh_by_table(self) -> None:
        """Read queries without the graph: each of their tokens has a weight."""
        from safetensors.numpy import load_file

        self.folder /= QUERY
        self.tokenizer = self._open_tokenizer()
        self.tokenizer.post_processor = None  # which adds special tokens
        with _reading(self.folder / "model.safetensors"):
            weights = np.append(load_file(self.folder / "model.safetensors")["weight"], 0)

        def run(inputs: Arrays) -> Arrays:
            ids = np.where(inputs["attention_mask"] == 1, inputs["input_ids"], len(weights) - 1)
            rows = np.zeros((len(ids), len(weights)), np.float32)
            np.put_along_axis(rows, ids, weights[ids], 1)
            return {"sparse_embedding": rows[:, :-1]}  # without padding

        self._run = run

    def _choose_tokens(self, task: str) -> None:
        """Read texts of a task as sentence-transformers does: at its length, expanded, and only the tokens of scores."""
        settings = read_object(self.folder / "sentence_bert_config.json")
        self.tokenizer = self._open_tokenizer()  # which sets the length
        expansion = {"length": 0, "attend": False}
        if task == "query":
            expansion = settings.get("query_expansion") or expansion
        width = expansion["length"]
        if expansion.get("strategy") == "fixed":
            self.max_length = width
        else:
            self.max_length = settings.get(f"{task}_length") or self.max_length
        self.tokenizer.enable_truncation(self.max_length, direction=self.tokenizer.truncation["direction"])
        if width:
            added = {"pad_id": self.tokenizer.token_to_id(expansion["token"]), "pad_to_multiple_of": width}
            self.tokenizer.enable_padding(**{**self.tokenizer.padding, **added})
        run_graph = self._run

        def run(inputs: Arrays) -> Arrays:
            mask = inputs["attention_mask"]
            is_added = (mask == 0) & (np.arange(mask.shape[1]) < width)
            outputs = run_graph({**inputs, "attention_mask": mask | (is_added & expansion["attend"])})
            rows = zip(outputs["token_embeddings"], is_added | (outputs[f"{task}_mask"] == 1))
            return {"token_embeddings": [vectors[is_chosen] for vectors, is_chosen in rows]}

        self._run = run

    def predict(
        self,
        texts: Inputs,
        top_k: int | None = None,
        batch_size: int = 32,
        truncation: Truncation = "warn",
    ) -> Any:
        """Return what the model says of texts, as the pipelines of transformers do.

        Args:
            texts: A text, or several. A pair of texts is a tuple.
            top_k: Number of the best labels of a text (by default only the best, and no list) or tokens for a mask (default 5).
            batch_size: Number of texts in a batch of the model; of a tagger, of windows.
            truncation: "warn", "error" or "off", for texts that are longer than `max_length`. A tagger truncates nothing.

        Returns:
            A result for one text, otherwise a list of results. Of a classifier: `label` and `score`. Of a tagger: a list of
            entities of a text of any length, as of `EntityFinder`. Of a masked language model: as of the pipeline "fill-mask".

        Raises:
            ValueError: The model is of another kind, a text has not one mask, or it is refused because of its length.
            TypeError: An element is no text.
        """
        given = _texts_of(texts)
        if self.saved.kind == "tags":
            results = self._find_entities(given, batch_size)
        else:
            read = self._fillings if self.saved.kind == "masked words" else self._labels
            prompt = self.prompts.get(self.default_prompt_name or "")  # of a model of sentence-transformers
            if prompt:
                given = [with_prompt(prompt, text) for text in given]
            results = self._read_output("logits", partial(read, top_k), given, batch_size, truncation)
        return results[0] if isinstance(texts, str | tuple) else results

    def tag_words(self, words: Sequence[Sequence[str]]) -> list[dict]:
        """Return the tags of rows of words, as `Tagger` does: `prediction` and `probability`, as of `tag_columns`."""
        return tag_columns(self._find_entities.tag_words(words), self.labels, self.config.get("tag_scheme"))

    def answer(self, question: str, context: str, max_answer_tokens: int = MAX_ANSWER_TOKENS) -> dict:
        """Return the part of a text of any length that answers a question, as `QuestionAnswerer` does.

        Args:
            question: The question.
            context: The text, which is read in windows that overlap by a quarter.
            max_answer_tokens: Length of the longest answer.

        Returns:
            `answer`, `score` and `start`, as of `best_answers`; an empty answer if there is none.

        Raises:
            ValueError: The model is of another kind, the question leaves no place for the text, or the text has no token.
        """
        if "start_logits" not in self.output_names:
            raise ValueError(f"{self.folder} has no start_logits; answer needs a model that answers questions")
        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        stride = self.max_length // 4
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_length, stride=stride, strategy="only_second")
        longest = self.max_length - tokenizer.num_special_tokens_to_add(is_pair=True) - stride - 1
        num_tokens = len(self.tokenizer.encode(question, add_special_tokens=False).ids)
        if not 0 < num_tokens <= longest:
            raise ValueError(f"the question {question!r:.80} has {num_tokens} tokens; give 1 to {longest}")
        first = tokenizer.encode(question, context)
        windows: dict[str, list] = {"row": [], "offsets": [], "first": []}
        starts, ends = [], []
        for window in (first, *first.overflowing):
            columns = [column for column, text in enumerate(window.sequence_ids) if text == 1]
            if not columns:
                raise ValueError(f"the context {context!r:.80} has no token; give another one")
            outputs = self._compute([window])
            starts.append(outputs["start_logits"][0])
            ends.append(outputs["end_logits"][0])
            windows["row"].append(0)
            windows["offsets"].append([window.offsets[column] for column in columns])
            windows["first"].append(columns[0])
        return best_answers(starts, ends, windows, [context], max_answer_tokens)[0]

    def _labels(self, top_k: int | None, logits: np.ndarray, *_: Any) -> dict | list[dict]:
        scores = scores_of(logits, self.saved.score_type)
        best = [{"label": self.labels[index], "score": float(scores[index])} for index in np.argsort(-scores)[:top_k]]
        return best[0] if top_k is None else best

    def _fillings(self, top_k: int | None, logits: np.ndarray, encoding: Encoding, text: Text) -> list[dict]:
        tokens = list(encoding.ids)
        mask = self.special_tokens["mask_token"]
        mask_id = self.tokenizer.token_to_id(mask)
        if tokens.count(mask_id) != 1:
            fact = f"{text[:60]!r} has {tokens.count(mask_id)} {mask} in its first {self.max_length} tokens"
            raise ValueError(f"{fact}; put one in place of a word")
        place = tokens.index(mask_id)
        scores = softmax(logits[place])
        fillings = []
        for token in np.argsort(-scores)[: top_k or 5].tolist():
            tokens[place] = token
            filling = {"score": float(scores[token]), "token": token}
            filling["token_str"] = self.tokenizer.decode([token], skip_special_tokens=False)
            filling["sequence"] = self.tokenizer.decode(tokens)
            fillings.append(filling)
        return fillings


def _row(row: np.ndarray, *_: Any) -> np.ndarray:
    """The row itself, of an output that needs no reading."""
    return row


def with_prompt(prompt: str, text: Text) -> Text:
    """Put a prompt before a text, or before the first text of a pair."""
    if isinstance(text, str):
        return prompt + text
    return (prompt + text[0], *text[1:])  # the tokenizer refuses three texts


def _prompted(texts: Texts, prompt: str | None) -> list[str]:
    """Return a text, or several, with the prompt before each; a dict is one element, which is no text."""
    found: Iterable[Any] = [texts] if isinstance(texts, str | dict) else texts
    return [(prompt or "") + text for text in found]


def _texts_of(texts: Inputs) -> list[Text]:
    """Return a text, a pair, or several of them as a list; a dict, as pipelines take it, is one element, which is no text."""
    return [texts] if isinstance(texts, str | tuple | dict) else list(texts)  # type: ignore[list-item]  # the dict


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Name the file in an error of a library that reads it; tokenizers and the runtimes have no class for a damaged file."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{file} cannot be read ({' '.join(str(error).split())}); export the model again") from error


def open_graph(
    file: Path, dtype: str = "fp32", num_threads: int | None = None, is_shared: bool = False
) -> tuple[list[str], Run]:
    """Open a file of ONNX Runtime (`.onnx`) or OpenVINO (`.xml`) on the CPU.

    Args:
        file: The file.
        dtype: "bf16" lets OpenVINO compute in bfloat16; otherwise the numbers of the file decide.
        num_threads: As for `OnnxModel`.
        is_shared: The same.

    Returns:
        The names of the outputs, and a function from inputs to outputs by name. Several threads may call it at the same time.

    Raises:
        ValueError: The file is damaged.
        ImportError: The runtime is not installed.
    """
    with _reading(file):
        if file.suffix == ".onnx":
            import onnxruntime

            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = num_threads or 0
            # Files of earlier versions have signed weights, whose products saturate on a processor without VNNI.
            settings.add_session_config_entry("session.x64quantprecision", "1")
            if is_shared:  # a thread that spins takes the time of another batch
                settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
            session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
            names = [output.name for output in session.get_outputs()]
            return names, lambda inputs: dict(zip(names, session.run(None, inputs)))
        import openvino

        options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "bf16" if dtype == "bf16" else "f32"}
        if num_threads or is_shared:
            options["INFERENCE_NUM_THREADS"] = num_threads or 1
        compiled = openvino.Core().compile_model(file, "CPU", options)
    names = [output.get_any_name() for output in compiled.outputs]

    def run(inputs: Arrays) -> Arrays:
        results = compiled.create_infer_request().infer(inputs)  # a request belongs to one thread
        return {name: results[name] for name in names}

    return names, run
