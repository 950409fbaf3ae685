"""Serve what a folder holds over HTTP: embeddings, classes, tags, scores of pairs, or answers.

    neobert serve runs/classifier
    neobert serve exported --dtype int8 --port 8000

A folder that `neobert export` wrote is served without torch and transformers. The page /docs of the server lists its routes.
"""

import base64
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel, BeforeValidator, Field
from starlette.exceptions import HTTPException
from tokenizers import Tokenizer

import neobert_hf
from neobert_cli.parser import Parser
from neobert_hf.checkpoints import SavedModel
from neobert_hf.data import fact_of_truncated, plain_tokenizer
from neobert_hf.export import OnnxModel, sigmoid
from neobert_hf.files import run_command

EXAMPLES = {
    "/v1/embeddings": {"input": ["It works well."], "model": "any"},
    "/predict": {"inputs": "It works well."},
    "/rerank": {"query": "Does it work?", "texts": ["It works well.", "It rains."]},
    "/answer": {"question": "Who wrote it?", "context": "Ada wrote it in 1843."},
}
ROUTES = {  # of what a folder holds
    "an embedding model": ["/v1/embeddings"],
    "a classifier": ["/predict"],
    "a tagger": ["/predict"],
    "a reranker or a model of one number": ["/rerank", "/predict"],
    "a model that answers questions": ["/answer"],
}
EMBEDDER, CLASSIFIER, TAGGER, RERANKER, ANSWERER = ROUTES

# 1. Requests. `Input` is a text, or a pair of texts. Clients send null for what they leave out.
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Input = Annotated[list[Text], Field(min_length=1, max_length=2)]


class TextsRequest(BaseModel, extra="forbid"):
    """What the requests of OpenAI and of text-embeddings-inference (TEI) have in common here."""

    truncate: bool | None = Field(None, description="Truncate a text that is longer than the model reads.")
    truncation_direction: Literal["right", "Right"] | None = "right"


class EmbeddingsRequest(TextsRequest):
    """As OpenAI's; `model` may be any name, and `dimensions` is the width of the model."""

    input: Annotated[Texts, BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
    model: str
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    user: str | None = None


class ScoresRequest(TextsRequest):
    """What the requests of TEI have in common."""

    raw_scores: bool | None = Field(False, description="Give logits.")


class PredictRequest(ScoresRequest):
    """As TEI's: a text, a pair of texts, or a batch of both."""

    inputs: Text | Input | Annotated[list[Input], Field(min_length=1)]


class RerankRequest(ScoresRequest):
    """As TEI's: a question, and texts to order."""

    query: Text
    texts: Texts
    return_text: bool | None = False


class AnswerRequest(BaseModel, extra="forbid"):
    """A question, and a text of any length."""

    question: Text
    context: Text


# 2. Answers
@dataclass
class Server:
    """An open model, and what it answers. FastAPI calls the methods in a pool of threads.

    Args:
        folder: Its folder.
        what: A key of ROUTES.
        run: The model: it takes texts or pairs, and whether scores are raw; or a question and a context.
        tokenizer: Counts the tokens of a text; None if the model reads texts of any length.
        max_length: Number of tokens that the model reads.
        prompt: What the model puts before a text.
        lock: Of a model that computes one request after another; the default lets it compute several at a time.
        truncation: "error", "warn" or "off": what becomes of a text that is too long, unless the request says it.
    """

    folder: Path
    what: str
    run: Callable[..., Any]
    tokenizer: Tokenizer | None = None
    max_length: int = sys.maxsize
    prompt: str = ""
    lock: Any = field(default_factory=nullcontext)
    truncation: str = "error"

    def __post_init__(self):
        if self.tokenizer:
            self.tokenizer = plain_tokenizer(self.tokenizer)  # the model's own one cuts and pads

    def compute(self, inputs: list, request: TextsRequest) -> tuple[Any, int]:
        """Return what the model says of texts or pairs, and the number of tokens that it reads; status 400 for one too long."""
        texts = [self.prompt + each if isinstance(each, str) else (self.prompt + each[0], each[1]) for each in inputs]
        num_tokens = 0
        if self.tokenizer:
            lengths = list(map(len, self.tokenizer.encode_batch(texts)))
            lost = [max(length - self.max_length, 0) for length in lengths]
            truncation = {None: self.truncation, True: "off", False: "error"}[request.truncate]
            fact = fact_of_truncated(lost, len(texts), self.max_length, "off" if truncation == "off" else "warn")
            if fact and truncation == "error":
                raise HTTPException(400, f"{fact}; split long texts, or send truncate=true")
            if fact:
                print(fact, flush=True)
            num_tokens = sum(lengths) - sum(lost)
        is_raw = getattr(request, "raw_scores", False)
        with self.lock:
            return self.run(inputs, is_raw), num_tokens

    def embeddings(self, request: EmbeddingsRequest) -> dict:
        """Vectors of length 1."""
        vectors, num_tokens = self.compute(request.input, request)
        width = vectors.shape[1]
        if request.dimensions not in (None, width):
            fact = f"dimensions={request.dimensions} is not {width}, the width of the model"
            raise HTTPException(400, f"{fact}; leave it out")
        rows = vectors.tolist()
        if request.encoding_format == "base64":
            rows = [base64.b64encode(vector).decode() for vector in vectors.astype("<f4")]
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": request.model, "usage": usage}

    def predict(self, request: PredictRequest) -> list:
        """Labels and scores of a text, the best first, or its entities; for a batch a list of such lists."""
        is_batch = isinstance(request.inputs, list) and isinstance(request.inputs[0], list)
        inputs = [input_of(each) for each in (request.inputs if is_batch else [request.inputs])]
        if self.what == TAGGER and (request.raw_scores or tuple in map(type, inputs)):
            raise HTTPException(400, "a tagger reads single texts and gives probabilities; send no pair, no raw_scores")
        found, _ = self.compute(inputs, request)
        return found if is_batch else found[0]

    def rerank(self, request: RerankRequest) -> list:
        """The number of each text in the request and its score, the best first."""
        found, _ = self.compute([(request.query, text) for text in request.texts], request)
        ranks = [{"index": index, "score": label["score"]} for index, (label,) in enumerate(found)]
        if request.return_text:
            for rank, text in zip(ranks, request.texts):
                rank["text"] = text
        return sorted(ranks, key=lambda rank: -rank["score"])

    def answer(self, request: AnswerRequest) -> dict:
        """A part of the context, its score and where it starts; an empty text if there is no answer."""
        try:
            with self.lock:
                return self.run(request.question, request.context)
        except ValueError as error:  # such as a question that leaves no place for its context
            raise HTTPException(400, str(error)) from error


def input_of(given: str | list[str]) -> str | tuple[str, ...]:
    """Return a text, or the tuple of a pair, of what a request gives: a text, or a list of one or two."""
    if isinstance(given, str):
        return given
    return tuple(given) if len(given) == 2 else given[0]


def make_app(server: Server) -> FastAPI:
    """Return the application, with the routes of what the folder holds."""
    name = server.folder.resolve().name  # of "." too
    app = FastAPI(title=f"neobert serve {name}", description=f"The folder holds {server.what}.")
    functions = dict(zip(EXAMPLES, (server.embeddings, server.predict, server.rerank, server.answer)))
    for path in ROUTES[server.what]:
        example = {"requestBody": {"content": {"application/json": {"example": EXAMPLES[path]}}}}
        app.post(path, openapi_extra=example)(functions[path])
    if server.what == EMBEDDER:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "neobert_hf"}]
        app.get("/v1/models", name="models")(lambda: {"object": "list", "data": models})
    app.get("/health", name="health")(lambda: None)
    app.get("/", include_in_schema=False)(lambda: RedirectResponse("/docs"))

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(HTTPException)
    def answer_error(request: Request, error: Any) -> JSONResponse:
        """In the form that clients of OpenAI or TEI read."""
        if isinstance(error, HTTPException):
            status, message = error.status_code, error.detail
        else:
            status, message = 400, fault_of(error)
        if status == 404:
            message = f"no {request.url.path} here: the folder holds {server.what}; see /docs"
        if request.url.path.startswith("/v1"):
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)
        return JSONResponse({"error": message, "error_type": "Validation"}, status)

    return app


def fault_of(error: RequestValidationError) -> str:
    """Return the place and the message of the first fault of a request."""
    first = error.errors()[0]
    message = first["msg"]
    place = ".".join(map(str, first["loc"][1:])) or "body"
    if first["type"] == "json_invalid":
        return f"body is no JSON: {first['ctx']['error']} at character {place}"
    if place.startswith("inputs") and first["type"] != "missing":
        return "inputs: give a text, a pair [text, text], or a batch [[text], [text, text], ...], and no empty text"
    if place.startswith("input") and first["type"] in ("list_type", "string_type"):
        message = "give a text or a list of texts; token ids are not accepted"
    return f"{place}: {message}"


# 3. Models
def open_folder(folder: Path, dtype: str | None, runtime: str | None, num_threads: int | None) -> Server:
    """Open what a folder holds; ValueError if it cannot be served, or if an option is not for it."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one that a training saved, or that `neobert export` wrote")
    saved = SavedModel(folder)
    if saved.graph:
        runtime = runtime or ("onnxruntime" if (folder / "onnx").is_dir() else "openvino")
        return open_exported(OnnxModel(folder, dtype or "fp32", runtime, num_threads or 1))
    if dtype or runtime:
        raise ValueError(f"{folder} is not exported, and --dtype and --runtime are for exported folders; omit them")
    return open_saved(saved.check_model(), num_threads)


def open_exported(model: OnnxModel) -> Server:
    """Serve an exported model. Requests share it, and a thread computes each of them."""
    what = what_is_served(model.saved)
    if what == TAGGER:
        return Server(model.folder, what, lambda texts, _: model.predict(texts))
    if what == ANSWERER:
        return Server(model.folder, what, model.answer)
    of_logits = copy(model)
    of_logits.config = model.config | {"problem_type": "regression"}  # whose scores are the logits
    options = {"top_k": len(model.labels), "truncation": "off"}

    def classify(inputs: list, is_raw: bool) -> list:
        return (of_logits if is_raw else model).predict(inputs, **options)

    def embed(texts: list, _: bool) -> Any:
        return model.encode(texts, normalize_embeddings=True, truncation="off")

    run = embed if what == EMBEDDER else classify
    prompt = model.prompts.get(model.default_prompt_name, "")
    return Server(model.folder, what, run, model.tokenizer, model.max_length, prompt)


def what_is_served(saved: SavedModel) -> str:
    """Return a key of ROUTES; ValueError if a folder holds none of these models."""
    served = {"vector": EMBEDDER, "classes": CLASSIFIER, "score": RERANKER, "tags": TAGGER, "spans": ANSWERER}
    if saved.kind not in served:
        name = saved.library or saved.architecture or "model without a head"
        raise ValueError(f"{saved.source} holds a {name}; give the folder of {', '.join(ROUTES)}")
    return RERANKER if saved.kind == "classes" and len(saved.labels) == 1 else served[saved.kind]


def open_saved(saved: SavedModel, num_threads: int | None) -> Server:
    """Open a folder that a training saved. Requests are computed one after another, each by all threads."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    neobert_hf.register()
    disable_progress_bar()
    if num_threads:
        torch.set_num_threads(num_threads)
    what = what_is_served(saved)
    saved.check_head()
    server = open_modules(saved, what) if saved.library else open_head(saved, what)
    server.lock = Lock()
    return server


def open_modules(saved: SavedModel, what: str) -> Server:
    """Open a model of sentence-transformers: it embeds texts, or reads pairs."""
    from sentence_transformers import CrossEncoder
    from torch.nn import Identity, Sigmoid

    from neobert_hf.embeddings import open_embedding_model, prompt_of

    if saved.library == "CrossEncoder":
        saved.load_tokenizer()  # which refuses that of another model
        model = CrossEncoder(saved.source)
    else:
        model = open_embedding_model(saved.source)

    def classify(inputs: list, is_raw: bool) -> list:
        if str in map(type, inputs):
            raise HTTPException(400, "the model reads pairs of texts; send [text, text], or a batch of pairs")
        has_sigmoid = type(model.activation_fn) is Sigmoid
        activation = Identity() if is_raw or has_sigmoid else None
        scores = model.predict(inputs, activation_fn=activation).reshape(len(inputs), -1)
        if has_sigmoid and not is_raw:
            scores = sigmoid(scores)
        rows = [[{"label": name, "score": score} for name, score in zip(saved.labels, row)] for row in scores.tolist()]
        return [sorted(row, key=lambda found: -found["score"]) for row in rows]

    def embed(texts: list, _: bool) -> Any:
        return model.encode(texts, normalize_embeddings=True)

    run = embed if what == EMBEDDER else classify
    tokenizer = model.tokenizer.backend_tokenizer
    return Server(saved.folder, what, run, tokenizer, model.max_seq_length or sys.maxsize, prompt_of(model))


def open_head(saved: SavedModel, what: str) -> Server:
    """Open a model of transformers: a classifier, a tagger, or one that answers questions."""
    from transformers import pipeline

    folder = saved.folder
    if what == ANSWERER:
        from neobert_hf.finetuning import QuestionAnswerer

        answerer = QuestionAnswerer(str(folder), verbose=False)
        return Server(folder, ANSWERER, lambda question, context: answerer.predict([question], [context])[0])
    if what == TAGGER:
        from neobert_hf.finetuning import Tagger

        tagger = Tagger(str(folder), verbose=False)
        return Server(folder, TAGGER, lambda texts, _: tagger.find_entities(texts))
    model = pipeline("text-classification", saved.source, tokenizer=saved.load_tokenizer())
    length = min(model.tokenizer.model_max_length, model.model.config.max_position_embeddings)
    model.tokenizer.model_max_length = length

    def classify(inputs: list, is_raw: bool) -> list:
        rows = [each if isinstance(each, str) else dict(zip(("text", "text_pair"), each)) for each in inputs]
        has_logits = is_raw or what == RERANKER
        found = model(
            rows, top_k=None, function_to_apply="none" if has_logits else None, truncation=True, batch_size=32
        )
        if has_logits and not is_raw and model.model.config.problem_type != "regression":
            found = [[label | {"score": float(sigmoid(label["score"]))} for label in labels] for labels in found]
        return found

    return Server(folder, what, classify, model.tokenizer.backend_tokenizer, length)


# 4. The process
def serve(folder: str, host: str, port: int, truncation: str, **options) -> None:
    """Open the folder, say how to ask, and answer requests."""
    if not 0 <= port < 65536:
        raise ValueError(f"the port {port} is not between 0 and 65535")
    name = f"[{host}]" if ":" in host else host
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        fault = f"--port {port} of {host} cannot be used ({os.strerror(error.errno or 0)})"
        raise OSError(f"{fault}; give another --port, or 0 for a free one") from error
    server = open_folder(Path(folder), **options)
    server.truncation = truncation
    config = uvicorn.Config(make_app(server), log_level="warning")
    address = f"http://{name}:{listening.getsockname()[1]}"
    path = ROUTES[server.what][0]
    curl = ["curl", address + path, "--header", "Content-Type: application/json", "--data", json.dumps(EXAMPLES[path])]
    print(f"{folder} is {server.what}; {address}/docs lists what it answers. Ask in another shell:")
    print(f"  {shlex.join(curl)}", flush=True)
    uvicorn.Server(config).run([listening])


def main() -> None:
    """Read the command line, and serve."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="Folder that a training saved, or that `neobert export` wrote.")
    add("--host", default="127.0.0.1", help="Address to listen on; the default is this machine only.")
    add("--port", type=int, default=8000, help="Port to listen on.")
    add("--dtype", help="Numbers of an exported folder: fp32 (default), fp16, bf16 or int8.")
    add("--runtime", help="onnxruntime or openvino, of an exported folder. Default: the first one whose files it has.")
    add(
        "--num_threads",
        type=int,
        help="Threads that compute a request. Default: one for an exported folder, all for a saved one.",
    )
    add(
        "--truncation",
        choices=("error", "warn", "off"),
        default="error",
        help="What becomes of a text that is too long, unless the request says truncate.",
    )
    run_command(parser.prog, lambda: serve(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
