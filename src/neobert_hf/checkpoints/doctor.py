"""What is wrong with a checkpoint, what that means, and the command that mends it. Nothing is executed, unpickled or changed.

`examine` reads a folder, loads its model by the class of this library, and calls the functions in CHECKS. What `from_pretrained`
refuses is one finding, in its words; the other checks see what loading does not. Each yields the code of a finding, its place,
and what the texts in findings.yaml mention.
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
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..data.lengths import plain_tokenizer
from ..files.errors import one_line
from ..files.json_files import read_json
from ..files.terminal import printable
from ..model import configuration_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.modeling_neobert import NeoBERTModel, NeoBERTPreTrainedModel
from ..model.weight_files_neobert import canonical_name
from .card import read_base
from .layouts import (
    FLOATS,
    INDEX,
    PICKLE,
    WEIGHTS,
    StoredTensor,
    check_sizes,
    class_of,
    quiet,
    read_checkpoint,
    read_config,
    read_header,
    stored_sizes,
)
from .modules import read_kind, read_modules
from .trust import check_links, check_source, check_vocabulary, foreign_settings, holds_tokenizer, nodes, resolve

Findings = Iterator[tuple]  # code, place, and values of its text

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
OWN_CODE = Path(configuration_neobert.__file__).parent
# A folder without weights is a checkpoint that lacks them if it has one of these files.
MARKS = ("config.json", "modules.json", "adapter_config.json", WEIGHTS, INDEX)
CONTEXTUAL = "contextual_neobert"  # the model type of contextual embedding models
# The class of the model by the task of an adapter. Where its config gives no task, PEFT names the class.
CLASSES_OF_PEFT = {
    "SEQ_CLS": "NeoBERTForSequenceClassification",
    "TOKEN_CLS": "NeoBERTForTokenClassification",
    "QUESTION_ANS": "NeoBERTForQuestionAnswering",
}
# JSON files that a loader reads. Another damaged one is no error.
LOADED = re.compile(r"(.*config|tokenizer|special_tokens_map|added_tokens|vocab|modules|.*\.index)\.json")
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
    """A checkpoint as the checks see it: names of files, config, headers of weights, and the model.

    Args:
        source: Folder or id as the user gave it.

    Attributes:
        folder: The folder.
        faults: Why the links, the config, the weights or the whole cannot be read.
        modules: Types of the modules of sentence-transformers, by their folders.
        inside: Those of these folders that are inside the folder, links followed.
        main: Folder of the encoder.
        config: Content of config.json; empty if it is missing or damaged.
        checkpoint: Its weights; None if they cannot be read.
        tensors: Its tensors by their published names.
        layout: Layout of the weights, or what else the folder is.
        shape: The checked config; None if it is missing or refused.
        model: The model; None if it is refused, or is not one that `from_pretrained` loads alone.
        lost: As of `lost_layers`, for an adapter.
    """

    def __init__(self, source: str):
        self.source, self.folder = source, resolve(source, more=("*.py",))
        self.faults: dict[str, str] = {}
        self.lost: list[str] = []
        self.shape: NeoBERTConfig | None = None
        self.attempt("links", check_links, self.folder)
        self.attempt("whole", read_kind, self.folder)
        modules = self.attempt("whole", read_modules, self.folder) or ()
        self.modules = {self.folder / path: kind for path, kind in modules}
        self.inside = [module for module in self.modules if module.resolve().is_relative_to(self.folder.resolve())]
        self.main = next((module for module in self.inside if (module / "config.json").is_file()), self.folder)
        self.config = self.attempt("config", read_config, self.main) or {}
        self.checkpoint = self.attempt("weights", read_checkpoint, self.main)
        if self.checkpoint is None and not any(os.path.lexists(self.folder / name) for name in MARKS):
            raise OSError(self.faults["weights"])
        tensors = self.checkpoint.tensors if self.checkpoint else {}
        self.tensors = {canonical_name(name): tensor for name, tensor in tensors.items()}
        self.layout = self.find_layout()
        self.model = self.attempt("whole", self.load)

    def attempt(self, what: str, read: Callable, *arguments: Any) -> Any:
        """Return what a function returns; None, and a fault, if it refuses: transformers has many errors for odd values."""
        try:
            return read(*arguments)
        except Exception as error:
            self.faults.setdefault(what, one_line(error))

    def find_layout(self) -> str:
        """Layout of the weights, or what else the folder is."""
        graphs = [*self.folder.glob("onnx/*.onnx"), *self.folder.glob("openvino/*.xml"), *self.folder.glob("*.gguf")]
        layout = self.checkpoint.layout if self.checkpoint else "unreadable"
        if any((place / "adapter_config.json").is_file() for place in (self.folder, self.main)):
            return "adapter"
        if graphs and self.checkpoint is None and not any(self.main.glob("*.safetensors*")):
            return "exported"
        is_contextual = self.config.get("model_type") == CONTEXTUAL and layout == "published"
        return "contextual" if is_contextual else layout

    def load(self) -> NeoBERTPreTrainedModel | None:
        """Return the model as `from_pretrained` loads it; None for a pickle, and for what it does not load alone.

        Raises:
            Exception: The model is refused; or its tensors have other sizes or types, or its head is missing or another one.
        """
        if self.layout == "adapter":
            self.lost = lost_layers(self.folder)
            return None
        if not self.config:
            missing = f"{self.main} has no config.json, so nothing knows its shape; copy that of the same model"
            raise OSError(self.faults.get("config") or self.faults.get("weights") or missing)
        if "model_type" not in self.config:
            remedy = 'add "model_type": "neobert"'
            raise ValueError(f"{self.main}/config.json has no model_type, so AutoModel does not know it; {remedy}")
        stored = {key: value for key, value in self.config.items() if value != CONTEXTUAL}
        shape = self.shape = NeoBERTConfig.from_dict(stored)
        if self.layout == "unreadable":
            raise OSError(self.faults["weights"])
        others = ("contextual", "exported", "pickle", "deepspeed")
        if self.layout in others or self.config.get("quantization_config"):
            return None
        if self.layout == "other":
            raise ValueError("no tensor has a name of NeoBERT, so all weights would be random; choose a NeoBERT")
        check_sizes(shape, self.tensors, self.main)  # a wrong number of blocks would take for ever
        with quiet():
            model_class = class_of(shape.architectures) or NeoBERTModel
            model = model_class.from_pretrained(self.main, ignore_mismatched_sizes=True)
        if model.new_layers:
            raise ValueError(
                f"{self.main} lacks {listed(sorted(model.new_layers))} in the shapes of config.json, so they would be random; "
                "correct config.json, such as its number of labels, or download or copy the checkpoint again"
            )
        return model

    def files(self, pattern: str) -> list[Path]:
        """Files of the folder and of its modules."""
        folders = {self.folder, *self.inside}
        return sorted(file for folder in folders for file in folder.glob(pattern) if file.is_file())

    def name(self, file: Path) -> str:
        """Path of a file inside the folder; the source for the folder itself."""
        return self.source if file == self.folder else os.path.relpath(file, self.folder)

    def mends(self) -> dict[str, str]:
        """The commands that findings.yaml mentions, for this checkpoint."""
        name = "ORG/NAME" if Path(self.source).is_dir() else self.source
        commands = TEXTS["commands"] | (TEXTS["commands of modules"] if self.modules else {})
        commands = {key: text.format(name=name, source=shlex.quote(self.source)) for key, text in commands.items()}
        if self.layout in ("pickle", "deepspeed", "w1w2"):  # which build.py refuses
            commands["rebuild"] = commands["convert"]
        return commands


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


def lost_layers(folder: Path) -> list[str]:
    """Return the layers of the head that neither an adapter of PEFT nor its base model holds: each opening makes them anew.

    Raises:
        ValueError: The config of the adapter is damaged, or its base model is refused.
        OSError: A file cannot be read.
    """
    base = read_base(folder)
    settings: dict[str, Any] = read_json(folder / "adapter_config.json") if base else {}
    named = (settings.get("auto_mapping") or {}).get("base_model_class", "")
    model_class = class_of([CLASSES_OF_PEFT.get(settings.get("task_type", ""), named)])
    if model_class is None:
        return []
    with quiet():
        new = model_class.from_pretrained(resolve(str(base)), ignore_mismatched_sizes=True).new_layers
    stored = {name for file in folder.glob("adapter_model.safetensors") for name in read_header(file)}
    return [layer for layer in sorted(new if stored else ()) if f"base_model.model.{layer}.weight" not in stored]


def listed(names: list[str]) -> str:
    """Return the first names, and how many there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_loading(subject: Subject) -> Findings:
    """What `from_pretrained` refuses, and what it ignores in silence."""
    mends, names = subject.mends(), subject.config.get("architectures")
    if fault := subject.faults.get("whole"):
        stored = subject.checkpoint.tensors if subject.checkpoint else ()
        wrapped = [name for name in stored if canonical_name(name) not in (name, f"model.{name}")]
        fact, _, way_out = fault.rpartition("; ")
        mend = mends["convert"] if wrapped or "neobert convert" in way_out else way_out
        yield "refused", subject.name(subject.main), fact or fault, mend if fact else f"correct it, or {mends['again']}"
    elif subject.model is not None:
        if names and class_of(names) is None:
            yield "architecture", "config.json: architectures", names
        if unknown := sorted(subject.model.unused_tensors):
            yield "tensors-unknown", listed(unknown)
    yield from (("adapter-lacks", layer) for layer in subject.lost)


def check_values(subject: Subject) -> Findings:
    """NaN, infinity and numbers that no training gives; a remark in a file that no loader reads."""
    files, found = subject.files("*.safetensors"), {}
    read = subject.checkpoint.files if subject.checkpoint else files
    for file in sorted({*files, *(file for file in read if file.suffix == ".safetensors")}):
        is_read = file in read or file.parent not in (subject.folder, subject.main)
        mark, where = ("", subject.name(file)) if is_read else ("?", f"{subject.name(file)}, which is not loaded")
        try:
            tensors = read_header(file)
        except OSError as error:
            if "weights" not in subject.faults or subject.layout == "adapter":  # otherwise `check_loading` says so
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
            yield "code-damaged", where, f"it is not valid Python ({one_line(error)})"
            continue
        text = content.decode("utf-8", "replace")
        for name in sorted({name for name in IMPORT.findall(text) if not (file.parent / f"{name}.py").is_file()}):
            yield "code-damaged", where, f"it imports {name}.py, which is missing"
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
        try:
            settings = list(foreign_settings(file))
        except (OSError, ValueError) as error:
            if (
                file != subject.main / "config.json" or "whole" not in subject.faults
            ):  # otherwise `check_loading` says so
                code = "json-damaged" if LOADED.fullmatch(file.name) else "?json-damaged"
                yield code, subject.name(file), one_line(error).partition(";")[0]
            continue
        for key, value in settings:
            names = [str(leaf) for leaf in nodes(value) if leaf and not isinstance(leaf, dict | list)]
            is_missing = key == "auto_map" and all(re.fullmatch(r"\w+\.\w+", name) for name in names)
            code = "code-missing" if is_missing else "foreign-code"
            yield code, f"{subject.name(file)}: {key}", json.dumps(value)[:200]


def check_tokenizer(subject: Subject) -> Findings:
    """A tokenizer that is missing or refused, with other ids than the model or its own file, or without [CLS] and [SEP]."""
    folder, settings, file = subject.main, subject.main / "tokenizer_config.json", subject.main / "tokenizer.json"
    where, vocab_size = subject.name(file), stored_sizes(subject.tensors).get("vocab_size")
    vocab_size = vocab_size or subject.config.get("vocab_size")
    if subject.layout != "adapter" and not holds_tokenizer(folder):  # the base model of an adapter has it
        yield "tokenizer-missing" if settings.is_file() else "?tokenizer-missing", where
    if not holds_tokenizer(folder) or type(vocab_size) is not int or "links" in subject.faults:
        return
    named = subject.attempt("settings", read_json, settings)  # `check_json` says what is damaged
    kind = named.get("tokenizer_class") if isinstance(named, dict) else None
    kind = str(kind or subject.config.get("tokenizer_class") or "")
    try:
        own = Tokenizer.from_file(str(file)) if file.is_file() else None
        check_source(str(folder))  # which refuses code of other places
        config = subject.shape or NeoBERTConfig()
        opened = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        differing = None if own is None else differing_text(opened, own)
        if differing is None:  # another class may add tokens, and it is the cause then
            check_vocabulary(opened, str(folder), vocab_size)
        words = (own or opened).get_vocab()
        if (last := max(words.values())) >= vocab_size or len({*words.values()}) < len(words):
            raise ValueError(f"its last id is {last}, and there are {vocab_size} embeddings; or two tokens have one id")
    except ValueError as error:
        yield "tokenizer-vocabulary", where, one_line(error)
        return
    except Exception as error:  # tokenizers raises Exception itself
        yield "tokenizer-damaged", where, one_line(error)
        return
    if {"[CLS]", "[SEP]"} <= words.keys() and not opened.num_special_tokens_to_add():
        yield "tokenizer-ends", where
    if differing is not None:
        yield "tokenizer-ids", subject.name(settings), kind or "what it is without a class", repr(differing)
    if kind == "TokenizersBackend":
        mend = f"sed -i 's/TokenizersBackend/PreTrainedTokenizerFast/' {shlex.quote(str(settings))}"
        is_folder = Path(subject.source).is_dir()  # the cache of the Hub stays as it is
        yield "tokenizer-class", subject.name(settings), mend if is_folder else subject.mends()["rebuild"]


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


def check_pickles(subject: Subject) -> Findings:
    """Pickles: the weights of the model or of a module; a remark beside safetensors files."""
    weights, arguments = subject.checkpoint.files if subject.checkpoint else (), subject.folder / "training_args.bin"
    if subject.layout in ("pickle", "deepspeed"):
        yield subject.layout, listed([subject.name(file) for file in weights]), subject.mends()["convert"]
    for file in subject.files("*"):
        if file.suffix in PICKLES and file not in (*weights, arguments):
            is_read = PICKLE.fullmatch(file.name) and not any(file.parent.glob("*.safetensors"))
            save = "if you trust it, open the model with SentenceTransformer, and save it with save_pretrained"
            mend = save if is_read else "remove it before you publish"
            yield "pickle" if is_read else "?pickle", subject.name(file), mend


def check_modules(subject: Subject) -> Findings:
    """Modules of sentence-transformers that are missing or outside the folder."""
    for path, kind in subject.modules.items():  # a Normalize has no file, and git keeps no empty folder
        if path not in subject.inside or not (path.is_dir() or kind.endswith(".Normalize")):
            yield "module-missing", f"modules.json: {os.path.relpath(path, subject.folder)}"


CHECKS = (check_loading, check_values, check_code, check_json, check_tokenizer, check_pickles, check_modules)


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
