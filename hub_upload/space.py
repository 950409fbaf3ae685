"""Assemble the page that searches Python's documentation and fills masks in the browser: a folder for a static Hub Space.

    python hub_upload/space.py runs/space
    python -m http.server --directory runs/space            # http://localhost:8000
    hf upload ORG/NAME runs/space --repo-type space

Needs `pip install -e ".[demo,onnx]"` and npm, which downloads two packages. The large files are compressed with gzip, whose
checksum shows the page a damaged download.
"""

import argparse
import gzip
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from neobert_hf import MINI_MODEL_PATH, NeoBERTForMaskedLM
from neobert_hf.embeddings import open_embedding_model
from neobert_hf.export.onnx import write_int8, write_onnx
from neobert_hf.files import check_folder, new_folder
from neobert_hf.files.terminal import quiet

PAGE = Path(__file__).with_name("space")
sys.path.append(str(PAGE.parents[1] / "examples/documentation_search"))
from docstrings import first_sentence  # noqa: E402
from search import DocumentationIndex, bonus, import_line, read_cached  # noqa: E402

PACKAGES = {"onnxruntime-web": "1.30.0", "@huggingface/tokenizers": "0.2.0"}
QUESTION_TOKENS = 64  # of a question; the page says so if it is longer
VENDOR = {
    "onnxruntime-web": {
        "dist/ort.wasm.bundle.min.mjs": "vendor/ort.mjs",
        "dist/ort-wasm-simd-threaded.wasm": "files/runtime.wasm",
    },
    "@huggingface/tokenizers": {
        "dist/tokenizers.min.mjs": "vendor/tokenizers.mjs",
        "LICENSE": "vendor/tokenizers_LICENSE",
    },
}


class TwoHeads(nn.Module):
    """The embedding model and the masked language model on one network: as two files they would have its weights twice."""

    outputs = ("sentence_embedding", "logits")

    def __init__(self, model: SentenceTransformer, language_model: NeoBERTForMaskedLM):
        super().__init__()
        self.language_model, self.after = language_model, nn.ModuleList(list(model)[1:])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings (B, D) and logits (B, L, V); the inputs are (B, L)."""
        states = self.language_model.model(input_ids, attention_mask).last_hidden_state
        features = {"attention_mask": attention_mask, "input_ids": input_ids, "token_embeddings": states}
        for module in self.after:
            features = module(features)
        return features["sentence_embedding"], self.language_model.decoder(states)


def main() -> None:
    """Read the command line, and assemble the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="Folder to write, new or empty.")
    parser.add_argument(
        "--package", default="python", help="Packages or modules, separated by commas; python: standard library."
    )
    arguments = parser.parse_args()
    try:
        with quiet():
            files = assemble(arguments.out, arguments.package.split(","))
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(" ".join(str(error).split()))
    except ImportError as error:
        parser.error(f"{error}; install: pip install -e '.[demo,onnx]'")
    print(f"{arguments.out}: {sum(files.values()) / 1e6:.1f} MB, of which")
    for name, size in files.items():
        print(f"{size / 1e6:8.2f} MB  {name}")


def assemble(out: Path, packages: list[str]) -> dict[str, int]:
    """Write the folder and return the bytes of its files by name.

    Args:
        out: Folder to write, new or empty; it appears when it is complete.
        packages: Packages whose documentation is searched; "python" is the standard library.

    Raises:
        ValueError: The folder has files, or a package has no documentation.
        OSError: npm is missing or fails, or a file cannot be written.
    """
    check_folder(out)
    if not shutil.which("npm"):
        raise OSError("npm is not installed; install Node.js 20 or later")
    with new_folder(out) as folder:
        shutil.copytree(PAGE, folder, dirs_exist_ok=True)
        write_vendor(folder)
        model = open_embedding_model(MINI_MODEL_PATH, device="cpu", model_kwargs={"dtype": torch.float32}).eval()
        write_model(model, folder / "files/model.onnx")
        write_index(model, packages, folder / "files")
        write_list(folder)
    return {str(file.relative_to(out)): file.stat().st_size for file in sorted(out.rglob("*")) if file.is_file()}


def write_vendor(folder: Path) -> None:
    """Write the files of the npm packages that the page runs."""
    for name in ("vendor", "files"):
        (folder / name).mkdir()
    with tempfile.TemporaryDirectory() as packed:
        for package, version in PACKAGES.items():
            command = ["npm", "pack", "--silent", "--pack-destination", packed, f"{package}@{version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                raise OSError(f"npm cannot download {package}@{version}: {reason[-1]}")
            with tarfile.open(Path(packed, done.stdout.split()[-1])) as archive:
                for name, target in VENDOR[package].items():
                    content = archive.extractfile(f"package/{name}").read()
                    # the map is not there, and a browser with open tools would ask for it
                    (folder / target).write_bytes(content.split(b"\n//# sourceMappingURL=")[0])


def write_model(model: SentenceTransformer, file: Path) -> None:
    """Write the graph with both heads in int8, and the tokenizer."""
    language_model = NeoBERTForMaskedLM.from_pretrained(MINI_MODEL_PATH, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        write_onnx(TwoHeads(model, language_model), Path(folder, "model.onnx"))
        write_int8(Path(folder, "model.onnx"), file)
    names = ("tokenizer", "tokenizer_config")
    rules = {name: json.loads(Path(MINI_MODEL_PATH, f"{name}.json").read_text("utf-8")) for name in names}
    file.with_name("tokenizer.json").write_text(json.dumps(rules), "utf-8")


def write_index(model: SentenceTransformer, packages: list[str], folder: Path) -> None:
    """Write the entries of the documentation, and their vectors: float32 scales, then int8 rows."""
    index = DocumentationIndex(read_cached(packages))
    vectors = index.documents.vectors / np.linalg.norm(index.documents.vectors, axis=1, keepdims=True)
    owners = [index.entry_of_row[passage.line - 1] for passage in index.documents.passages]
    starts = [i for i, entry in enumerate(owners) if i == 0 or entry is not owners[i - 1]]
    scales = np.abs(vectors).max(1) / 127
    rows = np.rint(vectors / scales[:, None]).astype(np.int8)
    (folder / "vectors.bin").write_bytes(scales.astype(np.float32).tobytes() + rows.tobytes())
    content = {
        "python": platform.python_version(),
        "question_tokens": QUESTION_TOKENS,
        "max_tokens": model[0].model.config.max_position_embeddings,
        "starts": [*starts, len(rows)],
        "bonuses": [round(bonus(entry), 5) for entry in index.entries],
        "entries": [[e.name, e.signature, *first_sentence(e.text), import_line(e)] for e in index.entries],
    }
    (folder / "entries.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def write_list(folder: Path) -> None:
    """Compress the large files, list them for the page, and give the service worker the version of the folder."""
    files = []
    for file in sorted((folder / "files").iterdir()):
        packed = gzip.compress(file.read_bytes(), mtime=0)
        # With the hash in its name, a file of one version is never taken for that of another.
        path = file.rename(file.with_name(f"{file.stem}-{_hash(packed)}{file.suffix}.gz"))
        path.write_bytes(packed)
        files.append({"name": file.name, "path": f"files/{path.name}", "bytes": len(packed)})
    (folder / "files.json").write_text(json.dumps(files, indent=1), "utf-8")
    small = [file for file in sorted(folder.rglob("*")) if file.suffix != ".gz" and file.is_file()]
    worker = folder / "sw.js"
    version = _hash(b"".join(file.read_bytes() for file in small))
    worker.write_text(worker.read_text("utf-8").replace('"development"', f'"{version}"'), "utf-8")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


if __name__ == "__main__":
    main()
