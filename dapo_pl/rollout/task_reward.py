"""The task's reward: correctness (Eq. 7), or functions of the user's, each with a weight.

A function is called once for each response, in a worker process, as

    fn(text: str, answer: int, about: About, **arguments) -> float

and gives a finite number. Whatever else it does (raise, hang, exit, return NaN) is a failure: counted, logged, and
dealt with as `reward.on_failure` says. Shaping terms such as the overlong penalty come on top and are no part of it.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

from dapo_pl.errors import UserError, nearest
from dapo_pl.rollout.types import Group, Prompt, Response, differ
from dapo_pl.rollout.workers import Function, Outcome, WorkerPool

log = logging.getLogger(__name__)

OnFailure = Literal["worst", "drop_group", "stop"]

CORRECTNESS = "dapo_pl.rewards.correctness"
"""Our own grader's verdict: linear in the text and already there, so it needs no worker."""

TOTAL = "task"
"""The name of the weighted sum among the logged parts of the reward."""

REASONS = 3
"""Failures of each function that the log explains; the others are only counted."""

SETTINGS = ("timeout_seconds", "on_failure", "workers")


class About(TypedDict):
    """What a reward function learns beyond text and answer; `length` in tokens, end token included."""

    prompt_id: str
    question: str
    source: str
    stated_answer: int | None
    correct: bool
    truncated: bool
    length: int


@dataclass(frozen=True)
class Component:
    """One function of the reward.

    `minimum` is the least it can give, and what a failure counts as with `on_failure: worst`; None: unknown.
    """

    name: str
    path: str
    weight: float = 1.0
    minimum: float | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSettings:
    """The reward, and what becomes of a response on which one of its functions fails.

    `on_failure`: `worst` gives the component's minimum, `drop_group` takes the whole group out of acceptance,
    `stop` ends the run. `timeout_seconds` is one function's time for one response.
    """

    components: tuple[Component, ...] = (Component("correctness", CORRECTNESS),)
    timeout_seconds: float = 5.0
    on_failure: OnFailure = "worst"
    workers: int = 2

    def __post_init__(self) -> None:
        if not _is_number(self.timeout_seconds) or not 0 < self.timeout_seconds < float("inf"):
            raise UserError(f"reward.timeout_seconds is {self.timeout_seconds}; it must be seconds above 0")
        if self.on_failure not in get_args(OnFailure):
            known = nearest(str(self.on_failure), get_args(OnFailure))
            raise UserError(f"reward.on_failure is {self.on_failure!r}; {known}")
        if not isinstance(self.workers, int) or self.workers < 1:
            raise UserError(f"reward.workers is {self.workers}; it must be at least 1")
        for component in self.components:
            _check(component, self.on_failure)

    @property
    def plain(self) -> bool:
        """Whether the reward is Eq. 7 and nothing else."""
        return [(component.path, component.weight) for component in self.components] == [(CORRECTNESS, 1.0)]

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> RewardSettings:
        """From the config group: one function at the top, or several by name under `components`."""
        rest = dict(options)
        settings = {name: rest.pop(name) for name in SETTINGS if name in rest}
        several = rest.pop("components", None) or {}
        if several:
            given = sorted(name for name, value in rest.items() if value is not None)
            if given:
                raise UserError(
                    f"reward.{given[0]} stands beside reward.components: name one function at the top, or all of "
                    "them under components (reward=several)"
                )
            components = tuple(_component(name, part, f"reward.components.{name}") for name, part in several.items())
        else:
            path = rest.get("_target_")
            name = path.rpartition(".")[2] if isinstance(path, str) else "reward"
            components = (_component(name, rest, "reward"),)
        return cls(components, **settings)


class TaskReward:
    """Scores groups: one task reward for each response, whatever the functions do.

    `failures` counts by function, over the life of the process.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.failures: Counter[str] = Counter()
        isolated = {
            component.name: Function(component.path, component.arguments)
            for component in settings.components
            if component.path != CORRECTNESS
        }
        self.pool = WorkerPool(isolated, size=settings.workers, timeout=settings.timeout_seconds)

    def __call__(self, group: Group) -> None:
        """Score graded responses, in place."""
        calls = {
            (number, name): (name, (response.text, group.prompt.answer, about(group.prompt, response)))
            for number, response in enumerate(group.responses)
            for name in self.pool.functions
        }
        outcomes = self.pool.run(calls)
        for number, response in enumerate(group.responses):
            total = 0.0
            for component in self.settings.components:
                outcome = _bounded(outcomes.get((number, component.name)) or _verdict(response), component)
                if outcome.value is None:
                    self._note(component, group, number, outcome.reason)
                    response.reward_failures[component.name] = outcome.reason
                    value = component.minimum
                    if self.settings.on_failure == "drop_group" or value is None:
                        group.dropped = True
                        continue
                else:
                    value = outcome.value
                response.reward_components[component.name] = value
                total += component.weight * value
            if not group.dropped:
                response.task_reward = total

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def _note(self, component: Component, group: Group, number: int, reason: str) -> None:
        where = f"draw {group.index} (prompt {group.prompt.id}), response {number}"
        sentence = f"reward function {component.path} failed on {where}: it {reason}"
        if self.settings.on_failure == "stop":
            raise UserError(f"{sentence}; correct it, or set reward.on_failure to worst or drop_group")
        self.failures[component.name] += 1
        if self.failures[component.name] <= REASONS:
            last = "; further ones are only counted" if self.failures[component.name] == REASONS else ""
            log.warning("%s%s", sentence, last)


def about(prompt: Prompt, response: Response) -> About:
    """Facts of a graded response."""
    return {
        "prompt_id": prompt.id,
        "question": prompt.question,
        "source": prompt.source,
        "stated_answer": response.stated_answer,
        "correct": response.correct,
        "truncated": response.truncated,
        "length": response.length,
    }


def _verdict(response: Response) -> Outcome:
    return Outcome(1.0 if response.correct else -1.0)


def _bounded(outcome: Outcome, component: Component) -> Outcome:
    """What undercuts the stated minimum is a failure too: "worst" would be better than it."""
    if outcome.value is None or component.minimum is None or outcome.value >= component.minimum:
        return outcome
    if not differ([outcome.value, component.minimum]):
        return outcome
    return Outcome(None, f"returned {outcome.value:g}, below its stated minimum {component.minimum:g}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _component(name: str, options: Any, key: str) -> Component:
    options = dict(options) if isinstance(options, Mapping) else {}
    path = options.pop("_target_", None)
    if not isinstance(path, str) or not path:
        raise UserError(
            f"{key} names no function: set {key}._target_ to a dotted path such as my_package.my_function"
        )
    numbers = {part: options.pop(part) for part in ("weight", "minimum") if options.get(part) is not None}
    options.pop("minimum", None)
    for part, value in numbers.items():
        if not _is_number(value) or not abs(value) < float("inf"):
            raise UserError(f"{key}.{part} is {value!r}; it must be a finite number")
    return Component(name, path, arguments=options, **numbers)


def _check(component: Component, on_failure: str) -> None:
    """Load the function here once, so that what is wrong with it is said before any model loads."""
    name, path = component.name, component.path
    if component.weight < 0:
        raise UserError(
            f"the weight of reward {name} is {component.weight}; it must be at least 0, so that its minimum is the "
            "worst: let the function return negative numbers instead"
        )
    if path == CORRECTNESS:
        if component.arguments:
            raise UserError(f"reward {name}: {path} takes no argument {sorted(component.arguments)[0]!r}: remove it")
        return
    if name == TOTAL:
        raise UserError(f"a reward cannot be called {TOTAL!r}, the name of the weighted sum: rename it")
    try:
        function = pkgutil.resolve_name(path)
    except Exception as error:  # a user's module can raise anything on import
        raise UserError(
            f"reward {name}: {path} cannot be loaded ({type(error).__name__}: {error}): check the dotted path, and "
            "that PYTHONPATH leads to it"
        ) from error
    if not callable(function) or inspect.isclass(function):
        kind = "class" if inspect.isclass(function) else type(function).__name__
        raise UserError(f"reward {name}: {path} is a {kind}, not a function of (text, answer, about)")
    try:
        inspect.signature(function).bind("", 0, {}, **component.arguments)
    except TypeError as error:
        given = ", ".join(["text", "answer", "about", *(f"{key}=" for key in component.arguments)])
        raise UserError(f"reward {name}: {path} cannot be called with ({given}): {error}") from error
    except ValueError:
        pass  # a built-in that tells nobody its signature
    if on_failure == "worst" and component.minimum is None:
        raise UserError(
            f"reward {name} states no minimum, which reward.on_failure=worst gives a failure: set its minimum, or "
            "reward.on_failure to drop_group or stop"
        )
