"""What is wrong with a checkpoint, what that means, and the command that mends it. Nothing is executed, unpickled or changed.

`examine` reads a folder and calls the functions in CHECKS. To add a check, write a function from a Subject to findings and add it
there. No model is built, and weights are read a part at a time, so a checkpoint of any size needs little memory.

This module imports neither torch nor the root of the package, so that the command starts quickly.
"""

import ast
import json
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..files.trust import check_links, foreign_settings, holds_tokenizer, leaves, read_json, resolve
from ..model import configuration_neobert
from ..model.configuration_neobert import NeoBERTConfig
from ..model.weight_files_neobert import canonical_name
from ..runs.commands import one_line
from .code_reading import lost_positions, sibling_imports
from .expected_tensors import expected_shapes, stored_sizes
from .layouts import INDEX, Checkpoint, StoredTensor, read_checkpoint, read_config, read_header
from .stored_numbers import FLOATS, LARGEST, ROUNDING, changes_of_rows, odd_values

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
OWN_CODE = Path(configuration_neobert.__file__).parent
# A folder without weights is a checkpoint that lacks them if it has one of these files.
MARKS = ("config.json", "modules.json", "adapter_config.json", "model.safetensors", INDEX)
CONTEXTUAL = "contextual_neobert"  # the model type of ContextualNeoBERTConfig, whose module imports torch


@dataclass(frozen=True)
class Finding:
    """What is wrong at one place.

    Attributes:
        code: Short name of the kind, such as "nan".
        where: File, tensor or setting.
        meaning: What follows from it.
        mend: The command or step that mends it.
        severity: "error" if the model is not usable or wrong, or loading it runs code of others; otherwise "remark".
    """

    code: str
    where: str
    meaning: str
    mend: str
    severity: str = "error"


@dataclass(frozen=True)
class Subject:
    """A checkpoint as the checks see it.

    Attributes:
        source: Folder or id as the user gave it.
        folder: The folder.
        modules: Types of the modules of sentence-transformers, by their folders.
        inside: Those of these folders that are inside the folder, links followed.
        main: Folder of the encoder.
        config: Content of config.json; empty if it is missing or damaged.
        shape: The checked config; None if it is missing or refused.
        checkpoint: Its weights; None if they cannot be read.
        faults: Why modules.json, the config, the shape or the weights cannot be read.
    """

    source: str
    folder: Path
    modules: dict[Path, str]
    inside: list[Path]
    main: Path
    config: dict[str, Any]
    shape: NeoBERTConfig | None
    checkpoint: Checkpoint | None
    faults: dict[str, str]

    @property
    def layout(self) -> str:
        """Layout of the weights, or what else the folder is."""
        kind = self.checkpoint.layout if self.checkpoint else "unreadable"
        if (self.folder / "adapter_config.json").is_file():
            return "adapter"
        return "contextual" if self.config.get("model_type") == CONTEXTUAL and kind == "published" else kind

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors by their published names."""
        tensors = self.checkpoint.tensors if self.checkpoint else {}
        return {canonical_name(name): tensor for name, tensor in tensors.items()}

    @property
    def is_plain(self) -> bool:
        """Whether the weights are those of one NeoBERT, not quantized, with a valid config: all tensors are known then."""
        is_one = self.layout in ("published", "w1w2") and "quantization_config" not in self.config
        return is_one and self.shape is not None and self.config.get("model_type") == NeoBERTConfig.model_type

    def files(self, pattern: str) -> list[Path]:
        """Files of the folder and of its modules."""
        folders = {self.folder, *self.inside}
        return sorted(file for folder in folders for file in folder.glob(pattern) if file.is_file())

    def name(self, file: Path) -> str:
        """Path of a file inside the folder; the source for the folder itself."""
        return self.source if file == self.folder else os.path.relpath(file, self.folder)

    @property
    def again(self) -> str:
        """How to get an undamaged copy."""
        name = "ORG/NAME" if Path(self.source).is_dir() else self.source
        return f"copy the checkpoint again, or download it: hf download {name} --local-dir NEW_FOLDER"

    @property
    def rebuild(self) -> str:
        """The command that writes the model with this library's code, config and tokenizer class."""
        if self.layout in LAYOUTS:  # build.py refuses these
            return self.convert
        return f"python hub_upload/build.py --model {shlex.quote(self.source)} --out NEW_FOLDER"

    @property
    def convert(self) -> str:
        """The command that writes the weights in the published layout."""
        if self.modules:
            return "copy config, weights and tokenizer to a folder FOLDER, neobert convert FOLDER NEW_FOLDER, and copy them back"
        return f"neobert convert {shlex.quote(self.source)} NEW_FOLDER"


def examine(source: str | Path, base: str | Path | None = None) -> dict[str, Any]:
    """Examine a checkpoint.

    Args:
        source: Folder, or id on the Hub, whose data files and code are downloaded and no pickles.
        base: The model from which it was trained: its q and k rows are compared (see `check_base`).

    Returns:
        `source`, `layout`, `num_tensors`, `num_parameters`, `dtypes`, `is_clean` and `findings`, each with the fields of Finding.
        It is clean if no finding is an error.

    Raises:
        ValueError: `source` or `base` is neither a folder nor an id, or `base` has no such layers.
        OSError: The repository cannot be reached, the folder holds no checkpoint, or the base model cannot be read.
    """
    subject = read_subject(str(source))
    findings = [finding for check in CHECKS for finding in check(subject)]
    if base is not None:
        findings += check_base(subject, str(base))
    findings.sort(key=lambda finding: finding.severity)
    tensors = subject.tensors.values()
    return {
        "source": str(source),
        "layout": subject.layout,
        "num_tensors": len(tensors),
        "num_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "is_clean": all(finding.severity != "error" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def read_subject(source: str) -> Subject:
    """Read what the checks need: names of files, config, headers of weights."""
    folder = resolve(source, more=("*.py",))
    config, shape, checkpoint, modules, faults = {}, None, None, {}, {}
    try:
        if (folder / "modules.json").is_file():
            named = map(dict, read_json(folder / "modules.json"))
            modules = {folder / str(module.get("path", "")): str(module.get("type")) for module in named}
    except (ValueError, TypeError) as error:
        faults["modules"] = one_line(error)
    root = folder.resolve()
    inside = [module for module in modules if module.resolve().is_relative_to(root)]
    main = next((module for module in inside if (module / "config.json").is_file()), folder)
    try:
        config = read_config(main)
        # A contextual model has the shape of its encoders. `check_tensors` finds a tied decoder.
        ignored = ("model_type", "tie_word_embeddings")
        if config:
            shape = NeoBERTConfig.from_dict({key: value for key, value in config.items() if key not in ignored})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        faults["shape" if config else "config"] = one_line(error)
    try:
        checkpoint = read_checkpoint(main)
    except (OSError, ValueError) as error:
        if not any(os.path.lexists(folder / name) for name in MARKS):
            raise
        faults["checkpoint"] = one_line(error)
    return Subject(source, folder, modules, inside, main, config, shape, checkpoint, faults)


# --- The folder -------------------------------------------------------------------------------------------------------


def check_json(subject: Subject) -> Iterator[Finding]:
    """Damaged JSON files; settings that name code of other places or that is missing; links out of the folder."""
    try:
        check_links(subject.folder)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        if "is not JSON" not in str(error):  # which is found below
            yield Finding("link", subject.source, one_line(error), "remove it, or replace a link by the file itself")
    for file in sorted(subject.folder.rglob("*")):
        if file.is_symlink() and not file.exists():
            meaning = f"it is a link to {os.readlink(file)}, which does not exist"
            yield Finding(
                "link", subject.name(file), meaning, "copy the files, not their links: cp -rL FOLDER NEW_FOLDER"
            )
    for file in subject.files("*.json"):
        if file == subject.main / "config.json" and "config" in subject.faults:
            continue  # `check_config` says that it is damaged
        try:
            settings = list(foreign_settings(file))
        except (OSError, ValueError) as error:
            meaning = f"it cannot be read: {one_line(error).partition(';')[0]}"
            yield Finding("json-damaged", subject.name(file), meaning, subject.again)
            continue
        for key, value in settings:
            where = f"{subject.name(file)}: {key}"
            if key == "auto_map" and all(re.fullmatch(r"\w+\.\w+", str(leaf)) for leaf in leaves(value) if leaf):
                meaning = "the code that it names is not in the folder, so only an installed neobert_hf loads the model"
                yield Finding("code-missing", where, meaning, subject.rebuild, "remark")
            else:
                meaning = f"code of another place runs, which can change at any time: {json.dumps(value)[:200]}"
                mend = f"remove this key, or: {subject.rebuild}"
                if file.name == "modules.json":
                    mend = "read that code; without it, save the model again with modules of sentence-transformers only"
                yield Finding("foreign-code", where, meaning, mend)


def check_pickles(subject: Subject) -> Iterator[Finding]:
    """Pickles beside safetensors files; `check_layout` names those that hold the weights."""
    weights = subject.checkpoint.files if subject.checkpoint else ()
    pickles = [file for file in subject.files("*") if file.suffix in PICKLES and file not in weights]
    if pickles:
        names = listed([subject.name(file) for file in pickles])
        meaning = "a pickle can run any code when it is loaded; a model needs none"
        yield Finding("pickle", names, meaning, "remove it before you publish; open only your own", "remark")


def check_modules(subject: Subject) -> Iterator[Finding]:
    """Modules of sentence-transformers that are missing or outside the folder."""
    if "modules" in subject.faults:
        meaning = f"it is not a list of modules ({subject.faults['modules']})"
        yield Finding("modules", "modules.json", meaning, subject.again)
    for path, kind in subject.modules.items():
        where = f"modules.json: {os.path.relpath(path, subject.folder)}"
        if path not in subject.inside:
            meaning = "sentence-transformers reads a module outside the folder"
            yield Finding("module-outside", where, meaning, "copy the module into the folder")
        elif not path.is_dir() and not kind.endswith(".Normalize"):  # it has no file, and git keeps no empty folder
            meaning = "sentence-transformers cannot load the model: the folder of this module is missing"
            yield Finding("module-missing", where, meaning, subject.again)


# --- Weights ----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "pickle": "the weights are pickled: loading them can run any code, and this library and safe tools refuse them",
    "deepspeed": "these are the states of a training with DeepSpeed, pickled; no from_pretrained reads them",
    "w1w2": "gate and up are separate tensors ffn.w1 and ffn.w2; the published code and llama.cpp expect ffn.w12",
}


def check_layout(subject: Subject) -> Iterator[Finding]:
    """Weights that cannot be read, that are of another model, or in a layout that other tools do not read."""
    layout = subject.layout
    if layout in LAYOUTS:
        files = ", ".join(subject.name(file) for file in subject.checkpoint.files[:3])
        yield Finding(layout, files, LAYOUTS[layout], subject.convert)
    elif layout == "neodictabert":
        meaning = (
            "this is a NeoDictaBERT: it rotates halves instead of pairs, so a NeoBERT of its weights computes nonsense"
        )
        yield Finding(layout, "config.json: encoder_init_range", meaning, "load it with the code of its own repository")
    elif layout == "other" and "quantization_config" not in subject.config:
        first = ", ".join(list(subject.tensors)[:3]) or "no tensor"
        meaning = "no tensor has a name of NeoBERT, so all weights would be random"
        yield Finding("other-tensors", first, meaning, "choose a checkpoint of NeoBERT")
    elif layout == "unreadable" and "config" not in subject.faults:
        mend = subject.again
        if not Path(subject.source).is_dir():  # pickles are not downloaded
            mend += f"; if its weights are pickled: {subject.convert}"
        yield Finding("weights-unreadable", subject.name(subject.main), subject.faults["checkpoint"], mend)


def check_config(subject: Subject) -> Iterator[Finding]:
    """A config that is missing, of another model, or with values that NeoBERT refuses."""
    if subject.layout in ("adapter", "neodictabert"):
        return
    where = subject.name(subject.main / "config.json")
    if "config" in subject.faults:
        yield Finding("config-unreadable", where, subject.faults["config"], subject.again)
        return
    if not subject.config:
        meaning = "the shape of the model is unknown, so nothing loads it"
        yield Finding("config-missing", where, meaning, "copy config.json of the same model into the folder")
        return
    kind = subject.config.get("model_type")
    if kind not in (NeoBERTConfig.model_type, CONTEXTUAL):
        meaning = f"model_type is {kind!r}, not 'neobert'"
        yield Finding("other-model", where, meaning, "choose a checkpoint of NeoBERT, or copy its config.json again")
        return
    if subject.config.get("transformers_weights"):
        meaning = f"transformers_weights names other weight files: {subject.config['transformers_weights']!r}"
        yield Finding("weights-elsewhere", where, meaning, "remove this key; this library never reads such files")
    if foreign := [name for name in subject.config.get("architectures") or () if "NeoBERT" not in str(name)]:
        meaning = f"it names {foreign[0]}, no class of NeoBERT, so llama.cpp and hub_upload/build.py refuse the model"
        mend = 'write "NeoBERTLMHead" for a masked language model, or the class of its head'
        yield Finding("architecture", "config.json: architectures", meaning, mend, "remark")
    if subject.shape is None:
        yield Finding("config-invalid", where, subject.faults["shape"], "correct this value in config.json")


def check_sizes(subject: Subject) -> Iterator[Finding]:
    """Sizes that differ between config and tensors."""
    if not subject.is_plain:
        return
    for name, stored in stored_sizes(subject.tensors).items():
        given = getattr(subject.shape, name)
        if stored != given:
            key, value = ("intermediate_size", stored * 3 // 2) if name == "swiglu_width" else (name, stored)
            meaning = f"the config gives {name} = {given}, and the tensors have {stored}"
            mend = f"set {key} = {value} in config.json if the tensors are right; else {subject.again}"
            yield Finding("config-mismatch", f"config.json: {key}", meaning, mend)


def check_tensors(subject: Subject) -> Iterator[Finding]:
    """Tensors that are missing, of an odd shape or type, or unknown."""
    if not subject.is_plain:
        return
    tensors, sizes = subject.tensors, stored_sizes(subject.tensors)
    shapes = expected_shapes(subject.shape, sizes, is_split=subject.layout == "w1w2")
    missing = sorted(shapes.keys() - tensors.keys())
    is_tied = subject.config.get("tie_word_embeddings", bool(missing) and subject.layout == "w1w2")
    if set(missing) <= {"decoder.weight", "decoder.bias"} and (is_tied or missing == ["decoder.bias"]):
        meaning = (
            "the decoder is tied to the embedding or has no bias; the published code and llama.cpp read an own decoder"
        )
        where, mend = listed(missing), subject.convert
        if not missing:
            where, mend = "config.json: tie_word_embeddings", "set it to false"
            meaning = "the config says that the decoder is tied, and the file holds one: from_pretrained refuses it"
        yield Finding("tied-decoder", where, meaning, mend)
    elif missing:
        meaning = "loading is refused, or these layers get random weights"
        yield Finding("tensors-missing", listed(missing), meaning, subject.again)
    if odd := sorted(name for name in shapes.keys() & tensors.keys() if tensors[name].shape != shapes[name]):
        meaning = (
            f"the shape of the first is {tensors[odd[0]].shape}, and config and other tensors require {shapes[odd[0]]}"
        )
        is_head = odd[0].startswith("classifier.")
        mend = f"correct the number of labels in config.json; else {subject.again}" if is_head else subject.again
        yield Finding("shape", listed(odd), meaning, mend)
    if odd := sorted(name for name, tensor in tensors.items() if tensor.dtype not in FLOATS):
        meaning = f"{tensors[odd[0]].dtype} is no type of trained weights, and config.json names no quantization"
        yield Finding("dtype", listed(odd), meaning, subject.again)
    stored = subject.checkpoint.tensors
    if wrapped := sorted(name for name in stored if canonical_name(name) not in (name, f"model.{name}")):
        meaning = "a wrapper (DistributedDataParallel, torch.compile) added a prefix to the names, so the tensors are not found"
        yield Finding("prefix", listed(wrapped), meaning, subject.convert)
    known = re.compile(r"(decoder|dense|classifier|qa_outputs)\.(weight|bias)")
    if unknown := sorted(name for name in tensors.keys() - shapes.keys() if not known.fullmatch(name)):
        meaning = "NeoBERT has no such tensors; they are ignored here, and llama.cpp refuses the file"
        yield Finding("tensors-unknown", listed(unknown), meaning, subject.rebuild, "remark")


def listed(names: list[str]) -> str:
    """Return the first names, and how many there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_values(subject: Subject) -> Iterator[Finding]:
    """NaN, infinity and numbers that no training gives, in all safetensors files."""
    found = defaultdict(list)
    for file in subject.files("*.safetensors"):
        try:
            tensors = read_header(file)
        except OSError as error:
            if "checkpoint" not in subject.faults or subject.layout == "adapter":  # otherwise `check_layout` says so
                yield Finding("weights-unreadable", subject.name(file), one_line(error), subject.again)
            continue
        for name, tensor in tensors.items():
            for kind in odd_values(tensor):
                found[kind].append(f"{subject.name(file)}: {name}")
    meanings = {
        "nan": "every output that depends on these tensors is NaN",
        "infinity": "outputs become infinite or NaN",
        "huge": f"numbers above {LARGEST:.0e} are no trained weights; a bit of the file is damaged, or the training diverged",
    }
    for kind, names in found.items():
        mend = f"{subject.again}; if your training wrote it, take an earlier checkpoint"
        yield Finding(kind, listed(names), meanings[kind], mend)


# --- Code -------------------------------------------------------------------------------------------------------------


def check_code(subject: Subject) -> Iterator[Finding]:
    """Code in the folder, judged by reading it: the published code, files that are missing, and code that is not ours."""
    other, stored = [], {name.rpartition(".")[2] for name in subject.tensors}
    drop_in = f"{subject.rebuild}; in a repository of the Hub: python hub_upload/push.py --drop-in ORG/NAME"
    for file in subject.files("*.py"):
        content, own = file.read_bytes(), OWN_CODE / file.name
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            meaning = f"it is not valid Python ({error}), so trust_remote_code=True fails"
            yield Finding("code-damaged", subject.name(file), meaning, drop_in)
            continue
        for name in sorted(name for name in sibling_imports(tree) if not (file.parent / f"{name}.py").is_file()):
            meaning = f"it imports {name}.py, which is missing, so trust_remote_code=True fails"
            yield Finding("code-incomplete", subject.name(file), meaning, drop_in)
        if own.is_file() and own.read_bytes() == content:
            continue
        if buffers := sorted(lost_positions(tree) - stored):
            meaning = (
                f"it computes {listed(buffers)} in __init__, and no file holds it: transformers 5 leaves it uninitialised, so "
                "outputs are NaN, or positions are lost without an error; a fine-tune made so is damaged (--base shows it)"
            )
            yield Finding("rotary-buffer", subject.name(file), meaning, drop_in)
        else:
            other.append(subject.name(file))
    if other:
        meaning = (
            "this code is not that of the installed neobert_hf: another version, or code of somebody else, to be read"
        )
        yield Finding("code-differs", listed(other), meaning, drop_in, "remark")


# --- Tokenizer --------------------------------------------------------------------------------------------------------


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """A tokenizer that is missing, damaged, of another model, or saved under a name that transformers 4 does not know."""
    folder = subject.main
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    copy = "copy tokenizer.json and tokenizer_config.json of the model from which this one was made"
    if subject.layout == "adapter":  # the base model has it
        return
    if not holds_tokenizer(folder):
        meaning, severity = "no file of a tokenizer is there: texts cannot be read", "remark"
        if settings.is_file():
            meaning, severity = "tokenizer_config.json is there, and the vocabulary is not", "error"
        yield Finding("tokenizer-missing", subject.name(file), meaning, copy, severity)
        return
    vocab_size = stored_sizes(subject.tensors).get("vocab_size", subject.config.get("vocab_size"))
    try:
        vocabulary = read_vocabulary(folder)
    except Exception as error:  # tokenizers raises Exception itself
        meaning = f"it cannot be read: {one_line(error)}"
        yield Finding("tokenizer-damaged", subject.name(file), meaning, copy)
        return
    if vocabulary and isinstance(vocab_size, int):
        last, count = max(vocabulary.values()), len(vocabulary)
        if last >= vocab_size or not vocab_size / 2 <= count:
            meaning = f"it has {count} tokens, the last with id {last}, and the model has {vocab_size} embeddings"
            mend = f"{copy}; for new tokens, call resize_token_embeddings and save the model"
            yield Finding("tokenizer-vocabulary", subject.name(file), meaning, mend)
    try:
        name = read_json(settings).get("tokenizer_class") if settings.is_file() else None
    except (ValueError, AttributeError):  # `check_json` says so
        return
    if name == "TokenizersBackend":
        meaning = "this name of transformers 5 is unknown to transformers 4, which refuses the tokenizer"
        # the cache of the Hub stays as it is
        command = f"sed -i 's/TokenizersBackend/PreTrainedTokenizerFast/' {shlex.quote(str(settings))}"
        mend = command if Path(subject.source).is_dir() else subject.rebuild
        yield Finding("tokenizer-class", f"{subject.name(settings)}: tokenizer_class", meaning, mend, "remark")


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the tokens with their ids, from tokenizer.json or vocab.txt; empty for another kind of tokenizer."""
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    if (folder / "vocab.txt").is_file():
        return {token: i for i, token in enumerate((folder / "vocab.txt").read_text("utf-8").splitlines())}
    return {}


# --- Fine-tunes with a corrupted rotary table -------------------------------------------------------------------------


def check_base(subject: Subject, base: str) -> list[Finding]:
    """Compare the rows of q, k and v with those of the base model.

    If the rotary table is garbage near zero, all scores are equal and the gradients of q and k are zero. Such a fine-tune has the
    q and k of its base model, to which weight decay gave a common factor, and another v.

    Raises:
        ValueError: The base model has other layers.
        OSError: It cannot be read.
    """
    checkpoint = read_checkpoint(resolve(base))
    tensors = {canonical_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    names = [name for name in subject.tensors if name.endswith(".qkv.weight") and subject.tensors[name].dtype in FLOATS]
    if not names or subject.shape is None:
        meaning = f"the rows of q and k were not compared with {base}: weights or config cannot be read as they are"
        return [Finding("not-compared", subject.source, meaning, "mend the errors first", "remark")]
    heads = subject.shape.num_attention_heads
    changes, rounding = [], 0.0
    for name in names:
        own, other = subject.tensors[name], tensors.get(name)
        if other is None or other.shape != own.shape or other.dtype not in FLOATS or own.shape[0] % (3 * heads):
            raise ValueError(
                f"the base model {base} has no {name} of the shape {own.shape}; give the model that was fine-tuned"
            )
        rounding = max(rounding, ROUNDING[own.dtype], ROUNDING[other.dtype])
        changes.append(changes_of_rows(own, other, heads))
    q_and_k, v = max(max(change[:2]) for change in changes), min(change[2] for change in changes)
    # In a sound training the changes of q, k and v are alike. Many steps of weight decay add rounding errors to q and k.
    if v < 3 * rounding or q_and_k > max(rounding, v / 20):
        return []
    meaning = (
        f"in all {len(names)} layers q and k are those of {base}, and v is not: this model was fine-tuned with a corrupted "
        "rotary table (transformers 5 with the published code), so without positions; or q and k were frozen on purpose"
    )
    mend = "fine-tune again from the base model with neobert_hf; no conversion restores what was not learned"
    return [Finding("corrupted-rotary", listed(names), meaning, mend)]


CHECKS = (
    check_layout,
    check_config,
    check_sizes,
    check_tensors,
    check_values,
    check_code,
    check_json,
    check_tokenizer,
    check_pickles,
    check_modules,
)


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
    for line in lines:
        yield "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
