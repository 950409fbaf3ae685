"""Run a script in two CPU processes, like `torchrun --nproc_per_node 2`: `launch.py [--fsdp2] SCRIPT ARGUMENTS`.

The imports of the script run once, before the processes fork, because they take most of the time of a small run.

accelerate supports FSDP on several GPUs only, although PyTorch's FSDP also runs on a CPU. `--fsdp2` reports "several GPUs" when
accelerate checks, and changes nothing else, so that the code path of the example is tested without a GPU.
"""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import yaml
from accelerate import state
from accelerate.utils import DistributedType
from torch.multiprocessing import start_processes

NUM_PROCESSES = 2


def on_two_processes(*arguments: str) -> None:
    """Run this file with `arguments` and wait for it; a failure is an AssertionError."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def use_fsdp2() -> None:
    """Configure FSDP2 as `accelerate launch --config_file examples/accelerate/fsdp2.yaml` does."""
    config = yaml.safe_load((Path(__file__).parents[1] / "examples/accelerate/fsdp2.yaml").read_text())
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    for name, value in config["fsdp_config"].items():
        os.environ[name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    init = state.AcceleratorState.__init__

    def init_as_if_on_gpus(self, *args, **kwargs):
        shared = state.PartialState._shared_state
        if shared.get("distributed_type") == DistributedType.MULTI_CPU:
            shared["distributed_type"] = DistributedType.MULTI_GPU
        init(self, *args, **kwargs)

    state.AcceleratorState.__init__ = init_as_if_on_gpus


def work(rank: int, port: int, script: str, arguments: list[str]) -> None:
    """Run the script as process `rank`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(NUM_PROCESSES), "LOCAL_WORLD_SIZE": str(NUM_PROCESSES), "DS_ACCELERATOR": "cpu"}
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Run the script with its arguments."""
    arguments = sys.argv[1:]
    if arguments[0] == "--fsdp2":
        use_fsdp2()
        arguments = arguments[1:]
    script, *arguments = arguments
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="imports")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(work, (port, script, arguments), nprocs=NUM_PROCESSES, start_method="fork")


if __name__ == "__main__":
    main()
