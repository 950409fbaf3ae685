"""Contextual batching: each batch holds pairs of one topic, so that in-batch negatives are hard.

A surrogate model embeds all pairs once. Paired K-means groups them within each dataset, and clusters are packed into batches of a
fixed size. The surrogate's embeddings also identify false negatives (see `ContextualRankingLoss`).

Axes: `N` pairs of a dataset; `D` width of the surrogate's embeddings; `C` clusters.

Source: paper, appendix G.1; CDE (arXiv 2410.02525), section 4.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import DefaultBatchSampler
from sklearn.cluster import KMeans, MiniBatchKMeans

ROW_COLUMN = "label"  # sentence-transformers passes this column to the loss; it holds the number of the row
MOST_POINTS = 50_000  # up to here K-means reads all points in each iteration, beyond it reads mini-batches


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
        return (read_clusters, (self.file,)) if self.file else super().__reduce__()

    def is_false_negative(self, rows: np.ndarray) -> np.ndarray:
        """(B, B) bool for a batch of rows: whether document j is at least as similar to query i as its own document.

        Own documents are never marked. Documents with equal texts have equal embeddings, so they are marked; the margin covers
        the rounding of the products.
        """
        scores = self.queries[rows] @ self.documents[rows].T
        own = scores.diagonal()[:, None]
        return (scores >= own - 1e-6) & ~np.eye(len(rows), dtype=bool)


def unit_vectors(texts: list[str], surrogate: SentenceTransformer) -> np.ndarray:
    """(N, D) fp32 unit vectors of the surrogate; equal texts are embedded once, so that their vectors are equal."""
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    vectors = surrogate.encode(list(number), batch_size=64, normalize_embeddings=True, show_progress_bar=True)
    return vectors.astype(np.float32)[[number[text] for text in texts]]


def cluster_pairs(queries: np.ndarray, documents: np.ndarray, num_clusters: int, seed: int = 0) -> np.ndarray:
    """Cluster pairs by spherical K-means on [query; document] and [document; query], both for every pair.

    Both orders make clusters in which any query is similar to any document. A pair belongs to the centroid nearest to
    [query; document].

    Args:
        queries: (N, D) unit vectors.
        documents: (N, D) unit vectors.
        num_clusters: Number C of clusters, at most 2 N.
        seed: Seed of the initial centroids.

    Returns:
        (N,) int64 cluster of each pair.
    """
    points = np.block([[queries, documents], [documents, queries]]).astype(np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    options = {"n_init": 3, "max_iter": 100, "random_state": seed}
    if len(points) <= MOST_POINTS:
        kmeans = KMeans(num_clusters, **options)
    else:
        kmeans = MiniBatchKMeans(num_clusters, batch_size=max(4096, 3 * num_clusters), **options)
    centroids = kmeans.fit(points).cluster_centers_
    centroids = centroids / np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    pairs = points[: len(queries)]
    nearest = [(pairs[start : start + 8192] @ centroids.T).argmax(1) for start in range(0, len(pairs), 8192)]
    return np.concatenate(nearest).astype(np.int64)


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
    """Batches of one dataset from its clusters, packed again and shuffled in each epoch; the order depends on seed and epoch.

    Use it through `functools.partial(ContextualBatchSampler, datasets=...)` as `batch_sampler` of the training arguments.

    Args:
        dataset: Rows with their number in the column `ROW_COLUMN`.
        batch_size: Rows of a batch; incomplete batches are dropped.
        args: As of `DefaultBatchSampler`.
        datasets: Clusters by the number of a dataset's first row.
        kwargs: As of `DefaultBatchSampler`.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *args, datasets: dict[int, PairClusters], **kwargs) -> None:
        super().__init__(dataset, batch_size, *args, **kwargs)
        self.pairs = datasets[dataset[0][ROW_COLUMN]]

    def __iter__(self) -> Iterator[list[int]]:
        seed = self.seed + self.epoch
        batches = pack_clusters(self.pairs.clusters, self.batch_size, seed)
        rng = np.random.default_rng(seed)
        for batch in rng.permutation(batches):
            yield rng.permutation(batch).tolist()

    def __len__(self) -> int:
        return len(self.pairs.clusters) // self.batch_size


def load_or_cluster(
    folder: Path, name: str, rows: Dataset, settings: list, load: Callable[[], SentenceTransformer]
) -> PairClusters:
    """Read the clusters of a dataset from a file, or make them and write the file.

    Args:
        folder: Folder of the files. The name of a file has a hash of texts and settings.
        name: Name of the dataset, the beginning of the file's name.
        rows: Pairs; the first two columns are query and document.
        settings: What identifies the surrogate's embeddings, mean number of pairs in a cluster, seed.
        load: Loads the surrogate; called only if the file does not exist.

    Raises:
        OSError: The file cannot be read or written.
    """
    queries, documents = (list(rows[column]) for column in rows.column_names[:2])
    digest = hashlib.sha256(repr([settings, queries, documents]).encode()).hexdigest()
    file = folder / f"{name}-{digest[:16]}.safetensors"
    if not file.is_file():
        surrogate, (_, cluster_size, seed) = load(), settings
        vectors = {"queries": unit_vectors(queries, surrogate), "documents": unit_vectors(documents, surrogate)}
        clusters = cluster_pairs(*vectors.values(), -(-len(rows) // cluster_size), seed)
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part")
        save_file({**vectors, "clusters": clusters}, partial)
        partial.replace(file)
    return read_clusters(str(file))


def read_clusters(file: str) -> PairClusters:
    """Read a file of clusters."""
    return PairClusters(**load_file(file), file=file)
