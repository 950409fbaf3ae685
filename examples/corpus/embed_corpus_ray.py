"""Embed the texts of Parquet files on all cores or GPUs of a machine or of a Ray cluster; the same command resumes.

python examples/corpus/embed_corpus_ray.py corpus vectors --model exported --dtype int8
"""

import argparse
from pathlib import Path

import pyarrow.dataset

from neobert_hf.embeddings import open_embedding_model
from neobert_hf.export import OnnxModel
from neobert_hf.files import run_command


class Embedder:
    """A model, in a process that Ray starts again if it ends."""

    def __init__(self, model: str, dtype: str):
        if Path(model, "onnx").is_dir():
            self.model = OnnxModel(model, dtype, num_threads=1)
        else:
            self.model = open_embedding_model(model, model_kwargs={"dtype": dtype})

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """Return the rows with their embeddings."""
        vectors = list(self.model.encode(rows["text"].fill_null("").to_pylist()))
        return rows.append_column("embedding", pyarrow.array(vectors, pyarrow.list_(pyarrow.float32())))


def embed(files: str, output: Path, model: str, dtype: str, gpus: int):
    """Write rows with their embeddings, block by block; leave out what an interrupted run has written."""
    import ray.data.checkpoint

    done = Path(f"{output.resolve()}.{Path(model).name}.{dtype}")  # keeps the ids until all rows are written
    if output.exists() and any(output.iterdir()) and not done.exists():
        raise ValueError(f"{output} has files of another run; choose a new folder")
    embedder = Embedder(model, dtype)
    first = pyarrow.dataset.dataset(files).head(1, ["id", "text"])
    embedder(first)  # raises what each core would raise
    ray.init(log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = ray.data.checkpoint.CheckpointConfig("id", str(done))
    pool = ray.data.ActorPoolStrategy(size=gpus or int(ray.cluster_resources()["CPU"]))
    rows = ray.data.read_parquet(files, columns=["id", "text"], num_cpus=0).repartition(target_num_rows_per_block=1024)
    rows = rows.map_batches(
        Embedder,
        fn_constructor_args=[model, dtype],
        compute=pool,
        batch_format="pyarrow",
        num_gpus=min(gpus, 1),
        num_cpus=0,  # Ray's own tasks need the cores
    )
    rows.write_parquet(str(output.resolve()), ray_remote_args={"num_cpus": 0})


def main():
    """Read the command line, and embed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", help="Parquet file, folder of them, or URL, with the columns id and text.")
    parser.add_argument("output", type=Path, help="Folder to write, new or empty.")
    parser.add_argument("--model", required=True, help="Embedding model, or folder of `neobert export`.")
    parser.add_argument("--dtype", default="float32", help="Of torch; for an exported folder, fp32 or int8.")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs, with a model on each; 0: a model on each core.")
    run_command(parser.prog, embed, *vars(parser.parse_args()).values())


if __name__ == "__main__":
    main()
