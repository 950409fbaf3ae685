"""Pretraining: from text to a model, by the paper's recipe, with exact resume."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

# Training needs datasets, accelerate and datatrove (the extra `train`), so a name is imported when it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

if TYPE_CHECKING:
    from .arguments import CorpusArguments as CorpusArguments, PretrainingArguments as PretrainingArguments
    from .collators import PackedMLMCollator as PackedMLMCollator
    from .corpus import Corpus as Corpus
    from .documents import Documents as Documents, Selection as Selection
    from .optimizers import muon as muon
    from .packing import MixedRows as MixedRows, PackedRows as PackedRows, PackedStream as PackedStream
    from .plans import (
        PackingPlan as PackingPlan,
        PackingSettings as PackingSettings,
        make_packing_plan as make_packing_plan,
        read_packing_plan as read_packing_plan,
        write_packing_plan as write_packing_plan,
    )
    from .recipes import RECIPES as RECIPES, Recipe as Recipe, load_recipe as load_recipe
    from .run_rows import RunRows as RunRows, open_text as open_text, order_of_rows as order_of_rows
    from .summary import say_pretrained as say_pretrained
    from .tokenizing import tokenize as tokenize, tokenizing_tasks as tokenizing_tasks, write_manifest as write_manifest
    from .training import build_model as build_model, pretrain as pretrain
    from .trainer import PretrainingTrainer as PretrainingTrainer, predicted_tokens as predicted_tokens
    from .vocabulary import (
        adapt_vocabulary as adapt_vocabulary,
        old_tokens as old_tokens,
        write_adapted_model as write_adapted_model,
    )
