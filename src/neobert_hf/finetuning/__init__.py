"""Fine-tuning as Python calls: `Classifier`, `Tagger`, `QuestionAnswerer`, `FewShotClassifier`, and rows of users' files."""

from importlib import import_module

# The jobs need scikit-learn, seqeval or sentence-transformers, so a name is imported when it is used.
_MODULES = {
    "answers": ("QuestionAnswerer", "answer_metrics"),
    "classifier": ("Classifier", "label_metrics", "pearson", "spearman"),
    "few_shot": ("FewShotArguments", "FewShotClassifier", "FewShotTrainingArguments", "add_head"),
    "predictions": ("write_predictions",),
    "questions": ("read_questions",),
    "rows": ("LabelledDataArguments", "LabelledRows"),
    "tagger": ("Tagger", "tag_metrics"),
    "texts": ("LabelledTextArguments", "read_labelled_texts"),
    "words": ("TaggedWordArguments", "read_tagged_words"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
