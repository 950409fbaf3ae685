"""`inference_copy`: a copy of a model for fast inference; the copy cannot be trained or saved."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from .blocks_neobert import NeoBERTBlock
from .gpu_neobert import make_compiled
from .invariant_neobert import InvariantLinear, make_invariant, pad_columns
from .kernels_neobert import COPY_REMEDY, InferenceLinear, Int8Linear, has_own_hooks
from .machine_neobert import TORCH, best_dtype, has_invariant_products


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
def inference_copy(
    model: nn.Module, int8: bool = False, batch_invariant: bool = False, cuda_graphs: bool = True
) -> nn.Module:
    """Return a copy of a NeoBERT for fast inference on its device, in evaluation mode; the model itself does not change.

    NeoBERT's linear layers become `InferenceLinear`. Layers with hooks, adapters or quantized weights, and those of other modules
    if `batch_invariant` is not set, stay as they are. To train, save, copy or export the copy is an error; convert or move the
    model before. Delete the model to keep its weights in memory once.

    On a CPU, matrices are in the order of oneDNN where that is faster. On CUDA, blocks are compiled, which takes some seconds at
    the first call, and inputs of up to 4,096 tokens run as CUDA graphs. Blocks with hooks or adapters run as in the model, and so
    do all with `output_attentions`, autograd or autocast.

    Args:
        model: A NeoBERT on a CPU or a GPU, or a model that contains one, such as a SentenceTransformer.
        int8: On a CPU: compute the matrix products of the blocks in int8, and all else in float32. Accuracy decreases;
            docs/performance.md gives the numbers of the small model. FlopCounterMode does not count int8 products.
        batch_invariant: On a CPU: a text gets the same vector, bit by bit, alone and in any batch. Attention is SDPA in float32
            and padding is removed, whatever the config says; a SentenceTransformer pads to a multiple of 64 columns. Linear
            layers and activations of torch.nn in other modules, such as Dense, are computed in the same way. Other layers, those
            with hooks or adapters, and blocks of a variant may still differ. docs/performance.md says where this was tested.
        cuda_graphs: On CUDA: whether inputs of up to 4,096 tokens run as CUDA graphs where attention is FlashAttention or
            torch_varlen, and no block is a variant's. The first input of a size takes 0.1 s more.

    Raises:
        ValueError: The model contains no NeoBERT, is sharded, on several devices, or neither on a CPU nor on CUDA; nothing of it
            would be int8, or compiled; this device has no int8 or batch-invariant products in torch, or no bfloat16.
    """
    encoders = [module for module in model.modules() if hasattr(module, "is_inference_copy")]
    if not encoders:
        raise ValueError(f"{type(model).__name__} contains no NeoBERT; give a NeoBERT, or a model that contains one")
    if any(hasattr(tensor, "device_mesh") for tensor in model.parameters()):
        raise ValueError("the weights are sharded over several processes; load the model without tensor parallelism")
    device, *others = {tensor.device for tensor in model.parameters()}
    if others or device.type not in ("cpu", "cuda"):
        found = ", ".join(sorted(map(str, (device, *others))))
        raise ValueError(
            f"inference_copy needs a model on a CPU or one CUDA GPU, but it is on {found}; call model.cpu() first"
        )
    is_on_gpu = device.type == "cuda"
    has_int8 = TORCH.onednn_int8_prepack and TORCH.onednn_int8_linear and torch.backends.mkldnn.is_available()
    if int8 and (is_on_gpu or not has_int8):
        raise ValueError(f"torch {torch.__version__} has no int8 products for {device} on this machine; omit int8=True")
    dtype = torch.float32 if int8 else encoders[0].dtype
    if batch_invariant and (is_on_gpu or not has_invariant_products(dtype)):
        raise ValueError(
            f"batch_invariant=True needs products whose bits do not depend on the batch, and torch {torch.__version__} has none "
            f"for {dtype} on this {device}; load the model with dtype=torch.float32 on a CPU with AVX-512, or omit it"
        )
    if is_on_gpu and encoders[0].dtype == torch.bfloat16 != best_dtype(device):
        raise ValueError(f"{device} has no instructions for bfloat16; load the model with dtype=torch.float16")
    blocks = [block for block in model.modules() if isinstance(block, NeoBERTBlock)]
    if batch_invariant and not blocks:
        raise ValueError(f"{type(model).__name__} is not of this package; import neobert_hf before the model is loaded")
    kinds = {type(part).__name__ for block in blocks for part in (block, block.attention)}
    has_graphs = cuda_graphs and kinds == {"NeoBERTBlock", "NeoBERTAttention"}  # others read lengths on the host
    in_blocks = {id(layer) for name, layer in model.named_modules() if "transformer_encoder" in name.split(".")}
    inside = {module for encoder in encoders for module in encoder.modules()}
    parents = [x for x in model.modules() if x.__module__.endswith("_neobert") or (batch_invariant and x not in inside)]
    layers = {}
    for layer in (child for parent in parents for child in parent.children()):
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not has_own_hooks(layer):
            kernel = InvariantLinear if batch_invariant else InferenceLinear
            kernel = Int8Linear if int8 and id(layer) in in_blocks and layer.bias is None else kernel
            layers[id(layer)] = kernel(layer, torch.float32 if int8 else layer.weight.dtype)
    kind, wanted = ("int8", Int8Linear) if int8 else ("compiled", InferenceLinear)
    if (int8 or is_on_gpu) and not any(isinstance(layers.get(key), wanted) for key in in_blocks):
        raise ValueError(
            f"no linear layer in the blocks of this {type(model).__name__} can be {kind}, because all have hooks, adapters or "
            "quantized weights; merge adapters first (PEFT's merge_and_unload), or omit int8=True"
        )
    copied = copy.deepcopy(model, layers)  # takes the layers of this dict instead of copies
    copied = copied.float() if int8 else copied
    # a CrossEncoder keeps its activation out of its modules
    for module in (*copied.modules(), getattr(copied, "activation_fn", None)):
        if batch_invariant:
            make_invariant(module)
        if is_on_gpu and hasattr(module, "run_blocks"):
            make_compiled(module, has_graphs)
        if hasattr(module, "is_inference_copy"):
            module.is_inference_copy = True
    if batch_invariant and isinstance(copied, nn.Sequential):  # a SentenceTransformer
        copied[0].register_forward_pre_hook(pad_columns)
    return copied.eval()
