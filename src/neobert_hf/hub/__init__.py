"""What goes to the Hub: build, verify, convert, examine, and the model card.

The names are imported at once: a function that has the name of its module would otherwise be the module after its first use.
"""

from .build import build
from .card import write_card
from .convert import convert
from .doctor import examine
from .verify import verify

__all__ = ["build", "convert", "examine", "verify", "write_card"]
