"""The one exception for mistakes a user can cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in config, data or set-up: one sentence that names the key or file and the cure.

    Entry points print the sentence without a traceback and exit with status 2.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """A closing half-sentence that suggests the nearest known word, or lists them all.

    >>> nearest("clip_hihger", ["clip_higher", "dapo"])
    "did you mean 'clip_higher'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known are " + ", ".join(known)
