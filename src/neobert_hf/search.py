"""Semantic search in the documentation of this Python: the nearest entries by their vectors, then compared token by token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from huggingface_hub.constants import HF_HOME
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.util import semantic_search
from transformers.utils import logging

from .documentation import Entry, collect_documentation, first_sentence
from .embeddings import check_texts, fingerprint, multi_vector_encoder

logger = logging.get_logger(__name__)

CACHE = Path(HF_HOME) / "neobert_hf"


@dataclass(frozen=True)
class Hit:
    """An entry that was found, and how well it fits: the mean of the question's tokens' best cosines, or the texts' cosine."""

    score: float
    entry: Entry

    def __str__(self) -> str:
        sentence = first_sentence(self.entry.text)[0]
        return f"{self.score:.2f}  {self.entry.name}{self.entry.signature}\n      {sentence}"


class DocumentationIndex:
    """Embedded documentation of this Python. The vectors are kept in the cache of Hugging Face, so a second index comes at once.

    Args:
        model: What embeds.
        packages: As for `documentation.collect_documentation`.
        num_candidates: So many entries, nearest by cosine, are put in order by late interaction (`multi_vector_encoder`), for
            which each question embeds them again; 0 leaves them in theirs.
        batch_size: Texts that are embedded at once.
        show_progress: Show progress bars.
        cache_dir: Folder of the vectors; they are found by what embeds and by what is embedded.

    Raises:
        ValueError: A package is not installed, or candidates are wanted of a model that has no vectors of tokens,
            or fewer than 0.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        packages: list[str] | None = None,
        num_candidates: int = 0,
        batch_size: int = 64,
        show_progress: bool = True,
        cache_dir: str | Path = CACHE,
    ) -> None:
        if num_candidates < 0:
            raise ValueError(f"num_candidates={num_candidates}: at least 0, which compares no tokens")
        if num_candidates and not isinstance(model[0], Transformer):
            raise ValueError(
                f"num_candidates={num_candidates}: {type(model[0]).__name__} has no vectors of tokens to compare; take 0"
            )
        self.model, self.num_candidates, self.batch_size = model, num_candidates, batch_size
        self.tokens_model = multi_vector_encoder(model) if num_candidates else None
        self.entries = collect_documentation(show_progress, packages)
        texts = [entry.full_text for entry in self.entries]
        key = hashlib.sha256("\0".join([fingerprint(model, {}), *texts]).encode()).hexdigest()[:32]
        file = Path(cache_dir, f"{key}.npy")
        if not file.is_file():
            options = dict(normalize_embeddings=True, batch_size=batch_size, show_progress_bar=show_progress)
            vectors = model.encode_document(texts, **options)
            self.vectors = np.asarray(vectors)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                partial = file.with_suffix(".partial.npy")
                np.save(partial, self.vectors)
                partial.replace(file)  # a file under its own name is whole
            except OSError as error:
                logger.warning(f"the vectors could not be kept, so the next index takes as long again: {error}")
        else:
            self.vectors = np.load(file)

    def search(self, question: str, top_k: int = 5) -> list[Hit]:
        """Return the entries nearest to the question, best first.

        Raises:
            ValueError: The question is not a string or holds half of a surrogate pair, or `top_k` is below 1.
        """
        if top_k < 1:
            raise ValueError(f"top_k={top_k} shows nothing; take at least 1")
        check_texts([question])
        vector = self.model.encode_query([question], normalize_embeddings=True)
        (nearest,) = semantic_search(vector, self.vectors, top_k=max(top_k, self.num_candidates))
        hits = [Hit(hit["score"], self.entries[hit["corpus_id"]]) for hit in nearest]
        return (self._compare_tokens(question, hits) if self.num_candidates else hits)[:top_k]

    def _compare_tokens(self, question: str, hits: list[Hit]) -> list[Hit]:
        """The same entries with the scores of late interaction, best first."""
        documents = self.tokens_model.encode_document([hit.entry.full_text for hit in hits], batch_size=self.batch_size)
        (scores,) = self.tokens_model.similarity(self.tokens_model.encode_query([question]), documents).tolist()
        compared = [Hit(score, hit.entry) for score, hit in zip(scores, hits)]
        return sorted(compared, key=lambda hit: hit.score, reverse=True)
