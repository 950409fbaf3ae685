"""Pretraining: from text to a model, by the paper's recipe, with exact resume."""

from ..lazy import lazy_names

# Training needs datasets, accelerate and datatrove (the extra `train`), so a name is imported when it is used.
NAMES_OF = {
    "arguments": ("CorpusArguments", "PretrainingArguments"),
    "collators": ("PackedMLMCollator",),
    "corpus": ("Corpus",),
    "documents": ("Documents", "Selection", "verify_documents"),
    "flops": ("training_flops",),
    "held_out": ("held_out_losses",),
    "optimizers": ("muon",),
    "packing": ("MixedRows", "PackedRows", "PackedStream"),
    "plans": ("PackingPlan", "PackingSettings", "make_packing_plan", "read_packing_plan", "write_packing_plan"),
    "recipes": ("RECIPES", "Recipe", "load_recipe"),
    "run_rows": ("RunRows", "open_text", "order_of_rows"),
    "tokenizing": ("tokenize", "tokenizing_tasks", "write_manifest"),
    "training": ("build_model", "pretrain"),
    "trainer": ("PretrainingTrainer", "predicted_tokens"),
    "vocabulary": ("adapt_vocabulary", "old_tokens", "write_adapted_model"),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, NAMES_OF)
