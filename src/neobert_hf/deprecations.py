"""Old public names, which work for one more version with a FutureWarning."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

LAST_VERSION = "0.2"  # the last version that accepts the old names of 0.1


def renamed_names(module: str, new_names: dict[str, Any]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module whose public names were renamed.

    Args:
        module: The `__name__` of the module.
        new_names: Old name to (new name, object).

    Returns:
        A function that returns the object of an old name with a FutureWarning and raises AttributeError for any other name.
    """

    def __getattr__(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new_name, value = new_names[name]
        warn_of_rename(f"{module}.{name}", f"{module}.{new_name}")
        return value

    return __getattr__


def renamed_argument(old: str, new: str) -> Callable[[type], type]:
    """Make a class decorator: the old name of an argument and attribute works with a FutureWarning.

    It also renames the attribute in objects that an earlier version pickled.

    Args:
        old: The old name.
        new: The new name.
    """

    def decorate(cls: type) -> type:
        init, name = cls.__init__, cls.__name__

        @wraps(init)
        def __init__(self, *args, **kwargs):
            if (value := kwargs.pop(old, None)) is not None:
                warn_of_rename(f"{name}({old}=...)", f"{name}({new}=...)")
                kwargs[new] = value
            init(self, *args, **kwargs)

        def get(self):
            warn_of_rename(f"{name}.{old}", f"{name}.{new}")
            return getattr(self, new)

        def set_(self, value):
            warn_of_rename(f"{name}.{old}", f"{name}.{new}")
            setattr(self, new, value)

        def __setstate__(self, state):
            self.__dict__.update({new if key == old else key: value for key, value in state.items()})

        cls.__init__, cls.__setstate__ = __init__, __setstate__
        setattr(cls, old, property(get, set_))
        return cls

    return decorate


def warn_of_rename(old: str, new: str, stacklevel: int = 3) -> None:
    """Issue a FutureWarning that `old` is now `new`.

    Args:
        old: The name that was used.
        new: The name to use.
        stacklevel: Frames between this function and the user's line.
    """
    message = f"{old} is now {new}; the old name works up to version {LAST_VERSION}"
    warnings.warn(message, FutureWarning, stacklevel=stacklevel)
