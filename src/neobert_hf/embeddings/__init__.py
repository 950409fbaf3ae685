"""Embeddings with sentence-transformers: models, contrastive training, rerankers, retrieval, search of files."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

# sentence-transformers is optional and slow to import, so a name is imported when it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

if TYPE_CHECKING:
    from ..checkpoints.common_form import SentenceTransformer as SentenceTransformer
    from .contrastive import (
        ContrastiveArguments as ContrastiveArguments,
        ContrastiveTrainer as ContrastiveTrainer,
        ContrastiveTrainingArguments as ContrastiveTrainingArguments,
        contrastive_loss as contrastive_loss,
        mine_negatives as mine_negatives,
        set_sampling as set_sampling,
        train_contrastive as train_contrastive,
    )
    from ..checkpoints.embedding_models import (
        adopt as adopt,
        fingerprint as fingerprint,
        hash_of_weights as hash_of_weights,
        multi_vector_encoder as multi_vector_encoder,
        open_embedding_model as open_embedding_model,
        prompt_of as prompt_of,
        sentence_transformer as sentence_transformer,
        sparse_encoder as sparse_encoder,
        warn_of_truncated as warn_of_truncated,
    )
    from .pairs import (
        hold_out as hold_out,
        read_pairs as read_pairs,
        read_sets_of_pairs as read_sets_of_pairs,
    )
    from .reranking import (
        RerankerArguments as RerankerArguments,
        RerankerTrainer as RerankerTrainer,
        RerankerTrainingArguments as RerankerTrainingArguments,
        labelled_pairs as labelled_pairs,
        open_reranker as open_reranker,
        reranking_evaluator as reranking_evaluator,
        reranking_loss as reranking_loss,
        train_reranker as train_reranker,
    )
    from .retrieval import pairs_evaluator as pairs_evaluator, pairs_evaluators as pairs_evaluators
    from .search import DocumentSearch as DocumentSearch
    from .training import PairArguments as PairArguments, open_sets as open_sets, train_and_record as train_and_record
    from .vector_files import embed_files as embed_files
