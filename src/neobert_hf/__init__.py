"""NeoBERT in the Hugging Face ecosystem. Importing this package registers the model with the Auto classes.

The jobs are in namespaces, each imported when it is used: `neobert_hf.finetuning`, `embeddings`, `pretraining`, `export`,
`checkpoints`, `data`, `runs`. Where torch is not installed, only `neobert_hf.export.OnnxModel` and `__version__` exist.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import neobert_cli

from .checkpoints.registration import register
from .lazy import lazy_names

__version__ = "0.1.0"

NAMESPACES = ("checkpoints", "data", "embeddings", "export", "files", "finetuning", "pretraining", "runs")
# Some need an extra, so a name is imported when it is used.
_get, _, __all__ = lazy_names(__name__, __file__)
__all__ += ["__version__"]

if TYPE_CHECKING:
    from . import (
        checkpoints as checkpoints,
        data as data,
        embeddings as embeddings,
        export as export,
        files as files,
        finetuning as finetuning,
        pretraining as pretraining,
        runs as runs,
    )
    from .embeddings import DocumentSearch as DocumentSearch
    from .checkpoints.embedding_models import (
        multi_vector_encoder as multi_vector_encoder,
        sentence_transformer as sentence_transformer,
        sparse_encoder as sparse_encoder,
    )
    from .finetuning import Classifier as Classifier, Tagger as Tagger
    from .model.configuration_neobert import NeoBERTConfig as NeoBERTConfig
    from .model.inference_neobert import inference_copy as inference_copy
    from .model.machine_neobert import best_dtype as best_dtype
    from .model.modeling_neobert import (
        AUTO_CLASSES as AUTO_CLASSES,
        NeoBERT as NeoBERT,
        NeoBERTForMaskedLM as NeoBERTForMaskedLM,
        NeoBERTForMultipleChoice as NeoBERTForMultipleChoice,
        NeoBERTForQuestionAnswering as NeoBERTForQuestionAnswering,
        NeoBERTForSequenceClassification as NeoBERTForSequenceClassification,
        NeoBERTForTokenClassification as NeoBERTForTokenClassification,
        NeoBERTLMHead as NeoBERTLMHead,
        NeoBERTModel as NeoBERTModel,
    )
    from .pretraining.collators import PackedMLMCollator as PackedMLMCollator
    from .pretraining.packing import PackedStream as PackedStream
    from .checkpoints import MINI_MODEL_PATH as MINI_MODEL_PATH
    from .checkpoints.adapters import (
        lora_config as lora_config,
        open_adapter as open_adapter,
        save_adapter as save_adapter,
    )
    from .runs.allocator import tune_allocator as tune_allocator


def __getattr__(name: str):
    if name in NAMESPACES:
        return import_module(f".{name}", __name__)
    if name in __all__ and find_spec("torch") is None:
        raise ImportError(f"neobert_hf.{name} needs torch; install the package with its dependencies", name="torch")
    return _get(name)


def __dir__() -> list[str]:
    return [*__all__, *NAMESPACES]


if not neobert_cli.is_checking:
    register()
