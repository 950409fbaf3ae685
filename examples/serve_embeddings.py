"""Serve an exported embedding model to clients of OpenAI's embeddings: POST /v1/embeddings.

python examples/serve_embeddings.py exported --dtype int8 --port 8000
"""

import argparse
import base64
from typing import Annotated, Literal

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Field

from neobert_hf.export import OnnxModel

as_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class EmbeddingRequest(BaseModel, extra="forbid"):
    """What a client of OpenAI sends; another field, such as `dimensions`, is an error."""

    input: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), as_list]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


def make_app(model: OnnxModel) -> FastAPI:
    """Return the application; FastAPI calls `embeddings` in a pool of threads, which share the model."""
    app = FastAPI()

    @app.post("/v1/embeddings")
    def embeddings(request: EmbeddingRequest) -> dict:
        texts = [model.prompts.get(model.default_prompt_name, "") + text for text in request.input]
        encodings = model.tokenizer.encode_batch(texts)
        for number, encoding in enumerate(encodings):
            if encoding.overflowing:
                message = f"The text has more than {model.max_length} tokens; split it"
                raise RequestValidationError([{"type": "too_long", "loc": ("body", "input", number), "msg": message}])
        vectors = model.encode(texts, prompt="", normalize_embeddings=True)  # of length 1, as OpenAI's
        is_base64 = request.encoding_format == "base64"
        rows = [base64.b64encode(vector.astype("<f4")).decode() if is_base64 else vector.tolist() for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        num_tokens = sum(sum(encoding.attention_mask) for encoding in encodings)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": request.model, "usage": usage}

    @app.exception_handler(RequestValidationError)
    def answer_error(_, error: RequestValidationError) -> JSONResponse:
        """In the form of OpenAI, which its clients read."""
        first = error.errors()[0]
        place, message = ".".join(map(str, first["loc"][1:])) or "body", first["msg"]
        if first["type"] == "json_invalid":
            place, message = "body is no JSON", f"{first['ctx']['error']} at character {place}"
        elif place.startswith("input") and first["type"] in ("list_type", "string_type"):
            message = "give a text or a list of texts; token ids are not accepted"
        message = f"{place}: {message}"
        return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, 400)

    return app


def main() -> None:
    """Open the model and serve it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="Folder that `neobert export MODEL FOLDER --to onnx` wrote.")
    parser.add_argument("--dtype", default="fp32", help="fp32, fp16 or int8.")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen on.")
    options = parser.parse_args()
    try:
        model = OnnxModel(options.folder, options.dtype, num_threads=1)  # several requests run at a time
        model.encode("")  # an error if it is no embedding model
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    uvicorn.run(make_app(model), port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
