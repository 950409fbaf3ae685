"""Embed the texts of Parquet files on all cores or GPUs of a machine or of a Ray cluster.

    python examples/embed_corpus_ray.py --files corpus --output_dir vectors
    python examples/embed_corpus_ray.py --files corpus --output_dir vectors --model exported --dtype int8

After an interruption the same command computes what is missing. `neobert export` writes a folder such as `exported`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyarrow.dataset import dataset

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.embeddings.models import open_embedding_model
from neobert_hf.export import OnnxModel
from neobert_hf.runs.commands import CommandParser, run_command

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ROWS = 1024  # of an output file, which one model computes


@dataclass
class CorpusArguments:
    """Corpus and model. All machines need the same folders."""

    files: str = field(metadata={"help": "Parquet file, folder of them, or URL."})
    output_dir: str = field(metadata={"help": "Folder to write, new or empty."})
    model: str = field(default=MINI_MODEL_PATH, metadata={"help": "Embedding model, or folder of `neobert export`."})
    dtype: str = field(default="fp32", metadata={"help": "fp32, fp16, or bf16; int8 of an exported folder."})
    id_column: str = field(default="id", metadata={"help": "Column of ids, different in all rows."})
    text_column: str = field(default="text", metadata={"help": "Column of texts; a null gets the embedding null."})
    prompt_name: str = field(default=None, metadata={"help": "Name of the model's prompt to put before each text."})
    gpus: float = field(default=0, metadata={"help": "GPUs of a model: 1, or a fraction."})


class Embedder:
    """A model on one core or GPU, in a process that Ray starts again if it ends."""

    def __init__(self, arguments: CorpusArguments):
        self.column, self.prompt_name, model = arguments.text_column, arguments.prompt_name, arguments.model
        if Path(model, "onnx").is_dir():
            self.model = OnnxModel(model, arguments.dtype, num_threads=1)
        else:
            dtype = TORCH_DTYPES.get(arguments.dtype, arguments.dtype)
            self.model = open_embedding_model(model, model_kwargs={"dtype": dtype})

    def __call__(self, rows):
        """Return the rows of a pyarrow.Table with their embeddings."""
        texts = rows[self.column].to_pylist()
        vectors = iter(self.model.encode([text for text in texts if text is not None], prompt_name=self.prompt_name))
        embeddings = [None if text is None else next(vectors) for text in texts]
        return rows.append_column("embedding", pa.array(embeddings, pa.list_(pa.float32())))


def embed(arguments: CorpusArguments):
    """Read, embed and write blocks of rows; a call after an interruption leaves out what is written."""
    import ray
    from ray.data.checkpoint import CheckpointConfig

    corpus, columns = dataset(arguments.files), [arguments.id_column, arguments.text_column]
    if not corpus.count_rows() or not set(columns) <= set(corpus.schema.names):
        raise ValueError(f"{arguments.files}: no rows with the columns {columns}, but with {corpus.schema.names}")
    output = Path(arguments.output_dir).resolve()
    done = Path(f"{output}.{Path(arguments.model).name}.{arguments.dtype}")  # keeps ids until all rows are written
    if output.exists() and any(output.iterdir()) and not done.exists():
        raise ValueError(f"{output} has files of another run; choose a new folder")
    Embedder(arguments)  # raises here what it would raise on each core
    ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(arguments.id_column, str(done))
    kind, share = ("GPU", arguments.gpus) if arguments.gpus else ("CPU", 1)
    pool = ray.data.ActorPoolStrategy(size=int(ray.cluster_resources().get(kind, 0) / share))
    rows = ray.data.read_parquet(arguments.files, num_cpus=0).select_columns(columns)
    rows = rows.repartition(target_num_rows_per_block=ROWS)
    # Ray counts no core for a model: its own tasks, which read, resume and write, would wait for one for ever.
    options = {"fn_constructor_args": [arguments], "num_cpus": 0, "num_gpus": arguments.gpus, "compute": pool}
    rows = rows.map_batches(Embedder, batch_size=ROWS, batch_format="pyarrow", **options)
    rows.write_parquet(str(output), ray_remote_args={"num_cpus": 0})


def main():
    """Read the command line, and embed."""
    parser = CommandParser(CorpusArguments, description=__doc__)
    run_command(parser.prog, embed, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
