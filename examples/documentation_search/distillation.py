"""Distillation: a NeoBERT learns the embeddings of a larger model, with contrastive and masked-language losses beside it.

The student has fewer dimensions than the teacher, so its targets are the teacher's vectors in the directions of the largest
variance, which keep cosine similarities best (Eckart and Young). The losses are those of sentence-transformers.
"""

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, Features, List, Value
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss, MultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from neobert_hf import NeoBERTForMaskedLM, best_dtype, sentence_transformer
from neobert_hf.embeddings import ContrastiveTrainer
from neobert_hf.pretraining import PackedMLMCollator, muon

TEXTS_AT_ONCE = 8192  # texts in a file of teacher vectors
SAMPLED_ROWS = 512  # rows whose mean length determines the batch size of their set
LEAST_COSINE = 0.5  # of a student and its teacher in the best directions; the mini model has 0.8, unrelated vectors 0.2
TEMPERATURE = 0.07  # paper, appendix D.2


def open_teacher(name: str, max_seq_length: int) -> SentenceTransformer:
    """Open the teacher: an installed Python package with a folder `model`, or a model of sentence-transformers.

    Args:
        name: Module name of the package, or folder or Hub id of the model.
        max_seq_length: Length in the teacher's tokens at which texts are truncated.
    """
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    path = str(Path(spec.origin).parent / "model") if spec else name
    teacher = SentenceTransformer(path, model_kwargs={"dtype": best_dtype()})
    teacher.max_seq_length = max_seq_length
    return teacher


class TeacherVectors:
    """Unit-length vectors of a teacher for texts, kept in a folder: a text is embedded once, in whichever set it occurs.

    Args:
        teacher: Embedding model.
        folder: Folder of the vectors of this teacher. An interrupted call loses at most `TEXTS_AT_ONCE` of them.
    """

    def __init__(self, teacher: SentenceTransformer, folder: str | Path) -> None:
        self.teacher, self.folder = teacher, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._vectors: dict[bytes, np.ndarray] = {}
        for file in self.folder.glob("*.npz"):
            with np.load(file) as part:
                self._vectors |= zip(map(bytes, part["keys"]), part["vectors"])

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors, (number of texts, width of the teacher), float32; the folder keeps them in float16."""
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        missing = [pair for pair in dict(zip(keys, texts)).items() if pair[0] not in self._vectors]
        parts = range(0, len(missing), TEXTS_AT_ONCE)
        for start in tqdm(parts, "teacher", disable=not missing, unit=f" x {TEXTS_AT_ONCE} texts"):
            new_keys, new_texts = zip(*missing[start : start + TEXTS_AT_ONCE])
            vectors = self.teacher.encode(list(new_texts), batch_size=64, normalize_embeddings=True).astype(np.float16)
            file = self.folder / f"{new_keys[0].hex()[:16]}.npz"
            with file.with_suffix(".part").open("wb") as partial:
                np.savez(partial, keys=np.frombuffer(b"".join(new_keys), np.uint8).reshape(-1, 32), vectors=vectors)
            os.replace(partial.name, file)
            self._vectors |= zip(new_keys, vectors)
        return np.stack([self._vectors[key] for key in keys]).astype(np.float32)


def main_directions(vectors: np.ndarray, width: int, num_rows: int = 20_000) -> np.ndarray:
    """Return the orthonormal directions that keep the most of the vectors, (teacher width, width), float32.

    They are the right singular vectors of a sample. The vectors are not centred, because cosines are not.

    Args:
        vectors: (N, teacher width).
        width: Number of directions, at most the teacher's width and at most N.
        num_rows: Size of the sample.
    """
    rows = np.random.default_rng(0).choice(len(vectors), min(num_rows, len(vectors)), replace=False)
    _, _, directions = np.linalg.svd(vectors[rows].astype(np.float32), full_matrices=False)
    return np.ascontiguousarray(directions[:width].T)


def fitted_directions(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Return the orthonormal directions with the largest sum of inner products of a student's vectors and its targets.

    With them a student can be trained further if its folder does not keep those of its training.

    Args:
        student: Unit-length vectors of texts, (N, width).
        teacher: Unit-length vectors of the same texts, (N, teacher width).

    Returns:
        (teacher width, width), float32.

    Raises:
        ValueError: The student did not learn from this teacher.

    Source: the orthogonal Procrustes problem (Schönemann 1966), whose solution is the polar factor of teacher^T student.
    """
    left, _, right = np.linalg.svd(teacher.T @ student, full_matrices=False)
    directions = np.ascontiguousarray(left @ right, np.float32)
    cosine = F.cosine_similarity(torch.from_numpy(student), torch.from_numpy(teacher @ directions)).mean().item()
    if not cosine >= LEAST_COSINE:
        raise ValueError(
            f"the model and the teacher agree with a mean cosine of {cosine:.2f}, below {LEAST_COSINE}, in the best of all "
            "directions: it did not learn from this teacher; choose its teacher, or train a new model"
        )
    return directions


def set_token_embeddings(
    model: NeoBERTForMaskedLM, tokenizer: PreTrainedTokenizerBase, vectors: TeacherVectors, directions: np.ndarray
) -> None:
    """Set the token embeddings of a new NeoBERT to the teacher's vectors of the tokens.

    A token without its continuation prefix is a text for the teacher. The vectors are centred, because all of them have a large
    common part, and scaled to the initial range of the configuration.

    Source: Model2Vec (github.com/MinishLab/model2vec) makes a table of tokens in the same way.
    """
    tokens = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    table = vectors.encode([token.removeprefix("##") for token in tokens]) @ directions
    table -= table.mean(0)
    table *= model.config.embedding_init_range / table.std()
    table[model.config.pad_token_id] = 0
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.from_numpy(table))


def open_student(folder: str | Path, max_seq_length: int) -> tuple[SentenceTransformer, NeoBERTForMaskedLM]:
    """Return an embedding model and a masked language model with one encoder, in float32."""
    options = {"dtype": torch.float32}
    student = sentence_transformer(str(folder), max_seq_length=max_seq_length, model_kwargs=options)
    language_model = NeoBERTForMaskedLM.from_pretrained(folder, **options)
    language_model.model = student[0].model
    return student, language_model


def with_targets(columns: dict[str, Sequence[str]], vectors: TeacherVectors, directions: np.ndarray) -> Dataset:
    """Return a training set: the columns of texts, and `label`, the unit-length targets of the first column."""
    targets = vectors.encode(next(iter(columns.values()))) @ directions
    label = targets / np.linalg.norm(targets, axis=1, keepdims=True)
    vector = List(Value("float32"), length=label.shape[1])
    features = Features({**dict.fromkeys(columns, Value("string")), "label": vector})
    return Dataset.from_dict({**columns, "label": label}, features=features)


class DistillationLoss(nn.Module):
    """Distance to the teacher's vectors, with the paper's contrastive loss if a row holds a pair.

    Only the first column of a row has targets. The documents of pairs learn from the contrastive loss, so the teacher need not
    embed them.

    Args:
        model: The student.
        contrastive_weight: Weight of the contrastive loss beside the distance, whose weight is 1.
    """

    def __init__(self, model: SentenceTransformer, contrastive_weight: float) -> None:
        super().__init__()
        self.model, self.contrastive_weight = model, contrastive_weight
        self.distance = EmbedDistillLoss(model, distance_metric="cosine")
        self.ranking = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch by name; `labels` are the targets of the first column, (rows, width)."""
        vectors = [self.model(features)["sentence_embedding"] for features in sentence_features]
        losses = {"distillation": self.distance.compute_loss_from_embeddings(vectors[:1], [labels])}
        if len(vectors) > 1:
            losses["contrastive"] = self.contrastive_weight * self.ranking.compute_loss_from_embeddings(vectors, None)
        return losses


class MaskedTextLoss(nn.Module):
    """The paper's masked-language loss and the distance to the teacher's vectors, from one forward of masked texts.

    The target is the vector of the whole text: the student embeds it although it does not see a part of the tokens.

    Args:
        model: The student.
        language_model: NeoBERT with a decoder; its encoder is the student's.
        weight: Weight of the masked-language loss beside the distance, whose weight is 1.
    """

    def __init__(self, model: SentenceTransformer, language_model: NeoBERTForMaskedLM, weight: float) -> None:
        super().__init__()
        self.language_model, self.weight = language_model, weight
        self.distance = EmbedDistillLoss(model, distance_metric="cosine")
        self.masks = PackedMLMCollator(model.tokenizer)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch with one column of texts by name; `labels` are their targets, (rows, width)."""
        (features,) = sentence_features
        lengths = features["attention_mask"].sum(1).tolist()
        columns = [features[name].cpu() for name in ("input_ids", "attention_mask")]
        documents = [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(*columns)]
        row = {name: value.to(labels.device) for name, value in self.masks(documents).items()}
        tokens = row.pop("labels")[0]
        hidden_TD = self.language_model.model(**row).last_hidden_state[0]
        is_masked = tokens != -100
        logits = self.language_model.decoder(hidden_TD[is_masked])
        vectors = torch.stack([document.float().mean(0) for document in hidden_TD.split(lengths)])
        return {
            "masked_lm": self.weight * F.cross_entropy(logits.float(), tokens[is_masked]),
            "distillation": self.distance.compute_loss_from_embeddings([vectors], [labels]),
        }


class DistillationTrainer(ContrastiveTrainer):
    """Contrastive trainer whose checkpoints and result hold the decoder too: one folder fills masks and embeds.

    Args:
        language_model: NeoBERT with a decoder; its encoder is the student's.
        tokens_per_batch: Mean number of tokens in a batch, for short texts and for long ones.
        **kwargs: As for sentence-transformers' trainer.
    """

    def __init__(self, *args, language_model: NeoBERTForMaskedLM, tokens_per_batch: int, **kwargs) -> None:
        self.language_model, self.tokens_per_batch = language_model, tokens_per_batch
        super().__init__(*args, **kwargs)

    def get_batch_sampler(self, dataset: Dataset, batch_size: int, *args, **kwargs) -> BatchSampler | None:
        """As of sentence-transformers, with `tokens_per_batch` tokens in a batch."""
        sample = dataset[: 16 * SAMPLED_ROWS : 16]
        texts = [text for column in sample.values() if isinstance(column[0], str) for text in column]
        tokens_per_row = self.model.tokenize(texts)["attention_mask"].sum().item() / len(sample["label"])
        batch_size = max(2, round(self.tokens_per_batch / tokens_per_row))
        return super().get_batch_sampler(dataset, batch_size, *args, **kwargs)

    def create_optimizer(self, *args) -> torch.optim.Optimizer:
        """Return Muon for the matrices of the blocks, and AdamW for embeddings, norms and decoder."""
        if self.optimizer is None:
            parameters = dict(self.language_model.named_parameters())
            options = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}
            self.optimizer = muon(parameters, **options, betas=(0.9, 0.98))  # fused matrices as one
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        self.language_model.save_pretrained(output_dir or self.args.output_dir)  # replaces config and weights

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        stored = NeoBERTForMaskedLM.from_pretrained(checkpoint_path, dtype=torch.float32)
        self.language_model.load_state_dict(stored.state_dict())
