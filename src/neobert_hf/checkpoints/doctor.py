"""What is wrong with a checkpoint, what that means, and the command that mends it. Nothing is executed, unpickled or changed.

What `SavedModel` refuses is one finding, in its words; the functions in CHECKS see what loading does not. Each yields the code of
a finding, its place, and what the texts in findings.yaml mention.
"""

import ast
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..data.lengths import plain_tokenizer
from ..files.errors import one_line
from ..files.messages import first_of
from ..files.terminal import printable
from ..model import configuration_neobert
from ..model.configuration_neobert import NeoBERTConfig
from .network import FLOATS, StoredTensor, class_of, lost_layers, read_header, unknown_tensors
from .saved_model import INDEX, WEIGHTS, SavedModel, kind_of, read_object
from .trust import NAMES, foreign_settings, nodes, resolve

Findings = Iterator[tuple]  # code, place, and values of its text

OWN_CODE = Path(configuration_neobert.__file__).parent
# A folder without weights is a checkpoint that lacks them if it has one of these files.
MARKS = ("config.json", "modules.json", "adapter_config.json", WEIGHTS, INDEX)
# The kind of a model by the task of an adapter. Where its config gives no task, PEFT names the class.
KINDS_OF_PEFT = {"SEQ_CLS": "classes", "TOKEN_CLS": "tags", "QUESTION_ANS": "spans"}
IMPORT = re.compile(r"^\s*from \.(\w+)", re.MULTILINE)
# Tables of positions that a class computes: a buffer, or an attribute that a function of frequencies returns.
TABLE = re.compile(
    r"register_buffer\(\s*[\"'](\w*(?:freq|rot|rope|cos|sin|pos)\w*)|self\.(\w*(?:freq|rot|rope)\w*) *= *[\w.]*freq[a-z_]*\("
)
INITIALIZER = re.compile(r"^    def _init_weights.*?(?=^ {0,4}\S|\Z)", re.MULTILINE | re.DOTALL)
# Words that normalizers and pre-tokenizers treat differently: case, accents, forms of letters, CJK, control characters, signs.
ODD_WORDS = "Élan e\u0301 İ ß ﬁ 東京 a\u200bb a\x07b a\xa0b\tc\nd  don't x_y a--b 3.14 ... ---- HTTPServer utf8"
PART = 1 << 24  # numbers that are examined at a time
LARGEST = 1e5  # trained weights are smaller by far; one changed bit of the exponent makes 0.02 a number near 1e36
ROUNDING = 1e-6  # Relative change of a tensor in float32 by the rounding of many steps of weight decay, at most

TEXTS = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text("utf-8"))


class Subject:
    """A checkpoint as the checks see it.

    Args:
        source: Folder or id as the user gave it.

    Attributes:
        folder: The folder.
        fault: Why `SavedModel` refuses it; empty if it does not.
        saved: What it holds; None if it cannot be read.
        main: Folder of the encoder.
        layout: Layout of the weights, or what else the folder is.
        tensors: Its tensors by their published names.
        read: The files that hold them.
        parts: The folder, and those of its modules that are inside.
        shape: The checked config; None if it is refused, or the tensors are those of another network.
        base: The base model of an adapter.
        tokenizer: Its tokenizer; None if there is none, or it is refused.
    """

    def __init__(self, source: str):
        self.source = source
        self.folder = self.main = resolve(source, more=("*.py",))
        self.fault, self.layout = "", "unreadable"
        self.saved: SavedModel | None = None
        self.tensors: Mapping[str, StoredTensor] = {}
        self.read: tuple[Path, ...] = ()
        self.parts = {self.folder}
        self.shape: NeoBERTConfig | None = None
        self.base: SavedModel | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        try:
            self.open()
        except Exception as error:  # transformers has many for odd values
            self.fault = one_line(error)
        if "holds no weights" in self.fault and not any((self.folder / name).exists() for name in MARKS):
            raise OSError(self.fault)

    def open(self) -> None:
        """Read and compare the folder, as all that opens it does."""
        saved = self.saved = SavedModel(self.source, more=("*.py",))
        self.main, self.layout = saved.main, saved.layout
        self.tensors, self.read = saved.tensors, saved.files
        inside = self.folder.resolve()
        self.parts |= {part for part in saved.parts if part.resolve().is_relative_to(inside)}
        if saved.graph:
            if saved.has_tokenizer:  # an export of a model without one has none
                saved.check_export()
            return
        saved.check()
        if saved.is_adapter:
            self.base = SavedModel(saved.base).check()
            return
        self.shape = saved.shape
        saved.check_head(saved.head)
        if saved.has_tokenizer:
            self.tokenizer = saved.load_tokenizer()

    def files(self, ending: str) -> list[Path]:
        """Files of the folder and of its modules whose names end so."""
        found = {file for part in self.parts for file in part.glob(f"*{ending}")}
        found |= {file for file in self.read if file.name.endswith(ending)}
        return sorted(file for file in found if file.is_file())

    def name(self, file: Path) -> str:
        """Path of a file inside the folder."""
        return os.path.relpath(file, self.folder)

    def mends(self) -> dict[str, str]:
        """The commands that findings.yaml mentions, for this checkpoint."""
        name = "ORG/NAME" if Path(self.source).is_dir() else self.source
        commands = TEXTS["commands"]
        if (self.folder / "modules.json").is_file():
            commands = commands | TEXTS["commands of modules"]
        return {key: text.format(name=name, source=shlex.quote(self.source)) for key, text in commands.items()}


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
    found = TEXTS["findings"][code.removeprefix("?")]
    severity = "remark" if code.startswith("?") else found.get("severity", "error")
    texts = {name: found[name].format(*details, **subject.mends()) for name in ("meaning", "mend")}
    return {"code": code.removeprefix("?"), "where": where, **texts, "severity": severity}


def check_loading(subject: Subject) -> Findings:
    """What `SavedModel` refuses, and what `from_pretrained` ignores in silence."""
    mends = subject.mends()
    if subject.fault:
        fact, _, way_out = subject.fault.rpartition("; ")
        if "neobert convert" in way_out:
            way_out = mends["convert"]
        if fact:
            yield "refused", subject.source, fact, way_out
        else:
            yield "refused", subject.source, subject.fault, f"correct it, or {mends['again']}"
    elif subject.saved and subject.shape:
        name = subject.saved.architecture
        if name and class_of(name) is None:
            yield "architecture", "config.json: architectures", name
        unknown = unknown_tensors(subject.shape, subject.tensors, subject.saved.head)
        if unknown:
            yield "tensors-unknown", first_of(unknown)


def check_adapter(subject: Subject) -> Findings:
    """The layers of the head that neither an adapter of PEFT nor its base model holds: each opening makes them anew."""
    saved, base = subject.saved, subject.base
    if saved is None or base is None or base.shape is None:
        return
    named = (saved.adapter.get("auto_mapping") or {}).get("base_model_class", "")
    kind = KINDS_OF_PEFT.get(saved.adapter.get("task_type") or "", kind_of(named))
    for layer in lost_layers(base.shape, base.tensors, kind):
        if f"base_model.model.{layer}.weight" not in subject.tensors:
            yield "adapter-lacks", layer


def check_values(subject: Subject) -> Findings:
    """NaN, infinity and numbers that no training gives; a remark in a file that no loader reads."""
    found: dict[str, list[str]] = {}
    for file in subject.files(".safetensors"):
        mark, where = "", subject.name(file)
        if file not in subject.read and file.parent in (subject.folder, subject.main):
            mark, where = "?", f"{where}, which is not loaded"
        try:
            tensors = read_header(file)
        except OSError:  # `SavedModel` refuses one that is read
            continue
        for name, tensor in tensors.items():
            for kind in odd_values(tensor):
                found.setdefault(mark + kind, []).append(f"{where}: {name}")
    yield from ((code, first_of(names)) for code, names in found.items())


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
    for file in subject.files(".py"):
        content, own, where = file.read_bytes(), OWN_CODE / file.name, subject.name(file)
        try:
            ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield "code-damaged", where, f"it is not valid Python ({one_line(error)})"
            continue
        text = content.decode("utf-8", "replace")
        for name in sorted({name for name in IMPORT.findall(text) if not (file.parent / f"{name}.py").is_file()}):
            yield "code-damaged", where, f"it imports {name}.py, which is missing"
        if own.is_file() and own.read_bytes() == content:
            continue
        if tables := sorted(lost_tables(text) - stored):
            yield "rotary-buffer", where, first_of(tables)
        else:
            other.append(where)
    if other:
        yield "code-differs", first_of(other)


def lost_tables(code: str) -> set[str]:
    """Return the tables of positions that a class computes, and that its `_init_weights` does not compute again.

    transformers 5 builds a model without data and loads the files into it: a tensor that no file holds has no values then.
    transformers itself computes `inv_freq` again if `original_inv_freq` is beside it.
    """
    mended = "".join(INITIALIZER.findall(code))
    names = {name for pair in TABLE.findall(code) for name in pair if name and name not in mended}
    return names - {"inv_freq", "original_inv_freq"} if "original_inv_freq" in code else names


def check_json(subject: Subject) -> Findings:
    """Settings that name code of other places or that is missing."""
    for file in subject.files(".json"):
        try:
            settings = list(foreign_settings(file))
        except (OSError, ValueError):  # `SavedModel` refuses one that is read
            continue
        for key, value in settings:
            if key in NAMES:  # which `SavedModel` refuses where they count
                continue
            names = [str(leaf) for leaf in nodes(value) if leaf and not isinstance(leaf, dict | list)]
            is_missing = key == "auto_map" and all(re.fullmatch(r"\w+\.\w+", name) for name in names)
            code = "code-missing" if is_missing else "foreign-code"
            yield code, f"{subject.name(file)}: {key}", json.dumps(value)[:200]


def check_tokenizer(subject: Subject) -> Findings:
    """A tokenizer that is missing, with other ids than its own file, or without [CLS] and [SEP]."""
    saved, opened = subject.saved, subject.tokenizer
    if saved is None or saved.is_adapter:  # the base model of an adapter has it
        return
    settings, file = subject.main / "tokenizer_config.json", subject.main / "tokenizer.json"
    if not saved.has_tokenizer:
        mark = "?" * (not settings.is_file())
        yield f"{mark}tokenizer-missing", subject.name(file)
    if opened is None:
        return
    words = opened.get_vocab()
    own = None
    kind = str(read_object(settings).get("tokenizer_class") or saved.config.get("tokenizer_class") or "")
    if file.is_file():
        own = Tokenizer.from_file(str(file))
        words = own.get_vocab()
    if len({*words.values()}) < len(words):
        yield "tokenizer-vocabulary", subject.name(file), "two tokens have one id"
        return
    differing = differing_text(opened, own) if own else None
    if differing is not None:
        yield "tokenizer-ids", subject.name(settings), kind or "what it is without a class", repr(differing)
    if {"[CLS]", "[SEP]"} <= words.keys() and not opened.num_special_tokens_to_add():
        yield "tokenizer-ends", subject.name(file)
    if kind == "TokenizersBackend":
        mend = subject.mends()["rebuild"]
        if Path(subject.source).is_dir():  # the cache of the Hub stays as it is
            mend = f"sed -i 's/TokenizersBackend/PreTrainedTokenizerFast/' {shlex.quote(str(settings))}"
        yield "tokenizer-class", subject.name(settings), mend


def differing_text(opened: PreTrainedTokenizerBase, own: Tokenizer) -> str | None:
    """Return a text to which a tokenizer gives other ids than its tokenizer.json; None if none of known and odd words does."""
    own = plain_tokenizer(own)
    adds_ends = own.num_special_tokens_to_add(is_pair=False) > 0
    words = sorted(own.get_vocab().keys() - {*opened.all_special_tokens})
    texts = [f"{word} {word.upper()} {word.title()}{word} {word}1" for word in words[:: 1 + len(words) // 1000]]
    texts += [*ODD_WORDS.split(" "), ODD_WORDS]
    found = opened(texts, add_special_tokens=adds_ends, verbose=False)["input_ids"]
    expected = own.encode_batch(texts, add_special_tokens=adds_ends)
    return next((text for text, ids, encoding in zip(texts, found, expected) if ids != encoding.ids), None)


CHECKS = (check_loading, check_adapter, check_values, check_code, check_json, check_tokenizer)


def check_base(subject: Subject, base: str) -> Findings:
    """Compare the rows of q, k and v with those of the base model.

    If the rotary table is garbage near zero, all scores are equal and the gradients of q and k are zero. Each block that such a
    fine-tune has trained has the q and k of the base model, to which weight decay gave a common factor, and another v.

    Raises:
        ValueError: The base model has other layers.
        OSError: It cannot be read.
    """
    tensors = SavedModel(base).tensors
    names = [name for name in subject.tensors if name.endswith(".qkv.weight") and subject.tensors[name].dtype in FLOATS]
    if not names or subject.shape is None:
        yield "not-compared", subject.source, base
        return
    heads = subject.shape.num_attention_heads
    changes = []
    for name in names:
        own, other = subject.tensors[name], tensors.get(name)
        if other is None or other.shape != own.shape or other.dtype not in FLOATS or own.shape[0] % (3 * heads):
            raise ValueError(
                f"the base model {base} has no {name} of the shape {own.shape}; give the model that was fine-tuned"
            )
        changes.append(changes_of_rows(own.read(), other.read(), heads))
    # A block whose v is that of the base model was frozen. In a sound training, the changes of q, k and v are alike.
    if any(v for _, _, v in changes) and all(max(q, k) <= v / 20 for q, k, v in changes):
        yield "corrupted-rotary", first_of(names), base


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
