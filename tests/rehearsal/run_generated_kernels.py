"""Runs the model through generated Triton kernels in the interpreter; a program that test_triton.py starts.

    TRITON_INTERPRET=1 python run_generated_kernels.py FOLDER

FOLDER has the checkpoint `model` and the cases in `cases.pt`. It receives for each case a file `CASE.result` with the loss, the
logits and the gradients of each batch, the kernels that the interpreter ran, and the sources of those that were generated.
"""

import sys
from pathlib import Path

import interpreted_gpu
import torch
from stand_ins import cuda_graphs
from torch._dynamo.testing import CompileCounterWithBackend

from neobert_hf import NeoBERTForMaskedLM, inference_copy
from neobert_hf.model import attention_neobert, backends_neobert, gpu_neobert, kernels_neobert

REGIONS = gpu_neobert.project, gpu_neobert.finish


def run(folder: Path, name: str, case: dict) -> None:
    """Forward and backward of every batch. With flex attention, attention and its mask are compiled; else the whole model is."""
    interpreted_gpu.launches.clear()
    interpreted_gpu.sources.clear()
    torch.compiler.reset()
    options = dict(attn_implementation=case["attention"], dtype=case["dtype"])
    model = NeoBERTForMaskedLM.from_pretrained(folder / "model", **options)
    counter = CompileCounterWithBackend("inductor")
    results = []
    if name.startswith("regions"):
        forward = copy_as_on_a_gpu(model, counter)
        with torch.no_grad():
            for inputs in case["batches"]:
                output = forward(**inputs)
                results.append(dict(loss=output.loss, logits=output.logits, num_graphs=counter.frame_count))
        save(folder, name, results)
        return
    is_flex = case["attention"] == "flex_attention"
    forward = model if is_flex else torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for inputs in case["batches"]:
        model.zero_grad()
        output = forward(**inputs)
        output.loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        result = dict(loss=output.loss.detach(), logits=output.logits.detach(), num_graphs=counter.frame_count)
        results.append(result | dict(grads=grads))
    save(folder, name, results)


def save(folder: Path, name: str, results: list[dict]) -> None:
    kernels = dict(launches=dict(interpreted_gpu.launches), sources=interpreted_gpu.sources)
    torch.save(dict(results=results, **kernels), folder / f"{name}.result")


def copy_as_on_a_gpu(model: NeoBERTForMaskedLM, backend) -> NeoBERTForMaskedLM:
    """`inference_copy` as it is on CUDA, with regions that are compiled by `backend`."""
    kernels_neobert.onednn_is_best = lambda *args, **kwargs: False
    regions = [torch.compile(each, backend=backend, dynamic=True, fullgraph=True) for each in REGIONS]
    gpu_neobert.compiled_regions = lambda: regions
    backends_neobert.BACKENDS["torch_varlen"] = cuda_graphs.VARLEN
    copied = inference_copy(model)
    copied.set_attn_implementation("torch_varlen")
    gpu_neobert.make_compiled(copied.model, cuda_graphs=False)
    return copied


def attend_as_on_a_gpu() -> None:
    """Choose what attention_neobert.py chooses on a GPU: flex attention is compiled, and so is the function of its mask."""
    table, create_block_mask = backends_neobert.BACKENDS, attention_neobert.create_block_mask
    table["flex_attention"] = table["flex_attention"]._replace(attend=attention_neobert.attend_registry)
    attention_neobert.create_block_mask = lambda *args, **more: create_block_mask(*args, **more | {"_compile": True})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # dynamic=True makes symbols of the floats of the config too; torch would see that it cannot and compile the graph again.
    torch._dynamo.config.specialize_float = True
    interpreted_gpu.pretend()
    attend_as_on_a_gpu()
    for name, case in torch.load(folder / "cases.pt").items():
        run(folder, name, case)
