"""The causal language model as a policy: log-probs and entropies of response tokens.

Only hidden states that predict a response token are projected onto the vocabulary, chunk by chunk, and no
chunk's logits outlive the chunk. Responses of one prompt may share a row, in which the prompt stands once:
attention lets each response see the prompt and itself, and its positions continue from the prompt's end, so
that the values are those of separate rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dapo_pl.errors import UserError

PADDING, PROMPT = 0, 1  # segment numbers; the responses of a row are 2, 3, ...


@dataclass
class MicroBatch:
    """Some responses of a mini-batch, laid out as rows for one forward pass.

    `input_ids`, `position_ids`, `segments`: [rows, length]. The n response tokens, flat: `row`, `column`
    (of the hidden state that predicts the token), `target` (the token), `slot`, `token` (its place in this
    micro-batch's [responses, tokens] tables), all [n]. `responses`: which responses of the mini-batch the
    slots are.
    """

    input_ids: Int[Tensor, "rows length"]
    position_ids: Int[Tensor, "rows length"]
    segments: Int[Tensor, "rows length"]
    row: Int[Tensor, " n"]
    column: Int[Tensor, " n"]
    target: Int[Tensor, " n"]
    slot: Int[Tensor, " n"]
    token: Int[Tensor, " n"]
    responses: list[int]

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return MicroBatch(**moved, responses=self.responses)

    @property
    def shares_prompts(self) -> bool:
        """Whether any row holds more than one response."""
        return bool((self.segments > PROMPT + 1).any())


@dataclass
class _Row:
    prompt: Sequence[int]
    responses: list[tuple[int, Sequence[int]]]

    @property
    def length(self) -> int:
        return len(self.prompt) + sum(len(tokens) for _, tokens in self.responses)


def micro_batches(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    share_prompts: bool,
    pad_id: int,
) -> Iterator[MicroBatch]:
    """Lay responses out as micro-batches of at most `max_tokens` (rows × length, padding included).

    Args:
        prompts: the prompt of each response; equal neighbours are one group.
        responses: token ids, end token included.
        max_tokens: a row that is longer by itself still gets its own micro-batch.
        share_prompts: encode the prompt of neighbouring responses once per row.
        pad_id: fills rows up; masked, so any token does.
    """
    rows: list[_Row] = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        fits = share_prompts and rows and rows[-1].prompt == prompt and rows[-1].length + len(response) <= max_tokens
        if not fits:
            rows.append(_Row(prompt, []))
        rows[-1].responses.append((index, response))
    rows.sort(key=lambda row: row.length)
    batch: list[_Row] = []
    for row in rows:
        if batch and row.length * (len(batch) + 1) > max_tokens:
            yield _lay_out(batch, pad_id)
            batch = []
        batch.append(row)
    if batch:
        yield _lay_out(batch, pad_id)


def _lay_out(rows: list[_Row], pad_id: int) -> MicroBatch:
    shape = (len(rows), max(row.length for row in rows))
    input_ids = torch.full(shape, pad_id)
    position_ids = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, PADDING)
    flat: list[Tensor] = []
    slots: list[int] = []
    for r, row in enumerate(rows):
        start = len(row.prompt)
        input_ids[r, :start] = torch.as_tensor(row.prompt)
        position_ids[r, :start] = torch.arange(start)
        segments[r, :start] = PROMPT
        column = start
        for number, (index, tokens) in enumerate(row.responses):
            end = column + len(tokens)
            ids = torch.as_tensor(tokens)
            input_ids[r, column:end] = ids
            position_ids[r, column:end] = torch.arange(start, start + len(tokens))
            segments[r, column:end] = PROMPT + 1 + number
            sources = torch.arange(column - 1, end - 1)
            sources[0] = start - 1  # the first token is predicted from the prompt's end
            places = torch.arange(len(tokens))
            flat.append(
                torch.stack([torch.full_like(places, r), sources, ids, torch.full_like(places, len(slots)), places])
            )
            slots.append(index)
            column = end
    row_, column_, target, slot, token = torch.cat(flat, dim=1)
    return MicroBatch(input_ids, position_ids, segments, row_, column_, target, slot, token, slots)


def shared_prompt_mask(segments: Int[Tensor, "rows length"]) -> Bool[Tensor, "rows 1 length length"]:
    """Which position (third axis) may attend to which (fourth): earlier ones of the prompt or its own response."""
    length = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    order = torch.arange(length, device=segments.device)
    causal = order[:, None] >= order[None, :]
    allowed = causal & ((key == PROMPT) | (key == query)) & (query != PADDING)
    # A query that may attend to nothing would be NaN; padding attends to itself and is read by nobody.
    return (allowed | torch.eye(length, dtype=torch.bool, device=segments.device))[:, None]


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h Wᵀ / T)[target] and the entropy, keeping no logits for the backward pass.

    The backward pass recomputes each chunk's logits: one more projection buys a memory that does not grow
    with the number of tokens. The entropy is a statistic and carries no gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, temperature, soft_cap, chunk, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        log_probs = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        entropies = torch.empty_like(log_probs)
        low_weight = weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in _slices(hidden.shape[0], chunk):
                logits, _ = _logits(hidden[piece].to(dtype), low_weight, bias, temperature, soft_cap)
                everything = torch.log_softmax(logits, dim=-1)
                log_probs[piece] = everything.gather(-1, target[piece, None]).squeeze(-1)
                entropies[piece] = -(everything.exp().mul_(everything)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.settings = (temperature, soft_cap, chunk, dtype)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx, grad_log_probs, _grad_entropies):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, target = ctx.saved_tensors
        temperature, soft_cap, chunk, dtype = ctx.settings
        # Summed over chunks: in low precision the later ones would be rounded away.
        wide = torch.promote_types(weight.dtype, torch.float32)
        needs_weight = ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        low_weight = weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in _slices(hidden.shape[0], chunk):
                low_hidden = hidden[piece].to(dtype)
                logits, slope = _logits(low_hidden, low_weight, bias, temperature, soft_cap)
                grad = torch.softmax(logits, dim=-1).neg_()
                grad.scatter_add_(-1, target[piece, None], torch.ones_like(grad[:, :1]))
                grad.mul_(grad_log_probs[piece, None].to(grad.dtype) / temperature)
                if slope is not None:
                    grad.mul_(slope)
                low_grad = grad.to(dtype)
                grad_hidden[piece] = (low_grad @ low_weight).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += low_grad.T @ low_hidden
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _logits(
    hidden: Float[Tensor, "n hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, " vocabulary"] | None,
    temperature: float,
    soft_cap: float | None,
) -> tuple[Float[Tensor, "n vocabulary"], Float[Tensor, "n vocabulary"] | None]:
    """Logits over temperature, at least float32, and the soft cap's slope d capped / d raw."""
    raw = F.linear(hidden, weight)
    raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if bias is not None:
        raw = raw + bias
    if soft_cap is None:
        return raw.div_(temperature), None
    tanh = torch.tanh(raw / soft_cap)
    return tanh * soft_cap / temperature, 1 - tanh.square()


def token_log_probs(
    hidden: Float[Tensor, "n hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    target: Int[Tensor, " n"],
    *,
    bias: Float[Tensor, " vocabulary"] | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = 512,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Log-probs of `target` and entropies under softmax(h Wᵀ / temperature), nats.

    Args:
        hidden: [n, hidden], states that predict the targets.
        weight, bias: the output projection.
        target: [n], token ids.
        temperature: that of the sampling, so that both sides speak of one distribution.
        soft_cap: c of models that cap logits as c · tanh(logits / c).
        chunk: tokens projected at a time; bounds the memory, not the result.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return _ChunkedLogProbs.apply(hidden, weight, bias, target, temperature, soft_cap, chunk, dtype)  # pyright: ignore[reportReturnType]


class CausalPolicy(nn.Module):
    """A transformers causal language model, seen as the distribution its responses are drawn from."""

    def __init__(self, model: Any, *, temperature: float = 1.0, share_prompts: bool = True, chunk: int = 512) -> None:
        super().__init__()
        self.model: Any = model
        self.temperature = temperature
        self.share_prompts = share_prompts
        self.chunk = chunk

    def forward(
        self, batch: MicroBatch
    ) -> tuple[Float[Tensor, "responses tokens"], Float[Tensor, "responses tokens"]]:
        """Log-probs (with gradient) and entropies of the micro-batch's response tokens, 0 beyond their ends."""
        # A plain row needs no mask at all: padding stands at its end, where causal attention never looks.
        mask = shared_prompt_mask(batch.segments) if batch.shares_prompts else None
        states = self.model.base_model(
            input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
        ).last_hidden_state
        # index_select, because the backward pass of states[row, column] adds up in an order that changes from
        # run to run on a CPU, and the first tokens of a group share their state.
        chosen = states.flatten(0, 1).index_select(0, batch.row * states.shape[1] + batch.column)
        head = self.model.get_output_embeddings()
        log_probs, entropies = token_log_probs(
            chosen,
            head.weight,
            batch.target,
            bias=head.bias,
            temperature=self.temperature,
            soft_cap=getattr(self.model.config, "final_logit_softcapping", None),
            chunk=self.chunk,
        )
        shape = (len(batch.responses), int(batch.token.max()) + 1)
        place = (batch.slot, batch.token)
        return (
            log_probs.new_zeros(shape).index_put(place, log_probs),
            entropies.new_zeros(shape).index_put(place, entropies),
        )

    @torch.no_grad()
    def check_layout(self) -> None:
        """Refuse a model for which shared rows or the output projection are not what this class assumes."""
        vocabulary = self.model.get_input_embeddings().num_embeddings
        tokens = [(7 * i + 3) % min(vocabulary, 1000) for i in range(12)]
        prompt, responses = tokens[:5], [tokens[5:9], tokens[8:]]
        (batch,) = micro_batches(
            [prompt, prompt], responses, max_tokens=100, share_prompts=self.share_prompts, pad_id=0
        )
        batch = batch.to(next(self.model.parameters()).device)
        ours, _ = self(batch)
        for slot, index in enumerate(batch.responses):
            row = torch.tensor([prompt + responses[index]], device=batch.input_ids.device)
            logits = self.model(input_ids=row).logits[0, len(prompt) - 1 : -1].float() / self.temperature
            plain = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None]).squeeze(-1)
            gap = (plain - ours[slot, : len(plain)]).abs().max().item()
            if not gap < 0.05:
                raise UserError(
                    f"model {type(self.model).__name__} gives other log-probs in this platform's row layout "
                    f"(gap {gap:.3g} nats): "
                    + (
                        "set policy.share_prompts=false"
                        if self.share_prompts
                        else "its output layer is not supported"
                    )
                )
