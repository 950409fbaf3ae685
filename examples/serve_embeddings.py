"""Serve an exported embedding model to clients of OpenAI's embeddings: POST /v1/embeddings.

python examples/serve_embeddings.py exported --dtype int8 --port 8000
"""

import argparse
import base64
from typing import Literal

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from neobert_hf.export import OnnxModel


class EmbeddingRequest(BaseModel, extra="forbid"):
    """What a client of OpenAI sends; another field, such as `dimensions`, is an error."""

    input: str | list[str]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


def make_app(model: OnnxModel) -> FastAPI:
    """Return the application; FastAPI calls `embeddings` in a pool of threads, which share the model."""
    app = FastAPI(title="neobert_hf")

    @app.post("/v1/embeddings")
    def embeddings(request: EmbeddingRequest) -> dict:
        texts = [request.input] if isinstance(request.input, str) else request.input
        if not texts or "" in texts:
            raise HTTPException(400, "input is empty; give a text, or a list of texts")
        try:
            encodings = model.tokenizer.encode_batch(texts)
        except TypeError as error:  # half of a pair of surrogates
            raise HTTPException(400, "input is no valid Unicode") from error
        for number, encoding in enumerate(encodings):
            if encoding.overflowing:
                raise HTTPException(400, f"input[{number}] has more than {model.max_length} tokens; split the text")
        vectors = model.encode(texts, normalize_embeddings=True)  # as OpenAI's
        if request.encoding_format == "base64":
            vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        else:
            vectors = vectors.tolist()
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        num_tokens = sum(sum(encoding.attention_mask) for encoding in encodings)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": request.model, "usage": usage}

    @app.exception_handler(HTTPException)
    @app.exception_handler(RequestValidationError)
    def answer_error(_, error: HTTPException | RequestValidationError) -> JSONResponse:
        """In the form of OpenAI, which its clients read."""
        if isinstance(error, HTTPException):
            status, message = error.status_code, error.detail
        else:
            status, first = 400, error.errors()[0]
            message = f"{'.'.join(map(str, first['loc'][1:])) or 'body'}: {first['msg']}"
        return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)

    return app


def main() -> None:
    """Open the model and serve it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Folder that `neobert export MODEL FOLDER --to onnx` wrote.")
    parser.add_argument("--dtype", default="fp32", help="fp32, fp16 or int8.")
    parser.add_argument(
        "--num_threads", type=int, default=1, help="Threads of one request; several requests run at a time."
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen on.")
    options = parser.parse_args()
    try:
        model = OnnxModel(options.folder, options.dtype, num_threads=options.num_threads)
        model.encode("")  # an error if it is no embedding model
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    uvicorn.run(make_app(model), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
