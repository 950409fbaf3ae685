"""Forms of int8 weights in ONNX Runtime: signed, signed in 7 bits, unsigned; speed and cosines with float32.

    python benchmarks/int8_weights.py --folder FILES --json benchmarks/results/int8_weights_cpu.json

The mini model, and the published shape with random weights. All forms run in one process and take turns, A B A B; `--num_threads`
threads. Cosines are those of vectors of texts: of tickets and of lines of the pages, each alone. Of the published shape, whose
weights are random, they are those of the means of token states, of a quarter of the texts.
"""

import csv
from pathlib import Path

import numpy as np
import onnx
from harness import finish, median_and_spread, neobert_config, read_arguments, take_turns
from onnxruntime import InferenceSession, SessionOptions
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoTokenizer

import neobert_hf
from neobert_hf.export import export_model

ROOT = Path(__file__).parents[1]
FORMS = {
    "float32": None,
    "signed, 8 bits (before)": {"weight_type": QuantType.QInt8},
    "signed, 7 bits": {"weight_type": QuantType.QInt8, "reduce_range": True},
    "unsigned, 8 bits": {"weight_type": QuantType.QUInt8},
}


def make_files(source: Path, folder: Path) -> dict[str, Path]:
    """Write the file of each form, if it is not there."""
    if not folder.exists():
        export_model(source, folder, task="sentence-similarity")
    whole = folder / "onnx/model.onnx"
    graph = onnx.load(whole, load_external_data=False).graph
    columns = {tensor.name for tensor in graph.initializer if tensor.dims[-1:] == [1]}
    kept = [node.name for node in graph.node if node.op_type == "Gather" and node.input[0] in columns]
    files = {name: folder / f"{number}.onnx" if form else whole for number, (name, form) in enumerate(FORMS.items())}
    for name, form in FORMS.items():
        if form and not files[name].exists():
            kinds = {"op_types_to_quantize": ["MatMul", "Gather"], "nodes_to_exclude": kept, "per_channel": True}
            quantize_dynamic(whole, files[name], **kinds, **form)
    return files


def texts() -> list[str]:
    """Tickets, and lines of the pages."""
    tickets = [row["ticket"] for row in csv.DictReader((ROOT / "examples/data/tickets.csv").open())]
    pages = [
        line.strip() for file in sorted((ROOT / "docs").glob("*.md")) for line in file.read_text("utf-8").splitlines()
    ]
    return tickets + [line for line in pages if 60 < len(line) < 150][:300]


def open_file(file: Path, num_threads: int):
    """Return a function from ids (B, L) to vectors of length 1."""
    options = SessionOptions()
    options.intra_op_num_threads = num_threads
    session = InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(ids: list[list[int]]) -> np.ndarray:
        inputs = {"input_ids": np.array(ids), "attention_mask": np.ones_like(ids)}
        vectors = session.run(["sentence_embedding"], inputs)[0]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return run


def neighbours(vectors: np.ndarray) -> np.ndarray:
    """The nearest other text of each."""
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -1)
    return scores.argmax(1)


def main():
    """Measure all forms of both models."""
    arguments = read_arguments(__doc__, folder="int8_weights", num_threads=2, num_rounds=9, num_layers=0)
    folder, tokenizer = Path(arguments.folder), AutoTokenizer.from_pretrained(neobert_hf.MINI_MODEL_PATH)
    large = folder / "source"
    if not large.exists():
        config = neobert_config(512, arguments.num_layers)
        config.vocab_size = len(tokenizer)
        neobert_hf.NeoBERTModel(config).save_pretrained(large)
        tokenizer.save_pretrained(large)
    rows = []
    for name, source in {"mini": neobert_hf.MINI_MODEL_PATH, "28 x 768": large}.items():
        files = make_files(Path(source), folder / name.replace(" ", ""))
        runs = {form: open_file(file, arguments.num_threads) for form, file in files.items()}
        every = [
            tokenizer(text, truncation=True, max_length=128)["input_ids"]
            for text in texts()[:: 1 if name == "mini" else 4]
        ]
        vectors = {form: np.concatenate([run([ids]) for ids in every]) for form, run in runs.items()}
        found = {form: {"model": name, "weights": form} for form in runs}
        for length in (16, 64, 256):
            ids = np.random.default_rng(0).integers(200, len(tokenizer), (1, length)).tolist()
            turns = {form: lambda run=run, ids=ids: run(ids) for form, run in runs.items()}
            for form, seconds in take_turns(turns, arguments.num_rounds, "cpu", f"{name}, {length} tokens").items():
                median, spread = median_and_spread(seconds)
                found[form] |= {f"{length} tokens, ms": 1000 * median, f"spread {length}": f"{spread:.0%}"}
        for form, of_form in vectors.items():
            cosines = (of_form * vectors["float32"]).sum(1)
            changed = float(np.mean(neighbours(of_form) != neighbours(vectors["float32"])))
            rows.append(found[form] | {"smallest cosine": float(cosines.min()), "neighbours changed": f"{changed:.1%}"})
    finish("int8_weights", rows, arguments)


if __name__ == "__main__":
    main()
