"""Pretraining: from text to a model, by the paper's recipe, with exact resume."""

from importlib import import_module

# Training needs datasets, accelerate and datatrove (the extra `train`), so a name is imported when it is used.
_MODULES = {
    "arguments": ("CorpusArguments", "PretrainingArguments"),
    "collators": ("PackedMLMCollator",),
    "corpus": ("Corpus",),
    "documents": ("Documents", "Selection", "verify_documents"),
    "flops": ("training_flops",),
    "packing": ("MixedRows", "PackedRows", "PackedStream"),
    "plans": ("PackingPlan", "PackingSettings", "make_packing_plan", "read_packing_plan", "write_packing_plan"),
    "recipes": ("RECIPES", "Recipe", "load_recipe"),
    "tokenizing": ("tokenize", "typed_options"),
    "training": ("build_model", "pretrain"),
    "trainer": ("PretrainingTrainer", "predicted_tokens"),
    "vocabulary": ("adapt_vocabulary", "old_tokens", "write_adapted_model"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
