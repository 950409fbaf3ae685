"""Start a script under FSDP2 on processes of the CPU: `torchrun ... tests/fsdp_on_cpu.py SCRIPT ARGUMENTS`.

accelerate takes FSDP for several GPUs only, though PyTorch's runs on a CPU as well. This says "several GPUs" at the moment when
accelerate asks, and changes nothing else, so that the example's own path is tested without any.
"""

import os
import runpy
import sys
from pathlib import Path

import yaml
from accelerate import state
from accelerate.utils import DistributedType

config = yaml.safe_load((Path(__file__).parents[1] / "examples/accelerate/fsdp2.yaml").read_text())
os.environ["ACCELERATE_USE_FSDP"] = "true"
for name, value in config["fsdp_config"].items():
    os.environ[name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)

begin = state.AcceleratorState.__init__


def begin_as_if_on_gpus(self, *args, **kwargs):
    """Let accelerate's state see several GPUs while it decides on FSDP."""
    shared = state.PartialState._shared_state
    if shared.get("distributed_type") == DistributedType.MULTI_CPU:
        shared["distributed_type"] = DistributedType.MULTI_GPU
    begin(self, *args, **kwargs)


state.AcceleratorState.__init__ = begin_as_if_on_gpus
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
