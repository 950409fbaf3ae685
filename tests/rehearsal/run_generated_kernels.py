"""Runs the model through generated Triton kernels in the interpreter; a program that test_triton.py starts.

    TRITON_INTERPRET=1 python run_generated_kernels.py CHECKPOINT FOLDER

CHECKPOINT has the folder `model` and the cases in `inputs.pt`. FOLDER receives for each case a file `CASE.pt` with the loss, the
logits and the gradients of each batch, the kernels that the interpreter ran, and the sources of those that were generated.
"""

import sys
from pathlib import Path

import interpreted_gpu
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForMaskedLM

import neobert_hf  # noqa: F401
from neobert_hf.model import attention_neobert, backends_neobert


def run(checkpoint: Path, folder: Path, name: str, case: dict) -> None:
    """Forward and backward of every batch of a case; `is_compiled` compiles the model, else only flex attention and its mask."""
    interpreted_gpu.launches.clear()
    interpreted_gpu.sources.clear()
    torch.compiler.reset()
    options = dict(attn_implementation=case["attention"], dtype=case["dtype"])
    model = AutoModelForMaskedLM.from_pretrained(checkpoint / "model", **options)
    counter = CompileCounterWithBackend("inductor")
    forward = torch.compile(model, backend=counter, fullgraph=True, dynamic=True) if case["is_compiled"] else model
    results = []
    for inputs in case["batches"]:
        model.zero_grad()
        output = forward(**inputs)
        output.loss.backward()
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        result = dict(loss=output.loss.detach(), logits=output.logits.detach(), grads=grads)
        results.append(result | dict(num_graphs=counter.frame_count))
    kernels = dict(launches=dict(interpreted_gpu.launches), sources=list(interpreted_gpu.sources))
    torch.save(dict(results=results, **kernels), folder / f"{name}.pt")


def attend_as_on_a_gpu() -> None:
    """Choose what attention_neobert.py chooses on a GPU: flex attention is compiled, and so is the function of its mask."""
    table, create_block_mask = backends_neobert.BACKENDS, attention_neobert.create_block_mask
    table["flex_attention"] = table["flex_attention"]._replace(attend=attention_neobert.attend_registry)
    attention_neobert.create_block_mask = lambda *args, **kwargs: create_block_mask(
        *args, **{**kwargs, "_compile": True}
    )


if __name__ == "__main__":
    checkpoint, folder = map(Path, sys.argv[1:])
    interpreted_gpu.pretend()
    attend_as_on_a_gpu()
    for name, case in torch.load(checkpoint / "inputs.pt", weights_only=False).items():
        run(checkpoint, folder, name, case)
