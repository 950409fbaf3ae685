"""What a folder or a Hub id of other people may bring: its own files, a tokenizer of its vocabulary, and settings of known names.

transformers saves each unknown setting that it has read, and some of them name code. What is loaded here is saved without them.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER
from transformers.utils import cached_file, logging

from ..data.wordpiece import SPECIAL_TOKENS, PreTrainedTokenizerFast
from ..files.json_files import read_json
from ..files.terminal import printable

logger = logging.get_logger(__name__)

# Files of a repository on the Hub that are read: no code, no pickles.
DATA_FILES = ("*.json", "*.txt", "*.safetensors", "*.jinja", "*.model")
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "*.model")
CODE = Path(__file__).resolve().parents[1] / "model"  # in a clone, the mini model has links to this code
# Names of special tokens in the files of tokenizers; the last one that a vocabulary has counts.
SPECIAL_NAMES = {role: [f"<{role.removesuffix('_token')}>", name] for role, name in SPECIAL_TOKENS.items()}
SPECIAL_NAMES |= {"cls_token": ["<s>", "<cls>", "[CLS]"], "sep_token": ["</s>", "<sep>", "[SEP]"]}
# Settings whose values sentence-transformers imports and calls, and the names of its own code, torch's and transformers' (words).
MODULES, ACTIVATIONS = r"sentence_transformers(\.\w+)+", r"\w*|torch\.nn(\.\w+)+|sentence_transformers(\.\w+)+"
NAMES = {
    "type": MODULES,  # in modules.json
    "types": MODULES,  # of Router and Asym, beside "structure"
    "tokenizer_class": r"\w*|" + MODULES,
    "activation_function": ACTIVATIONS,  # of Dense
    "activation_fn": ACTIVATIONS,  # of CrossEncoder
    "sbert_ce_default_activation_function": ACTIVATIONS,
}
# Settings by which transformers runs code of the Hub: a pipeline of any name, a kernel such as org/name.
KERNELS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
ALLOWED = {**NAMES, **dict.fromkeys(KERNELS, "[^/]*"), "custom_pipelines": "(?!)"}
# Settings besides those that the class of a config declares. None of them names code.
CONFIG_KEYS = {"architectures", "dtype", "torch_dtype", "quantization_config", "_name_or_path", "transformers_version"}
CONFIG_KEYS |= {"tag_scheme", "word_division", "label_type"}  # of trained heads


def check_source(source: str | Path) -> None:
    """Raise ValueError if a source is neither a folder nor an id of the Hub, or if `check_links` refuses the folder."""
    folder = Path(source)
    is_below = "/" in str(source) and folder.parent.is_dir()
    if folder.is_dir():
        check_links(folder)
    elif folder.exists() or is_below or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)):
        fault = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{source} {fault}; give an existing folder, or an id on the Hub such as org/name")


def resolve(source: str | Path, more: Iterable[str] = ()) -> Path:
    """Return a folder as it is, unchecked, or the folder of a Hub id, whose data files are downloaded.

    Args:
        source: Folder or Hub id.
        more: Patterns of further files to download: code (`*.py`) or pickles, which this library never runs or opens unasked.

    Raises:
        ValueError: It is neither a folder nor an id.
        OSError: The repository cannot be reached.
    """
    if Path(source).is_dir():
        return Path(source)
    check_source(source)
    try:
        return Path(snapshot_download(str(source), allow_patterns=[*DATA_FILES, *more]))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{source} cannot be downloaded ({reason}); check the id, the network and your token") from error


def check_links(folder: Path) -> None:
    """Refuse files of a folder that are elsewhere, or no regular files.

    What is saved after loading the folder, or uploaded, would contain files of another place. Reading a pipe waits for ever. The
    links of the Hub's cache, which keeps files beside the folder of a revision, and those to our own code are accepted.

    Raises:
        ValueError: A symbolic link leaves the folder, tokenizer_config.json names a file outside it, or a file is not regular: a
            pipe, a socket or a device.
    """
    roots = [folder.resolve(), CODE]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    files = sorted(folder.rglob("*"))
    for file in files:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ValueError(f"{file} is a pipe, a socket or a device, not a regular file; remove it")
    references = [(file, file) for file in files if file.is_symlink()]
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and isinstance(content := read_json(settings), dict):  # transformers 4 opens these files
        paths = (folder / value for value in content.values() if isinstance(value, str) and 0 < len(value) < 4096)
        references += [(settings, path) for path in paths if path.is_file()]
    for file, target in references:
        if not any(target.resolve().is_relative_to(root) for root in roots):
            found = f"{file} refers to {target.resolve()}, outside its folder"
            raise ValueError(f"{found}; a copy of the model would publish it; to do that, replace the link by the file")


def check_own_code(folder: Path) -> None:
    """Refuse a folder that makes transformers or sentence-transformers run code, or read weights, of another place.

    Nothing is loaded. The code in the folder itself is not judged.

    Raises:
        ValueError: A JSON file names such a place or is damaged, or `check_links` refuses the folder.
    """
    check_links(folder)
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter, whose base model is elsewhere; merge it and save the model")
    for file in sorted(folder.rglob("*.json")):
        for key, value in foreign_settings(file):
            raise ValueError(f"{file} names foreign code: {key} is {json.dumps(value)}; save the model by this library")


def foreign_settings(file: Path) -> Iterator[tuple[str, Any]]:
    """Return the settings of a JSON file by which transformers or sentence-transformers would run code of another place."""
    content = read_json(file)
    is_judged = {"type": file.name == "modules.json", "types": isinstance(content, dict) and "structure" in content}
    for key, value in (pair for node in nodes(content) if isinstance(node, dict) for pair in node.items()):
        names = [node for node in nodes(value) if isinstance(node, str)]
        if key == "auto_map":  # a class in a file of the folder, such as "modeling_neobert.NeoBERTModel", is its own
            found = [re.fullmatch(r"(\w+)\.\w+", name) for name in names]
            is_own = all(each and (file.parent / f"{each[1]}.py").is_file() for each in found)
        else:
            is_own = not is_judged.get(key, key in ALLOWED) or all(re.fullmatch(ALLOWED[key], name) for name in names)
        if not is_own:
            yield key, value


def nodes(content: Any) -> Iterator[Any]:
    """All parts of JSON content at any depth, a part before those inside of it."""
    yield content
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from nodes(part)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any(file.is_file() for name in TOKENIZER_FILES for file in folder.glob(name))


def load_tokenizer(
    source: str, vocab_size: int | None = None, config: PretrainedConfig | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer with the checks of this module; no code of the folder runs, and none is named when it is saved.

    Args:
        source: Folder or Hub id.
        vocab_size: Vocabulary of the model; by default that of the config.json in the folder.
        config: Config of the model, if that in the folder is not valid.

    Raises:
        ValueError: As of `check_source` and `check_vocabulary`, or the folder holds no tokenizer.
        OSError: The tokenizer cannot be read.
    """
    check_source(source)
    folder = Path(source)
    if folder.is_dir() and not holds_tokenizer(folder):
        raise ValueError(f"{source} holds no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy that of its model there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=False)
    except (OSError, ImportError):
        raise
    except Exception as error:  # tokenizers raises this class, and json errors do not name the file
        raise OSError(f"the tokenizer of {source} cannot be read ({error}); download or copy it again") from error
    if vocab_size is None and (folder / "config.json").is_file():
        vocab_size = read_json(folder / "config.json").get("vocab_size")
    check_vocabulary(tokenizer, source, vocab_size)
    return keep_known_settings(tokenizer, source)


class FolderTokenizer(transformers.PreTrainedTokenizerFast):
    """What AutoTokenizer opens for a NeoBERT that names no tokenizer class: tokenizer.json as it is, else vocab.txt of BERT."""

    @classmethod
    def from_pretrained(cls, source: str | Path, *args, **kwargs) -> PreTrainedTokenizerBase:
        """Load the tokenizer of a folder or Hub id.

        Special tokens that no file names are known by their usual names. The length that no file gives is that of the config.
        """
        find = partial(cached_file, source, **kwargs, _raise_exceptions_for_missing_entries=False)
        if (file := find("tokenizer.json")) is None:
            tokenizer = transformers.BertTokenizerFast.from_pretrained(source, *args, **kwargs)
        else:
            stored = read_json(Path(file)).get("pre_tokenizer") or {}
            # transformers 4 sets it to False in the pre-tokenizer that it has read
            spaces = {"add_prefix_space": True} if stored.get("add_prefix_space") else {}
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source, *args, **spaces | kwargs)
            words, new = tokenizer.get_vocab(), SPECIAL_NAMES.keys() - tokenizer.special_tokens_map.keys()
            tokenizer.add_special_tokens({role: name for role in new for name in SPECIAL_NAMES[role] if name in words})
        if tokenizer.model_max_length > LARGE_INTEGER and (file := find("config.json")) is not None:
            config = read_json(Path(file))
            length = config.get("max_position_embeddings") or config.get("max_length")
            tokenizer.model_max_length = length or tokenizer.model_max_length
        return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, source: str | Path, vocab_size: int | None) -> None:
    """Refuse the tokenizer of another model, and the one without words that transformers makes if the files are missing.

    A model may have up to twice as many embeddings as its tokenizer has tokens: vocabularies are often padded. None is unknown.
    """
    num_tokens, num_special = len(tokenizer), len(tokenizer.all_special_ids)
    found = f"the tokenizer of {source} has {num_tokens}"
    if num_tokens <= num_special:
        raise ValueError(f"{found} special tokens and no word; its files are missing: add tokenizer.json")
    if vocab_size is not None and not vocab_size / 2 <= num_tokens <= vocab_size:
        raise ValueError(f"{found} tokens, but the model has {vocab_size}; give the tokenizer of this model")


def keep_known_settings(
    holder: PretrainedConfig | PreTrainedTokenizerBase, source: str | Path
) -> PretrainedConfig | PreTrainedTokenizerBase:
    """Remove the settings that name code of other people, so that no later save repeats them.

    Args:
        holder: Config, which loses all settings that its class does not declare, or tokenizer, which loses
            those that name code.
        source: Where it was read, for the warning about a config.

    Returns:
        The same object; in place of a tokenizer of the stock class, a copy whose saved name transformers 4 and 5 load.
    """
    if isinstance(holder, PreTrainedTokenizerBase):
        for name in ("auto_map", *KERNELS, "custom_pipelines"):  # by which transformers would run code of the Hub
            holder.init_kwargs.pop(name, None)
        if type(holder) is transformers.PreTrainedTokenizerFast:
            return PreTrainedTokenizerFast(tokenizer_object=holder.backend_tokenizer, **holder.init_kwargs)
        return holder
    unknown = holder.to_dict().keys() - type(holder)().to_dict().keys() - CONFIG_KEYS
    for name in unknown:
        delattr(holder, name)
    if unknown := sorted(unknown - {"auto_map"}):  # each save writes its own
        names = printable(", ".join(unknown))
        logger.warning(f"{source} has settings unknown to this library, which are not saved: {names}")
    return holder
