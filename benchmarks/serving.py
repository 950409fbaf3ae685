"""Servers of embeddings under load: the same weights, texts and clients, a process for each server, in turns.

    python benchmarks/serving.py --infinity_emb path/to/infinity_emb

A client asks for the embedding of one text after another. The peers are infinity (docs/exporting.md installs it in an environment
of its own) and the few lines of FastAPI and sentence-transformers that people write, `PLAIN`.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path

import httpx
import numpy as np
from harness import docstrings, finish, median_and_spread, neobert_config, read_arguments
from transformers import AutoTokenizer

from neobert_hf import MINI_MODEL_PATH, NeoBERT
from neobert_hf.checkpoints.embedding_models import sentence_transformer
from neobert_hf.export import export_model

EXAMPLE = Path(__file__).parents[1] / "examples/serve.py"
PLAIN = """
import sys

import uvicorn
from fastapi import FastAPI
from sentence_transformers import SentenceTransformer

_, folder, port = sys.argv
model = SentenceTransformer(folder, trust_remote_code=True)
app = FastAPI()


@app.post("/embeddings")
def embed(request: dict):
    return {"data": [{"embedding": vector.tolist()} for vector in model.encode([request["input"]])]}


uvicorn.run(app, port=int(port), log_level="warning")
"""
SECONDS, MOST_REQUESTS = 3, 320  # of a cell, by the time of one request


def write_model(name: str, num_layers: int, folder: Path) -> None:
    """Save and export a mean of token vectors, of 512 tokens: of the mini model, or of the published shape at random."""
    source = MINI_MODEL_PATH
    if name != "mini":
        source = str(folder / "encoder")
        tokenizer = AutoTokenizer.from_pretrained(MINI_MODEL_PATH)
        tokenizer.save_pretrained(source)
        config = neobert_config(4096, num_layers)
        config.vocab_size = len(tokenizer)
        NeoBERT(config).save_pretrained(source)
    model = sentence_transformer(source)
    model.max_seq_length = 512
    model.save_pretrained(str(folder / "saved"))
    export_model(folder / "saved", folder / "exported", int8=True)


def texts_of(length: int, number: int) -> list[str]:
    """Parts of docstrings that have a length in tokens, special ones included."""
    tokenizer = AutoTokenizer.from_pretrained(MINI_MODEL_PATH)
    text = " ".join(docstrings())[: 8 * number * length]
    offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    size = length - 2
    starts = range(0, min(number * size, len(offsets) - size), size)
    return [text[offsets[start][0] : offsets[start + size - 1][1]] for start in starts]


def run_clients(ask: Callable[[str], object], texts: list[str], num_clients: int) -> tuple[float, list[float]]:
    """Let clients ask at the same time; returns the seconds of all, and of each request."""

    def client(number: int) -> list[float]:
        seconds = []
        for text in texts[number::num_clients]:
            started = time.perf_counter()
            ask(text)
            seconds.append(time.perf_counter() - started)
        return seconds

    with ThreadPoolExecutor(num_clients) as clients:
        started = time.perf_counter()
        by_client = list(clients.map(client, range(num_clients)))
        return time.perf_counter() - started, list(chain(*by_client))


@contextmanager
def running(command: list[str], route: str) -> Iterator[Callable[[str], list[float]]]:
    """Start a server, and give a function that asks it for the embedding of a text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*map(str, command), str(port)], stdout=subprocess.DEVNULL)
    client = httpx.Client(timeout=600, limits=httpx.Limits(keepalive_expiry=2))

    def ask(text: str) -> list[float]:
        answer = client.post(f"http://127.0.0.1:{port}{route}", json={"input": text, "model": "saved"})
        return answer.raise_for_status().json()["data"][0]["embedding"]

    try:
        is_ready = False
        while not is_ready:
            if process.poll() is not None:
                raise OSError(f"{command} has ended with status {process.returncode}")
            time.sleep(0.1)
            with suppress(httpx.ConnectError):
                ask("It works.")
                is_ready = True
        yield ask
    finally:
        process.kill()
        process.wait()


def commands_of(folder: Path, infinity_emb: str) -> dict[str, tuple[list, str]]:
    """The command of each server, to which its port is added, and its route."""
    ours = [sys.executable, EXAMPLE]
    port = ["--truncation", "off", "--port"]
    commands = {
        "ours, saved": ([*ours, folder / "saved", *port], "/v1/embeddings"),
        "ours, fp32": ([*ours, folder / "exported", *port], "/v1/embeddings"),
        "ours, int8": ([*ours, folder / "exported", "--dtype", "int8", *port], "/v1/embeddings"),
        "plain": ([sys.executable, "-c", PLAIN, folder / "saved"], "/embeddings"),
    }
    if infinity_emb:
        options = ["--model-id", folder / "saved", "--engine", "torch", "--device", "cpu", "--port"]
        commands["infinity"] = ([infinity_emb, "v2", *options], "/embeddings")
    return commands


def measure(asks: dict[str, Callable], texts: list[str], num_clients: int, num_rounds: int) -> Iterator[dict]:
    """Yield a row for each server; the servers answer in turns."""
    started = time.perf_counter()
    next(iter(asks.values()))(texts[0])
    number = int(SECONDS / (time.perf_counter() - started))
    number = max(num_clients, min(number, len(texts)) // num_clients * num_clients)
    runs = {name: [] for name in asks}
    for _ in range(num_rounds):
        for name, ask in asks.items():
            runs[name].append(run_clients(ask, texts[:number], num_clients))
    for name, measured in runs.items():
        speed, spread = median_and_spread([number / seconds for seconds, _ in measured])
        requests = [seconds for _, some in measured for seconds in some]
        p50, p99 = (1e3 * float(np.percentile(requests, share)) for share in (50, 99))
        yield {"server": name, "requests_per_s": speed, "spread": spread, "p50_ms": p50, "p99_ms": p99}


def main() -> None:
    """Measure each server in turns, and print a table and one line of JSON."""
    arguments = read_arguments(
        __doc__,
        folder="serving",
        models=["mini", "neobert"],
        num_layers=0,
        lengths=[16, 128, 512],
        num_clients=[1, 8, 32],
        num_rounds=2,
        infinity_emb="",
    )
    rows = []
    for model in arguments.models:
        folder = Path(arguments.folder, model)
        if not folder.exists():
            write_model(model, arguments.num_layers, folder)
        with ExitStack() as processes:
            asks = {}
            for name, (command, route) in commands_of(folder, arguments.infinity_emb).items():
                asks[name] = processes.enter_context(running(command, route))
            for length in arguments.lengths:
                texts = texts_of(length, MOST_REQUESTS)
                for num_clients in arguments.num_clients:
                    found = measure(asks, texts, num_clients, arguments.num_rounds)
                    rows += [{"model": model, "tokens": length, "clients": num_clients, **row} for row in found]
                    print(*rows[-len(asks) :], sep="\n", file=sys.stderr, flush=True)
    finish("serving", rows, arguments)


if __name__ == "__main__":
    main()
