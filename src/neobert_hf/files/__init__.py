"""The ground floor, beside the model: rows of files, atomic writes, what a folder of other people may bring, WordPiece."""

from importlib import import_module

# Rows need pyarrow (the extra `train`), so a name is imported when it is used.
_MODULES = {
    "rows": ("read_lines", "read_rows", "read_text_column", "read_texts"),
    "texts": ("check_leaves_tokens", "check_max_length", "printable"),
    "trust": ("check_links", "check_own_code", "check_source", "load_tokenizer", "read_json", "resolve"),
    "wordpiece": ("plain_tokenizer", "tokenizer_hash", "train_wordpiece"),
    "writing": (
        "content_hash",
        "file_hash",
        "only_writer",
        "saving",
        "write_json",
    ),  # not `writing`, as the module is named
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
