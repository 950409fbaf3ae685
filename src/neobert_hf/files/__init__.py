"""The ground floor, beside the model: rows of files, atomic writes, what a folder of other people may bring, WordPiece."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

# Rows need pyarrow (the extra `train`), so a name is imported when it is used.
NAMES_OF = {
    "modules": ("check_modules_of",),
    "rows": ("read_lines", "read_rows", "read_text_column", "read_texts"),
    "texts": ("check_leaves_tokens", "check_max_length", "printable"),
    "trust": (
        *("FolderTokenizer", "check_links", "check_own_code", "check_source"),
        *("load_tokenizer", "read_json", "resolve"),
    ),
    "wordpiece": ("plain_tokenizer", "tokenizer_hash", "train_wordpiece", "write_wordpiece"),
    "writing": (
        "check_target",
        "content_hash",
        "file_hash",
        "new_folder",
        "only_writer",
        "replacing",
        "saving",
        "write_json",
    ),  # not `writing`, as the module is named
}
__getattr__, __dir__, __all__ = lazy_names(__name__, NAMES_OF)

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from .modules import check_modules_of as check_modules_of
    from .rows import (
        read_lines as read_lines,
        read_rows as read_rows,
        read_text_column as read_text_column,
        read_texts as read_texts,
    )
    from .texts import (
        check_leaves_tokens as check_leaves_tokens,
        check_max_length as check_max_length,
        printable as printable,
    )
    from .trust import (
        FolderTokenizer as FolderTokenizer,
        check_links as check_links,
        check_own_code as check_own_code,
        check_source as check_source,
        load_tokenizer as load_tokenizer,
        read_json as read_json,
        resolve as resolve,
    )
    from .wordpiece import (
        plain_tokenizer as plain_tokenizer,
        tokenizer_hash as tokenizer_hash,
        train_wordpiece as train_wordpiece,
        write_wordpiece as write_wordpiece,
    )
    from .writing import (
        check_target as check_target,
        content_hash as content_hash,
        file_hash as file_hash,
        new_folder as new_folder,
        only_writer as only_writer,
        replacing as replacing,
        saving as saving,
        write_json as write_json,
    )
