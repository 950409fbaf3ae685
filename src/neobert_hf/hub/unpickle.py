"""Read pickled weights in a process of its own, and write them as one safetensors file.

    python unpickle.py FILE [FILE ...] OUT.safetensors

With `weights_only=True`, a pickle can make tensors and plain containers and run nothing else. The process does not import this
package. A file that cannot be read ends it with the status `UNREADABLE` and the reason on one line.
"""

import re
import sys
import zipfile

import torch
from safetensors.torch import save_file

UNREADABLE = 2  # exit status
# Names under which trainings nest the weights; the first is DeepSpeed's.
NESTED = ("module", "state_dict", "model_state_dict", "model")


def read_weights(file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file that torch.save wrote, by name.

    Raises:
        ValueError: It holds something else than a dictionary of tensors.
    """
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    for name in NESTED:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not content:
        raise ValueError(f"it holds no weights but a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"its entry {name!r} is a {type(value).__name__} and not a tensor")
    return content


def main(*files: str) -> None:
    """Write the tensors of all files but the last to the last."""
    weights, seen = {}, set()
    for file in files[:-1]:
        try:
            content = read_weights(file)
        except Exception as error:  # whatever a damaged file leads to: the caller reports it
            found = re.search(r"GLOBAL (\S+)", str(error))
            print(f"it holds objects of {found[1]}" if found else repr(error).partition("\\n")[0], file=sys.stderr)
            raise SystemExit(UNREADABLE) from error
        if twice := weights.keys() & content.keys():
            raise SystemExit(f"{file} and another file hold {min(twice)}; move one of them away")
        for name, tensor in content.items():
            storage = tensor.untyped_storage().data_ptr()
            weights[name] = tensor.clone() if storage in seen else tensor.contiguous()  # safetensors shares no memory
            seen.add(storage)
    save_file(weights, files[-1], metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
