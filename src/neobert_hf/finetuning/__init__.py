"""Fine-tuning as Python calls: `Classifier`, `Tagger`, `QuestionAnswerer`, `FewShotClassifier`, and rows of users' files."""

from ..lazy import lazy_names

# The jobs need scikit-learn, seqeval or sentence-transformers, so a name is imported when it is used.
NAMES_OF = {
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
__getattr__, __dir__, __all__ = lazy_names(__name__, NAMES_OF)
