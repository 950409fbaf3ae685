"""The server of examples/serve_embeddings.py: a real process without torch, real HTTP, the client of OpenAI."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import serve_embeddings
from conftest import run_main
from fastapi.testclient import TestClient

import neobert_hf
from neobert_hf.export import OnnxModel

EXAMPLE = Path(__file__).parents[2] / "examples/serve_embeddings.py"
WITHOUT_TORCH = """
import runpy, sys
sys.modules.update(torch=None, transformers=None)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TEXTS = [f"Wait for {number} seconds and return the value. " * (1 + number % 4) for number in range(32)]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(folder, port, *options):
    """A server process that answers, which it does within minutes on any machine; it is killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(neobert_hf.__file__).parents[1])}
    command = [sys.executable, "-c", WITHOUT_TORCH, str(EXAMPLE), str(folder), "--port", str(port), *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(3000):
            assert process.poll() is None, process.stderr.read()
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            pytest.fail("the server did not start")
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(exported_mini):
    port = free_port()
    with serving(exported_mini, port):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def model(exported_mini):
    return OnnxModel(exported_mini, num_threads=1)


def vectors_of(model, texts):
    return model.encode(texts, normalize_embeddings=True)  # OpenAI's have length 1


@pytest.mark.slow
def test_the_client_of_openai_gets_the_vectors_of_encode_with_length_1(url, model):
    """The client asks for base64 by default, which holds every bit."""
    openai = pytest.importorskip("openai", reason="the client of OpenAI is not installed (pip install openai)")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    answer = client.embeddings.create(input=TEXTS, model="mini")
    np.testing.assert_array_equal([row.embedding for row in answer.data], vectors_of(model, TEXTS))
    assert [row.index for row in answer.data] == list(range(32)) and answer.model == "mini"
    assert answer.usage.prompt_tokens == sum(len(model.tokenizer.encode(text).ids) for text in TEXTS)
    one = client.embeddings.create(input=TEXTS[0], model="mini", encoding_format="float").data[0].embedding
    np.testing.assert_allclose(one, vectors_of(model, TEXTS[0]), rtol=1e-5, atol=1e-7)
    with pytest.raises(openai.BadRequestError, match="input: List should have at least 1 item"):
        client.embeddings.create(input=[], model="mini")


def test_32_clients_at_once_get_their_own_vectors(url, model):
    wanted = [vectors_of(model, text) for text in TEXTS]

    def ask(text):
        return httpx.post(f"{url}/embeddings", json={"input": text, "model": "mini"}, timeout=300).json()

    with ThreadPoolExecutor(32) as clients:
        for answer, vector in zip(clients.map(ask, TEXTS * 2), wanted * 2):
            np.testing.assert_allclose(answer["data"][0]["embedding"], vector, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"input": [], "model": "mini"}', "input: List should have at least 1 item"),
        (b'{"input": "", "model": "mini"}', "input.0: String should have at least 1 character"),
        (b'{"input": ["a", "%s"], "model": "mini"}' % (b"word " * 200), "input.1: The text has more than 128 tokens"),
        (b'{"input": ["a", null], "model": "mini"}', "input.1: give a text or a list of texts; token ids are not"),
        (b'{"input": [[101, 2003]], "model": "mini"}', "input.0: give a text or a list of texts; token ids are not"),
        (b'{"input": null, "model": "mini"}', "input: give a text or a list of texts; token ids are not"),
        (b'{"input": "a"}', "model: Field required"),
        (b'{"input": "a", "model": "mini", "dimensions": 64}', "dimensions: Extra inputs are not permitted"),
        (b'{"input": "a", "model": "mini", "encoding_format": "int8"}', "encoding_format: Input should be 'float' or"),
        (b'{"input": "\\ud800", "model": "mini"}', "input.0: Input should be a valid string, unable to parse"),
        (b'{"input": "a', "body is no JSON: Unterminated string starting at"),
        (b"", "body: Field required"),
    ],
)
def test_a_request_without_an_answer_gets_the_error_form_of_openai(url, body, words):
    answer = httpx.post(f"{url}/embeddings", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and words in error["message"]
    assert len(error["message"].splitlines()) == 1


def test_a_default_prompt_is_part_of_the_text(exported_mini):
    model = OnnxModel(exported_mini)
    model.prompts, model.default_prompt_name = {"query": "word " * 100}, "query"
    client = TestClient(serve_embeddings.make_app(model))
    answer = client.post("/v1/embeddings", json={"input": "a", "model": "mini"}).json()
    wanted = vectors_of(model, "a")
    np.testing.assert_allclose(answer["data"][0]["embedding"], wanted, rtol=1e-5, atol=1e-7)
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode("word " * 100 + "a").ids)
    assert client.post("/v1/embeddings", json={"input": "word " * 50, "model": "mini"}).status_code == 400


def test_a_killed_server_starts_again_on_its_port(exported_mini):
    port = free_port()
    answers = []
    for _ in range(2):
        with serving(exported_mini, port, "--dtype", "int8") as process:
            body = {"input": "Open a file.", "model": "mini"}
            answers.append(httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json=body).json())
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    assert answers[0] == answers[1]


def test_a_folder_that_was_not_exported_ends_the_command_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(serve_embeddings, tmp_path)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("serve_embeddings.py: error: ")
    assert "has no file onnx/model.onnx; write it: neobert export" in last
