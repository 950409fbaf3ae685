"""Checkpoint validation on load (complete encoder) and on save; `auto_map` on save."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

logger = logging.get_logger(__name__)


def check_encoder_is_complete(
    model,
    missing: set[str],
    unexpected: set[str],
) -> None:
    """Refuse a checkpoint with missing encoder tensors, or with only the weight or only the bias of a head layer.

    A head that is missing entirely is allowed; it is newly initialised. `missing` are the names of parameters that the checkpoint
    lacks, `unexpected` the names in the checkpoint that the model lacks.

    Raises:
        ValueError: A tensor is missing; the message names it and the solution.
    """
    source, again = model.config.name_or_path, "download or copy the checkpoint again"
    convert = f"write the published layout by neobert convert {source} DST, and load DST"
    encoder = dict(model.base_model.named_parameters())
    lost = sorted(name for name in missing if name.removeprefix(f"{model.base_model_prefix}.") in encoder)
    if lost:
        hint = f"it is no NeoBERT, or it is incomplete; check the path, or {again}"
        if any(".ffn.w1." in name for name in unexpected):
            hint = f"gate and up are separate tensors ffn.w1 and ffn.w2; {convert}"
        raise ValueError(f"{source} lacks {len(lost)} encoder tensors (first: {lost[0]}); {hint}")
    parameters = dict(model.named_parameters())
    other_half = {"weight": "bias", "bias": "weight"}
    for name in sorted(missing & parameters.keys()):
        layer, _, half = name.rpartition(".")
        other = f"{layer}.{other_half.get(half)}"
        if other in parameters and other not in missing:
            hint = again
            if layer == "decoder":
                hint = f"if it is tied to the embedding, set tie_word_embeddings=true in config.json; then {convert}"
            raise ValueError(f"{source} has {other} but no {name}, so the head is incomplete; {hint}")


# What a subclass of `NeoBERTModel` replaces to be another network.
PARTS = ("norm_class", "attention_class", "ffn_class", "embed", "rotary_table")


def check_model_type(model, is_stock: bool) -> None:
    """Raise ValueError if a variant has the model type of the stock model, as which its folder would load."""
    if not is_stock and model.config.model_type == "neobert":
        raise ValueError(
            f"model={type(model).__name__} has the model_type 'neobert', so with this package its saved folder would load as "
            "the stock model; give it a config_class with another model_type"
        )


def check_can_be_saved(model, encoder_class: type[Any]) -> None:
    """Raise ValueError if the folder would load as another network, before a file is written.

    Args:
        model: The model to save.
        encoder_class: `NeoBERTModel`, whose parts are those of the stock model.
    """
    encoders = [part for part in model.modules() if isinstance(part, encoder_class)]
    is_stock = all(getattr(type(each), name) is getattr(encoder_class, name) for each in encoders for name in PARTS)
    is_stock &= all(isinstance(each.layer_norm, encoder_class.norm_class) for each in encoders)
    is_stock &= "model_type" in vars(type(model.config))
    is_stock &= getattr(model, "encoder_class", encoder_class) is encoder_class
    check_model_type(model, is_stock)


def warn_of_frozen_layers(model) -> None:
    """Warn once about a layer of the head that is new and that training leaves at its random numbers; no adapter saves it."""
    if not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for name in model.new_layers:
        layer = model.get_submodule(name)
        layer = getattr(layer, "base_layer", layer)  # below a LoRA
        if {parameter.requires_grad for parameter in layer.parameters()} == {False}:
            logger.warning_once(
                f"The layer {name} is not in the checkpoint, so its weights are random, and it is frozen: training does not "
                "change it, and an adapter does not save it. With PEFT, name it in modules_to_save, as neobert_hf.lora_config "
                f"does; without PEFT, call model.{name}.requires_grad_(True)."
            )


def set_auto_map(model, auto_classes: dict[str, type]) -> None:
    """Set `auto_map` in the config: for every Auto class the file and the class that load the saved folder."""
    model.config.auto_map = {
        auto_class: f"{loaded.__module__.rsplit('.', 1)[-1]}.{loaded.__name__}"
        for auto_class, loaded in auto_classes.items()
    }
    if any(base.__name__ == "FSDPModule" for base in type(model).__mro__):
        # FSDP2 replaces the class of the model with a subclass that is defined in PyTorch. Without this line transformers would
        # save PyTorch's source file and name it in `auto_map`.
        type(model)._auto_class = None


# In the folder, the files of this package stand beside the one that imports them.
OF_PACKAGE = re.compile(r"^(\s*from )neobert_hf(?:\.model(?:\.(\w+))?)?(?= import )", re.MULTILINE)


def save_code(
    encoder_class: type,
    classes: Iterable[type],
    folder: str | Path,
) -> None:
    """Copy the files of this package, and the files of other places that define classes, so that they load without the package.

    Args:
        encoder_class: `NeoBERTModel`, whose file imports all files of this package.
        classes: The classes that `auto_map` names.
        folder: Folder of the saved model.
    """
    shipped = {file.stem for file in custom_object_save(encoder_class, folder)}
    for loaded in {each.__module__: each for each in classes}.values():
        copied = custom_object_save(loaded, folder) or ()  # nothing of a class in __main__, and transformers warns
        for file in copied:
            if file.stem not in shipped:
                _make_importable(file, shipped)


def _make_importable(file, shipped):
    """Let a copied file import the files of this package from beside it."""
    code = file.read_text("utf-8")
    code = OF_PACKAGE.sub(lambda found: f"{found[1]}.{found[2] or 'modeling_neobert'}", code)
    # The loader of transformers 4.57 copies only the files that this one imports.
    for name in sorted(shipped):
        if f"from .{name} import" not in code:
            code += f"from .{name} import __doc__ as _  # noqa: E402, F401\n"
    file.write_text(code, "utf-8")
