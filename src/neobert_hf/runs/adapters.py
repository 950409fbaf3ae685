"""Adapters of PEFT for a NeoBERT."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import LoraConfig

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
NOT_OF_PEFT = ("MULTIPLE_CHOICE", "MASKED_LM")


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
    from peft import LoraConfig

    more = options.pop("modules_to_save", None) or []
    saved = [*HEAD_LAYERS[task], *([more] if isinstance(more, str) else more)]
    options = {"target_modules": list(BLOCK_LAYERS), "task_type": None if task in NOT_OF_PEFT else task, **options}
    return LoraConfig(**options, modules_to_save=saved or None)
