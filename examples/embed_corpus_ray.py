"""Embed the texts of Parquet files on all cores or GPUs of a machine or of a Ray cluster.

python examples/embed_corpus_ray.py --files corpus --output_dir vectors
python examples/embed_corpus_ray.py --files corpus --output_dir vectors --model exported --dtype int8
"""

from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.embeddings.models import open_embedding_model
from neobert_hf.export import OnnxModel
from neobert_hf.runs.commands import CommandParser, run_command

ROWS = 1024  # of an output file, which one model computes


@dataclass
class CorpusArguments:
    """Corpus and model. All machines need the same folders."""

    files: str = field(metadata={"help": "Parquet file, folder of them, or URL."})
    output_dir: str = field(metadata={"help": "Folder to write, new or empty."})
    model: str = field(default=MINI_MODEL_PATH, metadata={"help": "Embedding model, or folder of `neobert export`."})
    dtype: str = field(default=None, metadata={"help": "Such as bfloat16; of an exported folder fp32, fp16 or int8."})
    id_column: str = field(default="id", metadata={"help": "Column of ids, different in all rows."})
    text_column: str = field(default="text", metadata={"help": "Column of texts; a null gets the embedding null."})
    gpus: float = field(default=0, metadata={"help": "GPUs of a model: 1, or a fraction."})


class Embedder:
    """A model on one core or GPU, in a process that Ray starts again if it ends."""

    def __init__(self, arguments: CorpusArguments):
        self.column, model = arguments.text_column, arguments.model
        options = {"dtype": arguments.dtype} if arguments.dtype else {}
        if Path(model, "onnx").is_dir():
            self.model = OnnxModel(model, num_threads=1, **options)
        else:
            self.model = open_embedding_model(model, model_kwargs=options)

    def __call__(self, rows):
        """Return the rows of a pyarrow.Table with their embeddings."""
        texts = rows[self.column].to_pylist()
        vectors = iter(self.model.encode([text for text in texts if text is not None]))
        return rows.append_column("embedding", [[None if text is None else next(vectors) for text in texts]])


def embed(arguments: CorpusArguments):
    """Read, embed and write blocks of rows; a call after an interruption leaves out what is written."""
    import ray
    from pyarrow.dataset import dataset
    from ray.data.checkpoint import CheckpointConfig

    corpus, columns = dataset(arguments.files), [arguments.id_column, arguments.text_column]
    if not corpus.count_rows() or not set(columns) <= set(corpus.schema.names):
        raise ValueError(f"{arguments.files}: no rows with the columns {columns}, but with {corpus.schema.names}")
    output = Path(arguments.output_dir).resolve()
    done = output.with_name(f"{output.name}.{Path(arguments.model).name}")  # ids that are written; removed at the end
    if output.exists() and any(output.iterdir()) and not done.exists():
        raise ValueError(f"{output} has files of another run; choose a new folder")
    Embedder(arguments)  # raises here what it would raise on each core
    ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(arguments.id_column, str(done))
    if arguments.gpus:
        size, share = int(ray.cluster_resources()["GPU"] / arguments.gpus), {"num_gpus": arguments.gpus}
    else:
        size, share = int(ray.cluster_resources()["CPU"]), {"num_cpus": 0.5}  # the rest is for reading and writing
    options = {"batch_format": "pyarrow", "compute": ray.data.ActorPoolStrategy(size=size), **share}
    rows = ray.data.read_parquet(arguments.files, num_cpus=0).select_columns(columns)
    rows = rows.repartition(target_num_rows_per_block=ROWS)
    rows = rows.map_batches(Embedder, batch_size=ROWS, fn_constructor_args=[arguments], **options)
    rows.write_parquet(str(output), ray_remote_args={"num_cpus": 0})


def main():
    """Read the command line, and embed."""
    parser = CommandParser(CorpusArguments, description=__doc__)
    run_command(parser.prog, embed, *parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
