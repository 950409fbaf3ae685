"""The ground floor, beside the model: places that may be written, atomic writes, messages, one-line errors."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

# Some need transformers, so a name is imported when it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

if TYPE_CHECKING:
    from .errors import one_line as one_line, run_command as run_command
    from .json_files import read_json as read_json, read_json_object as read_json_object
    from .output import (
        check_file as check_file,
        check_folder as check_folder,
        content_hash as content_hash,
        file_hash as file_hash,
        new_folder as new_folder,
        only_writer as only_writer,
        saving as saving,
        write_json as write_json,
    )
    from .terminal import printable as printable
