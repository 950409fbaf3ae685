"""Validation of texts before they are embedded."""

from collections.abc import Sequence


def check_texts(texts: Sequence[str]) -> None:
    """Raise an error that names the first text that cannot be embedded.

    An empty text is valid; its embedding is that of the special tokens alone.

    Raises:
        ValueError: A text is not a string, or holds a lone surrogate (half of a surrogate pair), which UTF-8 cannot store.
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
