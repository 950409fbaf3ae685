"""Embeddings with sentence-transformers: models, contrastive training, rerankers, retrieval, search of files."""

from ..lazy import lazy_names

# sentence-transformers is optional and slow to import, so a name is imported when it is used.
NAMES_OF = {
    "common_form": ("SentenceTransformer",),
    "contrastive": (
        *("ContrastiveArguments", "ContrastiveTrainer", "ContrastiveTrainingArguments"),
        *("contrastive_loss", "mine_negatives", "read_prompts", "set_sampling", "train_contrastive"),
    ),
    "models": (
        *("adopt", "fingerprint", "hash_of_weights", "multi_vector_encoder", "open_embedding_model"),
        *("prompt_of", "sentence_transformer", "sparse_encoder", "warn_of_truncated"),
    ),
    "pairs": ("hold_out", "read_pairs", "read_sets_of_pairs", "read_yaml"),
    "reranking": (
        *("RerankerArguments", "RerankerTrainer", "RerankerTrainingArguments", "labelled_pairs", "open_reranker"),
        *("reranking_evaluator", "reranking_loss", "train_reranker"),
    ),
    "retrieval": ("pairs_evaluator", "pairs_evaluators"),
    "search": ("DocumentSearch",),
    "training": ("PairArguments", "open_sets", "train_and_record"),
    "vector_files": ("embed_files",),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, NAMES_OF)
