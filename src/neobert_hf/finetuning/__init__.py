"""Fine-tuning as Python calls: `Classifier`, `Tagger`, `QuestionAnswerer`, and rows of users' files."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

# The jobs need scikit-learn, seqeval or sentence-transformers, so a name is imported when it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

if TYPE_CHECKING:
    from .answers import QuestionAnswerer as QuestionAnswerer, answer_metrics as answer_metrics
    from .arguments import (
        LabelledDataArguments as LabelledDataArguments,
        LabelledTextArguments as LabelledTextArguments,
        TaggedWordArguments as TaggedWordArguments,
    )
    from .classifier import Classifier as Classifier
    from .entities import EntityFinder as EntityFinder
    from .figures import label_metrics as label_metrics, pearson as pearson, spearman as spearman
    from .predictions import write_predictions as write_predictions
    from .questions import read_questions as read_questions
    from .rows import LabelledRows as LabelledRows
    from .summary import say_saved as say_saved
    from .tagger import Tagger as Tagger, tag_metrics as tag_metrics
    from .texts import read_labelled_texts as read_labelled_texts
    from .words import read_tagged_words as read_tagged_words
