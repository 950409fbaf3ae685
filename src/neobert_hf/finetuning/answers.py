"""`QuestionAnswerer`: answers as parts of a text; windows of long texts, the best span of all windows, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, PreTrainedTokenizerBase

from ..checkpoints import MINI_MODEL_PATH
from ..data.lengths import DEFAULT_LENGTH
from ..files.messages import say
from ..runs import FineTuningArguments
from .decorators import all_or_nothing
from .findings import Scores
from .job import Job
from .plan import Plan
from .questions import checked_answers, checked_question
from .spans import MAX_ANSWER_TOKENS, best_answers


class QuestionAnswerer(Job):
    """Questions are answered by parts of texts of any length, or by an empty text if the text has no answer.

    Args:
        model: Folder or id on the Hub: of an encoder, or of a model that answers questions.
        max_seq_length: Length of a window in tokens, with the question. A trained model keeps its own.
        stride: Tokens of the context that a window shares with the one before it; by default a quarter of a window.
        max_answer_tokens: Length of the longest answer.
        verbose: Tell what `fit`, `evaluate`, `predict` and `save` find; False leaves warnings and errors only.
    """

    auto_class = AutoModelForQuestionAnswering
    kind = "spans"
    noun = "model for questions"
    column_names = ("questions", "contexts", "answers")

    def __init__(
        self,
        model: str | Path = MINI_MODEL_PATH,
        max_seq_length: int = DEFAULT_LENGTH,
        stride: int | None = None,
        max_answer_tokens: int = MAX_ANSWER_TOKENS,
        verbose: bool = True,
    ):
        super().__init__(model, max_seq_length, verbose)
        self.stride = stride
        self.max_answer_tokens = max_answer_tokens

    def _row(self, question: Any, context: Any, *answers) -> tuple:
        checked = checked_question({"question": question, "context": context})
        return (*checked, *(checked_answers(one, context) for one in answers))

    @all_or_nothing
    def fit(
        self,
        questions: Sequence[str],
        contexts: Sequence[str],
        answers: Sequence[Any],
        validation: tuple[Sequence, Sequence, Sequence] | None = None,
        training: FineTuningArguments | None = None,
        **options,
    ) -> QuestionAnswerer:
        """Train on questions and texts that hold their answers.

        Args:
            questions: Questions.
            contexts: A text for each question.
            answers: As `checked_answers` takes them.
            validation: Other questions, contexts and answers. They choose the best epoch, and the metrics on them are printed.
            training: As of `Classifier.fit`, and `options` too.

        Raises:
            ValueError: An answer is not at its place, a question leaves no place for its context, or a context has no token.
            FloatingPointError: The model has diverged.
        """
        columns = self._columns(questions, contexts, answers)
        # F1 chooses the best epoch, also of few rows
        plan = Plan(
            columns,
            validation and self._columns(*validation),
            {"stride": self.stride},
        )
        self._fit(plan, training, options)
        return self

    def _read_labels(self) -> None:
        """None; an error if the model is not trained."""
        super()._read_labels()
        self._names = []

    def _rows(
        self,
        questions: Sequence,
        contexts: Sequence,
        answers: list[dict] | None = None,
        split: str | None = None,
    ) -> Dataset:
        """Windows of `cut_windows`; of a training, a line says how many there are."""
        columns = {"question": list(questions), "context": list(contexts)}
        if answers:
            columns["answers"] = answers
        windows = Dataset.from_dict(columns).map(
            cut_windows,
            batched=True,
            with_indices=True,
            remove_columns=list(columns),
            fn_kwargs={
                "tokenizer": self.tokenizer,
                "max_seq_length": self.tokenizer.model_max_length,
                "stride": self.stride,
            },
        )
        if answers:
            say(f"{split}: {len(answers):,} questions, {len(windows):,} windows{_lost(windows, answers)}")
        return windows

    def _outputs(self, rows: Dataset, logits: tuple[np.ndarray, np.ndarray], inputs: Sequence) -> list[dict]:
        return best_answers(*logits, rows, inputs[1], self.max_answer_tokens)

    def metrics(self, outputs: list[dict], labels: Sequence[Any]) -> Scores:
        """Return the metrics that `answer_metrics` describes."""
        return answer_metrics([found["answer"] for found in outputs], labels)

    def _trivial(self, labels: Sequence[Any]) -> tuple[str, list[dict]]:
        return "the trivial answer, never an answer", [{"answer": "", "score": 0.0, "start": None}] * len(labels)

    def prediction_rows(self, outputs: list[dict], rows: list[dict]) -> list[dict]:
        """Return rows with `answer`, `score` and `start`."""
        return [row | found for row, found in zip(rows, outputs)]


def _lost(windows: Dataset, answers: list[dict]) -> str:
    """End of a line about the answers that no window has; empty if there are none."""
    whole = {row for row, start in zip(windows["row"], windows["start_positions"]) if start}
    lost = sum(bool(found["text"]) and row not in whole for row, found in enumerate(answers))
    if not lost:
        return ""
    return f"; {lost:,} of the answers are whole in no window, and are trained as none; give a larger stride"


def cut_windows(
    rows: Mapping[str, list],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    stride: int | None = None,
) -> dict[str, list]:
    """Tokenize each question with its context, in several windows if both are longer than `max_seq_length`.

    It is a function for `Dataset.map` with `batched` and `with_indices`.

    Args:
        rows: Columns `question` and `context`, and perhaps `answers`, as `read_questions` returns them.
        indices: Number of each row.
        tokenizer: A fast tokenizer.
        max_seq_length: Length of a window in tokens, with the question.
        stride: Tokens of the context that a window shares with the one before it; by default a quarter of `max_seq_length`.

    Returns:
        Columns with an item for each window: what the model reads; `row`, the number of the row; `offsets`, for each token of
        the context its begin and end in characters; `first`, the column of the first of them. With answers, `start_positions`
        and `end_positions` are the columns of the first answer; 0, the column of [CLS], if the window does not have all of it.

    Raises:
        ValueError: A question leaves no place for its context, or a context has no token.
    """
    if stride is None:
        stride = max_seq_length // 4
    _check_questions(rows["question"], tokenizer, max_seq_length, stride)
    tokens = tokenizer(
        rows["question"],
        rows["context"],
        max_length=max_seq_length,
        stride=stride,
        truncation="only_second",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = tokens.pop("overflow_to_sample_mapping")
    all_offsets = tokens.pop("offset_mapping")
    windows = {**tokens, "row": [indices[owner] for owner in owners], "offsets": [], "first": []}
    for number, (owner, offsets) in enumerate(zip(owners, all_offsets)):
        sides = tokens.sequence_ids(number)
        if 1 not in sides:
            raise ValueError(f"the context {rows['context'][owner]!r:.80} has no token; remove its questions")
        windows["offsets"].append([offset for offset, side in zip(offsets, sides) if side == 1])
        windows["first"].append(sides.index(1))
    if "answers" in rows:
        answers = [rows["answers"][owner] for owner in owners]
        is_first = [owner != earlier for owner, earlier in zip(owners, [None, *owners])]
        spans = map(
            _columns,
            answers,
            windows["offsets"],
            windows["first"],
            is_first,
            [*is_first[1:], True],
        )
        windows["start_positions"], windows["end_positions"] = map(list, zip(*spans))
    return windows


def _check_questions(
    questions: list[str], tokenizer: PreTrainedTokenizerBase, max_seq_length: int, stride: int
) -> None:
    longest = max_seq_length - tokenizer.num_special_tokens_to_add(pair=True) - stride - 1
    for question, ids in zip(questions, tokenizer(questions, add_special_tokens=False)["input_ids"]):
        if len(ids) > longest:
            fault = f"the question {question!r:.80} has {len(ids)} tokens"
            left = f"max_seq_length={max_seq_length} and stride={stride} leave {max(longest, 0)}"
            raise ValueError(f"{fault}, but {left}; shorten it, or give a larger max_seq_length")


def _columns(answers: dict, offsets: list, first: int, is_first: bool, is_last: bool) -> tuple[int, int]:
    """Columns of the first and the last token of the first answer, or twice 0."""
    if not answers["text"]:
        return 0, 0
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    # a tokenizer may drop characters at the ends of the context, which belong to the first and the last window
    is_whole = (is_first or offsets[0][0] <= start) and (is_last or end <= offsets[-1][1])
    inside = [number for number, (begin, stop) in enumerate(offsets) if begin < end and start < stop]
    return (first + inside[0], first + inside[-1]) if is_whole and inside else (0, 0)


def answer_metrics(answers: Sequence[str], expected: Sequence[Mapping]) -> Scores:
    """Return exact match and F1 as in the evaluation of SQuAD 2.0, from 0 to 1.

    torchmetrics computes them by SQuAD 1.1; the expected answer to a question without an answer is the empty text, as in 2.0.

    Args:
        answers: Predicted answers; an empty text is no answer.
        expected: For each question a dict with `text`, the list of right answers; empty if there is none.

    Returns:
        `exact_match` and `f1`. If there are both kinds of questions, also `answerable_f1` of those with an answer, and
        `impossible_accuracy`, the share of the others that got no answer.
    """
    from torchmetrics.functional.text import squad  # takes two seconds to import

    def scores(rows: Sequence[int]) -> Scores:
        found = [{"id": str(row), "prediction_text": answers[row]} for row in rows]
        right = [{"id": str(row), "answers": {"text": list(expected[row]["text"]) or [""]}} for row in rows]
        return {name: value.item() / 100 for name, value in squad(found, right).items()}

    metrics = scores(range(len(answers)))
    answerable = [row for row, answer in enumerate(expected) if answer["text"]]
    impossible = [row for row, answer in enumerate(expected) if not answer["text"]]
    if answerable and impossible:
        metrics["answerable_f1"] = scores(answerable)["f1"]
        metrics["impossible_accuracy"] = scores(impossible)["exact_match"]
    return metrics
