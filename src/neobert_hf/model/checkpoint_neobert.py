"""Checkpoint validation on load (complete encoder) and on save; `auto_map` on save."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging

logger = logging.get_logger(__name__)


def check_encoder_is_complete(model, missing: set[str], unexpected: set[str]) -> None:
    """Refuse a checkpoint with missing encoder tensors, or with only the weight or only the bias of a head layer.

    A head that is missing entirely is allowed; it is newly initialised. `missing` are the names of parameters that the checkpoint
    lacks, `unexpected` the names in the checkpoint that the model lacks.

    Raises:
        ValueError: A tensor is missing; the message names it and the solution.
    """
    source, again = model.config.name_or_path, "download or copy the checkpoint again"
    convert = f"write the published layout by neobert convert {source} DST, and load DST"
    encoder = {name for name, _ in model.base_model.named_parameters()}
    if lost := sorted(name for name in missing if name.removeprefix(f"{model.base_model_prefix}.") in encoder):
        hint = f"it is no NeoBERT, or it is incomplete; check the path, or {again}"
        if any(".ffn.w1." in name for name in unexpected):
            hint = f"gate and up are separate tensors ffn.w1 and ffn.w2; {convert}"
        raise ValueError(f"{source} lacks {len(lost)} encoder tensors (first: {lost[0]}); {hint}")
    parameters = {name for name, _ in model.named_parameters()}
    for name in sorted(missing & parameters):
        layer, _, kind = name.rpartition(".")
        other = f"{layer}.{'bias' if kind == 'weight' else 'weight'}"
        if other in parameters - missing:
            hint = again
            if layer == "decoder":
                hint = f"if it is tied to the embedding, set tie_word_embeddings=true in config.json; then {convert}"
            raise ValueError(f"{source} has {other} but no {name}, so the head is incomplete; {hint}")


def check_parallel_shape(model) -> None:
    """Raise ValueError if the processes of tensor parallelism do not divide the heads or the feed-forward width."""
    for name in ("num_attention_heads", "swiglu_width"):
        number, size = getattr(model.config, name), model.tp_size or 1
        if number % size:
            raise ValueError(
                f"{name}={number} is not divisible by the {size} processes of tensor parallelism; choose a number of processes "
                "that divides it"
            )


def check_vocabulary(layers: dict[str, torch.nn.Module], vocab_size: int) -> None:
    """Raise ValueError if an embedding or a decoder has another number of tokens than the config.

    `resize_token_embeddings` of an encoder inside another model changes the config of both, but not the layers around it. An
    adapter or a quantized layer without a size is not checked.
    """
    for name, layer in layers.items():
        size = getattr(layer, "num_embeddings", getattr(layer, "out_features", vocab_size))
        if size != vocab_size:
            raise ValueError(
                f"{name} has {size} tokens, but config.vocab_size={vocab_size}; call resize_token_embeddings of the whole "
                "model, not of an encoder inside it"
            )


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
    """Raise ValueError if vocabulary and config differ, or if the folder would load as another network; before a file is written.

    Args:
        model: The model to save.
        encoder_class: `NeoBERTModel`, whose parts are those of the stock model.
    """
    encoders = [part for part in model.modules() if isinstance(part, encoder_class)]
    is_stock = all(getattr(type(each), name) is getattr(encoder_class, name) for each in encoders for name in PARTS)
    is_stock &= all(isinstance(each.layer_norm, encoder_class.norm_class) for each in encoders)
    is_stock &= "model_type" in vars(type(model.config))
    check_model_type(model, is_stock and getattr(model, "encoder_class", encoder_class) is encoder_class)
    for part in model.modules():
        # A model of another type inside a subclass has a vocabulary of its own.
        if isinstance(part, PreTrainedModel) and part.config.model_type == model.config.model_type:
            ends = (part.get_input_embeddings(), part.get_output_embeddings())
            layers = {name: layer for name, layer in model.named_modules() if any(layer is end for end in ends)}
            check_vocabulary(layers, part.config.vocab_size)


def warn_of_frozen_layers(model) -> None:
    """Warn once about a layer of the head that is new and that training leaves at its random numbers; no adapter saves it."""
    if not (model.new_layers and model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
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


def save_code(encoder_class: type, classes: Iterable[type], folder: str | Path) -> None:
    """Copy the files of this package, and the files of other places that define classes, so that they load without the package.

    Args:
        encoder_class: `NeoBERTModel`, whose file imports all files of this package.
        classes: The classes that `auto_map` names.
        folder: Folder of the saved model.
    """
    shipped = {file.stem for file in custom_object_save(encoder_class, folder)}
    for loaded in {each.__module__: each for each in classes}.values():
        copied = custom_object_save(loaded, folder) or ()  # nothing of a class in __main__, and transformers warns
        for file in (file for file in copied if file.stem not in shipped):
            code = OF_PACKAGE.sub(lambda found: f"{found[1]}.{found[2] or 'modeling_neobert'}", file.read_text("utf-8"))
            # The loader of transformers 4.57 copies only the files that this one imports.
            missing = [name for name in sorted(shipped) if f"from .{name} import" not in code]
            code += "".join(f"from .{name} import __doc__ as _  # noqa: E402, F401\n" for name in missing)
            file.write_text(code, "utf-8")
