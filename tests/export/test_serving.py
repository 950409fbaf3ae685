"""`neobert serve` and `neobert predict`: saved and exported folders; a real process without torch, the client of OpenAI."""

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import finetune_classifier
import finetune_qa
import finetune_tagger
import httpx
import numpy as np
import pytest
import serve
import torch
from conftest import SENTENCE, reranker_of_modules, run_main
from fastapi.testclient import TestClient
from oracle import CONFIG
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import neobert_hf
from neobert_hf.data import read_rows
from neobert_hf.export import OnnxModel, export_model
from neobert_hf.export.predicting import predict_file
from neobert_hf.finetuning import QuestionAnswerer, write_predictions

WITHOUT_TORCH = "import sys; sys.modules.update(torch=None, transformers=None); "
WITHOUT_TORCH += "from neobert_hf.examples import serve; serve.main()"
TEXTS = [f"Wait for {number} seconds and return the value. " * (1 + number % 4) for number in range(32)]


@pytest.fixture(scope="module")
def url(exported_mini):
    """The address that a server process prints when it listens."""
    environment = {**os.environ, "PYTHONPATH": str(Path(neobert_hf.__file__).parents[1])}
    command = [sys.executable, "-c", WITHOUT_TORCH, str(exported_mini), "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield re.search(r"(http://\S+)/docs", process.stdout.readline())[1] + "/v1"
        process.kill()


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
    assert [each.id for each in client.models.list()] == ["mini"]
    with pytest.raises(openai.BadRequestError, match="input: List should have at least 1 item"):
        client.embeddings.create(input=[], model="mini")


def test_32_clients_at_once_get_their_own_vectors(url, model):
    wanted = [vectors_of(model, text) for text in TEXTS]

    def ask(text):
        return httpx.post(f"{url}/embeddings", json={"input": text, "model": "mini"}, timeout=300).json()

    with ThreadPoolExecutor(32) as clients:
        for answer, vector in zip(clients.map(ask, TEXTS * 2), wanted * 2):
            np.testing.assert_allclose(answer["data"][0]["embedding"], vector, rtol=1e-5, atol=1e-7)


PAIR = (SENTENCE, "the fox sleeps")
LONG = f"{SENTENCE} " * 5
PROMPT = {"prompts": {"text": "old sea "}, "default_prompt_name": "text"}


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A folder of each kind of model, of one layer and random weights that are large enough to show errors."""
    parent = tmp_path_factory.mktemp("saved")
    sizes = {name: size for name, size in CONFIG.items() if name.endswith("_size") or name == "num_attention_heads"}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 64}

    def save(name, model_class, **options):
        torch.manual_seed(0)
        model = model_class(neobert_hf.NeoBERTConfig(**sizes, **options))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(parent / name)
        tokenizer.save_pretrained(parent / name)
        return str(parent / name)

    of_texts, tags = neobert_hf.NeoBERTForSequenceClassification, dict(enumerate(["O", "B-PLACE", "I-PLACE", "NOUN"]))
    save("softmax", of_texts, num_labels=3)
    save("sigmoid", of_texts, num_labels=3, problem_type="multi_label_classification")
    save("number", of_texts, num_labels=1, problem_type="regression")
    save("tags", neobert_hf.NeoBERTForTokenClassification, id2label=tags, num_labels=4)
    save("answers", neobert_hf.NeoBERTForQuestionAnswering)
    scores = save("scores", of_texts, num_labels=1)
    CrossEncoder(scores, device="cpu", **PROMPT).save_pretrained(scores)
    encoder = save("encoder", neobert_hf.NeoBERTModel, num_labels=3)
    reranker_of_modules(encoder, **PROMPT).save_pretrained(str(parent / "modules"))
    vectors = neobert_hf.sentence_transformer(encoder, prompts=PROMPT["prompts"])
    vectors.default_prompt_name = "text"
    vectors.save_pretrained(str(parent / "vectors"))
    return parent


@pytest.fixture(scope="module")
def client_of(folders):
    @cache
    def client(name, is_exported=False):
        folder = folders / (f"exported {name}" if is_exported else name)
        if is_exported:
            export_model(folders / name, folder)
        return TestClient(serve.make_app(serve.Server(serve.open_folder(folder))), follow_redirects=False)

    return client


saved_and_exported = pytest.mark.parametrize("is_exported", [False, pytest.param(True, marks=pytest.mark.slow)])


def answer_to(client, path, **request):
    answer = client.post(path, json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()


def near(score):
    """Within 1e-5, the error of float32 products in another order."""
    return pytest.approx(float(score), abs=1e-5)


def assert_labels(found, scores):
    order = np.argsort([-float(score) for score in scores])
    assert found == [{"label": f"LABEL_{i}", "score": near(scores[i])} for i in order]


@saved_and_exported
@pytest.mark.parametrize("name", ["softmax", "sigmoid", "number"])
def test_predict_gives_the_classes_of_texts_pairs_and_batches(client_of, folders, name, is_exported):
    client, folder = client_of(name, is_exported), folders / name
    apply = {"sigmoid": torch.sigmoid, "number": lambda logits: logits}.get(name, lambda logits: logits.softmax(-1))

    @torch.inference_mode()
    def logits(*texts):
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        return model(**AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")).logits[0]

    for inputs in (SENTENCE, [SENTENCE], PAIR):
        wanted = logits(*([inputs] if isinstance(inputs, str) else inputs))
        assert_labels(answer_to(client, "/predict", inputs=inputs), apply(wanted))
        assert_labels(answer_to(client, "/predict", inputs=inputs, raw_scores=True), wanted)
    batch = [["sleeps"], PAIR, [SENTENCE]]
    for found, texts in zip(answer_to(client, "/predict", inputs=batch, truncate=None), batch, strict=True):
        assert_labels(found, apply(logits(*texts)))


@saved_and_exported
def test_predict_gives_the_entities_of_the_pipeline(client_of, folders, is_exported):
    """Of several windows, those of torch are those of ONNX Runtime; the pipeline joins windows in another way."""
    client, other, texts = client_of("tags", is_exported), client_of("tags", True), [SENTENCE.title(), "the fox"]
    tag = pipeline("token-classification", str(folders / "tags"), aggregation_strategy="first")
    for text, entities in zip([*texts, LONG], [*tag(texts), answer_to(other, "/predict", inputs=LONG)]):
        for entity in entities:
            entity |= {"score": near(entity["score"]), "word": text[entity["start"] : entity["end"]]}
        assert answer_to(client, "/predict", inputs=text) == entities and entities
        assert answer_to(client, "/predict", inputs=[["the"], [text]])[1] == entities
    assert entities[-1]["end"] > 4 * len(SENTENCE)


@saved_and_exported
@pytest.mark.parametrize("name", ["scores", "modules"])
def test_rerank_orders_texts_by_the_scores_of_the_cross_encoder(client_of, folders, name, is_exported):
    client, model = client_of(name, is_exported), CrossEncoder(str(folders / name))
    texts = ["a quick dog", "sleeps in a warm red house", "old sea"]
    for options, given in (({}, {}), ({"raw_scores": True}, {"activation_fn": torch.nn.Identity()})):
        scores = model.predict([("the fox", text) for text in texts], **given)
        wanted = [{"index": int(i), "text": texts[i], "score": near(scores[i])} for i in np.argsort(-scores)]
        assert answer_to(client, "/rerank", query="the fox", texts=texts, return_text=True, **options) == wanted
        assert_labels(answer_to(client, "/predict", inputs=["the fox", texts[0]], **options), scores[:1])
    found = answer_to(client, "/rerank", query="the fox", texts=texts, raw_scores=True)
    assert found == [{name: rank[name] for name in ("index", "score")} for rank in wanted]


@saved_and_exported
def test_answer_finds_the_part_of_a_text_of_several_windows(client_of, folders, is_exported):
    found = answer_to(client_of("answers", is_exported), "/answer", question="the fox", context=LONG)
    (wanted,) = QuestionAnswerer(folders / "answers", verbose=False).predict(["the fox"], [LONG])
    assert found == wanted | {"score": near(wanted["score"])} and found["answer"]


@saved_and_exported
def test_embeddings_have_the_default_prompt_and_length_1(client_of, folders, is_exported):
    client, model = client_of("vectors", is_exported), SentenceTransformer(str(folders / "vectors"))
    answer = answer_to(client, "/v1/embeddings", input=["the fox", LONG], model="any", truncate=True)
    wanted = model.encode(["the fox", LONG], normalize_embeddings=True)
    np.testing.assert_allclose([row["embedding"] for row in answer["data"]], wanted, rtol=0, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer("old sea the fox").input_ids) + 64


NULLS = [
    ("/v1/embeddings", "vectors", {"input": "a", "model": "any"}, "encoding_format dimensions user"),
    ("/predict", "softmax", {"inputs": "a"}, "raw_scores"),
    ("/rerank", "scores", {"query": "a", "texts": ["b"]}, "raw_scores return_text"),
]


@pytest.mark.parametrize(("path", "name", "request_", "fields"), NULLS)
def test_null_and_the_own_width_are_as_no_value(client_of, path, name, request_, fields):
    client, nulls = client_of(name), dict.fromkeys(f"{fields} truncate truncation_direction".split())
    wanted = answer_to(client, path, **request_)
    assert answer_to(client, path, **request_, **nulls) == wanted
    if name == "vectors":
        assert answer_to(client, path, **request_, dimensions=CONFIG["hidden_size"]) == wanted


@saved_and_exported
@pytest.mark.parametrize("name", ["softmax", "scores", "vectors"])
def test_a_long_text_is_an_error_unless_it_is_allowed(client_of, folders, tokenizer, name, is_exported, capsys):
    path = {"scores": "/rerank", "vectors": "/v1/embeddings"}.get(name, "/predict")
    bodies = {"/rerank": {"query": "a", "texts": ["a", LONG]}, "/v1/embeddings": {"input": ["a", LONG], "model": "any"}}
    body, prompt = bodies.get(path, {"inputs": [["a"], [LONG]]}), "" if name == "softmax" else "old sea "
    length = len(tokenizer(*([f"{prompt}a", LONG] if name == "scores" else [prompt + LONG])).input_ids)
    answer = client_of(name, is_exported).post(path, json=body)
    fact = f"1 of 2 texts are truncated to 64 tokens, and {'at least ' * (length > 128)}{length - 64} tokens are lost"
    wanted = f"{fact}; split long texts, or send truncate=true"
    found = answer.json()["error"]
    assert answer.status_code == 400 and (found["message"] if name == "vectors" else found) == wanted
    assert client_of(name, is_exported).post(path, json=body | {"truncate": True}).status_code == 200
    server = serve.Server(serve.open_folder(folders / (f"exported {name}" if is_exported else name)))
    capsys.readouterr()  # of the export
    for truncation, printed in (("warn", f"{fact}\n"), ("off", "")):
        server.truncation, client = truncation, TestClient(serve.make_app(server))
        assert client.post(path, json=body).status_code == 200 and capsys.readouterr().out == printed
        assert client.post(path, json=body | {"truncate": False}).status_code == 400


@saved_and_exported
def test_a_server_refuses_at_once_what_would_take_too_long(client_of, folders, is_exported):
    client_of("softmax", is_exported)  # which exports it
    server = serve.Server(serve.open_folder(folders / f"{'exported ' * is_exported}softmax"))
    post = TestClient(serve.make_app(server)).post
    answer = post("/predict", json={"inputs": "sea " * 400_000})
    assert answer.status_code == 400 and re.search(r"at least \d{3} tokens are lost", answer.json()["error"])
    assert post("/predict", json={"inputs": "sea " * 400_000, "truncate": True}).status_code == 200
    answer = post("/predict", content=(b"[" * 10**5 for _ in range(21)))
    assert answer.status_code == 413 and "the body has more than 2,000,000 bytes" in answer.json()["error"]
    server.num_requests = server.max_requests
    answer = post("/predict", json={"inputs": "sea"})
    assert (answer.status_code, answer.json()["error_type"]) == (429, "Overloaded")


def test_calls_that_are_computed_together_have_their_own_results_and_errors(folders):
    shared, alone = (serve.open_folder(folders / "scores", is_shared=is_shared) for is_shared in (True, False))
    calls = [["a"] if number == 5 else [("a", text), ("b", text)] for number, text in enumerate(TEXTS)]
    with ThreadPoolExecutor(32) as clients:
        futures = [clients.submit(shared.labels, call) for call in calls]
    for number, (future, call) in enumerate(zip(futures, calls)):
        if number == 5:
            assert "reads pairs of texts" in str(future.exception())
        else:
            scores = [label["score"] for (label,) in future.result()]
            assert scores == pytest.approx([label["score"] for (label,) in alone.labels(call)], abs=1e-6)


FORM = "inputs: give a text, a pair [text, text], or a batch [[text], [text, text], ...], and no empty text"
SINGLE = "a tagger reads single texts and gives probabilities; send no pair, no raw_scores"
NO_TEXT, EXTRA = "give a text or a list of texts; token ids are not", "Extra inputs are not permitted"
ANY, WIDTH = {"model": "any"}, CONFIG["hidden_size"]
FAULTS = [
    *(("softmax", {"inputs": given}, FORM) for given in ("", [], [[]], ["a", ""], ["a"] * 3, ["a", ["b"]], 1)),
    ("softmax", {}, "inputs: Field required"),
    ("scores", {"inputs": [["a"]]}, "the model reads pairs of texts; give two texts in place of one"),
    ("scores", {"query": "a", "texts": []}, "texts: List should have at least 1 item"),
    ("tags", {"inputs": ["a", "b"]}, SINGLE),
    ("tags", {"inputs": "a", "raw_scores": True}, SINGLE),
    ("answers", {"question": SENTENCE * 9, "context": "a"}, "the question 'the quick"),
    ("answers", {"question": "a", "context": ""}, "context: String should have at least 1 character"),
    ("vectors", {"input": [], **ANY}, "input: List should have at least 1 item"),
    ("vectors", {"input": "", **ANY}, "input.0: String should have at least 1 character"),
    ("vectors", {"input": ["a", None], **ANY}, f"input.1: {NO_TEXT}"),
    ("vectors", {"input": [[101, 2003]], **ANY}, f"input.0: {NO_TEXT}"),
    ("vectors", {"input": None, **ANY}, f"input: {NO_TEXT}"),
    ("vectors", {"input": "a"}, "model: Field required"),
    ("vectors", {"input": "a", "dimensions": 7, **ANY}, f"dimensions=7 is not {WIDTH}, the width of the model; leave"),
    ("vectors", {"input": "a", "raw_scores": True, **ANY}, f"raw_scores: {EXTRA}"),
    ("vectors", {"input": "a", "encoding_format": "int8", **ANY}, "encoding_format: Input should be 'float' or"),
    ("vectors", b'{"input": "\\ud800", "model": "any"}', "input.0: Input should be a valid string, unable to parse"),
    ("vectors", b'{"input": "a', "body is no JSON: Unterminated string starting at"),
    ("vectors", b"", "body: Field required"),
]


@pytest.mark.parametrize(("name", "body", "words"), FAULTS)
def test_a_request_without_an_answer_gets_the_error_form_of_tei_or_openai(client_of, name, body, words):
    of_pairs = "/rerank" if "query" in list(body) else "/predict"
    paths = {"answers": "/answer", "vectors": "/v1/embeddings", "scores": of_pairs}
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client_of(name).post(paths.get(name, "/predict"), **given, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    if name == "vectors":
        assert error["type"] == "invalid_request_error"
        error = error["message"]
    else:
        assert answer.json() == {"error": error, "error_type": "Validation"}
    assert answer.status_code == 400 and error.startswith(words) and len(error.splitlines()) == 1


def test_a_server_has_the_routes_of_what_its_folder_holds(client_of):
    client = client_of("scores")
    assert client.get("/health").status_code == 200 and client.get("/").headers["location"] == "/docs"
    paths = client.get("/openapi.json").json()["paths"]
    assert paths.keys() == {"/rerank", "/predict", "/health"}
    example = paths["/rerank"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert client.post("/rerank", json=example).status_code == 200
    answer = client.post("/answer", json={})
    assert answer.status_code == 404 and answer.json()["error"].startswith("no /answer here: the folder holds a rerank")
    assert [model["id"] for model in client_of("vectors").get("/v1/models").json()["data"]] == ["vectors"]


@pytest.mark.parametrize(("host", "ip"), [("::1", "::1"), ("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")])
def test_the_folder_of_the_shell_is_served_under_its_name_also_on_ipv6(folders, monkeypatch, capsys, host, ip):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    apps, sockets = [], []
    monkeypatch.chdir(folders / "vectors")

    def server(config):
        apps.append(config.app)
        return SimpleNamespace(run=sockets.extend)

    monkeypatch.setattr(serve.uvicorn, "Server", server)
    monkeypatch.setattr(serve.uvicorn.Config, "configure_logging", lambda _: None)  # it would hold the captured stream
    serve.serve(".", host, 0, "error", 9, dtype=None, runtime=None, num_threads=None)
    with sockets[0]:
        found, port, *_ = sockets[0].getsockname()
    assert found == ip
    assert f"http://{'[::1]' if host == '::1' else host}:{port}/docs" in capsys.readouterr().out
    client = TestClient(apps[0])
    assert client.get("/openapi.json").json()["info"]["title"] == "neobert serve vectors"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["vectors"]


REFUSALS = {
    "encoder": "holds a NeoBERT; give the folder of an embedding model, a classifier, a tagger, a reranker or a model",
    "nowhere": "is no folder; give one that a training saved, or that `neobert export` wrote",
    "tags": "is not exported, and --dtype and --runtime are for exported folders; omit them",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_folder_that_cannot_be_served_ends_the_command_with_one_line(folders, name):
    with pytest.raises(SystemExit) as caught:
        run_main(serve, folders / name, "--port", "0", *(["--dtype", "int8"] if name == "tags" else []))
    message = str(caught.value)
    assert message.startswith(f"serve.py: {folders / name} {REFUSALS[name]}") and len(message.splitlines()) == 1


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files to predict: a text, a pair, words, and a question; one row of each has no text."""
    folder = tmp_path_factory.mktemp("files")
    folder.joinpath("texts.csv").write_text(f"text,other,note\n{SENTENCE},old sea,1\n,,2\nthe fox,{LONG},3\n")
    words = [SENTENCE.title().split(), [], LONG.split(), ["the", "\u200b", "fox"]]
    write_predictions(folder / "words.jsonl", [{"words": row} for row in words])
    questions = [{"question": question, "context": LONG} for question in ("the fox", "old sea")]
    write_predictions(folder / "questions.jsonl", questions)
    return folder


def predicted(model, file, output, **options):
    predict_file(model, file, output, **options)
    return [row.values for row in read_rows(output)]


PREDICTED = dict.fromkeys(("softmax", "number"), ("texts.csv", ["text"]))
PREDICTED |= dict.fromkeys(("sigmoid", "scores", "modules"), ("texts.csv", ["text", "other"]))
PREDICTED |= {"tags": ("words.jsonl", ["text"]), "answers": ("questions.jsonl", ["text"])}


@pytest.mark.parametrize("name", ["tags", *(pytest.param(x, marks=pytest.mark.slow) for x in PREDICTED if x != "tags")])
def test_a_saved_and_an_exported_folder_predict_the_same(client_of, folders, files, tmp_path, name):
    """Within 1e-5 in float32; the export is computed without torch."""
    client_of(name, True)  # exports it
    file, columns = PREDICTED[name]
    found = [
        predicted(folders / folder, files / file, tmp_path / f"{number}.jsonl", text_columns=columns)
        for number, folder in enumerate((name, f"exported {name}"))
    ]
    given = [row.values for row in read_rows(files / file)]
    for row, saved, exported in zip(given, *found, strict=True):
        assert saved.keys() == exported.keys() > row.keys() - {"context"}
        for column, value in saved.items():
            assert exported[column] == (value if isinstance(value, str | None) else pytest.approx(value, abs=1e-5))


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "number", "tags", "answers"])
def test_predict_writes_what_the_test_file_of_a_training_gets(folders, files, tmp_path, monkeypatch, name):
    file, _ = PREDICTED[name]
    scripts = {"tags": finetune_tagger, "answers": finetune_qa}
    wanted = tmp_path / "wanted.jsonl"
    options = ["--test_file", files / file, "--predictions_file", wanted, "--output_dir", tmp_path / "results"]
    run_main(scripts.get(name, finetune_classifier), "--model_name_or_path", folders / name, *options)
    found = predicted(folders / name, files / file, tmp_path / "found.jsonl")
    for row, same in zip(found, [row.values for row in read_rows(wanted)], strict=True):
        assert list(row) == list(same)
        for column, value in same.items():
            assert row[column] == (value if isinstance(value, str | None) else pytest.approx(value, abs=1e-5))


NOT_PREDICTED = [
    ("vectors", {}, "holds an embedding model, which predicts nothing of rows; `neobert embed` writes vectors"),
    ("softmax", {"text_columns": ["body"]}, "no column 'body' among text, other, note"),
    ("softmax", {"output": "found.txt"}, "found.txt has none of the suffixes .csv, .jsonl, .parquet; choose one"),
    ("softmax", {"output": "texts.csv"}, "texts.csv is also an input; name another place"),
    ("softmax", {"truncation": "error"}, "1 of 2 texts are truncated to 64 tokens"),
    ("softmax", {"dtype": "int8"}, "is not exported, and --dtype and --runtime are for exported folders"),
    ("modules", {}, "the model reads pairs of texts; give two texts in place of one"),
]


@pytest.mark.parametrize(("name", "options", "message"), NOT_PREDICTED)
def test_a_file_that_cannot_be_predicted_is_refused(folders, files, monkeypatch, name, options, message):
    monkeypatch.chdir(files)
    options = {"text_columns": ["other"]} | options
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        predict_file(folders / name, "texts.csv", **options)
    assert not Path("predictions.csv").exists()
