"""Adapters of PEFT for a NeoBERT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..data.lengths import as_list
from ..files.output import saving, write_json
from .saved_model import BASE_FILE, SavedModel
from .trust import check_source

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

WRITES_CARD = "create_or_update_model_card"  # a method of PEFT, whose card names folders of this machine
BLOCK_LAYERS = ("qkv", "wo", "w12", "w3")
# The layers of the head that PEFT trains and saves whole. The checkpoint of a bare encoder lacks them; the decoder it has.
HEAD_LAYERS = {
    "SEQ_CLS": ("dense", "classifier"),
    "MULTIPLE_CHOICE": ("dense", "classifier"),
    "TOKEN_CLS": ("classifier",),
    "QUESTION_ANS": ("qa_outputs",),
    "MASKED_LM": (),
    "FEATURE_EXTRACTION": (),
}


def lora_config(task: str, **options) -> LoraConfig:
    """Return PEFT's configuration of LoRA (arXiv 2106.09685) for all matrices of the blocks, with the head trained and saved.

    PEFT alone saves `classifier` and not `dense`, the layer before it, which then has new random numbers after loading.

    Args:
        task: SEQ_CLS, MULTIPLE_CHOICE, TOKEN_CLS, QUESTION_ANS, MASKED_LM or FEATURE_EXTRACTION.
        options: Arguments of `peft.LoraConfig`, such as `r` and `lora_alpha`. `modules_to_save` adds layers to those of the head,
            for example `["decoder"]` for a decoder that is new.

    Raises:
        ValueError: The task is unknown.
        ImportError: PEFT is not installed.
    """
    if task not in HEAD_LAYERS:
        raise ValueError(f"task={task!r} is not one of {', '.join(HEAD_LAYERS)}")
    from peft import LoraConfig, TaskType

    saved = [*HEAD_LAYERS[task], *as_list(options.pop("modules_to_save", None))]
    known = task if task in TaskType.__members__ else None  # PEFT lacks two of the tasks
    options = {"target_modules": list(BLOCK_LAYERS), "task_type": known, **options}
    return LoraConfig(**options, modules_to_save=saved or None)


def save_adapter(model: PeftModel, folder: str | Path) -> None:
    """Save an adapter, and what `open_adapter` needs besides: the names of the classes, and a sample of the base model.

    Raises:
        FileExistsError: The folder holds a whole model, which nothing would open beside an adapter.
        OSError: A file cannot be written.
    """
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "modules.json"):
        if Path(folder, name).exists():
            raise FileExistsError(f"{folder} holds {name} of a whole model; choose another folder")
    base = model.get_base_model()
    config = base.config
    labels = {"id2label": config.id2label, "problem_type": config.problem_type}
    labels["label_type"] = getattr(config, "label_type", None)
    vars(model)[WRITES_CARD] = lambda folder: None
    try:
        with saving(Path(folder)):
            model.save_pretrained(folder)
    finally:
        del vars(model)[WRITES_CARD]
    write_json(Path(folder, BASE_FILE), {**labels, **_sample(base)})


def open_adapter(model_class: type[Any], folder: str | Path, base: str | None = None, **options) -> PeftModel:
    """Put an adapter of `save_adapter` on its base model, with the names of its classes.

    Args:
        model_class: Class of the base model, such as `AutoModelForSequenceClassification`.
        folder: Folder of the adapter.
        base: Folder or Hub id of the base model; by default that of the training.
        options: Other arguments of `model_class.from_pretrained`.

    Raises:
        ValueError: The base model does not exist, or it is another than that of the training.
        OSError: The folder holds no such adapter, or the base model cannot be read.
        ImportError: PEFT is not installed.
    """
    from peft import PeftModel

    saved = SavedModel(folder)
    names = saved.labels
    base = base or saved.base
    check_source(base)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    model = model_class.from_pretrained(base, problem_type=saved.problem_type, **labels, **options)
    set_label_type(model.config, saved.label_type)
    for name, numbers in _sample(model).items():
        of_training = saved.record[name]
        if None in (numbers, of_training):
            continue
        if not np.allclose(numbers, of_training, rtol=0.01, atol=1e-4):  # the rounding of bfloat16
            fault = f"the adapter {folder} was trained on {saved.base}, and {base} is another model"
            raise ValueError(f"{fault}; give the former")
    return PeftModel.from_pretrained(model, folder)


def set_label_type(config: PretrainedConfig, label_type: str | None) -> None:
    """Let a config say that the names of the classes are "int", "float" or "bool"; None for texts."""
    vars(config).pop("label_type", None)  # of an earlier training
    if label_type:
        config.label_type = label_type


def _sample(model: PreTrainedModel) -> dict:
    """16 numbers of the embedding, and of a block, which identify a model in every dtype.

    A block that is quantized has no such numbers: None.
    """

    def numbers(weight: Tensor) -> list[float] | None:
        rows = np.linspace(0, len(weight) - 1, 16).astype(int)
        return [weight[row, row % weight.shape[1]].item() for row in rows] if weight.is_floating_point() else None

    layer = model.get_input_embeddings()
    embedding = getattr(layer, "original_module", layer).weight  # below the copy that an adapter trains
    names = (".wo.weight", ".wo.base_layer.weight")  # without and with an adapter
    block = next(weight for name, weight in model.named_parameters() if name.endswith(names))
    return {"embedding_sample": numbers(embedding), "block_sample": numbers(block)}
