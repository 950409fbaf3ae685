"""Checks of texts before work is spent on them."""

from collections.abc import Sequence


def check_texts(texts: Sequence[str]) -> None:
    """Say which text cannot be embedded, before any time goes into the others.

    An empty text is fine: it is embedded as the special tokens alone.

    Raises:
        ValueError: One is not a string, or holds half of a surrogate pair, which no encoding of text can store.
    """
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {i} is {text!r}, a {type(text).__name__}; every text must be a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text {i} has the lone surrogate {text[error.start]!r} at character {error.start}; "
                'read the file with errors="replace", or remove it'
            ) from error
