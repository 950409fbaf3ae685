"""The ground floor, beside the model: rows of files, atomic writes, what a folder of other people may bring, WordPiece."""

from ..lazy import lazy_names

# Rows need pyarrow (the extra `train`), so a name is imported when it is used.
NAMES_OF = {
    "rows": ("read_lines", "read_rows", "read_text_column", "read_texts"),
    "texts": ("check_leaves_tokens", "check_max_length", "printable"),
    "trust": (
        "FolderTokenizer",
        "check_links",
        "check_own_code",
        "check_source",
        "load_tokenizer",
        "read_json",
        "resolve",
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
