"""Convert checkpoints of other layouts to the published one: split gate and up, tied decoder, pickles.

The layouts hold the same numbers in another order: a conversion joins and copies tensors, and changes no bit of them.
"""

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import custom_object_save

from ..files.output import check_folder, new_folder
from ..model.checkpoint_neobert import set_auto_map
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import AUTO_CLASSES, NeoBERTModel, NeoBERTPreTrainedModel
from ..model.weight_files_neobert import canonical_name, check_names
from .network import check_encoder, class_of, lost_layers, unknown_tensors
from .saved_model import WEIGHTS, SavedModel, kind_of, read_object
from .tokenizer import keep_known_settings, load_tokenizer
from .trust import holds_tokenizer, resolve

PICKLES = ("pytorch_model*.bin", "state_dict.pt")  # of a repository on the Hub, beside the data files
NESTED = ("module", "state_dict", "model_state_dict", "model")  # where trainings put the weights
FROM_WEIGHTS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")  # keys of config.json
EMBEDDING = "model.encoder.weight"
Tensors = dict[str, torch.Tensor]


def convert(source: str | Path, out: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """Write a checkpoint in the published layout, with config, tokenizer and code.

    Args:
        source: Folder or Hub id. Pickled weights are read with `weights_only=True`.
        out: Folder to write, new or empty. It appears when it is complete.
        base: Folder or Hub id of the model from which config and tokenizer come, if the source has none.

    Returns:
        The folder, the layout of the source (see `SavedModel.layout`), and in `added` what the source lacked.

    Raises:
        ValueError: The source is no NeoBERT or incomplete; the message names the solution.
        OSError: `out` is not empty, or a file cannot be read or written.
    """
    saved, out = SavedModel(source, more=PICKLES), Path(out)
    folder = saved.folder
    if (folder / "modules.json").exists():
        raise ValueError(
            f"{folder} holds more than a model, the modules of sentence-transformers; copy config, weights and tokenizer to a "
            "folder of their own, convert that, and copy the result back"
        )
    check_folder(out)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{out} is inside the source, which is never changed; choose another folder")
    base = None if base is None else resolve(base)
    tokenizer_folder = find_tokenizer(folder, base)
    if base is not None and not saved.config:
        saved.config = {**read_object(base / "config.json"), "architectures": None}
    tensors = as_published(read_weights(saved))
    model, added = describe_model(saved, tensors)
    tokenizer = load_tokenizer(str(tokenizer_folder), model.config.vocab_size, model.config)

    with new_folder(out) as built:
        save_file(tensors, built / WEIGHTS, metadata={"format": "pt"})
        tokenizer.save_pretrained(built)
        if (folder / "README.md").is_file():
            shutil.copy(folder / "README.md", built)
        custom_object_save(NeoBERTModel, built)
        set_auto_map(model, model.auto_classes)
        model.config.save_pretrained(built)
    return {"folder": str(out), "from": saved.layout, "added": added}


def find_tokenizer(folder: Path, base: Path | None) -> Path:
    """Return the folder of the tokenizer: the source, its folder `tokenizer`, as the fork's training writes it, or `base`."""
    places = (folder, folder / "tokenizer", *([base] if base else []))
    if found := next(filter(holds_tokenizer, places), None):
        return found
    raise ValueError(f"{folder} holds no tokenizer; copy that of its model there, or name a model that has it as base")


def read_weights(saved: SavedModel) -> Tensors:
    """Return the tensors of a checkpoint by their names in its files.

    Raises:
        OSError: There are none, a pickle cannot be read with `weights_only=True`, or two hold the same tensor.
    """
    if not saved.files:
        saved.check()  # which says what is there
        raise OSError(f"{saved.source} holds no weights; give a folder that holds them")
    weights: Tensors = {}
    storages = set()
    for file in saved.files:
        content = load_file(file) if saved.tensors else read_pickle(file)
        twice = weights.keys() & content.keys()
        if twice:
            raise OSError(f"{file} and another file hold {min(twice)}; move one of them away")
        for name, tensor in content.items():
            storage = tensor.untyped_storage().data_ptr()
            weights[name] = tensor.clone() if storage in storages else tensor  # safetensors shares no memory
            storages.add(storage)
    return weights


def read_pickle(file: Path) -> Tensors:
    """Return the tensors of a file that torch.save wrote, by name; nothing else is unpickled.

    Raises:
        OSError: It holds something else, or is damaged.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        for name in NESTED:
            if isinstance(content, dict) and isinstance(content.get(name), dict):
                content = content[name]
        types = {(type(name), isinstance(value, torch.Tensor)) for name, value in content.items()}
        if types != {(str, True)}:
            raise ValueError("it is no dictionary of tensors")
    except Exception as error:  # whatever a damaged file leads to
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds objects of {found[1]}" if found else str(error).partition("\n")[0]
        raise OSError(
            f"{file} cannot be read with weights_only=True ({reason}); download it again; or, if you trust it, load it where it "
            "was trained, and save the weights alone: torch.save(model.state_dict(), 'state_dict.pt')"
        ) from error
    return content


def as_published(tensors: Tensors) -> Tensors:
    """Name the tensors as published, and fuse each gate `w1` with its up `w2`.

    Raises:
        ValueError: A tensor exists twice, or gate and up do not fit.
    """
    check_names((name, "the checkpoint") for name in tensors)
    found = {canonical_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    for name in [name for name in found if name.endswith(".ffn.w1.weight")]:
        gate, up = found.pop(name), found.pop(name.replace(".w1.", ".w2."), None)
        fused = name.replace(".w1.", ".w12.")
        if up is None or (up.dtype, up.shape) != (gate.dtype, gate.shape) or fused in found:
            raise ValueError(
                f"{name} has no ffn.w2 of its shape, or stands beside {fused}; the checkpoint is incomplete"
            )
        found[fused] = torch.cat((gate, up))
    return found


def describe_model(saved: SavedModel, tensors: Tensors) -> tuple[NeoBERTPreTrainedModel, list[str]]:
    """Complete the decoder in `tensors` and compare them with the config.

    Returns:
        The model with these tensors, and what was added to them, in words.

    Raises:
        ValueError: The config is of another model, or a tensor is missing, unknown or of another shape.
    """
    folder = saved.folder
    is_tied = saved.config.get("tie_word_embeddings")
    if is_tied is None and "decoder.weight" not in tensors:
        # The code of the fork ties by default, and transformers 4 does not write this default.
        is_tied = any(".ffn.w1." in name for name in saved.tensors)
    if not saved.config:
        raise ValueError(
            f"{folder} holds no config.json; copy that of its model there, or name a model that has it as base"
        )
    config = NeoBERTConfig.from_dict({k: value for k, value in saved.config.items() if k not in FROM_WEIGHTS})
    keep_known_settings(config, folder)
    check_encoder(config, tensors, folder)
    model_class = find_class(config, tensors)
    added = complete_decoder(tensors, is_tied) if model_class is AUTO_CLASSES["AutoModelForMaskedLM"] else []
    with torch.device("meta"):
        model = model_class(config)
    kind = kind_of(model_class.__name__)
    for find, fault in ((lost_layers, "lacks"), (unknown_tensors, "holds unknown tensors:")):
        names = find(config, tensors, kind)
        if names:
            raise ValueError(
                f"{folder} {fault} {names[0]} of a {model_class.__name__}; it is incomplete, or its config.json is "
                "that of another model"
            )
    config.dtype = tensors[EMBEDDING].dtype
    config.architectures = [model_class.__name__]
    return model, added


def find_class(config: NeoBERTConfig, tensors: Tensors) -> type[NeoBERTPreTrainedModel]:
    """Return the class that the config names, otherwise that of the head in the weights."""
    if config.architectures:
        model_class = class_of(str(config.architectures[0]))
        if model_class is None:
            raise ValueError(f"architectures={config.architectures} is no class of NeoBERT; correct config.json")
        return model_class
    if "classifier.weight" in tensors:
        config.num_labels = tensors["classifier.weight"].shape[0]
        return AUTO_CLASSES["AutoModelForSequenceClassification"]
    return AUTO_CLASSES["AutoModelForMaskedLM" if "decoder.weight" in tensors else "AutoModel"]


def complete_decoder(tensors: Tensors, is_tied: bool | None) -> list[str]:
    """Write a tied decoder out as an own one, and a missing bias as zeros; return what was added, in words.

    Args:
        tensors: Tensors by published name; changed.
        is_tied: Whether the decoder is the embedding; None if it is not known, and the decoder is there.

    Raises:
        ValueError: The config says that the decoder is tied, but it has numbers of its own.
    """
    embedding, decoder, added = tensors.get(EMBEDDING), tensors.get("decoder.weight"), []
    if embedding is None:
        return []
    if decoder is None and is_tied:
        tensors["decoder.weight"] = decoder = embedding.clone()
        added.append("decoder.weight: the embedding, to which it was tied")
    elif decoder is not None and is_tied and not torch.equal(embedding.view(torch.uint8), decoder.view(torch.uint8)):
        raise ValueError(
            "tie_word_embeddings=True, but decoder.weight is not the embedding; set it to false in config.json to keep the "
            "decoder, or remove decoder.weight"
        )
    if decoder is not None and "decoder.bias" not in tensors:
        tensors["decoder.bias"] = decoder.new_zeros(len(decoder))
        added.append("decoder.bias: zeros")
    return added
