"""NeoBERT in the Hugging Face ecosystem. Importing this package registers the model with the Auto classes.

The jobs are in namespaces, each imported when it is used: `neobert_hf.finetuning`, `embeddings`, `pretraining`, `export`, `hub`,
`runs`. So are `Classifier`, `Tagger` and `DocumentSearch`. Where torch is not installed, only `neobert_hf.export.OnnxModel` and
`__version__` exist.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "AUTO_CLASSES",
    "MINI_MODEL_PATH",
    "Classifier",
    "DocumentSearch",
    "NeoBERT",
    "NeoBERTConfig",
    "NeoBERTForMaskedLM",
    "NeoBERTForMultipleChoice",
    "NeoBERTForQuestionAnswering",
    "NeoBERTForSequenceClassification",
    "NeoBERTForTokenClassification",
    "NeoBERTLMHead",
    "NeoBERTModel",
    "PackedMLMCollator",
    "PackedStream",
    "Tagger",
    "__version__",
    "best_dtype",
    "inference_copy",
    "lora_config",
    "multi_vector_encoder",
    "open_adapter",
    "save_adapter",
    "sentence_transformer",
    "sparse_encoder",
    "tune_allocator",
]

NAMESPACE_OF = {"Classifier": "finetuning", "DocumentSearch": "embeddings", "Tagger": "finetuning"}  # which need extras
NAMESPACES = ("embeddings", "export", "files", "finetuning", "hub", "pretraining", "runs")
if TYPE_CHECKING:  # the same names, for editors and type checkers
    from . import (
        embeddings as embeddings,
        export as export,
        files as files,
        finetuning as finetuning,
        hub as hub,
        pretraining as pretraining,
        runs as runs,
    )
    from .embeddings import DocumentSearch as DocumentSearch
    from .finetuning import Classifier as Classifier, Tagger as Tagger


def __getattr__(name: str):
    if name in NAMESPACES:
        return import_module(f".{name}", __name__)
    if name in __all__ and find_spec("torch") is None:
        raise ImportError(f"neobert_hf.{name} needs torch; install the package with its dependencies", name="torch")
    if name in NAMESPACE_OF:
        return getattr(import_module(f".{NAMESPACE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if find_spec("torch") is not None:
    import transformers

    from .embeddings.models import multi_vector_encoder, sentence_transformer, sparse_encoder
    from .files.trust import FolderTokenizer
    from .model.configuration_neobert import NeoBERTConfig
    from .model.inference_neobert import inference_copy
    from .model.machine_neobert import best_dtype
    from .model.modeling_neobert import (
        AUTO_CLASSES,
        NeoBERT,
        NeoBERTForMaskedLM,
        NeoBERTForMultipleChoice,
        NeoBERTForQuestionAnswering,
        NeoBERTForSequenceClassification,
        NeoBERTForTokenClassification,
        NeoBERTLMHead,
        NeoBERTModel,
    )
    from .pretraining.collators import PackedMLMCollator
    from .pretraining.packing import PackedStream
    from .runs import MINI_MODEL_PATH
    from .runs.adapters import lora_config, open_adapter, save_adapter
    from .runs.allocator import tune_allocator

    transformers.AutoConfig.register(NeoBERTConfig.model_type, NeoBERTConfig, exist_ok=True)
    for _auto_class, _model_class in AUTO_CLASSES.items():
        if _auto_class != "AutoConfig":
            getattr(transformers, _auto_class).register(NeoBERTConfig, _model_class, exist_ok=True)
    transformers.AutoTokenizer.register(NeoBERTConfig, fast_tokenizer_class=FolderTokenizer, exist_ok=True)
