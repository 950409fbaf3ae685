"""The tokenizer of a folder: opened without code of other people, compared with its model, and saved without their settings."""

from functools import partial
from pathlib import Path

import transformers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER
from transformers.utils import cached_file, logging

from ..data.wordpiece import SPECIAL_TOKENS, PreTrainedTokenizerFast
from ..files.json_files import read_json
from ..files.messages import first_of
from ..files.terminal import printable
from .trust import KERNELS, TOKENIZER_FILES, check_source, check_vocabulary, holds_tokenizer

logger = logging.get_logger(__name__)

# Names of special tokens in the files of tokenizers; the last one that a vocabulary has counts.
SPECIAL_NAMES = {role: [f"<{role.removesuffix('_token')}>", name] for role, name in SPECIAL_TOKENS.items()}
SPECIAL_NAMES |= {"cls_token": ["<s>", "<cls>", "[CLS]"], "sep_token": ["</s>", "<sep>", "[SEP]"]}
# Settings besides those that the class of a config declares. None of them names code.
CONFIG_KEYS = {"architectures", "dtype", "torch_dtype", "quantization_config", "_name_or_path", "transformers_version"}
CONFIG_KEYS |= {"tag_scheme", "word_division", "label_type"}  # of trained heads


def load_tokenizer(
    source: str, vocab_size: int | None = None, config: PretrainedConfig | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer with checks; no code of the folder runs, and none is named when it is saved.

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
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises this class, and json errors do not name the file
        raise OSError(f"the tokenizer of {source} cannot be read ({error}); download or copy it again") from error
    if vocab_size is None and (folder / "config.json").is_file():
        vocab_size = read_json(folder / "config.json").get("vocab_size")
    check_vocabulary(tokenizer.get_vocab(), len(tokenizer.all_special_ids), source, vocab_size)
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
        names = printable(first_of(unknown))
        logger.warning(f"{source} has settings unknown to this library, which are not saved: {names}")
    return holder
