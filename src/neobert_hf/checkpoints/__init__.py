"""What a folder of a model holds, and whether it may be opened; conversion, examination, adapters, and the model card."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..lazy import lazy_names

# Folder of the small embedding model that ships with the package; it was trained on Python's documentation.
MINI_MODEL_PATH = str(Path(__file__).parents[1] / "mini")

# Some need peft or sentence-transformers, so a name is imported when it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
__all__ += ["MINI_MODEL_PATH"]

if TYPE_CHECKING:
    from .adapters import lora_config as lora_config, open_adapter as open_adapter, save_adapter as save_adapter
    from .card import write_card as write_card
    from .conversion import convert as convert
    from .doctor import examine as examine
    from .record import write_record as write_record
    from .saved_model import SavedModel as SavedModel
    from .tokenizer import FolderTokenizer as FolderTokenizer, load_tokenizer as load_tokenizer
    from .trust import check_links as check_links, check_source as check_source, resolve as resolve
