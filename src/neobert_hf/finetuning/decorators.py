"""How methods of a job run: silently if it is not verbose, and `fit` with all or nothing learned."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..files import messages


def told(method: Callable) -> Callable:
    """Let a method of a job tell nothing if the job is not verbose."""

    @wraps(method)
    def wrapped(job: Any, *arguments, **options) -> Any:
        with messages.silence(not job.verbose):
            return method(job, *arguments, **options)

    return wrapped


def all_or_nothing(fit: Callable) -> Callable:
    """Let a `fit` train a new job without what an earlier one has left; what it learns is kept if it succeeds."""

    @told
    @wraps(fit)
    def wrapped(job: Any, *columns, **options) -> Any:
        new = type(job)(**job.get_params(deep=False))
        new._start()
        fit(new, *columns, **options)
        job.__dict__.update(vars(new))
        return job

    return wrapped
