"""Embedding models in the form that sentence-transformers 3.4 to 6.2 and other tools read, whichever call saves them.

sentence-transformers 6 saves names and settings that older versions refuse, and reads the older ones without a warning. Servers
such as text-embeddings-inference and infinity read the older ones too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import sentence_transformers
import torch
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights

MODULES = (Transformer, WordWeights, Pooling, Dense, Normalize)
# What a module reads and writes, after the pooling and before it.
EMBEDDING, TOKENS = "sentence_embedding", "token_embeddings"
TEXT = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": TOKENS,
}
# Names of the modes of a pooling in older settings, behind "pooling_mode_".
POOLING_FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


class SentenceTransformer(sentence_transformers.SentenceTransformer):
    """The class of the same name in sentence-transformers, saved in the form of this module."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if any(isinstance(module, WordWeights) for module in self):
            self[0].unpad_inputs = False  # the weights of the tokens need the attention mask
            for module in self:
                if isinstance(module, WordWeights):
                    module.requires_grad_(False)  # they are counts; near 0, as of [CLS], a step may change their sign
                elif isinstance(module, Dense) and module.module_input_name == EMBEDDING:
                    module.float()  # the weighted mean is float32, also after an encoder in bf16

    def save(self, path: str, *args, **kwargs) -> None:
        """Save the model as sentence-transformers does, then rewrite what other versions read in another form."""
        for module in self:
            if isinstance(module, WordWeights):  # it is loaded from these settings, not from its weights
                weights = module.emb_layer.weight.detach().float()[:, 0].cpu().numpy()
                module.word_weights = {token: float(str(weight)) for token, weight in zip(module.vocab, weights)}
        super().save(path, *args, **kwargs)
        if has_common_form(self):
            write_common_form(self, Path(path))


def has_common_form(model: sentence_transformers.SentenceTransformer) -> bool:
    """Whether the model has this form: texts only, one pooling, no newer option, before the pooling no two modules of a kind.

    A Dense before the pooling has it too, although it needs sentence-transformers 5.4.
    """
    first, *others = (module.get_config_dict() for module in model)
    kinds = [type(module) for module in model]
    before = kinds[: kinds.index(Pooling)] if Pooling in kinds else kinds
    names = [{each.get(f"module_{side}_name", EMBEDDING) for side in ("input", "output")} for each in others]
    return (
        all(kind in MODULES for kind in kinds)
        and len(before) == len(set(before))
        and {name: value for name, value in first.items() if name != "unpad_inputs"} == TEXT
        and [type(each["pooling_mode"]) for each in others if "pooling_mode" in each] == [str]
        and not any("use_residual" in each for each in others)
        and all(each in ({EMBEDDING}, {TOKENS}) for each in names)
    )


def write_common_form(model: sentence_transformers.SentenceTransformer, folder: Path) -> None:
    """Rewrite names and settings of a saved model. The pooling gets the path `1_Pooling`, which other tools read by name."""
    saved = json.loads((folder / "modules.json").read_text("utf-8"))
    kinds = [type(module).__name__ for module in model]
    for index, (module, kind, entry) in enumerate(zip(model, kinds, saved)):
        entry["type"] = f"sentence_transformers.models.{kind}"
        if index == 0:
            settings = {"max_seq_length": model.max_seq_length, "do_lower_case": False}
            (folder / "sentence_bert_config.json").write_text(json.dumps(settings, indent=2), "utf-8")
            continue
        before, entry["path"] = entry["path"], f"{max(index + 1 - kinds.index('Pooling'), 0)}_{kind}"
        if before != entry["path"]:
            shutil.rmtree(folder / entry["path"], ignore_errors=True)  # of an earlier save
            (folder / before).rename(folder / entry["path"])
        if settings := older_settings(module):
            separators = (",", ":") if kind == "WordWeights" else None  # a vocabulary is long
            (folder / entry["path"] / "config.json").write_text(json.dumps(settings, separators=separators), "utf-8")
    (folder / "modules.json").write_text(json.dumps(saved, indent=2), "utf-8")


def older_settings(module: torch.nn.Module) -> dict:
    """Return the settings of a module under the names that all versions read."""
    settings = module.get_config_dict()
    if isinstance(module, Pooling):
        names = [module.pooling_mode + ending for ending in ("", "_token", "_tokens")]
        flags = {f"pooling_mode_{flag}": flag in names for flag in POOLING_FLAGS}
        flags["include_prompt"] = module.include_prompt
        return {"word_embedding_dimension": module.embedding_dimension, **flags}
    # Before 5.4 a Dense stood after the pooling, and its settings had no names; those versions refuse the names.
    return {name: value for name, value in settings.items() if not name.startswith("module_") or value == TOKENS}
