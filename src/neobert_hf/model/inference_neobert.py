"""`inference_copy`: a copy of a model for fast inference; the copy cannot be trained or saved."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .blocks_neobert import NeoBERTAttention, NeoBERTBlock
from .gpu_neobert import GraphCache
from .kernels_neobert import COPY_REMEDY, InferenceLinear, Int8Linear, has_own_hooks
from .machine_neobert import TORCH, best_dtype, onednn_is_best
from .plan_neobert import ForwardPlan

COLUMNS = 64  # PyTorch adds up a row in one order for every multiple of 4 vectors, of 16 numbers at most


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


def runs_as_graph(encoder: nn.Module) -> bool:
    """Whether CUDA graphs may replay an encoder: attention of a variant reads lengths on the host, which a graph keeps."""
    blocks = encoder.transformer_encoder
    return all(type(block) is NeoBERTBlock and type(block.attention) is NeoBERTAttention for block in blocks)


def invariant_plan(plan: ForwardPlan) -> ForwardPlan:
    """The plan with the kernels of a batch-invariant copy; raise ValueError if standard operations or padding would run."""
    if plan.kernels == "plain" or not plan.layout.is_packed:
        raise ValueError(
            "a batch-invariant copy cannot run with autograd, output_attentions, a 4-D mask, or a mode such as FlopCounterMode; "
            "use torch.inference_mode() and a 2-D mask, or make the copy without batch_invariant=True"
        )
    return plan._replace(kernels="invariant")


def pad_columns(module: nn.Module, args: tuple) -> tuple:
    """Pre-hook of the first module of a SentenceTransformer: pads (B, L) inputs to a multiple of `COLUMNS`.

    The modules behind it add up the weights of a row, and the order of such a sum follows the number of columns. The order in
    their linear layers follows the number of rows, where there are fewer than 8.
    """
    features, *others = args
    num_more = -features["attention_mask"].shape[1] % COLUMNS
    names = features.keys() & {"input_ids", "attention_mask", "token_type_ids"}
    return features | {name: F.pad(features[name], (0, num_more)) for name in names}, *others


@torch.inference_mode(False)  # tensors that are made in inference mode could not be used outside it
def inference_copy(model: nn.Module, int8: bool = False, batch_invariant: bool = False) -> nn.Module:
    """Return a copy of a NeoBERT for fast inference on its device, in evaluation mode; the model itself does not change.

    NeoBERT's linear layers become `InferenceLinear`. Layers with hooks, adapters or quantized weights, and those of other modules
    stay as they are. To train, save, copy or export the copy is an error; convert or move the model before. Delete the model to
    keep its weights in memory once.

    On a CPU, matrices are in the order of oneDNN where that is faster. On CUDA, blocks are compiled, which takes some seconds at
    the first call, and inputs of up to 4,096 tokens run as CUDA graphs if attention is FlashAttention or torch_varlen. Blocks
    with hooks or adapters run as in the model, and so do all with `output_attentions`, autograd or autocast.

    Args:
        model: A NeoBERT on a CPU or a GPU, or a model that contains one, such as a SentenceTransformer.
        int8: On a CPU: compute the matrix products of the blocks in int8, and all else in float32. Accuracy decreases;
            docs/performance.md gives the numbers of the small model. FlopCounterMode does not count int8 products.
        batch_invariant: On a CPU: a text gets the same vector, bit by bit, alone and in any batch. Attention is SDPA in float32
            and padding is removed, whatever the config says; a SentenceTransformer pads to a multiple of 64 columns. Layers with
            hooks or adapters, and blocks of a variant, may still differ. docs/performance.md says where this was tested.

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
    if batch_invariant and (is_on_gpu or TORCH.onednn_reorder is None or not onednn_is_best(dtype, num_rows=1)):
        raise ValueError(
            f"batch_invariant=True needs products of oneDNN, and torch {torch.__version__} has none for {dtype} on this "
            f"{device}; load the model with dtype=torch.float32 on a CPU, or omit it"
        )
    if is_on_gpu and encoders[0].dtype == torch.bfloat16 != best_dtype(device):
        raise ValueError(f"{device} has no instructions for bfloat16; load the model with dtype=torch.float16")
    in_blocks = {id(layer) for name, layer in model.named_modules() if "transformer_encoder" in name.split(".")}
    modules = [module for encoder in encoders for module in encoder.modules()]
    parents = [module for module in modules if type(module).__module__.endswith("_neobert")]
    layers = {}
    for layer in (child for parent in parents for child in parent.children()):
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not has_own_hooks(layer):
            is_int8 = int8 and id(layer) in in_blocks and layer.bias is None
            dtype = torch.float32 if int8 else layer.weight.dtype
            layers[id(layer)] = (Int8Linear if is_int8 else InferenceLinear)(layer, dtype)
    kind, wanted = ("int8", Int8Linear) if int8 else ("compiled", InferenceLinear)
    can_run = any(isinstance(layer, wanted) for key, layer in layers.items() if key in in_blocks)
    if (int8 or is_on_gpu) and not can_run:
        raise ValueError(
            f"no linear layer in the blocks of this {type(model).__name__} can be {kind}, because all have hooks, adapters or "
            "quantized weights; merge adapters first (PEFT's merge_and_unload), or omit int8=True"
        )
    copied = copy.deepcopy(model, layers)  # takes the layers of this dict instead of copies
    copied = copied.float() if int8 else copied
    for module in copied.modules():
        if isinstance(module, InferenceLinear) and batch_invariant:
            module.fewest_rows = 2
        if hasattr(module, "is_inference_copy"):
            module.is_inference_copy, module.is_batch_invariant = True, batch_invariant
            if batch_invariant:
                module.config._attn_implementation, module.config.unpad_inputs = "sdpa", True
            if is_on_gpu and hasattr(module, "graphs") and runs_as_graph(module):
                module.graphs = GraphCache(module)
    if batch_invariant and isinstance(copied, nn.Sequential):  # a SentenceTransformer
        copied[0].register_forward_pre_hook(pad_columns)
    return copied.eval()
