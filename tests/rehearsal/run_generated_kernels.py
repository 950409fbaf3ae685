"""Runs the model through generated Triton kernels in the interpreter; a program that test_triton.py starts.

    TRITON_INTERPRET=1 python run_generated_kernels.py FOLDER

FOLDER has the checkpoint `model` and the cases in `cases.pt`. It receives for each case a file `CASE.result` with the loss, the
logits and the gradients of each batch, the kernels that the interpreter ran, and the sources of those that were generated.
"""

import sys
from pathlib import Path

import interpreted_gpu
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.model import attention_neobert, backends_neobert


def run(folder: Path, name: str, case: dict) -> None:
    """Forward and backward of every batch. With flex attention, attention and its mask are compiled; else the whole model is."""
    interpreted_gpu.launches.clear()
    interpreted_gpu.sources.clear()
    torch.compiler.reset()
    options = dict(attn_implementation=case["attention"], dtype=case["dtype"])
    model, counter = (
        NeoBERTForMaskedLM.from_pretrained(folder / "model", **options),
        CompileCounterWithBackend("inductor"),
    )
    is_flex = case["attention"] == "flex_attention"
    forward = model if is_flex else torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    results = []
    for inputs in case["batches"]:
        model.zero_grad()
        output = forward(**inputs)
        output.loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        result = dict(loss=output.loss.detach(), logits=output.logits.detach(), num_graphs=counter.frame_count)
        results.append(result | dict(grads=grads))
    kernels = dict(launches=dict(interpreted_gpu.launches), sources=interpreted_gpu.sources)
    torch.save(dict(results=results, **kernels), folder / f"{name}.result")


def attend_as_on_a_gpu() -> None:
    """Choose what attention_neobert.py chooses on a GPU: flex attention is compiled, and so is the function of its mask."""
    table, create_block_mask = backends_neobert.BACKENDS, attention_neobert.create_block_mask
    table["flex_attention"] = table["flex_attention"]._replace(attend=attention_neobert.attend_registry)
    attention_neobert.create_block_mask = lambda *args, **kwargs: create_block_mask(
        *args, **kwargs | {"_compile": True}
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # dynamic=True makes symbols of the floats of the config too; torch would see that it cannot and compile the graph again.
    torch._dynamo.config.specialize_float = True
    interpreted_gpu.pretend()
    attend_as_on_a_gpu()
    for name, case in torch.load(folder / "cases.pt").items():
        run(folder, name, case)
