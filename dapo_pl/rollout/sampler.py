"""The sampler: draws prompts, has them answered and graded, and refills until the batch is full.

Groups are accepted in the order their prompts were drawn, never in the order they finish: the first to
finish are the shortest, and a batch of those would teach the model to be short. The accepted set is
therefore that of a sampler that handles one group at a time; how many groups are in flight changes only the
speed and the waste. Prompts drawn beyond the last accepted group go back and are drawn again next step, by
the newer policy, so no prompt is lost.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dapo_pl import grading
from dapo_pl.data.sources import fits_int64
from dapo_pl.errors import UserError
from dapo_pl.rewards import give_rewards
from dapo_pl.rollout.engine import Engine, EngineFailed, Sampling, request_seed
from dapo_pl.rollout.types import Group, Prompt, Response
from dapo_pl.seams import Seams

OnShortfall = Literal["smaller_batch", "keep_unmixed", "stop"]


class RolloutInterrupted(Exception):
    """The user asked to stop while responses were being generated; nothing of this step was trained on."""


@dataclass(frozen=True)
class RolloutSettings:
    """The shape of a rollout step, and what happens when its budget runs out.

    `mini_batch_size` counts responses, one mini-batch is one optimizer step. `max_prompts_per_step` bounds
    the refill; when it is used up `on_shortfall` decides: train on what there is (if at least `min_groups`),
    fill up with unmixed groups, or stop.
    """

    steps: int
    groups_per_step: int
    group_size: int
    mini_batch_size: int
    max_prompts_per_step: int
    on_shortfall: OnShortfall = "smaller_batch"
    min_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "mini_batch_size", "max_prompts_per_step", "min_groups"):
            if getattr(self, name) < 1:
                raise UserError(f"rollout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.group_size < 2:
            raise UserError(
                f"rollout.group_size is {self.group_size}, but an advantage compares responses to one prompt: "
                "set it to 2 or more"
            )
        responses = self.groups_per_step * self.group_size
        if self.mini_batch_size > responses:
            raise UserError(
                f"rollout.mini_batch_size is {self.mini_batch_size} responses, more than the {responses} of a "
                f"rollout step (groups_per_step {self.groups_per_step} × group_size {self.group_size}): "
                "lower it or raise one of those"
            )
        if self.mini_batch_size % self.group_size:
            raise UserError(
                f"rollout.mini_batch_size is {self.mini_batch_size}, which cuts a group of "
                f"{self.group_size} in two: make it a multiple of rollout.group_size"
            )
        if self.max_prompts_per_step < self.groups_per_step:
            raise UserError(
                f"rollout.max_prompts_per_step is {self.max_prompts_per_step}, less than "
                f"groups_per_step {self.groups_per_step}: no step could ever be full"
            )
        if self.min_groups > self.groups_per_step:
            raise UserError(
                f"rollout.min_groups is {self.min_groups}, more than groups_per_step {self.groups_per_step}"
            )
        if self.on_shortfall not in ("smaller_batch", "keep_unmixed", "stop"):
            raise UserError(
                f"rollout.on_shortfall is {self.on_shortfall!r}; known are smaller_batch, keep_unmixed, stop"
            )


class PromptOrder:
    """Draw number -> prompt: every epoch a new permutation that depends on the seed and the epoch alone."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise UserError("the training set holds no prompt: check the data group")
        self.prompts = prompts
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, draw: int) -> Prompt:
        epoch, place = divmod(draw, len(self.prompts))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(request_seed(self.seed, "order", epoch))
            self._order = torch.randperm(len(self.prompts), generator=generator).tolist()
            self._epoch = epoch
        return self.prompts[self._order[place]]


@dataclass
class Rollout:
    """One step's outcome.

    `accepted`: what is trained on, in draw order. `examined`: every group judged, accepted or not. `fates`:
    amounts for the cost ledger. `shortfall`: why the batch is not N mixed groups, empty if it is.
    """

    accepted: list[Group]
    examined: list[Group]
    fates: dict[str, float]
    seconds: float
    shortfall: str = ""


@dataclass
class SamplerProgress:
    """What a progress line can say while a step is being generated."""

    accepted: int
    wanted: int
    tokens: int
    seconds: float


@dataclass
class Sampler:
    """Draws, grades, filters and refills; see the module's docstring for the order of acceptance.

    `cursor` is the number of prompts consumed so far: with the seed it is the whole state that determines
    which prompts come next.
    """

    engine: Engine
    order: PromptOrder
    seams: Seams
    settings: RolloutSettings
    sampling: Sampling
    seed: int
    max_in_flight: int = 256
    should_stop: Callable[[], bool] = lambda: False
    on_progress: Callable[[SamplerProgress], None] = lambda progress: None
    task_reward: Callable[[Group], None] = lambda group: None
    cursor: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=128))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"cursor": self.cursor, "recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.cursor = state["cursor"]
        self.recent = deque(state["recent"], maxlen=self.recent.maxlen)

    def sample(self) -> Rollout:
        """Generate until N groups are accepted or the budget is used up.

        Nothing a checkpoint holds changes before the step is complete, so an interrupted one leaves no trace.
        """
        start = time.perf_counter()
        tokens_before = self.engine.tokens_generated
        settings = self.settings
        wanted = settings.groups_per_step
        budget = settings.max_prompts_per_step
        pending: dict[int, dict[int, Response]] = {}
        complete: dict[int, Group] = {}
        accepted: list[Group] = []
        examined: list[Group] = []
        drawn = 0
        try:
            while len(accepted) < wanted and len(examined) < budget:
                share = self._accepted_share(accepted, examined)
                while drawn < budget and self._room(wanted - len(accepted), share, pending, complete):
                    index = self.cursor + drawn
                    pending[index] = {}
                    self._submit(index)
                    drawn += 1
                for request, response in self._step():
                    index, number = map(int, request.split(":"))
                    pending[index][number] = response
                    if len(pending[index]) == settings.group_size:
                        responses = [response for _, response in sorted(pending.pop(index).items())]
                        complete[index] = Group(index, self.order[index], responses)
                        self._grade(complete[index])
                while len(accepted) < wanted and self.cursor + len(examined) in complete:
                    group = complete.pop(self.cursor + len(examined))
                    examined.append(group)
                    if self.seams.group_filter(group):
                        accepted.append(group)
                seconds = time.perf_counter() - start
                self.on_progress(
                    SamplerProgress(len(accepted), wanted, self.engine.tokens_generated - tokens_before, seconds)
                )
                if self.should_stop():
                    raise RolloutInterrupted
        except EngineFailed:
            raise  # there is nothing to abort in an engine that is broken
        except BaseException:
            self._abort(pending)
            raise
        cut_off = self._abort(pending)
        shortfall = "" if len(accepted) == wanted else self._shortfall(accepted, examined)
        fates = _fates(accepted, examined, complete, pending, cut_off, settings.group_size)
        self.cursor += len(examined)
        self.recent.extend(self.seams.group_filter(group) for group in examined)
        return Rollout(accepted, examined, fates, time.perf_counter() - start, shortfall)

    def _accepted_share(self, accepted: list[Group], examined: list[Group]) -> float:
        """Of this step's groups and the recent ones before it; 1 when nothing is known yet."""
        return (sum(self.recent) + len(accepted) + 1) / (len(self.recent) + len(examined) + 1)

    def _room(
        self, needed: int, share: float, pending: dict[int, dict[int, Response]], complete: dict[int, Group]
    ) -> bool:
        """Whether another prompt should be in flight, going by the recent share of accepted groups."""
        ahead = sum(self.seams.group_filter(group) for group in complete.values())
        target = math.ceil((needed - ahead) / share)
        return len(pending) < min(target, max(1, self.max_in_flight // self.settings.group_size))

    def _step(self) -> list[tuple[str, Response]]:
        try:
            return self.engine.step()
        except UserError:
            raise
        except Exception as error:  # an engine can fail in any way
            raise EngineFailed(f"{type(error).__name__}: {error}") from error

    def _submit(self, index: int) -> None:
        for number in range(self.settings.group_size):
            seed = request_seed(self.seed, "train", index, number)
            self.engine.submit(f"{index}:{number}", self.order[index].token_ids, self.sampling, seed)

    def _abort(self, pending: dict[int, dict[int, Response]]) -> int:
        """Drop whatever is in flight; the tokens it had."""
        return self.engine.abort(
            f"{index}:{number}" for index in pending for number in range(self.settings.group_size)
        )

    def _grade(self, group: Group) -> None:
        grade(group.responses, group.prompt.answer)
        self.task_reward(group)
        if not group.dropped:
            give_rewards(group.responses, self.seams.reward_terms)

    def _shortfall(self, accepted: list[Group], examined: list[Group]) -> str:
        """Apply `on_shortfall` (filling `accepted` up for keep_unmixed) and say what happened and what helps."""
        settings = self.settings
        right = sum(group.correct == settings.group_size for group in examined)
        wrong = sum(group.correct == 0 for group in examined)
        cure = (
            "the problems are too hard for the model: train the warm start longer, choose easier problems or a "
            "larger rollout.group_size"
            if wrong >= right
            else "the problems are too easy for the model: choose harder ones or a larger rollout.group_size"
        )
        found = (
            f"{len(accepted)} of {settings.groups_per_step} groups were accepted after "
            f"rollout.max_prompts_per_step={settings.max_prompts_per_step} prompts "
            f"({wrong} all wrong, {right} all right); {cure}"
        )
        dropped = sum(group.dropped for group in examined)
        if dropped:
            found += f"; {dropped} were dropped because a reward function failed (reward.on_failure)"
        if settings.on_shortfall == "keep_unmixed":
            taken = {group.index for group in accepted}
            rest = [group for group in examined if group.index not in taken and not group.dropped]
            accepted.extend(rest[: settings.groups_per_step - len(accepted)])
            accepted.sort(key=lambda group: group.index)
        if settings.on_shortfall == "stop" or len(accepted) < settings.min_groups:
            raise UserError(found)
        return found


def grade(responses: Sequence[Response], answer: int) -> None:
    """Grade what each response states, in place. Truncation is a flag beside this, not a verdict.

    A stated number beyond 64 bits is wrong and kept as None: no problem has such an answer, and a degenerate
    response of thousands of nines could be written to no JSON file.
    """
    for response in responses:
        stated = grading.extract_answer(response.text)
        response.stated_answer = stated if stated is not None and fits_int64(stated) else None
        response.correct = response.stated_answer == answer


def _fates(
    accepted: list[Group],
    examined: list[Group],
    complete: dict[int, Group],
    pending: dict[int, dict[int, Response]],
    cut_off_tokens: int,
    group_size: int,
) -> dict[str, float]:
    used = {group.index for group in accepted}
    fates = dict.fromkeys(
        (f"{unit}_{fate}" for unit in ("responses", "tokens") for fate in ("used", "filtered", "beyond_need")),
        0.0,
    )
    for fate, groups in (
        ("used", accepted),
        ("filtered", [group for group in examined if group.index not in used]),
        ("beyond_need", complete.values()),
    ):
        for group in groups:
            fates[f"responses_{fate}"] += len(group.responses)
            fates[f"tokens_{fate}"] += sum(response.length for response in group.responses)
    finished = [response for responses in pending.values() for response in responses.values()]
    fates["responses_cut_off"] = len(pending) * group_size
    fates["tokens_cut_off"] = cut_off_tokens + sum(response.length for response in finished)
    return fates
