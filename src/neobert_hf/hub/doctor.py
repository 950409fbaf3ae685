"""What is wrong with a checkpoint, what that means, and the command that mends it. Nothing is executed, unpickled or changed.

`examine` reads a folder and calls the functions in CHECKS. Each yields the code of a finding, its place, and what the texts in
findings.yaml mention. The model is built without numbers, and weights are read one tensor at a time.
"""

import ast
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ..files.modules import read_kind, read_modules
from ..files.texts import printable
from ..files.trust import check_links, foreign_settings, holds_tokenizer, leaves, read_json, resolve
from ..files.wordpiece import plain_tokenizer
from ..model import configuration_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import NeoBERTModel
from ..model.weight_files_neobert import canonical_name
from ..runs.commands import one_line
from .card import read_base
from .layouts import (
    FLOATS,
    INDEX,
    PICKLE,
    WEIGHTS,
    StoredTensor,
    class_of,
    expected_shapes,
    read_checkpoint,
    read_config,
    read_header,
    stored_sizes,
)

Findings = Iterator[tuple]  # code, place, and values of its text

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
OWN_CODE = Path(configuration_neobert.__file__).parent
# A folder without weights is a checkpoint that lacks them if it has one of these files.
MARKS = ("config.json", "modules.json", "adapter_config.json", WEIGHTS, INDEX)
CONTEXTUAL = "contextual_neobert"  # the model type of contextual embedding models
# JSON files that a loader reads. Another damaged one is no error.
LOADED = re.compile(r"(.*config|tokenizer|special_tokens_map|added_tokens|vocab|modules|.*\.index)\.json")
IMPORT = re.compile(r"^\s*from \.(\w+)", re.MULTILINE)
# Tables of positions that a class computes: a buffer, or an attribute that a function of frequencies returns.
TABLE = re.compile(
    r"register_buffer\(\s*[\"'](\w*(?:freq|rot|rope|cos|sin|pos)\w*)|self\.(\w*(?:freq|rot|rope)\w*) *= *[\w.]*freq[a-z_]*\("
)
INITIALIZER = re.compile(r"^    def _init_weights.*?(?=^ {0,4}\S|\Z)", re.MULTILINE | re.DOTALL)
HEAD = re.compile(r"(decoder|dense|classifier|qa_outputs)\.(weight|bias)")
# Words that normalizers and pre-tokenizers treat differently: case, accents, forms of letters, CJK, control characters, signs.
ODD_WORDS = "Élan e\u0301 İ ß ﬁ 東京 a\u200bb a\x07b a\xa0b\tc\nd  don't x_y a--b 3.14 ... ---- HTTPServer utf8"
PART = 1 << 24  # numbers that are examined at a time
LARGEST = 1e5  # trained weights are smaller by far; one changed bit of the exponent makes 0.02 a number near 1e36
ROUNDING = 1e-6  # Relative change of a tensor in float32 by the rounding of many steps of weight decay, at most

FINDINGS = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text("utf-8"))


class Subject:
    """A checkpoint as the checks see it: names of files, config, headers of weights.

    Args:
        source: Folder or id as the user gave it.

    Attributes:
        folder: The folder.
        modules: Types of the modules of sentence-transformers, by their folders.
        inside: Those of these folders that are inside the folder, links followed.
        main: Folder of the encoder.
        config: Content of config.json; empty if it is missing or damaged.
        shape: The checked config; None if it is missing or refused.
        checkpoint: Its weights; None if they cannot be read.
        tensors: Its tensors by their published names.
        layout: Layout of the weights, or what else the folder is.
        faults: Why the modules, the adapter, the config, the shape or the weights cannot be read, or which link is refused.
    """

    def __init__(self, source: str):
        self.source, self.folder = source, resolve(source, more=("*.py",))
        self.faults = {}
        self.attempt("links", check_links, self.folder)
        self.attempt("modules", read_kind, self.folder)
        modules = self.attempt("modules", read_modules, self.folder) or ()
        self.modules = {self.folder / path: kind for path, kind in modules}
        self.inside = [module for module in self.modules if module.resolve().is_relative_to(self.folder.resolve())]
        self.main = next((module for module in self.inside if (module / "config.json").is_file()), self.folder)
        self.config = self.attempt("config", read_config, self.main) or {}
        # A contextual model has the shape of its encoders. `check_tensors` finds a tied decoder.
        stored = {k: v for k, v in self.config.items() if k not in ("model_type", "tie_word_embeddings")}
        self.shape = self.attempt("shape", NeoBERTConfig.from_dict, stored) if self.config else None
        self.checkpoint = self.attempt("checkpoint", read_checkpoint, self.main)
        if self.checkpoint is None and not any(os.path.lexists(self.folder / name) for name in MARKS):
            raise OSError(self.faults["checkpoint"])
        tensors = self.checkpoint.tensors if self.checkpoint else {}
        self.tensors = {canonical_name(name): tensor for name, tensor in tensors.items()}
        graphs = [*self.folder.glob("onnx/*.onnx"), *self.folder.glob("openvino/*.xml"), *self.folder.glob("*.gguf")]
        is_exported = graphs and not any(self.main.glob("*.safetensors*"))
        self.layout = self.checkpoint.layout if self.checkpoint else "exported" if is_exported else "unreadable"
        if (self.folder / "adapter_config.json").is_file():
            self.layout = "adapter"
            self.attempt("adapter", read_base, self.folder)
        elif self.config.get("model_type") == CONTEXTUAL and self.layout == "published":
            self.layout = "contextual"

    def attempt(self, what: str, read: Callable, *arguments: Any) -> Any:
        """Return what a function returns; None, and a fault, if it refuses: transformers has many errors for odd values."""
        try:
            return read(*arguments)
        except Exception as error:
            self.faults[what] = one_line(error)

    def files(self, pattern: str) -> list[Path]:
        """Files of the folder and of its modules."""
        folders = {self.folder, *self.inside}
        return sorted(file for folder in folders for file in folder.glob(pattern) if file.is_file())

    def name(self, file: Path) -> str:
        """Path of a file inside the folder; the source for the folder itself."""
        return self.source if file == self.folder else os.path.relpath(file, self.folder)

    def mends(self) -> dict[str, str]:
        """How to get an undamaged copy; the commands that write the published layout, and this library's code and config."""
        name = "ORG/NAME" if Path(self.source).is_dir() else self.source
        convert = f"neobert convert {shlex.quote(self.source)} NEW_FOLDER"
        if self.modules:
            convert = "copy config, weights, tokenizer to FOLDER, neobert convert FOLDER NEW_FOLDER, and copy them back"
        build = f"python hub_upload/build.py --model {shlex.quote(self.source)} --out NEW_FOLDER"
        return {
            "again": f"copy the checkpoint again, or download it: hf download {name} --local-dir NEW_FOLDER",
            "convert": convert,
            "rebuild": convert if self.layout in ("pickle", "deepspeed", "w1w2") else build,  # build.py refuses these
        }


def examine(source: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """Examine a checkpoint.

    Args:
        source: Folder, or id on the Hub, whose data files and code are downloaded and no pickles.
        base: The model from which it was trained: its q and k rows are compared (see `check_base`).

    Returns:
        `source`, `layout`, `num_tensors`, `num_parameters`, `dtypes`, `is_clean` and `findings`. A finding has a `code`,
        the short name of its kind; `where`, a file, tensor or setting; `meaning`, what follows from it; `mend`, the command that
        mends it; and `severity`: "error" if the model is not usable or wrong, or loading it runs code of others, otherwise
        "remark". The checkpoint is clean if no finding is an error.

    Raises:
        ValueError: `source` or `base` is neither a folder nor an id, or `base` has no such layers.
        OSError: The repository cannot be reached, the folder holds no checkpoint, or the base model cannot be read.
    """
    subject = Subject(str(source))
    found = [each for check in CHECKS for each in check(subject)]
    found += [] if base is None else check_base(subject, str(base))
    findings = sorted((describe(subject, *each) for each in found), key=lambda finding: finding["severity"])
    tensors = subject.tensors.values()
    return {
        "source": str(source),
        "layout": subject.layout,
        "num_tensors": len(tensors),
        "num_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "is_clean": all(finding["severity"] != "error" for finding in findings),
        "findings": findings,
    }


def describe(subject: Subject, code: str, where: str, *details: object) -> dict[str, str]:
    """Return a finding in words; a "?" before its code makes a remark of it."""
    found = FINDINGS[code.removeprefix("?")]
    severity = "remark" if code.startswith("?") else found.get("severity", "error")
    texts = {name: found[name].format(*details, **subject.mends()) for name in ("meaning", "mend")}
    return {"code": code.removeprefix("?"), "where": where, **texts, "severity": severity}


def listed(names: list[str]) -> str:
    """Return the first names, and how many there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_layout(subject: Subject) -> Findings:
    """Weights that cannot be read, that are of another model, or in a layout that other tools do not read."""
    layout = subject.layout
    if layout in ("pickle", "deepspeed", "w1w2"):
        yield layout, listed([subject.name(file) for file in subject.checkpoint.files]), subject.mends()["convert"]
    elif layout == "neodictabert":
        yield layout, "config.json: encoder_init_range"
    elif layout == "other" and not subject.config.get("quantization_config"):
        yield "other-tensors", listed(list(subject.tensors)) or "no tensor"
    elif layout == "unreadable" and "config" not in subject.faults:
        yield "weights-unreadable", subject.name(subject.main), subject.faults["checkpoint"]


def check_config(subject: Subject) -> Findings:
    """A config that is missing, of another model, or with values that NeoBERT refuses."""
    where, kind = subject.name(subject.main / "config.json"), subject.config.get("model_type")
    if subject.layout in ("adapter", "neodictabert"):
        return
    if "config" in subject.faults:
        yield "config-unreadable", where, subject.faults["config"]
    elif not subject.config:
        yield "config-missing", where
    elif kind not in (NeoBERTConfig.model_type, CONTEXTUAL):
        yield "other-model", where, repr(kind)
    else:
        if subject.config.get("transformers_weights"):
            yield "weights-elsewhere", f"{where}: transformers_weights", subject.config["transformers_weights"]
        names = subject.config.get("architectures") or ["NeoBERT"]
        if not isinstance(names, list) or "NeoBERT" not in str(names[0]):
            yield "architecture", f"{where}: architectures", names
        if not isinstance(subject.config.get("auto_map") or {}, dict):
            yield "config-invalid", f"{where}: auto_map", "it is no object of names, so trust_remote_code=True fails"
        if subject.shape is None:
            yield "config-invalid", where, subject.faults["shape"]


def check_tensors(subject: Subject) -> Findings:
    """Sizes that differ between config and tensors; if none does, tensors that are missing, of an odd shape, or unknown."""
    config, tensors = subject.config, subject.tensors
    is_known = subject.layout in ("published", "w1w2") and not config.get("quantization_config")
    if not is_known or subject.shape is None or config.get("model_type") != NeoBERTConfig.model_type:
        return
    if odd := sorted(name for name, tensor in tensors.items() if tensor.dtype not in FLOATS):
        yield "dtype", listed(odd), tensors[odd[0]].dtype
    names = sorted(subject.checkpoint.tensors)
    if wrapped := [name for name in names if canonical_name(name) not in (name, f"model.{name}")]:
        yield "prefix", listed(wrapped)
    sizes = {name: (getattr(subject.shape, name), size) for name, size in stored_sizes(tensors).items()}
    if differing := [name for name, (given, size) in sizes.items() if given != size]:
        for name in differing:
            is_width, (given, size) = name == "swiglu_width", sizes[name]
            key, size = ("intermediate_size", size * 3 // 2) if is_width else (name, size)
            yield "config-mismatch", f"config.json: {key}", subject.shape.intermediate_size if is_width else given, size
        return
    with torch.device("meta"):
        shapes = expected_shapes((class_of(subject.shape.architectures) or NeoBERTModel)(subject.shape))
    if subject.layout == "w1w2":
        for name in [name for name in shapes if ".ffn.w12." in name]:
            rows, width = shapes.pop(name)
            shapes |= {name.replace("w12", half): (rows // 2, width) for half in ("w1", "w2")}
    missing = sorted(shapes.keys() - tensors.keys())
    is_tied = config.get("tie_word_embeddings", bool(missing) and subject.layout == "w1w2")
    if set(missing) <= {"decoder.weight", "decoder.bias"} and (is_tied or missing == ["decoder.bias"]):
        is_there = "config.json: tie_word_embeddings", "set it to false"
        yield "tied-decoder", *((listed(missing), subject.mends()["convert"]) if missing else is_there)
    elif missing:
        yield "tensors-missing", listed(missing)
    if odd := sorted(name for name in shapes.keys() & tensors.keys() if tensors[name].shape != shapes[name]):
        yield "shape", listed(odd), tensors[odd[0]].shape, shapes[odd[0]]
    if unknown := sorted(name for name in tensors.keys() - shapes.keys() if not HEAD.fullmatch(name)):
        yield "tensors-unknown", listed(unknown)


def check_values(subject: Subject) -> Findings:
    """NaN, infinity and numbers that no training gives; a remark in a file that no loader reads."""
    files = subject.files("*.safetensors")
    loaded = {*files} if subject.checkpoint is None else {*subject.checkpoint.files}
    loaded |= {module / WEIGHTS for module in subject.inside}
    loaded |= {file for file in files if subject.layout == "adapter" and file.name == "adapter_model.safetensors"}
    found = {}
    for file in sorted({*files, *(file for file in loaded if file.match("*.safetensors") and file.is_file())}):
        mark, where = "" if file in loaded else "?", subject.name(file) + ", which is not loaded" * (file not in loaded)
        try:
            tensors = read_header(file)
        except OSError as error:
            if "checkpoint" not in subject.faults or subject.layout == "adapter":  # otherwise `check_layout` says so
                yield f"{mark}weights-unreadable", where, one_line(error)
            continue
        for name, tensor in tensors.items():
            for kind in odd_values(tensor):
                found.setdefault(mark + kind, []).append(f"{where}: {name}")
    yield from ((code, listed(names)) for code, names in found.items())


def odd_values(tensor: StoredTensor) -> set[str]:
    """Return which of nan, infinity and huge a tensor of floats holds."""
    kinds = set()
    if tensor.dtype not in FLOATS or 0 in tensor.shape:
        return kinds
    for part in tensor.read().flatten().split(PART):
        if not float(part.abs().max()) <= LARGEST:  # nan compares as false
            huge = part[part.isfinite()].double().abs() > LARGEST
            found = {"nan": part.isnan(), "infinity": part.isinf(), "huge": huge}
            kinds |= {kind for kind, is_there in found.items() if is_there.any()}
    return kinds


def check_code(subject: Subject) -> Findings:
    """Code in the folder, judged by reading it: the published code, files that are missing, and code that is not ours."""
    other, stored = [], {name.rpartition(".")[2] for name in subject.tensors}
    for file in subject.files("*.py"):
        content, own, where = file.read_bytes(), OWN_CODE / file.name, subject.name(file)
        try:
            ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield "code-damaged", where, one_line(error)
            continue
        text = content.decode("utf-8", "replace")
        for name in sorted({name for name in IMPORT.findall(text) if not (file.parent / f"{name}.py").is_file()}):
            yield "code-incomplete", where, name
        if own.is_file() and own.read_bytes() == content:
            continue
        if tables := sorted(lost_tables(text) - stored):
            yield "rotary-buffer", where, listed(tables)
        else:
            other.append(where)
    if other:
        yield "code-differs", listed(other)


def lost_tables(code: str) -> set[str]:
    """Return the tables of positions that a class computes, and that its `_init_weights` does not compute again.

    transformers 5 builds a model without data and loads the files into it: a tensor that no file holds has no values then.
    transformers itself computes `inv_freq` again if `original_inv_freq` is beside it.
    """
    mended = "".join(INITIALIZER.findall(code))
    names = {name for pair in TABLE.findall(code) for name in pair if name and name not in mended}
    return names - {"inv_freq", "original_inv_freq"} if "original_inv_freq" in code else names


def check_json(subject: Subject) -> Findings:
    """Damaged JSON files; settings that name code of other places or that is missing; links out of the folder."""
    if "is not JSON" not in (fault := subject.faults.get("links", "is not JSON")):  # which is found below
        yield "link", subject.source, fault
    for file in sorted(subject.folder.rglob("*")):
        if file.is_symlink() and not file.exists():
            yield "link", subject.name(file), f"it is a link to {os.readlink(file)}, which does not exist"
    for file in subject.files("*.json"):
        if file == subject.main / "config.json" and "config" in subject.faults:
            continue  # `check_config` says that it is damaged
        try:
            settings = list(foreign_settings(file))
        except (OSError, ValueError) as error:
            code = "json-damaged" if LOADED.fullmatch(file.name) else "?json-damaged"
            yield code, subject.name(file), one_line(error).partition(";")[0]
            continue
        for key, value in settings:
            names = [str(leaf) for leaf in leaves(value) if leaf]
            is_missing = key == "auto_map" and all(re.fullmatch(r"\w+\.\w+", name) for name in names)
            code = "code-missing" if is_missing else "foreign-code"
            yield code, f"{subject.name(file)}: {key}", json.dumps(value)[:200]


def check_tokenizer(subject: Subject) -> Findings:
    """A tokenizer that is missing, damaged, of another model, or saved under a name that transformers 4 does not know."""
    folder = subject.main
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    where = subject.name(file)
    if subject.layout == "adapter":  # the base model has it
        return
    if not holds_tokenizer(folder):
        yield "tokenizer-missing" if settings.is_file() else "?tokenizer-missing", where
        return
    try:
        named = read_json(settings) if settings.is_file() else {}
        kind = str(named.get("tokenizer_class") or subject.config.get("tokenizer_class") or "")
    except (ValueError, AttributeError):  # `check_json` says so
        kind = ""
    try:
        vocabulary, adds_ends = read_vocabulary(folder)
        differing = differing_text(folder, kind, subject.shape, adds_ends) if "links" not in subject.faults else None
    except Exception as error:  # tokenizers raises Exception itself
        yield "tokenizer-damaged", where, one_line(error)
        return
    vocab_size = stored_sizes(subject.tensors).get("vocab_size", subject.config.get("vocab_size"))
    last, count = max(vocabulary.values(), default=0), len(vocabulary)
    if vocabulary and isinstance(vocab_size, int) and (last >= vocab_size or not vocab_size / 2 <= count):
        meaning = f"it has {count} tokens, the last with id {last}, and the model has {vocab_size} embeddings"
        yield "tokenizer-vocabulary", where, meaning
    if num_twice := count - len(set(vocabulary.values())):
        yield "tokenizer-vocabulary", where, f"{num_twice} of its tokens have the id of another one"
    # The classes of BERT add both tokens by themselves.
    if {"[CLS]", "[SEP]"} <= vocabulary.keys() and not adds_ends and not kind.startswith("BertTokenizer"):
        yield "tokenizer-ends", where
    if differing is not None:
        yield "tokenizer-ids", subject.name(settings), kind or "what it is without a class", repr(differing)
    if kind == "TokenizersBackend":
        mend = f"sed -i 's/TokenizersBackend/PreTrainedTokenizerFast/' {shlex.quote(str(settings))}"
        is_folder = Path(subject.source).is_dir()  # the cache of the Hub stays as it is
        yield "tokenizer-class", subject.name(settings), mend if is_folder else subject.mends()["rebuild"]


def read_vocabulary(folder: Path) -> tuple[dict[str, int], bool]:
    """Return the tokens with their ids, and whether a text gets special tokens.

    They come from tokenizer.json or vocab.txt; another kind of tokenizer has no tokens here.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return tokenizer.get_vocab(), tokenizer.num_special_tokens_to_add(is_pair=False) > 0
    words = (folder / "vocab.txt").read_text("utf-8").splitlines() if (folder / "vocab.txt").is_file() else ()
    return {word: i for i, word in enumerate(words)}, True


def differing_text(folder: Path, kind: str, config: NeoBERTConfig | None, adds_ends: bool) -> str | None:
    """Return a text to which AutoTokenizer gives other ids than tokenizer.json; None if none of known and odd words does.

    Raises:
        Exception: AutoTokenizer refuses the folder.
    """
    # Another name may be that of a class that opens pickles.
    if not (folder / "tokenizer.json").is_file() or not re.fullmatch(r"|\w+Tokenizer(Fast)?", kind):
        return None
    own = plain_tokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
    opened = AutoTokenizer.from_pretrained(folder, config=config or NeoBERTConfig(), trust_remote_code=False)
    words = sorted(own.get_vocab().keys() - {*opened.all_special_tokens})
    texts = [f"{word} {word.upper()} {word.title()}{word} {word}1" for word in words[:: 1 + len(words) // 1000]]
    texts += [*ODD_WORDS.split(" "), ODD_WORDS]
    found = opened(texts, add_special_tokens=adds_ends, verbose=False)["input_ids"]
    expected = own.encode_batch(texts, add_special_tokens=adds_ends)
    return next((text for text, ids, encoding in zip(texts, found, expected) if ids != encoding.ids), None)


def check_pickles(subject: Subject) -> Findings:
    """Pickles: a remark beside safetensors files, otherwise the weights of a module; `check_layout` names those of the model."""
    weights, arguments = subject.checkpoint.files if subject.checkpoint else (), subject.folder / "training_args.bin"
    pickles = [file for file in subject.files("*") if file.suffix in PICKLES and file not in (*weights, arguments)]
    alone = [file for file in pickles if PICKLE.fullmatch(file.name) and not any(file.parent.glob("*.safetensors"))]
    if alone:
        mend = "if you trust it, open the model with SentenceTransformer, and save it with save_pretrained"
        yield "pickle", listed([subject.name(file) for file in alone]), mend
    if others := [file for file in pickles if file not in alone]:
        yield "?pickle", listed([subject.name(file) for file in others]), "remove it before you publish"


def check_modules(subject: Subject) -> Findings:
    """An adapter without a base model; modules of sentence-transformers that are missing or outside the folder."""
    if "adapter" in subject.faults:
        yield "adapter", "adapter_config.json", subject.faults["adapter"]
    if "modules" in subject.faults:
        yield "modules", subject.source, subject.faults["modules"]
    for path, kind in subject.modules.items():
        where = f"modules.json: {os.path.relpath(path, subject.folder)}"
        if path not in subject.inside:
            yield "module-outside", where
        elif not path.is_dir() and not kind.endswith(".Normalize"):  # it has no file, and git keeps no empty folder
            yield "module-missing", where


CHECKS = (
    *(check_layout, check_config, check_tensors, check_values, check_code),
    *(check_json, check_tokenizer, check_pickles, check_modules),
)


def check_base(subject: Subject, base: str) -> Findings:
    """Compare the rows of q, k and v with those of the base model.

    If the rotary table is garbage near zero, all scores are equal and the gradients of q and k are zero. Each block that such a
    fine-tune has trained has the q and k of the base model, to which weight decay gave a common factor, and another v.

    Raises:
        ValueError: The base model has other layers.
        OSError: It cannot be read.
    """
    tensors = {canonical_name(name): tensor for name, tensor in read_checkpoint(resolve(base)).tensors.items()}
    names = [name for name in subject.tensors if name.endswith(".qkv.weight") and subject.tensors[name].dtype in FLOATS]
    if not names or subject.shape is None:
        yield "not-compared", subject.source, base
        return
    heads, changes = subject.shape.num_attention_heads, []
    for name in names:
        own, other = subject.tensors[name], tensors.get(name)
        if other is None or other.shape != own.shape or other.dtype not in FLOATS or own.shape[0] % (3 * heads):
            raise ValueError(
                f"the base model {base} has no {name} of the shape {own.shape}; give the model that was fine-tuned"
            )
        changes.append(changes_of_rows(own.read(), other.read(), heads))
    # A block whose v is that of the base model was frozen. In a sound training, the changes of q, k and v are alike.
    if any(v for _, _, v in changes) and all(max(q, k) <= v / 20 for q, k, v in changes):
        yield "corrupted-rotary", listed(names), base


def changes_of_rows(own: torch.Tensor, base: torch.Tensor, heads: int) -> list[float]:
    """Return the relative changes of the rows of q, k and v, of shape (H * 3 * K, D), by head; 0 if all bits are equal.

    The base is rounded to the dtype of the training, which float32 may hold. If q or k has other bits, a common factor, as of
    weight decay, and its rounding are no change.
    """
    dtype = next(each for each in (torch.bfloat16, torch.float16, own.dtype) if own.to(each).to(own.dtype).equal(own))
    # (3, H * K * D)
    new, old = (x.double().unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1) for x in (own, base))
    square = old.square().sum(1, keepdim=True).clamp(min=1e-30)
    for factor, ulps in ((1, 0), ((new * old).sum(1, keepdim=True) / square, 1)):
        expected = (factor * old).to(dtype).double()
        rest = ((new - expected).abs() - ulps * torch.finfo(dtype).eps * expected.abs()).clamp(min=0)
        q, k, v = (rest.square().sum(1, keepdim=True) / square).sqrt().flatten().tolist()
        if ulps == q == k == 0:
            return [q, k, v]
    return [q, k, v] if v > ROUNDING else [0.0, 0.0, 0.0]


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Return the lines of a report of `examine`; a name from a file cannot control the terminal."""
    lines, severities = [], [finding["severity"] for finding in report["findings"]]
    for finding in report["findings"]:
        lines += [f"{finding['severity']} {finding['code']}: {finding['where']}", f"  {finding['meaning']}"]
        lines += [f"  mend: {finding['mend']}"]
    counts = {kind: severities.count(kind) for kind in ("error", "remark") if kind in severities}
    result = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items()) or "nothing found"
    size = f", {report['num_tensors']} tensors, {report['num_parameters']:,} numbers, {', '.join(report['dtypes'])}"
    lines += [f"{report['source']}: {result}; layout {report['layout']}" + size * bool(report["num_tensors"])]
    return map(printable, lines)
