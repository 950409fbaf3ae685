"""What goes to the Hub: build, verify, convert, examine, and the model card."""

from importlib import import_module

_MODULE_OF = {"build": "build", "convert": "convert", "examine": "doctor", "verify": "verify", "write_card": "card"}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
