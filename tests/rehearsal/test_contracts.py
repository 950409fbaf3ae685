"""Contracts with packages of attention kernels: their newest releases against our calls, our stand-ins and `BACKENDS`.

The files are downloaded and read; nothing is built. Only the Python part of xformers runs, in a process of its own.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from email.parser import Parser
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.version import Version

from neobert_hf.model.backends_neobert import BACKENDS

pytestmark = pytest.mark.rehearsal

TESTS = Path(__file__).parents[1]
STAND_INS = TESTS / "stand_ins"
HALF = {torch.float16, torch.bfloat16}


class Release(NamedTuple):
    version: str
    folder: Path


@pytest.fixture(scope="session")
def newest(tmp_path_factory):
    """Download the newest release of a distribution. No code of it runs: pip would run the setup.py of a source."""
    from pypi_simple import PyPISimple  # only the environment of the rehearsal has it

    @cache
    def find(name, kind, tag=""):
        folder = tmp_path_factory.mktemp(name)
        with PyPISimple() as registry:
            files = [
                file
                for file in registry.get_project_page(name).packages
                if file.package_type == kind and tag in file.filename and not file.is_yanked
            ]
            # FlashAttention 4 has pre-releases only
            file = max(files, key=lambda file: (not Version(file.version).is_prerelease, Version(file.version)))
            registry.download_package(file, folder / file.filename)
        shutil.unpack_archive(folder / file.filename, folder, "zip" if kind == "wheel" else "gztar")
        return Release(file.version, folder if kind == "wheel" else next(folder.glob("*/")))

    return find


def definition(file, name):
    tree = ast.parse(file.read_text("utf-8"))
    for part in name.split("."):
        tree = next((node for node in tree.body if getattr(node, "name", None) == part), None)
        assert tree is not None, f"{file} has no {name}"
    return tree


def signature(file, name):
    arguments = definition(file, name).args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments).split(", ")


def stand_in_version(name):
    metadata = next(STAND_INS.glob(f"{name}-*.dist-info")) / "METADATA"
    return Parser().parsestr(metadata.read_text("utf-8"))["Version"]


FUNCTIONS = {
    "FlashAttention 2": ("flash-attn", "flash_attn/flash_attn_interface.py", "flash_attn/__init__.py"),
    "FlashAttention 3": ("flash-attn", "hopper/flash_attn_interface.py", "flash_attn_interface.py"),
    "FlashAttention 4": ("flash-attn-4", "flash_attn/cute/interface.py", "flash_attn/cute/__init__.py"),
}


@pytest.fixture(scope="session")
def sources(newest):
    return {name: newest(name, "sdist" if name == "flash-attn" else "wheel") for name in ("flash-attn", "flash-attn-4")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stand_in_of_flash_attention_has_the_signature_of_the_package(sources, name):
    """tests/model/test_backends_neobert.py calls this signature through transformers, with our arguments."""
    distribution, file, stand_in = FUNCTIONS[name]
    release = sources[distribution]
    version, known = release.version, {"2": "flash_attn", "3": "flash_attn_3", "4": "flash_attn_4"}[name[-1]]
    if name == "FlashAttention 3":
        version = re.search(r'"(.+)"', (release.folder / "hopper/__init__.py").read_text())[1]
    actual, ours = (signature(path, "flash_attn_varlen_func") for path in (release.folder / file, STAND_INS / stand_in))
    assert actual == ours, f"{name} {version} against the stand-in of {stand_in_version(known)}"
    assert Version(version) == Version(stand_in_version(known)), "the signature is the same: raise the version"


def limits(backend):
    lowest, highest = zip(*BACKENDS[backend].capabilities.values())
    return set(BACKENDS[backend].capabilities), min(lowest), max(highest)


def test_the_limits_of_flash_attention_2_are_those_of_its_source(sources):
    source = (sources["flash-attn"].folder / "csrc/flash_attn/flash_api.cpp").read_text("utf-8")
    forward = source.partition("mha_varlen_fwd(")[2].partition("\nmha_")[0]
    assert f"head_size <= {BACKENDS['flash_attention_2'].max_head_width}," in forward
    assert f"head_size % {BACKENDS['flash_attention_2'].head_multiple} == 0," in forward
    assert "q_dtype == torch::kFloat16 || q_dtype == torch::kBFloat16" in forward
    assert "is_sm8x_min = cc_major >= 8;" in forward and limits("flash_attention_2")[:2] == (HALF, (8, 0))


def test_the_limits_of_flash_attention_3_are_those_of_its_source(sources):
    """Its kernels are not in the source package; the build script and README say what they are for."""
    folder = sources["flash-attn"].folder
    widths = map(int, re.findall(r"FLASH_ATTENTION_DISABLE_HDIM(\d+)", (folder / "hopper/setup.py").read_text("utf-8")))
    assert max(widths) == BACKENDS["flash_attention_3"].max_head_width
    assert "Requirements: H100 / H800 GPU" in (folder / "README.md").read_text("utf-8")
    assert limits("flash_attention_3") == (HALF, (9, 0), (9, 9))


def test_the_limits_of_flash_attention_4_are_those_of_its_source(sources):
    file = sources["flash-attn-4"].folder / "flash_attn/cute/interface.py"
    forward = ast.unparse(definition(file, "_flash_attn_fwd"))
    majors = json.loads(re.search(r"assert arch // 10 in (\[[\d, ]+\])", forward)[1])
    dtypes, lowest, highest = limits("flash_attention_4")
    assert dtypes == HALF and lowest[0] in majors and highest == (max(majors), 9)
    check = definition(file, "_validate_head_dims")  # a function of four numbers
    check.returns, check.decorator_list, names = None, [], {}
    for argument in check.args.args:
        argument.annotation = None
    exec(compile(ast.Module([check], []), str(file), "exec"), names)
    backend = BACKENDS["flash_attention_4"]
    for width in range(backend.head_multiple, backend.max_head_width + 1, backend.head_multiple):
        for major in majors:
            names["_validate_head_dims"](width, width, major, 8)  # raises AssertionError
    with pytest.raises(AssertionError):
        names["_validate_head_dims"](backend.max_head_width + 8, backend.max_head_width + 8, 10, 8)


XFORMERS_SCRIPT = """
import ctypes, json, sys, torch
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # the CUDA of the kernels, which this torch may lack; none of them runs
from conftest import packed_plan
from torch._subclasses.fake_tensor import FakeTensorMode
from neobert_hf.model.attention_neobert import attend_xformers, find_xformers
from neobert_hf.model.backends_neobert import BACKENDS, Situation, choose_backend

BACKENDS["xformers"] = BACKENDS["xformers"]._replace(devices=("cpu", "cuda"))
lengths = [3, 1, 4]
plan = packed_plan(lengths, "xformers", dtype=torch.float32)  # a head width of 8
document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
wanted = torch.zeros(8, 8).masked_fill(document[:, None] != document, -torch.inf)
assert torch.equal(plan.mask.materialize((8, 8)), wanted) and plan.mask.q_seqinfo is plan.mask.k_seqinfo

lies = []  # situations in which the table and the dispatcher of xformers differ
for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
    torch.cuda.get_device_capability = lambda device=None: capability
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for width in (8, 64, 256):
            try:
                choose_backend("xformers", Situation((torch.device("cuda", 0),), dtype, width, True))
                is_chosen = True
            except ValueError:
                is_chosen = False
            with FakeTensorMode(allow_non_fake_inputs=True):
                q, k, v = (torch.empty(8, 2, width, dtype=dtype, device="cuda") for _ in range(3))
                mask = find_xformers().fmha.BlockDiagonalMask.from_seqlens(lengths, device=torch.device("cpu"))
                mask.q_seqinfo.seqstart = mask.k_seqinfo.seqstart = torch.empty(4, dtype=torch.int32, device="cuda")
                try:
                    out, _ = attend_xformers(q, k, v, plan._replace(mask=mask))
                    assert (out.shape, out.dtype, out.device) == (q.shape, dtype, q.device)
                    runs = True
                except NotImplementedError:
                    runs = False
            lies += [f"{capability} {dtype} {width}: chosen {is_chosen}, runs {runs}"] if runs != is_chosen else []
print(json.dumps(lies))
"""


@pytest.fixture(scope="session")
def xformers(newest):
    return newest("xformers", "wheel", "manylinux")


def run_xformers(xformers, library):
    path = os.pathsep.join(map(str, (xformers.folder, TESTS, TESTS.parent / "src")))
    options = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": path}}
    process = subprocess.run([sys.executable, "-c", XFORMERS_SCRIPT, library], **options)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_the_stand_in_of_xformers_has_the_signatures_of_the_package(xformers):
    real, stand_in = xformers.folder / "xformers/ops/fmha", STAND_INS / "xformers/ops/fmha.py"
    known = re.search(r'__version__ = "(.+)"', (STAND_INS / "xformers/__init__.py").read_text("utf-8"))[1]
    places = {"memory_efficient_attention": "__init__.py", "BlockDiagonalMask.from_seqlens": "attn_bias.py"}
    for name, file in places.items():
        differ = f"{name} of xformers {xformers.version} against the stand-in of {known}"
        assert signature(real / file, name) == signature(stand_in, name), differ
    for name in ("BlockDiagonalMask", "_SeqLenInfo"):
        fields = [
            [node.target.id for node in definition(file, name).body if isinstance(node, ast.AnnAssign)]
            for file in (real / "attn_bias.py", stand_in)
        ]
        assert fields[0] == fields[1], (name, xformers.version, known)
    assert xformers.version == known, "the signatures are the same: raise the version of the stand-in"


def test_the_remedy_and_the_table_name_the_version_and_the_newest_gpu_of_xformers(xformers):
    built = json.loads((xformers.folder / "xformers/cpp_lib.json").read_text("utf-8"))
    assert f"xformers>={xformers.version}" in BACKENDS["xformers"].remedy
    newest_built = min(re.findall(r"\d+\.\d", built["env"]["TORCH_CUDA_ARCH_LIST"]), key=float)
    assert ".".join(map(str, limits("xformers")[1])) == newest_built


def test_the_real_mask_separates_documents_and_the_real_dispatcher_agrees_with_the_table(xformers, newest):
    """The kernels use the stable interface of torch: with the CUDA library that they name, they load beside a newer torch."""
    cuda = newest("nvidia-cuda-runtime-cu12", "wheel", "manylinux2014_x86_64")
    library = next(cuda.folder.rglob("libcudart.so.12"))
    assert run_xformers(xformers, str(library)) == []
