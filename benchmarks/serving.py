"""Servers of embeddings under load: clients that each send one sentence after another, all at the same time.

The script starts `neobert serve` on an exported folder. Start other servers by the commands of docs/exporting.md,
and name their addresses. fastembed is a library, not a server: it runs in this process.

    python benchmarks/serving.py --folder exported --servers infinity=http://127.0.0.1:7997 --fastembed
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import httpx
import numpy as np
from harness import docstrings, finish, median_and_spread, read_arguments

from neobert_hf.export import OnnxModel

EXAMPLE = Path(__file__).parents[1] / "examples/serve.py"


def sentences(number: int) -> list[str]:
    """First lines of docstrings: a sentence of 30 to 90 characters each."""
    lines = dict.fromkeys(text.partition("\n")[0] for text in docstrings())
    return [line for line in lines if 30 <= len(line) <= 90][:number]


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
        list(clients.map(ask, texts[:num_clients]))  # connections, and first calls
        started = time.perf_counter()
        by_client = list(clients.map(client, range(num_clients)))
        return time.perf_counter() - started, list(chain(*by_client))


def server(url: str) -> Callable[[str], list[float]]:
    """A function that asks a server for the embedding of a text."""
    client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))

    def ask(text: str) -> list[float]:
        answer = client.post(f"{url}/embeddings", json={"input": text, "model": "mini"}).raise_for_status()
        return answer.json()["data"][0]["embedding"]

    return ask


def fastembed_model(folder: str, file: str) -> Callable[[str], list]:
    """A function that embeds a text by fastembed, one thread a call, as the servers do."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    dimension = json.loads(Path(folder, "1_Pooling/config.json").read_text("utf-8"))["word_embedding_dimension"]
    options = {"pooling": PoolingType.MEAN, "normalization": True, "sources": ModelSource(hf="local/model")}
    TextEmbedding.add_custom_model(f"local/{file}", dim=dimension, model_file=f"onnx/{file}", **options)
    model = TextEmbedding(f"local/{file}", specific_model_path=folder, threads=1)
    return lambda text: list(model.embed([text]))


@contextmanager
def our_server(folder: str, dtype: str) -> Iterator[str]:
    """The address of `neobert serve`, which runs meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), folder, "--dtype", dtype, "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            try:
                httpx.get(f"http://127.0.0.1:{port}/docs")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measure each server in turns, and print a table and one line of JSON."""
    arguments = read_arguments(
        __doc__, folder="exported", servers=[""], num_clients=32, num_requests=320, num_rounds=3, fastembed=False
    )
    texts = sentences(arguments.num_requests)
    with ExitStack() as running:
        asks = {
            f"neobert serve, {dtype}": server(running.enter_context(our_server(arguments.folder, dtype)))
            for dtype in ("int8", "fp32")
        }
        named = dict(address.split("=", 1) for address in arguments.servers if address)
        asks |= {name: server(url) for name, url in named.items()}
        for dtype in ("int8", "fp32"):
            asks[f"OnnxModel, {dtype}, without HTTP"] = OnnxModel(arguments.folder, dtype, num_threads=1).encode
        if arguments.fastembed:
            files = {"int8": "model_quantized.onnx", "fp32": "model.onnx"}
            asks |= {
                f"fastembed, {dtype}, without HTTP": fastembed_model(arguments.folder, file)
                for dtype, file in files.items()
            }
        runs = {name: [] for name in asks}
        for _ in range(arguments.num_rounds):
            for name, ask in asks.items():
                runs[name].append(run_clients(ask, texts, arguments.num_clients))
    rows = []
    for name, measured in runs.items():
        speed, spread = median_and_spread([len(texts) / seconds for seconds, _ in measured])
        requests = [seconds for _, some in measured for seconds in some]
        p50, p99 = (1e3 * float(np.percentile(requests, share)) for share in (50, 99))
        rows.append({"server": name, "requests_per_s": speed, "spread": spread, "p50_ms": p50, "p99_ms": p99})
    arguments.servers = list(named)
    finish("serving", rows, arguments)


if __name__ == "__main__":
    main()
