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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel, BeforeValidator, Field
from starlette.exceptions import HTTPException

from neobert_cli.parser import Parser
from neobert_hf.export import Predictor, open_folder
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
MAX_BYTES = 2_000_000  # of the body of a request, as in TEI
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
        model: The model.
        truncation: "error", "warn" or "off": what becomes of a text that is too long, unless the request says it.
        max_requests: Number of requests that wait for an answer at the same time.
        num_requests: How many wait now.
    """

    model: Predictor
    truncation: str = "error"
    max_requests: int = 512
    num_requests: int = 0

    async def place(self) -> AsyncIterator[None]:
        """Count a request until it has its answer; status 429 for one above the limit."""
        if self.num_requests >= self.max_requests:
            raise HTTPException(429, f"{self.num_requests} requests wait for an answer; ask again later")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @property
    def what(self) -> str:
        """A key of ROUTES."""
        saved = self.model.saved
        if saved.kind == "classes" and len(saved.labels) == 1:
            return RERANKER
        return {"vector": EMBEDDER, "classes": CLASSIFIER, "score": RERANKER, "tags": TAGGER, "spans": ANSWERER}[
            saved.kind
        ]

    def compute(self, run: Callable[[list], Any], inputs: list, request: TextsRequest) -> tuple[Any, int]:
        """Return what the model says of texts or pairs, and the number of tokens that it reads; status 400 for one too long."""
        truncation = {None: self.truncation, True: "off", False: "error"}[request.truncate]
        try:
            inputs, fact, num_tokens = self.model.prepare(inputs, "off" if truncation == "off" else "warn")
            if fact and truncation == "error":
                raise ValueError(f"{fact}; split long texts, or send truncate=true")
            if fact:
                print(fact, flush=True)
            return run(inputs), num_tokens
        except ValueError as error:  # also of a single text for a model of pairs
            raise HTTPException(400, str(error)) from error

    def embeddings(self, request: EmbeddingsRequest) -> dict:
        """Vectors of length 1."""
        vectors, num_tokens = self.compute(self.model.vectors, request.input, request)
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
        run = partial(self.model.labels, is_raw=request.raw_scores)
        if self.what == TAGGER:
            if request.raw_scores or tuple in map(type, inputs):
                raise HTTPException(
                    400, "a tagger reads single texts and gives probabilities; send no pair, no raw_scores"
                )
            run = self.model.entities
        found, _ = self.compute(run, inputs, request)
        return found if is_batch else found[0]

    def rerank(self, request: RerankRequest) -> list:
        """The number of each text in the request and its score, the best first."""
        run = partial(self.model.labels, is_raw=request.raw_scores)
        found, _ = self.compute(run, [(request.query, text) for text in request.texts], request)
        ranks = [{"index": index, "score": label["score"]} for index, (label,) in enumerate(found)]
        if request.return_text:
            for rank, text in zip(ranks, request.texts):
                rank["text"] = text
        return sorted(ranks, key=lambda rank: -rank["score"])

    def answer(self, request: AnswerRequest) -> dict:
        """A part of the context, its score and where it starts; an empty text if there is no answer."""
        try:
            return self.model.answers([(request.question, request.context)])[0]
        except ValueError as error:  # such as a question that leaves no place for its context
            raise HTTPException(400, str(error)) from error


def input_of(given: str | list[str]) -> str | tuple[str, ...]:
    """Return a text, or the tuple of a pair, of what a request gives: a text, or a list of one or two."""
    if isinstance(given, str):
        return given
    return tuple(given) if len(given) == 2 else given[0]


def make_app(server: Server, max_bytes: int = MAX_BYTES) -> FastAPI:
    """Return the application, with the routes of what the folder holds; a longer body is refused before it is read."""
    name = server.model.saved.folder.resolve().name  # of "." too
    options = {"title": f"neobert serve {name}", "description": f"The folder holds {server.what}."}
    app = FastAPI(**options, max_body_size=max_bytes)
    functions = dict(zip(EXAMPLES, (server.embeddings, server.predict, server.rerank, server.answer)))
    for path in ROUTES[server.what]:
        example = {"requestBody": {"content": {"application/json": {"example": EXAMPLES[path]}}}}
        app.post(path, openapi_extra=example, dependencies=[Depends(server.place)])(functions[path])
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
        if status == 413:
            message = f"the body has more than {max_bytes:,} bytes; send fewer texts in a request, or shorter ones"
        if request.url.path.startswith("/v1"):
            kind = "overloaded" if status == 429 else "invalid_request_error"
            return JSONResponse({"error": {"message": message, "type": kind}}, status)
        kind = "Overloaded" if status == 429 else "Validation"
        return JSONResponse({"error": message, "error_type": kind}, status)

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


# 3. The process
def serve(folder: str, host: str, port: int, truncation: str, max_bytes: int, **options) -> None:
    """Open the folder, say how to ask, and answer requests."""
    if not 0 <= port < 65536:
        raise ValueError(f"the port {port} is not between 0 and 65535")
    name = f"[{host}]" if ":" in host else host
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        fault = f"--port {port} of {host} cannot be used ({os.strerror(error.errno or 0)})"
        raise OSError(f"{fault}; give another --port, or 0 for a free one") from error
    listening.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # else an answer of two packets waits 40 ms for the ACK
    server = Server(open_folder(folder, is_shared=True, **options), truncation)
    config = uvicorn.Config(make_app(server, max_bytes), log_level="warning")
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
    add("--max_bytes", type=int, default=MAX_BYTES, help="Longest body of a request; a longer one gets status 413.")
    run_command(parser.prog, lambda: serve(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
