"""The sampler: draws prompts, has them answered and graded, and refills until the batch is full.

Groups are accepted in the order their prompts were drawn, never in the order they finish: the first to
finish are the shortest, and a batch of those would teach the model to be short. The accepted set is
therefore that of a sampler that handles one group at a time; how many groups are in flight changes only the
speed and the waste. Prompts drawn beyond the last judged group go back and are drawn again next step, by
the newer policy, so no prompt is lost; their responses, where whole groups of them were ready, serve if the
policy has not changed.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from dapo_pl import grading
from dapo_pl.data.sources import fits_int64
from dapo_pl.errors import UserError, nearest
from dapo_pl.rewards import give_rewards
from dapo_pl.rollout.early_rejection import EarlyRejection, EarlyRejectionSettings
from dapo_pl.rollout.engine import Engine, EngineFailed, Sampling, request_seed
from dapo_pl.rollout.history import PromptHistory, probability_mixed
from dapo_pl.rollout.types import Group, Prompt, Response
from dapo_pl.seams import Seams

OnShortfall = Literal["smaller_batch", "keep_unmixed", "stop"]
Refill = Literal["continuous", "rounds"]


class RolloutInterrupted(Exception):
    """The user asked to stop while responses were being generated; nothing of this step was trained on."""


@dataclass(frozen=True)
class RolloutSettings:
    """The shape of a rollout step, how it is refilled, and what happens when its budget runs out.

    `mini_batch_size` counts responses, one mini-batch is one optimizer step.

    `refill`: `continuous` feeds prompts to the engine while others are being generated, as many as the recent share
    of accepted groups makes likely to be needed, plus `margin` standard deviations of that number. `rounds` is the
    released system's way: `oversampling` × `groups_per_step` prompts at once, all of them finished before the next
    round.

    The budget of a step are the groups judged (`max_prompts_per_step`) and the tokens in them
    (`max_tokens_per_step`, None: no limit). Both are counted in draw order, so that the batch does not depend on
    what finished first; what is in flight at the end comes on top and is dropped. When the budget is used up
    `on_shortfall` decides: train on what there is (if at least `min_groups`), fill up with unmixed groups, or stop.

    `history_decay` is what a prompt's earlier responses still count for each time it is drawn again.
    """

    steps: int
    groups_per_step: int
    group_size: int
    mini_batch_size: int
    max_prompts_per_step: int
    max_tokens_per_step: int | None = None
    on_shortfall: OnShortfall = "smaller_batch"
    min_groups: int = 1
    refill: Refill = "continuous"
    margin: float = 0.0
    oversampling: float = 1.0
    history_decay: float = 0.7
    early_rejection: EarlyRejectionSettings = field(default_factory=EarlyRejectionSettings)

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
        if self.max_tokens_per_step is not None and self.max_tokens_per_step < 1:
            raise UserError(
                f"rollout.max_tokens_per_step is {self.max_tokens_per_step}; it must be at least 1, or null"
            )
        if self.min_groups > self.groups_per_step:
            raise UserError(
                f"rollout.min_groups is {self.min_groups}, more than groups_per_step {self.groups_per_step}"
            )
        for name, known in (("on_shortfall", OnShortfall), ("refill", Refill)):
            if getattr(self, name) not in get_args(known):
                raise UserError(
                    f"rollout.{name} is {getattr(self, name)!r}; {nearest(str(getattr(self, name)), get_args(known))}"
                )
        if self.margin < 0:
            raise UserError(f"rollout.margin is {self.margin}; it must be at least 0 standard deviations")
        if self.oversampling <= 0:
            raise UserError(f"rollout.oversampling is {self.oversampling}; it must be above 0")
        if not 0 < self.history_decay <= 1:
            raise UserError(f"rollout.history_decay is {self.history_decay}; it must be above 0 and at most 1")
        self._check_early_rejection()

    def _check_early_rejection(self) -> None:
        early = self.early_rejection
        if not early.enabled:
            return
        if early.first >= self.group_size:
            raise UserError(
                f"rollout.early_rejection.first is {early.first}, which leaves nothing to save of a group of "
                f"{self.group_size}: set it below rollout.group_size"
            )
        if self.refill == "rounds":
            raise UserError(
                "rollout.refill=rounds waits for whole rounds, and rollout.early_rejection takes groups out of them: "
                "use rollout.refill=continuous"
            )
        if self.on_shortfall == "keep_unmixed":
            raise UserError(
                "rollout.on_shortfall=keep_unmixed fills up with unmixed groups, which rollout.early_rejection does "
                "not finish: use smaller_batch or stop"
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

    def epoch(self, draw: int) -> int:
        """The pass over the prompts, from 0, that the draw belongs to."""
        return draw // len(self.prompts)


@dataclass
class Rollout:
    """One step's outcome.

    `accepted`: what is trained on, in draw order. `examined`: every group judged, accepted or not, those rejected
    early with their first responses only. `fates`: amounts for the cost ledger. `shortfall`: why the batch is not N
    accepted groups, empty if it is.
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
    which prompts come next. `carried` holds groups that were ready beyond need, for the case that the policy is still
    the one that made them; it is in no checkpoint, since a resumed run makes the same ones again.
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
    carried: dict[int, Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.history = PromptHistory(self.settings.history_decay)
        self.early = EarlyRejection(self.settings.early_rejection, self.history, self.settings.group_size, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {
            "cursor": self.cursor,
            "recent": list(self.recent),
            "history": self.history.state_dict(),
            "early_rejection": self.early.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.cursor = state["cursor"]
        self.recent = deque(state["recent"], maxlen=self.recent.maxlen)
        self.carried = {}
        self.history.load_state_dict(state["history"])
        self.early.load_state_dict(state["early_rejection"])

    def sample(self) -> Rollout:
        """Generate until N groups are accepted or the budget is used up.

        Nothing a checkpoint holds changes before the step is complete, so an interrupted one leaves no trace.
        """
        start = time.perf_counter()
        tokens_before = self.engine.tokens_generated
        step = _Step(self)
        step.judge()
        try:
            while not step.over:
                step.feed()
                step.receive()
                step.judge()
                tokens = self.engine.tokens_generated - tokens_before
                self.on_progress(
                    SamplerProgress(len(step.accepted), step.wanted, tokens, time.perf_counter() - start)
                )
                if self.should_stop():
                    raise RolloutInterrupted
        except EngineFailed:
            raise  # there is nothing to abort in an engine that is broken
        except BaseException:
            step.abort()
            raise
        cut_off = step.abort()
        shortfall = "" if len(step.accepted) == step.wanted else self._shortfall(step.accepted, step.judged)
        fates = step.fates(cut_off)
        self._remember(step)
        return Rollout(step.accepted, step.judged, fates, time.perf_counter() - start, shortfall)

    def _remember(self, step: _Step) -> None:
        self.early.add(step.judged)
        epochs = [self.order.epoch(group.index) for group in step.judged]
        self.history.add(step.judged, {group.index for group in step.accepted}, epochs)
        self.early.update()
        self.recent.extend(self.seams.group_filter(group) for group in step.judged)
        self.cursor += len(step.judged)
        # Whether a group was stopped early depends on what was known in its own step.
        self.carried = {} if self.settings.early_rejection.enabled else step.complete

    def _shortfall(self, accepted: list[Group], examined: list[Group]) -> str:
        """Apply `on_shortfall` (filling `accepted` up for keep_unmixed) and say what happened and what helps."""
        settings = self.settings
        right = sum(group.correct == len(group.responses) for group in examined)
        wrong = sum(group.correct == 0 for group in examined)
        cure = (
            "the problems are too hard for the model: train the warm start longer, choose easier problems or a "
            "larger rollout.group_size"
            if wrong >= right
            else "the problems are too easy for the model: choose harder ones or a larger rollout.group_size"
        )
        if len(examined) >= settings.max_prompts_per_step:
            budget = f"rollout.max_prompts_per_step={settings.max_prompts_per_step} prompts"
        else:
            budget = f"{len(examined)} prompts and rollout.max_tokens_per_step={settings.max_tokens_per_step} tokens"
        found = (
            f"{len(accepted)} of {settings.groups_per_step} groups were accepted after {budget} "
            f"({wrong} all wrong, {right} all right); {cure}"
        )
        dropped = sum(group.dropped for group in examined)
        if dropped:
            found += f"; {dropped} were dropped because a reward function failed (reward.on_failure)"
        if settings.on_shortfall == "keep_unmixed":
            taken = {group.index for group in accepted}
            rest = [group for group in examined if group.index not in taken and group.scored]
            accepted.extend(rest[: settings.groups_per_step - len(accepted)])
            accepted.sort(key=lambda group: group.index)
        if settings.on_shortfall == "stop" or len(accepted) < settings.min_groups:
            raise UserError(found)
        return found


@dataclass
class _InFlight:
    """A group being generated: the responses asked for so far, those that came, and the chance of being accepted."""

    prompt: Prompt
    asked: int = 0
    responses: dict[int, Response] = field(default_factory=dict)
    chance: float = 0.0


class _Step:
    """One rollout step under way; nothing here outlives it but what `Sampler._remember` takes."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.settings = sampler.settings
        self.wanted = self.settings.groups_per_step
        self.drawn = 0
        self.pending: dict[int, _InFlight] = {}
        version = sampler.engine.policy_version
        self.complete = {
            index: group
            for index, group in sampler.carried.items()
            if all(response.policy_version == version for response in group.responses)
        }
        self.carried = set(self.complete)
        self.ahead = sum(sampler.seams.group_filter(group) for group in self.complete.values())
        self.share = (sum(sampler.recent) + 1) / (len(sampler.recent) + 1)
        self.waiting = 0
        self.judged: list[Group] = []
        self.judged_tokens = 0
        self.accepted: list[Group] = []
        self.round_end = 0

    @property
    def over(self) -> bool:
        """Whether the batch is full or the budget used up."""
        limit = self.settings.max_tokens_per_step
        return (
            len(self.accepted) >= self.wanted
            or len(self.judged) >= self.settings.max_prompts_per_step
            or (limit is not None and self.judged_tokens >= limit)
        )

    def feed(self) -> None:
        """Submit further prompts as far as they are likely to be needed."""
        self.drawn = max(self.drawn, len(self.judged))  # what was carried over may be judged before it is drawn
        while self.drawn < self.settings.max_prompts_per_step and self._room():
            index = self.sampler.cursor + self.drawn
            self.drawn += 1
            if index not in self.complete:
                group = self.pending[index] = _InFlight(self.sampler.order[index])
                group.chance = self._chance(index, group)
                self._ask(index, self.sampler.early.first(index))

    def receive(self) -> None:
        """Let the engine go on, and grade what it has finished."""
        try:
            finished = self.sampler.engine.step()
        except UserError:
            raise
        except Exception as error:  # an engine can fail in any way
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        for request, response in finished:
            index, number = map(int, request.split(":"))
            group = self.pending[index]
            grade([response], group.prompt.answer)
            group.responses[number] = response
            group.chance = self._chance(index, group)
            self.waiting -= 1
            if len(group.responses) == group.asked:
                self._group_in(index)

    def judge(self) -> None:
        """Accept or filter what is next in the order of draws, as far as it is there; a round only as a whole."""
        if self.settings.refill == "rounds" and self.pending:
            return
        while not self.over and self.sampler.cursor + len(self.judged) in self.complete:
            group = self.complete.pop(self.sampler.cursor + len(self.judged))
            self.judged.append(group)
            self.judged_tokens += group.tokens
            if self.sampler.seams.group_filter(group):
                self.accepted.append(group)
                self.ahead -= 1

    def abort(self) -> int:
        """Drop whatever is in flight; the tokens the engine had for it."""
        return self.sampler.engine.abort(
            f"{index}:{number}" for index, group in self.pending.items() for number in range(group.asked)
        )

    def fates(self, cut_off: int) -> dict[str, float]:
        """Amounts for the ledger; `cut_off` are the tokens of unfinished responses.

        What was carried over has been booked as beyond need by the step that made it, and is taken out there.
        """
        fates: Counter[str] = Counter()
        used = {group.index for group in self.accepted}
        for group in self.judged:
            _book(fates, "used" if group.index in used else FATES_OF_OUTCOMES[group.outcome], group.responses)
            if group.index in self.carried:
                _book(fates, "beyond_need", group.responses, sign=-1)
        for index, group in self.complete.items():
            if index not in self.carried:
                _book(fates, "beyond_need", group.responses)
        for group in self.pending.values():
            _book(fates, "cut_off", group.responses.values())
            fates["responses_cut_off"] += group.asked - len(group.responses)
        fates["tokens_cut_off"] += cut_off
        return dict(fates)

    def _room(self) -> bool:
        """Whether another prompt should be in flight."""
        if self.settings.refill == "rounds":
            if not self.pending and self.drawn >= self.round_end:
                self.round_end = self.drawn + math.ceil(self.settings.oversampling * self.wanted)
            return self.drawn < self.round_end
        if not self.pending:
            return True
        another = self.sampler.early.first(self.sampler.cursor + self.drawn)
        if self.waiting + another > self.sampler.max_in_flight:
            return False
        chances = [group.chance for group in self.pending.values()]
        spread = math.sqrt(sum(chance * (1 - chance) for chance in chances))
        return len(self.accepted) + self.ahead + sum(chances) - self.settings.margin * spread < self.wanted

    def _chance(self, index: int, group: _InFlight) -> float:
        """That the group will be accepted, going by its responses so far, its prompt's past and the recent share.

        This decides how much is in flight and nothing else. A group that would be accepted as it is counts whole; for
        any other it is the chance of being mixed, scaled so that a prompt nobody knows has the recent share.
        """
        sampler = self.sampler
        known = list(group.responses.values())
        if known and sampler.seams.group_filter(Group(index, group.prompt, known)):
            return 1.0
        correct = sum(response.correct for response in known)
        size = self.settings.group_size
        history = sampler.history
        usual = probability_mixed(history.prior, 0, 0, size)
        own = probability_mixed(history.posterior(group.prompt.id), correct, len(known), size)
        return min(1.0, self.share * own / usual)

    def _ask(self, index: int, until: int) -> None:
        """Submit the group's responses up to the number `until`."""
        sampler = self.sampler
        group = self.pending[index]
        for number in range(group.asked, until):
            seed = request_seed(sampler.seed, "train", index, number)
            sampler.engine.submit(f"{index}:{number}", group.prompt.token_ids, sampler.sampling, seed)
        self.waiting += until - group.asked
        group.asked = until

    def _group_in(self, index: int) -> None:
        """All that was asked for of a group is there: ask for the rest, give it up, or it is complete."""
        sampler = self.sampler
        responses = [response for _, response in sorted(self.pending[index].responses.items())]
        group = Group(index, self.pending[index].prompt, responses)
        if len(responses) < self.settings.group_size:
            if not sampler.early.rejects(group):
                self._ask(index, self.settings.group_size)
                return
            group.rejected = True
        del self.pending[index]
        self.complete[index] = group
        if not group.rejected:
            sampler.task_reward(group)
        if group.scored:
            give_rewards(group.responses, sampler.seams.reward_terms)
        self.ahead += sampler.seams.group_filter(group)


FATES_OF_OUTCOMES = {
    "mixed": "filtered_other",
    "all_correct": "filtered_all_correct",
    "all_wrong": "filtered_all_wrong",
    "equal": "filtered_other",
    "dropped": "filtered_other",
    "rejected": "early_rejected",
}
"""What becomes of a group that is not accepted."""


def grade(responses: Sequence[Response], answer: int) -> None:
    """Grade what each response states, in place. Truncation is a flag beside this, not a verdict.

    A stated number beyond 64 bits is wrong and kept as None: no problem has such an answer, and a degenerate
    response of thousands of nines could be written to no JSON file.
    """
    for response in responses:
        stated = grading.extract_answer(response.text)
        response.stated_answer = stated if stated is not None and fits_int64(stated) else None
        response.correct = response.stated_answer == answer


def _book(fates: Counter[str], fate: str, responses: Iterable[Response], sign: int = 1) -> None:
    for response in responses:
        fates[f"responses_{fate}"] += sign
        fates[f"tokens_{fate}"] += sign * response.length
