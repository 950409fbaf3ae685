"""`inference_copy`: a copy of a model for fast inference on a CPU; the copy cannot be trained or saved."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from .kernels_neobert import COPY_REMEDY, InferenceLinear, Int8Linear, has_own_hooks
from .machine_neobert import TORCH


def check_is_original(model: nn.Module, action: str) -> None:
    """Raise ValueError if the model is an inference copy, which cannot be `action`, "saved" or "trained"."""
    if model.is_inference_copy:
        raise ValueError(f"an inference copy cannot be {action}; {COPY_REMEDY}")


def check_conversion(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise ValueError if `fn`, which nn.Module applies to all tensors, converts or moves those of an inference copy."""
    if model.is_inference_copy:
        changed = fn(torch.empty(0, dtype=model.dtype, device=model.device))
        if (changed.dtype, changed.device) != (model.dtype, model.device):
            check_is_original(model, f"converted to {changed.dtype} on {changed.device}")


@torch.inference_mode(False)  # tensors that are made in inference mode could not be used outside it
def inference_copy(model: nn.Module, int8: bool = False) -> nn.Module:
    """Return a copy of a NeoBERT for fast inference on this CPU, in evaluation mode; the model itself does not change.

    NeoBERT's linear layers become `InferenceLinear`. Layers with hooks, adapters or quantized weights, and those of other modules
    stay as they are. To train, save, copy or export the copy is an error; convert or move the model before. Delete the model to
    keep its weights in memory once. FlopCounterMode does not count int8 products.

    Args:
        model: A NeoBERT on a CPU, or a model that contains one, such as a SentenceTransformer.
        int8: Compute the matrix products of the blocks in int8, and all else in float32. Accuracy decreases; docs/performance.md
            gives the numbers of the small model.

    Raises:
        ValueError: The model contains no NeoBERT, is sharded or not on a CPU; no product would be int8, or torch has none here.
    """
    encoders = [module for module in model.modules() if hasattr(module, "is_inference_copy")]
    if not encoders:
        raise ValueError(f"{type(model).__name__} contains no NeoBERT; give a NeoBERT, or a model that contains one")
    if any(hasattr(tensor, "device_mesh") for tensor in model.parameters()):
        raise ValueError("the weights are sharded over several processes; load the model without tensor parallelism")
    devices = {tensor.device.type for tensor in model.parameters()}
    if devices - {"cpu"}:
        found = ", ".join(sorted(devices))
        raise ValueError(f"inference_copy needs a model on the CPU, but it is on {found}; call model.cpu() first")
    if int8 and not (TORCH.onednn_int8_prepack and TORCH.onednn_int8_linear and torch.backends.mkldnn.is_available()):
        raise ValueError(f"torch {torch.__version__} has no int8 products on this machine; omit int8=True")
    in_blocks = {id(layer) for name, layer in model.named_modules() if "transformer_encoder" in name.split(".")}
    modules = [module for encoder in encoders for module in encoder.modules()]
    parents = [module for module in modules if type(module).__module__.endswith("_neobert")]
    layers = {}
    for layer in (child for parent in parents for child in parent.children()):
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not has_own_hooks(layer):
            is_int8 = int8 and id(layer) in in_blocks and layer.bias is None
            dtype = torch.float32 if int8 else layer.weight.dtype
            layers[id(layer)] = (Int8Linear if is_int8 else InferenceLinear)(layer, dtype)
    if int8 and not any(isinstance(layer, Int8Linear) for layer in layers.values()):
        raise ValueError(
            f"no linear layer in the blocks of this {type(model).__name__} can be int8, because all have hooks, adapters or "
            "quantized weights; merge adapters first (PEFT's merge_and_unload), or omit int8=True"
        )
    copied = copy.deepcopy(model, layers)  # takes the layers of this dict instead of copies
    copied = copied.float() if int8 else copied
    for module in copied.modules():
        if hasattr(module, "is_inference_copy"):
            module.is_inference_copy = True
    return copied.eval()
