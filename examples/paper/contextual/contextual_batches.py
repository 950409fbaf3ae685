"""Contextual batching: each batch holds pairs of one topic, so that in-batch negatives are hard.

A surrogate model embeds all pairs once. Paired K-means groups them within each dataset, and clusters are packed into batches of a
fixed size. The surrogate's embeddings also identify false negatives (see `ContextualRankingLoss`).

Axes: `N` pairs of a dataset; `D` width of the surrogate's embeddings; `C` clusters.

Source: paper, appendix G.1; CDE (arXiv 2410.02525), section 4.1.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors.numpy import save
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import DefaultBatchSampler
from sklearn.cluster import KMeans, MiniBatchKMeans
from transformers.utils import is_faiss_available, logging

from ..files.writing import writing
from ..model.weight_files_neobert import explain_damaged_file

logger = logging.get_logger(__name__)

ROW_COLUMN = "label"  # sentence-transformers passes this column to the loss; it holds the number of the row
MOST_POINTS = 50_000  # up to here K-means reads all points in each iteration, beyond it reads mini-batches
SHARD = 1_000_000  # pairs that are clustered together; a larger dataset is divided, which bounds memory and time


@dataclass(frozen=True)
class PairClusters:
    """Surrogate embeddings and clusters of the pairs of one dataset.

    Attributes:
        queries: (N, D) unit vectors.
        documents: (N, D) unit vectors.
        clusters: (N,) int64, cluster of each pair.
        file: The file that holds them, if there is one.
    """

    queries: np.ndarray
    documents: np.ndarray
    clusters: np.ndarray
    file: str | None = None

    def __reduce__(self):
        # The trainer saves its arguments, and with them the batch sampler, in each checkpoint.
        return (_read, (self.file,)) if self.file else super().__reduce__()

    def __len__(self) -> int:
        return len(self.clusters)

    def is_false_negative(self, rows: np.ndarray) -> np.ndarray:
        """(B, B) bool for a batch of rows: whether document j is at least as similar to query i as its own document.

        Own documents are never marked. Documents with equal texts have equal embeddings, so they are marked; the margin covers
        the rounding of the products.
        """
        scores = self.queries[rows] @ self.documents[rows].T
        own = scores.diagonal()[:, None]
        return (scores >= own - 1e-6) & ~np.eye(len(rows), dtype=bool)


def unit_vectors(texts: list[str], surrogate: SentenceTransformer, batch_size: int = 64) -> np.ndarray:
    """(N, D) fp32 unit vectors of the surrogate; equal texts are embedded once, so that their vectors are equal."""
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    vectors = surrogate.encode(list(number), batch_size=batch_size, normalize_embeddings=True, show_progress_bar=True)
    return vectors.astype(np.float32)[[number[text] for text in texts]]


def cluster_pairs(
    queries: np.ndarray, documents: np.ndarray, num_clusters: int, seed: int = 0, use_faiss: bool | None = None
) -> np.ndarray:
    """Cluster pairs by spherical K-means on [query; document] and [document; query], both for every pair.

    Both orders make clusters in which any query is similar to any document. A pair belongs to the centroid nearest to
    [query; document].

    Args:
        queries: (N, D) unit vectors.
        documents: (N, D) unit vectors.
        num_clusters: Number C of clusters, at most 2 N.
        seed: Seed of the initial centroids.
        use_faiss: faiss instead of scikit-learn. Default: faiss if it is installed.

    Returns:
        (N,) int64 cluster of each pair.
    """
    points = np.block([[queries, documents], [documents, queries]]).astype(np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    if is_faiss_available() if use_faiss is None else use_faiss:
        import faiss

        kmeans = faiss.Kmeans(
            points.shape[1], num_clusters, niter=100, nredo=3, spherical=True, seed=seed, min_points_per_centroid=1
        )
        kmeans.train(points)
        centroids = kmeans.centroids
    else:
        kind = KMeans if len(points) <= MOST_POINTS else MiniBatchKMeans
        options = {} if kind is KMeans else {"batch_size": max(4096, 3 * num_clusters)}
        fitted = kind(num_clusters, n_init=3, max_iter=100, random_state=seed, **options).fit(points)
        centroids = fitted.cluster_centers_
    centroids = centroids / np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    pairs = points[: len(queries)]
    nearest = [(pairs[start : start + 8192] @ centroids.T).argmax(1) for start in range(0, len(pairs), 8192)]
    return np.concatenate(nearest)


def pack_clusters(clusters: np.ndarray, batch_size: int, seed: int = 0) -> np.ndarray:
    """Pack clusters into batches of equal size: order the clusters at random, concatenate their rows, and cut.

    A large cluster becomes several batches, and small ones share a batch. Each row is in at most one batch; the last rows, fewer
    than a batch, are dropped.

    Args:
        clusters: (N,) cluster of each row.
        batch_size: Rows of a batch.
        seed: Seed of the order of clusters, and of the order of rows in a cluster.

    Returns:
        (batches, batch_size) int64 rows.
    """
    rng = np.random.default_rng(seed)
    names, members = np.unique(clusters, return_inverse=True)
    rank = rng.permutation(len(names))
    shuffled = rng.permutation(len(clusters))
    rows = shuffled[np.argsort(rank[members[shuffled]], kind="stable")]
    return rows[: len(rows) // batch_size * batch_size].reshape(-1, batch_size)


class ContextualBatchSampler(DefaultBatchSampler):
    """Batches of one dataset from its clusters, packed again and shuffled in each epoch.

    Use it through `functools.partial(ContextualBatchSampler, datasets=...)` as `batch_sampler` of the training arguments.

    Args:
        dataset: Rows with their number in the column `ROW_COLUMN`.
        batch_size: Rows of a batch.
        drop_last: Ignored: incomplete batches are always dropped.
        valid_label_columns: Ignored; passed by the trainer.
        generator: Ignored: the order depends on seed and epoch only.
        seed: Seed of the order.
        datasets: Clusters by the number of a dataset's first row.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        drop_last: bool = True,
        valid_label_columns: list[str] | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        datasets: dict[int, PairClusters],
    ) -> None:
        super().__init__(dataset, batch_size, drop_last, valid_label_columns, generator, seed)
        self.pairs = datasets[dataset[0][ROW_COLUMN]]

    def __iter__(self) -> Iterator[list[int]]:
        seed = self.seed + self.epoch
        batches = pack_clusters(self.pairs.clusters, self.batch_size, seed)
        rng = np.random.default_rng(seed)
        for batch in rng.permutation(batches):
            yield rng.permutation(batch).tolist()

    def __len__(self) -> int:
        return len(self.pairs) // self.batch_size


def load_or_cluster(
    folder: Path,
    name: str,
    rows: Dataset,
    surrogate: str,
    cluster_size: int,
    seed: int,
    load: Callable[[], SentenceTransformer],
) -> PairClusters:
    """Read the clusters of a dataset from a file, or make them and write the file.

    Args:
        folder: Folder of the files. The name of a file has a hash of texts, surrogate, cluster size and seed.
        name: Name of the dataset, the beginning of the file's name.
        rows: Pairs; the first two columns are query and document.
        surrogate: Name or hash of the surrogate model, which identifies the embeddings.
        cluster_size: Mean number of pairs in a cluster.
        seed: Seed of K-means.
        load: Loads the surrogate; called only if the file does not exist.

    Raises:
        OSError: The file cannot be read or written.
    """
    texts = {side: list(rows[column]) for side, column in zip(("queries", "documents"), rows.column_names)}
    digest = hashlib.sha256(f"{surrogate} {cluster_size} {seed}".encode())
    for text in itertools.chain(*texts.values()):
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    file = folder / f"{name}-{digest.hexdigest()[:16]}.safetensors"
    if not file.is_file():
        model = load()
        vectors = {side: unit_vectors(part, model) for side, part in texts.items()}
        clusters, num_made = [], 0
        for start in range(0, len(rows), SHARD):
            parts = [part[start : start + SHARD] for part in vectors.values()]
            num_clusters = -(-len(parts[0]) // cluster_size)
            clusters.append(num_made + cluster_pairs(*parts, num_clusters, seed))
            num_made += num_clusters
        folder.mkdir(parents=True, exist_ok=True)
        with writing(file) as stream:
            stream.write(save({**vectors, "clusters": np.concatenate(clusters).astype(np.int64)}))
        logger.info(f"{file}: {len(rows)} pairs in {num_made} clusters")
    return _read(str(file))


def _read(file: str) -> PairClusters:
    """Read a file of clusters; PyTorch maps the vectors into memory, so that only the rows that are used are read."""
    with explain_damaged_file(file, "remove it, and it will be made again"):
        return PairClusters(**{name: tensor.numpy() for name, tensor in load_file(file).items()}, file=file)
