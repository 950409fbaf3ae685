"""Rows of files, how much of a text a model reads, and the tokenizer of WordPiece."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

# Rows need pyarrow (the extra `train`), so a name is imported when it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

if TYPE_CHECKING:
    from .lengths import (
        check_leaves_tokens as check_leaves_tokens,
        check_max_length as check_max_length,
        fact_of_truncated as fact_of_truncated,
        longest_text as longest_text,
        plain_tokenizer as plain_tokenizer,
        tokens_lost as tokens_lost,
    )
    from .rows import (
        Row as Row,
        read_lines as read_lines,
        read_rows as read_rows,
        read_text_column as read_text_column,
        read_texts as read_texts,
    )
    from .wordpiece import (
        tokenizer_hash as tokenizer_hash,
        train_wordpiece as train_wordpiece,
        write_wordpiece as write_wordpiece,
    )
