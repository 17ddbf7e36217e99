"""Rows laid one after the other without padding, a prompt once for neighbours that share it; and back to (B, T)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional.errors import LossPlusError
from .segment_attention import Segment


@dataclass(frozen=True)
class Packing:
    """
    B rows of a prompt and a completion as one row of N tokens.

    A token is scored by the hidden state before it: `states` holds the place of that state in the packed row for each of the n
    completion tokens, `targets` the token's place in (B, T) laid flat. `ends` holds each row's last place.
    """

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N)
    segments: tuple[Segment, ...]
    states: Tensor  # (n,)
    labels: Tensor  # (n,)
    targets: Tensor  # (n,)
    ends: Tensor  # (B,)
    shape: tuple[int, int]  # (B, T)

    @property
    def inputs(self) -> dict[str, Any]:
        """What a model's layers take of it."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "segments": self.segments}

    def scatter(self, scored: Tensor) -> Tensor:
        """(n,) values of the completion tokens as (B, T), 0 elsewhere."""
        flat = scored.new_zeros(self.shape[0] * self.shape[1]).index_put((self.targets,), scored)
        return flat.view(self.shape)

    def at_tokens(self, values: Tensor) -> Tensor:
        """
        From values (1, N) at every place of the packed row to (B, T + 1): column t is that of the state before token t, the column after
        a row's last token that of the state after it; 0 elsewhere.
        """
        rows, width = self.shape
        row = self.targets // max(width, 1)
        after = torch.arange(rows, device=row.device) * (width + 1) + torch.bincount(row, minlength=rows)
        places, states = torch.cat([self.targets + row, after]), torch.cat([self.states, self.ends])
        return values.new_zeros(rows * (width + 1)).index_put((places,), values[0, states]).view(rows, width + 1)


def pack(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor, *, share_prefix: bool
) -> Packing:
    """
    Packs rows; waits for the device once.

    Args:
        prompt_ids: (B, P), with its mask (B, P).
        completion_ids: (B, T), with its mask (B, T).
        share_prefix: whether neighbours with the same prompt have it once.

    Raises:
        LossPlusError: a row without a prompt, whose first token nothing predicts.
    """
    device, (rows, width) = prompt_ids.device, completion_ids.shape
    split = prompt_ids.shape[1]
    ids = torch.cat([prompt_ids, completion_ids], 1).cpu()
    mask = torch.cat([prompt_mask, completion_mask], 1).bool().cpu()
    prompts = [ids[row, :split][mask[row, :split]] for row in range(rows)]
    completions = [ids[row, split:][mask[row, split:]] for row in range(rows)]
    columns = [mask[row, split:].nonzero().squeeze(1) + row * width for row in range(rows)]
    if any(len(prompt) == 0 for prompt in prompts):
        raise LossPlusError("a prompt has no tokens: nothing predicts the first token of its completions. Drop that row.")

    pieces: list[Tensor] = []
    positions: list[Tensor] = []
    states: list[Tensor] = []
    segments: list[Segment] = []
    ends: list[int] = []
    at = 0
    for members in _neighbours(prompts, share_prefix):
        prompt = prompts[members[0]]
        start, prefix_stop = at, at + len(prompt)
        pieces.append(prompt)
        positions.append(torch.arange(len(prompt)))
        at = prefix_stop
        if len(members) > 1:
            segments.append(Segment(start, at, start, start))
        for row in members:
            length = len(completions[row])
            pieces.append(completions[row])
            positions.append(torch.arange(len(prompt), len(prompt) + length))
            states.append(torch.arange(at - 1, at + length - 1))
            states[-1][:1] = prefix_stop - 1
            if len(members) == 1:
                segments.append(Segment(start, at + length, start, start))
            elif length:
                segments.append(Segment(at, at + length, start, prefix_stop))
            at += length
            ends.append(at - 1 if length else prefix_stop - 1)
    return Packing(
        input_ids=torch.cat(pieces).unsqueeze(0).to(device),
        position_ids=torch.cat(positions).unsqueeze(0).to(device),
        segments=tuple(segments),
        states=torch.cat(states).to(device),
        labels=torch.cat(completions).to(device),
        targets=torch.cat(columns).to(device),
        ends=torch.tensor(ends, device=device),
        shape=(rows, width),
    )


def _neighbours(prompts: list[Tensor], share: bool) -> list[list[int]]:
    """Rows in order, in one list where their prompts are the same and shared."""
    groups: list[list[int]] = []
    for row, prompt in enumerate(prompts):
        if share and groups and torch.equal(prompt, prompts[groups[-1][0]]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
