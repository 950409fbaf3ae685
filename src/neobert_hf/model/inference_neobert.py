"""`inference_copy`: a copy of a model for fast inference; the copy cannot be trained or saved."""

import copy

import torch
from torch import nn

from .blocks_neobert import NeoBERTBlock
from .gpu_neobert import make_compiled
from .invariant_neobert import InvariantLinear, make_invariant, pad_columns
from .kernels_neobert import COPY_REMEDY, InferenceLinear, Int8Linear, has_own_hooks, is_plain
from .machine_neobert import TORCH, best_dtype, has_invariant_products


def check_is_original(model: nn.Module, action: str) -> None:
    """Raise ValueError if the model is an inference copy, which cannot be `action`, "saved" or "trained"."""
    if model.is_inference_copy:
        raise ValueError(f"an inference copy cannot be {action}; {COPY_REMEDY}")


@torch.inference_mode(False)  # tensors that are made in inference mode could not be used outside it
def inference_copy(
    model: nn.Module,
    int8: bool = False,
    batch_invariant: bool = False,
    cuda_graphs: bool = True,
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
        ValueError: The model contains no NeoBERT, is on several devices, or neither on a CPU nor on CUDA; nothing of it
            would be int8, or compiled; this device has no int8 or batch-invariant products in torch, or no bfloat16.
    """
    encoders = [module for module in model.modules() if hasattr(module, "is_inference_copy")]
    if not encoders:
        raise ValueError(f"{type(model).__name__} contains no NeoBERT; give a NeoBERT, or a model that contains one")
    blocks = [block for block in model.modules() if isinstance(block, NeoBERTBlock)]
    if batch_invariant and not blocks:
        raise ValueError(f"{type(model).__name__} is not of this package; import neobert_hf before the model is loaded")
    device = _device_of(model)
    is_on_gpu = device.type == "cuda"
    _check_products(device, encoders[0].dtype, int8, batch_invariant)

    copied = copy.deepcopy(model, _make_layers(model, encoders, is_on_gpu, int8, batch_invariant))
    if int8:
        copied = copied.float()
    kinds = {type(part).__name__ for block in blocks for part in (block, block.attention)}
    has_graphs = cuda_graphs and kinds == {"NeoBERTBlock", "NeoBERTAttention"}  # others read lengths on the host
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


def _device_of(model):
    devices = {tensor.device for tensor in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"inference_copy needs a model on a CPU or one CUDA GPU, but it is on {found}; call model.cpu() first"
        )
    return devices.pop()


def _check_products(device, dtype, int8, batch_invariant):
    """Raise ValueError if the device has no products of the requested kind."""
    is_on_gpu = device.type == "cuda"
    has_int8 = TORCH.onednn_int8_prepack and TORCH.onednn_int8_linear and torch.backends.mkldnn.is_available()
    if int8 and (is_on_gpu or not has_int8):
        raise ValueError(f"torch {torch.__version__} has no int8 products for {device} on this machine; omit int8=True")
    if int8:
        dtype = torch.float32
    if batch_invariant and (is_on_gpu or not has_invariant_products(dtype)):
        raise ValueError(
            f"batch_invariant=True needs products whose bits do not depend on the batch, and torch {torch.__version__} has none "
            f"for {dtype} on this {device}; load the model with dtype=torch.float32 on a CPU with AVX-512, or omit it"
        )
    if is_on_gpu and dtype == torch.bfloat16 != best_dtype(device):
        raise ValueError(f"{device} has no instructions for bfloat16; load the model with dtype=torch.float16")


def _make_layers(model, encoders, is_on_gpu, int8, batch_invariant):
    """The linear layers of the copy, by the id of the layer of the model: `deepcopy` takes them in place of copies."""
    in_blocks = {id(layer) for name, layer in model.named_modules() if "transformer_encoder" in name.split(".")}
    in_encoders = {module for encoder in encoders for module in encoder.modules()}
    kernel = InvariantLinear if batch_invariant else InferenceLinear
    layers: dict[int, nn.Module] = {}
    for parent in model.modules():
        is_ours = parent.__module__.endswith("_neobert")
        if not is_ours and (parent in in_encoders or not batch_invariant):
            continue
        for layer in parent.children():
            if not is_plain(layer) or has_own_hooks(layer):
                continue
            if not int8:
                layers[id(layer)] = kernel(layer, layer.weight.dtype)
            elif id(layer) in in_blocks and layer.bias is None:
                layers[id(layer)] = Int8Linear(layer, torch.float32)
            else:
                layers[id(layer)] = kernel(layer, torch.float32)
    if (int8 or is_on_gpu) and not layers.keys() & in_blocks:
        raise ValueError(
            f"no linear layer in the blocks of this {type(model).__name__} can be int8 or compiled, because all have hooks, "
            "adapters or quantized weights; merge adapters first (PEFT's merge_and_unload), or omit int8=True"
        )
    return layers
