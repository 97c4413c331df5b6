"""Reward functions as users write them: good ones, and every way of going wrong that a worker must survive."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from typing import Any

not_a_function = 3


def number(text: str, answer: int, about: dict[str, Any]) -> float:
    """The number that the text is."""
    return float(text)


def vowels(text: str, answer: int, about: dict[str, Any], *, scale: float = 1.0) -> float:
    """Share of vowels: continuous, and different for almost any two texts."""
    return scale * sum(letter in "aeiou" for letter in text) / max(1, len(text))


def short(text: str, answer: int, about: dict[str, Any], *, longest: int) -> bool:
    """Whether the response is short, as a bool, which counts as a number."""
    return about["length"] <= longest


def endless(text: str, answer: int, about: dict[str, Any]) -> float:
    """Never ends on "endless", and otherwise is right."""
    while text == "endless":
        pass
    return 1.0


def faulty(text: str, answer: int, about: dict[str, Any]) -> Any:
    """Does what the text says, or gives the number that it is."""
    match text:
        case "endless":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "regex":  # holds the interpreter's lock all the time
            return re.match(r"(a+)+$", "a" * 60 + "b")
        case "raise":
            raise ValueError("no such answer")
        case "quit":
            sys.exit(0)
        case "exit":
            os._exit(3)
        case "nan":
            return math.nan
        case "infinite":
            return -math.inf
        case "huge":
            return 10**400
        case "word":
            return "1.0"
        case "none":
            return None
        case "recursion":
            return faulty(text, answer, about)
        case "stack":
            sys.setrecursionlimit(10**9)
            return descend()
        case "pipe":
            os.closerange(3, 100)
            return 1.0
        case "twice":  # a forked copy of the worker answers the same call
            os.fork()
            return 2.0
        case "child":
            subprocess.Popen(["sleep", "3600"])
            time.sleep(3600)
    return float(text)


def descend() -> int:
    """Recursion through C, which ends in a segmentation fault."""
    return max([0], key=lambda _: descend())


class Judge:
    """A class where a function is wanted."""
