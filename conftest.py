"""Fixtures: tiny checkpoints in the published layout, and their expected outputs."""

import atexit
import contextlib
import getpass
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of Hugging Face libraries
if "PYTEST_XDIST_WORKER" in os.environ:  # before the import of torch; workers and their subprocesses share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
else:  # not the user's cache; workers and their subprocesses share this one
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="neobert_tests_")
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
# torch.compile reuses cached code for other instructions, which then writes out of bounds: one cache per instruction set.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}",
)

import numpy as np
import pytest
import torch
from oracle import CONFIG, Oracle, random_weights, write_checkpoint
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoTokenizer

import neobert_hf
from neobert_hf.data.wordpiece import train_wordpiece
from neobert_hf.model.layout_neobert import Boundaries
from neobert_hf.model.plan_neobert import make_plan

ROOT = Path(__file__).parent
GOLDEN = ROOT / "tests/golden"

SENTENCE = "the quick brown fox jumps over lazy dog and then it sleeps in a warm red house by old sea"

WORKER_GIB = 3  # memory of a worker and of the two training processes that it may start

torch.manual_seed(0)  # for tensors that test modules make on import
# The default lock of progress bars is shared with forked processes: one that a test kills could keep it for ever.
tqdm.set_lock(threading.RLock())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed torch before the fixtures of a test, so that their numbers do not depend on the tests that ran before."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:  # graphs that other tests compiled count towards the limit of a function
        torch.compiler.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Seed torch again: a fixture that several tests share has drawn numbers only for the first of them."""
    torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)  # .venv-cuda has no xdist
def pytest_xdist_auto_num_workers(config):
    """One worker per core, fewer if memory is not sufficient."""
    import psutil

    return max(1, min(torch.get_num_threads(), psutil.virtual_memory().available // (WORKER_GIB * 2**30)))


def run_main(module, *arguments) -> str:
    """Call `main` of a script or of the command line in this process, and return its output.

    A subprocess needs seconds to import torch and transformers, so a test starts one only if it tests the process itself.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
        try:
            module.main()
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()


@contextlib.contextmanager
def largest_file(num_bytes):
    """Limit the size of every file to `num_bytes`; libraries then fail as with a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_disk_at_the_last_save(monkeypatch, trainer, num_bytes):
    """Let files have at most `num_bytes` while a trainer of this class saves its model."""
    save = trainer.save_model

    def save_on_a_full_disk(*args):
        with largest_file(num_bytes):
            save(*args)

    monkeypatch.setattr(trainer, "save_model", save_on_a_full_disk)


def write_documents(folder, lengths, documents_per_task=10, special_tokens=(0, 0)):
    """Tokenized documents in the files of datatrove, without a tokenizer: each holds its own number, repeated."""
    from neobert_hf.pretraining import tokenizing
    from neobert_hf.pretraining.documents import Documents, task_files

    tasks = range(-(-len(lengths) // documents_per_task))
    for task in tasks:
        numbers = np.arange(len(lengths))[task * documents_per_task :][:documents_per_task]
        block, files = np.array(lengths)[numbers], task_files(folder, task)
        files["ids"].parent.mkdir(parents=True, exist_ok=True)
        numbers.repeat(block).astype("<u2").tofile(files["ids"])
        block.cumsum().astype("<u8").tofile(files["ends"])
        tokenizing.write_record(folder, task, token_size=2)
    settings = {"source": {}, "tokenizer": {"sha256": "", "vocab_size": 1 << 16}, "special_tokens": special_tokens}
    (folder / tokenizing.SETTINGS).write_text(json.dumps(settings | {"num_tasks": len(tasks)}))
    tokenizing.write_manifest(folder)
    return Documents(folder)


def json_lines(file, rows):
    """Write rows as JSON lines, and return the file."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return file


def files_of_pairs(folder, **counts):
    """Files of random pairs in the columns q and d, one for each name."""
    rng, words, files = np.random.default_rng(0), SENTENCE.split(), []
    for name, count in counts.items():
        rows = [{"q": " ".join(rng.choice(words, 3)), "d": " ".join(rng.choice(words, 6))} for _ in range(count)]
        files.append(str(json_lines(folder / f"{name}.jsonl", rows)))
    return files


def flags(options):
    """Options as words of a command line; one with the value None is left out."""
    words = []
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def losses_of(folder):
    """The loss of each step, as the newest checkpoint of a run has them."""
    states = Path(folder).glob("checkpoint-*/trainer_state.json")
    last = max(states, key=lambda file: int(file.parent.name.split("-")[1]))
    return {entry["step"]: entry["loss"] for entry in json.loads(last.read_text())["log_history"] if "loss" in entry}


def contents(folder):
    """The bytes of each file and link of a folder, by path."""
    files = (file for file in folder.rglob("*") if file.is_file() or file.is_symlink())
    return {str(file.relative_to(folder)): file.read_bytes() if file.is_file() else file.readlink() for file in files}


def change_config(folder, **values):
    """Change values of the config.json of a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def relative_error(actual, wanted):
    """The norm of the error over the norm of what is wanted, a tensor in float64 on the CPU."""
    return ((actual.double().cpu() - wanted).norm() / wanted.norm()).item()


def largest_error(found, wanted, where=...):
    """Largest error over largest value."""
    found, wanted = np.asarray(found, np.float64)[where], np.asarray(wanted, np.float64)[where]
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def random_ids(*shape, seed=0):
    """Ids of the tiny vocabulary, without special tokens."""
    return torch.randint(5, CONFIG["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


class Trap:
    """Unpickling an object of this class creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def new_encoder(folder, tokenizer, **sizes):
    """Save a masked language model with new weights that learns in a few steps, with its tokenizer."""
    torch.manual_seed(0)
    config = neobert_hf.NeoBERTConfig(len(tokenizer), num_attention_heads=2, embedding_init_range=0.5, **sizes)
    neobert_hf.NeoBERTForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reranker_of_modules(folder, num_labels=1, **options):
    """A cross-encoder of an encoder and modules of sentence-transformers: pooling, Dense, LayerNorm, Dense."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Pooling, Transformer

    torch.manual_seed(0)
    network = Transformer(str(folder))
    width = network.get_embedding_dimension()
    dense = Dense(width, width, bias=False, activation_function=torch.nn.GELU())
    scores = Dense(width, num_labels, activation_function=torch.nn.Identity(), module_output_name="scores")
    modules = [network, Pooling(width, "mean"), dense, LayerNorm(width), scores]
    return CrossEncoder(modules=modules, device="cpu", **options)


@torch.no_grad()
def logits_of_modules(folder, pairs, max_length):
    """Logits (pairs, labels) of a saved `reranker_of_modules` in float64, by the numbers in its files."""
    network = neobert_hf.NeoBERTModel.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [load_file(folder / f"{part}/model.safetensors") for part in ("2_Dense", "3_LayerNorm", "4_Dense")]
    dense, norm, last = ({name: value.double() for name, value in part.items()} for part in parts)
    rows = []
    for pair in pairs:
        inputs = tokenizer(*pair, truncation=True, max_length=max_length, return_tensors="pt")
        x = torch.nn.functional.gelu(network(**inputs).last_hidden_state[0].mean(0) @ dense["linear.weight"].T)
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * norm["norm.weight"] + norm["norm.bias"]
        rows.append(x @ last["linear.weight"].T + last["linear.bias"])
    return torch.stack(rows).numpy()


def packed_rows(documents, max_tokens, max_length=None, num_rows=None, **settings):
    """Rows of documents in memory."""
    from neobert_hf.pretraining.packing import PackedRows
    from neobert_hf.pretraining.plans import PackingSettings, make_packing_plan

    settings = PackingSettings(max_tokens, max_length, **settings)
    return PackedRows(documents, make_packing_plan(list(map(len, documents)), settings), num_rows)


def unpack(rows):
    """The documents in packed rows, in order."""
    documents = []
    for row in rows:
        for token, position in zip(row["input_ids"], row["position_ids"]):
            if position == 0:
                documents.append([])
            assert position == len(documents[-1])
            documents[-1].append(token)
    return documents


def packed_plan(lengths, implementation="auto", dtype=torch.float32, is_training=True):
    """The plan of a forward over one packed row of documents."""
    boundaries = Boundaries(cu_seq_lens=torch.tensor([0, *lengths]).cumsum(0))
    config = neobert_hf.NeoBERTConfig(vocab_size=10, num_hidden_layers=1, attn_implementation=implementation)
    encoder = neobert_hf.NeoBERTModel(config).to(dtype).train(is_training)
    with torch.set_grad_enabled(is_training):
        return make_plan(encoder, torch.full((1, sum(lengths)), 5), boundaries)


@pytest.fixture(scope="session")
def weights():
    return random_weights()


@pytest.fixture(scope="session")
def oracle(weights):
    return Oracle(weights)


@pytest.fixture(scope="session")
def checkpoint(weights, tmp_path_factory):
    """A tiny masked language model in the published format of `chandar-lab/NeoBERT`."""
    return write_checkpoint(tmp_path_factory.mktemp("published") / "masked_lm", weights)


@pytest.fixture(scope="session")
def classifier_checkpoint(weights, tmp_path_factory):
    labels = {str(i): f"LABEL_{i}" for i in range(3)}
    return write_checkpoint(
        tmp_path_factory.mktemp("published") / "classifier",
        weights,
        architecture="NeoBERTForSequenceClassification",
        id2label=labels,
        label2id={name: int(i) for i, name in labels.items()},
    )


@pytest.fixture(scope="session")
def folder(checkpoint, tokenizer, tmp_path_factory):
    """The name of a folder that this library saved: the masked language model and its tokenizer. Tests only read it."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    neobert_hf.NeoBERTForMaskedLM.from_pretrained(checkpoint).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def model_folder(tokenizer, tmp_path_factory):
    """A new model that learns a rule of words. Tests only read it."""
    sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=96)
    return new_encoder(tmp_path_factory.mktemp("new") / "model", tokenizer, **sizes)


@pytest.fixture(scope="session")
def start(tokenizer, tmp_path_factory):
    """A new model that is smaller and learns single words. Tests only read it."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, intermediate_size=48)
    return new_encoder(tmp_path_factory.mktemp("start") / "model", tokenizer, **sizes)


@pytest.fixture(scope="session")
def bert(tokenizer, tmp_path_factory):
    """A new BERT of 64 positions with the same tokenizer. Tests only read it."""
    from transformers import BertConfig, BertForMaskedLM

    folder = tmp_path_factory.mktemp("other") / "bert"
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes, max_position_embeddings=64)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(checkpoint):
    """The tiny masked language model in float32, in evaluation mode."""
    return neobert_hf.NeoBERTForMaskedLM.from_pretrained(checkpoint).eval()


@pytest.fixture
def saved(model, tokenizer, tmp_path):
    """A folder with the tiny masked language model as save_pretrained writes it, with a tokenizer."""
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def published(checkpoint, tokenizer, tmp_path):
    """A folder with the tiny published checkpoint and its tokenizer."""
    shutil.copytree(checkpoint, tmp_path / "published")
    tokenizer.save_pretrained(tmp_path / "published")
    return tmp_path / "published"


@pytest.fixture
def tiny_config():
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return neobert_hf.NeoBERTConfig(**{key: CONFIG[key] for key in keys}, max_position_embeddings=64)


@pytest.fixture(scope="session")
def tokenizer():
    """A WordPiece tokenizer of at most 96 tokens, the vocabulary of the tiny model."""
    return train_wordpiece([SENTENCE] * 20, vocab_size=96, model_max_length=64)


@pytest.fixture(autouse=True)
def shared_tokenizer_keeps_its_settings(request):
    """Name the test that changes the tokenizer, and so the folders that later tests save."""
    tokenizer = request.getfixturevalue("tokenizer") if "tokenizer" in request.fixturenames else None
    before = repr(tokenizer)  # with lengths, sides and tokens
    yield
    assert repr(tokenizer) == before, "later tests use this tokenizer too; change a copy"


@pytest.fixture(scope="session")
def corpus(tokenizer, tmp_path_factory):
    """A folder with train.jsonl, held_out.jsonl and a tokenizer; each word of a text determines the next one."""
    folder = tmp_path_factory.mktemp("corpus")
    words, rng = SENTENCE.split(), np.random.default_rng(0)
    for name, count in {"train": 600, "held_out": 60}.items():
        lines = []
        for start, length in zip(rng.integers(0, len(words), count), rng.integers(3, 60, count)):
            lines.append(json.dumps({"text": " ".join(words[(start + i) % len(words)] for i in range(length))}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def exported_mini(tmp_path_factory):
    """The mini model as an embedding model in ONNX and OpenVINO, in float32 and int8."""
    from neobert_hf.export import export_model

    folder = tmp_path_factory.mktemp("exported") / "mini"
    export_model(neobert_hf.MINI_MODEL_PATH, folder, to=("onnx", "openvino"), int8=True)
    return folder


@pytest.fixture(scope="session")
def expected(oracle):
    """A padded batch (no padding, right, left, three tokens) and the oracle's results, with NaN at padding."""
    rng = np.random.default_rng(1)
    length = 20
    keep = np.ones((4, length), bool)
    keep[1, 11:], keep[2, :7], keep[3, 3:] = False, False, False
    ids = np.where(keep, rng.integers(5, CONFIG["vocab_size"], keep.shape), 0)
    documents = [row[mask] for row, mask in zip(ids, keep)]
    encoded = [oracle.encode(document) for document in documents]

    def rows(values, real):
        out = np.full((length, values.shape[-1]), np.nan)
        out[real] = values
        return out

    def squares(values, real):
        out = np.full((len(values), length, length), np.nan)
        out[:, np.outer(real, real)] = values.reshape(len(values), -1)
        return out

    result = {"input_ids": ids, "attention_mask": keep.astype(np.int64)}
    for i in range(CONFIG["num_hidden_layers"] + 1):
        result[f"residual_stream.{i}"] = np.stack([rows(e[0][i], m) for e, m in zip(encoded, keep)])
    for i in range(CONFIG["num_hidden_layers"]):
        result[f"attentions.{i}"] = np.stack([squares(e[1][i], m) for e, m in zip(encoded, keep)])
    result["last_hidden_state"] = np.stack([rows(e[2], m) for e, m in zip(encoded, keep)])
    result["mlm_logits"] = np.stack([rows(oracle.mlm_logits(e[2]), m) for e, m in zip(encoded, keep)])
    result["classifier_logits"] = np.stack([oracle.class_logits(e[2]) for e in encoded])
    lengths = [len(document) for document in documents]
    result["packed.input_ids"] = np.concatenate(documents)[None]
    result["packed.cu_seq_lens"] = np.cumsum([0, *lengths])
    result["packed.position_ids"] = np.concatenate([np.arange(n) for n in lengths])[None]
    result["packed.last_hidden_state"] = np.concatenate([e[2] for e in encoded])[None]
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in result.items()}


@pytest.fixture(params=["oracle", "golden"])
def reference(request):
    """Folders of a masked language model and a classifier, and expected outputs: the oracle's, and the golden tensors."""
    if request.param == "oracle":
        masked_lm, classifier = (request.getfixturevalue(name) for name in ("checkpoint", "classifier_checkpoint"))
        return masked_lm, classifier, request.getfixturevalue("expected")
    return GOLDEN / "masked_lm", GOLDEN / "classifier", load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The folder into which pip has installed the wheel; it is built of a copy, in which no file of an older build is left."""
    folder, pip = tmp_path_factory.mktemp("wheel"), [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    for name in ("src", "examples", "docs"):
        ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "_build")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "LICENSE", "CITATION.cff", *(file.name for file in ROOT.glob("*.md"))):
        shutil.copy(ROOT / file, folder / "source")
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "./source"], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 19e6
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "installed", wheel], check=True)
    return folder / "installed"
