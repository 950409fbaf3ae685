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
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("lora_config() needs the package peft; install it: pip install -e '.[train]'") from error
    more = options.pop("modules_to_save", None) or []
    if isinstance(more, str):
        raise ValueError(f"modules_to_save={more!r} must be a list of names, such as [{more!r}]")
    head = [*HEAD_LAYERS[task], *more]
    options = {"target_modules": list(BLOCK_LAYERS), "task_type": None if task in NOT_OF_PEFT else task, **options}
    return LoraConfig(**options, modules_to_save=head or None)
