"""`inference_copy`: a copy of a model for fast inference; the copy cannot be trained or saved."""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .blocks_neobert import NeoBERTAttention, NeoBERTBlock
from .gpu_neobert import GraphCache
from .kernels_neobert import COPY_REMEDY, InferenceLinear, Int8Linear, has_own_hooks, in_one_thread
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
    names = features.keys() & {"input_ids", "attention_mask", "token_type_ids"}
    return features | {x: F.pad(features[x], (0, -features[x].shape[1] % COLUMNS)) for x in names}, *others


def in_full_vectors(operate: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """operate(x), elementwise, with zeros up to a multiple of `COLUMNS` elements, so that every element is in a full vector."""
    rows = F.pad(x.flatten(), (0, -x.numel() % COLUMNS)).view(-1, COLUMNS)
    return in_one_thread(operate, rows).view(-1)[: x.numel()].view(x.shape)


def attend_in_small_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_) -> torch.Tensor:
    """SDPA (B, H, L, K) with one more head and 16 more columns, of zeros.

    Heads run in one thread each, but the products of a single head run in all threads of MKL. In heads of width 6, 8 and 10, the
    order of MKL's sums follows the address of the memory of a thread.
    """
    q, k, v = (F.pad(x, (0, 16, 0, 0, 0, 1)) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=(q.shape[-1] - 16) ** -0.5)[:, :-1, :, :-16]


def make_invariant(module: nn.Module) -> None:
    """Make a module of a batch-invariant copy compute a row in one way for every number of rows and of threads.

    The activations are those of torch that have another formula for the elements that do not fill a vector.
    """
    if isinstance(module, InferenceLinear):
        module.fewest_rows = 2
    elif hasattr(module, "is_inference_copy"):
        module.config._attn_implementation, module.config.unpad_inputs = "sdpa", True
    elif type(module) is NeoBERTAttention and (module.config.head_dim < 16 or module.config.num_attention_heads == 1):
        module.attend = attend_in_small_heads
    elif type(module) in (nn.Sigmoid, nn.SiLU, nn.GELU, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Softplus):
        module.forward = partial(in_full_vectors, module.forward)


@torch.inference_mode(False)  # tensors that are made in inference mode could not be used outside it
def inference_copy(model: nn.Module, int8: bool = False, batch_invariant: bool = False) -> nn.Module:
    """Return a copy of a NeoBERT for fast inference on its device, in evaluation mode; the model itself does not change.

    NeoBERT's linear layers become `InferenceLinear`. Layers with hooks, adapters or quantized weights, and those of other modules
    if `batch_invariant` is not set, stay as they are. To train, save, copy or export the copy is an error; convert or move the
    model before. Delete the model to keep its weights in memory once.

    On a CPU, matrices are in the order of oneDNN where that is faster. On CUDA, blocks are compiled, which takes some seconds at
    the first call, and inputs of up to 4,096 tokens run as CUDA graphs if attention is FlashAttention or torch_varlen. Blocks
    with hooks or adapters run as in the model, and so do all with `output_attentions`, autograd or autocast.

    Args:
        model: A NeoBERT on a CPU or a GPU, or a model that contains one, such as a SentenceTransformer.
        int8: On a CPU: compute the matrix products of the blocks in int8, and all else in float32. Accuracy decreases;
            docs/performance.md gives the numbers of the small model. FlopCounterMode does not count int8 products.
        batch_invariant: On a CPU: a text gets the same vector, bit by bit, alone and in any batch. Attention is SDPA in float32
            and padding is removed, whatever the config says; a SentenceTransformer pads to a multiple of 64 columns. Linear
            layers and activations of torch.nn in other modules, such as Dense, are computed in the same way. Other layers, those
            with hooks or adapters, and blocks of a variant may still differ. docs/performance.md says where this was tested.

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
    inside = {module for encoder in encoders for module in encoder.modules()}
    parents = [x for x in model.modules() if x.__module__.endswith("_neobert") or (batch_invariant and x not in inside)]
    layers = {}
    for layer in (child for parent in parents for child in parent.children()):
        if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not has_own_hooks(layer):
            kernel = Int8Linear if int8 and id(layer) in in_blocks and layer.bias is None else InferenceLinear
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
        if hasattr(module, "is_inference_copy"):
            module.is_inference_copy, module.is_batch_invariant = True, batch_invariant
            if is_on_gpu and hasattr(module, "graphs") and runs_as_graph(module):
                module.graphs = GraphCache(module)
    if batch_invariant and isinstance(copied, nn.Sequential):  # a SentenceTransformer
        copied[0].register_forward_pre_hook(pad_columns)
    return copied.eval()
