"""Packing, its attention, and the dealing of rows, by hand."""

import pytest
import torch

from trl_lossplus import LossPlusError, LossSpec, PolicyTerm, Window, register_policy_loss
from trl_lossplus.registry import POLICY_LOSSES
from trl_lossplus.still_rows import what_moves_still_rows
from trl_lossplus.trainers.budget import Packed, Padded, row_facts
from trl_lossplus.trainers.dealing import deal_windows, share_out
from trl_lossplus.trainers.packing import pack
from trl_lossplus.trainers.segment_attention import Segment, UnsupportedAttention, segment_attention

# Two completions of prompt 5 6, one of prompt 7; the second row ends early, the third is empty.
PROMPTS = torch.tensor([[5, 6], [5, 6], [0, 7], [5, 6]])
PROMPT_MASK = torch.tensor([[1, 1], [1, 1], [0, 1], [1, 1]])
COMPLETIONS = torch.tensor([[11, 12, 13], [21, 0, 0], [0, 0, 0], [41, 42, 0]])
COMPLETION_MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
ROWS = (PROMPTS, PROMPT_MASK, COMPLETIONS, COMPLETION_MASK)


def test_rows_one_after_the_other():
    packing = pack(*ROWS, share_prefix=False)
    assert packing.input_ids.tolist() == [[5, 6, 11, 12, 13, 5, 6, 21, 7, 5, 6, 41, 42]]
    assert packing.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1, 2, 3]]
    assert packing.segments == (Segment(0, 5, 0, 0), Segment(5, 8, 5, 5), Segment(8, 9, 8, 8), Segment(9, 13, 9, 9))
    assert packing.states.tolist() == [1, 2, 3, 6, 10, 11]  # the state before each completion token
    assert packing.labels.tolist() == [11, 12, 13, 21, 41, 42]
    assert packing.ends.tolist() == [4, 7, 8, 12]
    scattered = packing.scatter(packing.labels.float())
    assert scattered.tolist() == [[11, 12, 13], [21, 0, 0], [0, 0, 0], [41, 42, 0]]


def test_a_prompt_once_for_its_neighbours():
    """Rows 0 and 1 are neighbours; row 3 has the same prompt, but row 2 stands between."""
    packing = pack(*ROWS, share_prefix=True)
    assert packing.input_ids.tolist() == [[5, 6, 11, 12, 13, 21, 7, 5, 6, 41, 42]]
    assert packing.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 0, 0, 1, 2, 3]]
    assert packing.segments == (
        Segment(0, 2, 0, 0),
        Segment(2, 5, 0, 2),
        Segment(5, 6, 0, 2),
        Segment(6, 7, 6, 6),
        Segment(7, 11, 7, 7),
    )
    assert packing.states.tolist() == [1, 2, 3, 1, 8, 9]  # both first tokens come from the prompt's last state
    assert packing.ends.tolist() == [4, 5, 6, 10]


def test_values_of_the_states_before_the_tokens_and_after_the_last():
    """V = place in the packed row: rows 0 and 1 share the state of prompt place 1; an empty row has the value after its prompt alone."""
    packing = pack(*ROWS, share_prefix=True)
    places = torch.arange(11.0).unsqueeze(0)
    assert packing.at_tokens(places).tolist() == [[1, 2, 3, 4], [1, 5, 0, 0], [6, 0, 0, 0], [8, 9, 10, 0]]


def test_a_padding_token_that_is_also_a_token():
    """What is padding is told by the mask, not by the id: pad 0 may be an end token inside a completion."""
    packing = pack(PROMPTS[:1], PROMPT_MASK[:1], torch.tensor([[11, 0, 0]]), torch.tensor([[1, 1, 0]]), share_prefix=True)
    assert packing.input_ids.tolist() == [[5, 6, 11, 0]]


def test_a_prompt_of_no_tokens_is_refused():
    with pytest.raises(LossPlusError, match="a prompt has no tokens"):
        pack(PROMPTS, torch.zeros_like(PROMPT_MASK), COMPLETIONS, COMPLETION_MASK, share_prefix=False)


def test_nothing_to_score_stays_connected():
    packing = pack(PROMPTS, PROMPT_MASK, COMPLETIONS, torch.zeros_like(COMPLETION_MASK), share_prefix=True)
    scored = torch.zeros(0, requires_grad=True)
    packing.scatter(scored).sum().backward()
    assert scored.grad.shape == (0,)


@pytest.mark.parametrize("share_prefix", [False, True])
def test_attention_by_segment_is_the_masked_square(share_prefix):
    """Against one softmax over the whole packed row under the mask that the segments mean, values and gradients."""
    packing = pack(*ROWS, share_prefix=share_prefix)
    n = packing.input_ids.shape[1]
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, n, 8, generator=draw, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2))
    sees = torch.zeros(n, n, dtype=torch.bool)
    for start, stop, prefix, prefix_stop in packing.segments:
        sees[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
        sees[start:stop, prefix:prefix_stop] = True
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.3).masked_fill(~sees, -torch.inf)
    expected = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    got = segment_attention(query, key, value, packing.segments, scaling=0.3)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    direction = torch.randn(got.shape, generator=draw, dtype=torch.float64)
    theirs = torch.autograd.grad((expected * direction).sum(), (query, key, value))
    ours = torch.autograd.grad((got * direction).sum(), (query, key, value))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 0.1}, "without dropout"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"sliding_window": 4}, "a row of 5 tokens is longer than the model's sliding window of 4"),
    ],
)
def test_attention_that_is_not_computed_is_refused(options, words):
    one = torch.zeros(1, 1, 5, 2)
    with pytest.raises(UnsupportedAttention, match=words):
        segment_attention(one, one, one, (Segment(0, 5, 0, 0),), **options)
    segment_attention(one, one, one, (Segment(0, 5, 0, 0),), sliding_window=5)


def test_rows_are_shared_out_by_tokens():
    """Rows of 2 + 9, 2 + 1, 2 + 4 and 2 + 5 tokens: 11 alone against 7 + 6, and 3 to the lighter."""
    table = [[2, 9, 0, 1], [2, 1, 0, 1], [2, 4, 1, 1], [2, 5, 1, 1]]
    assert share_out(table, 2, share_prefix=False) == [[0, 1], [3, 2]]


def test_groups_stay_together_where_that_balances():
    """Prompt once: group 0 costs 2 + 9 + 1, group 1 costs 2 + 4 + 5. For four parts each is cut in two."""
    table = [[2, 9, 0, 1], [2, 1, 0, 1], [2, 4, 1, 1], [2, 5, 1, 1]]
    assert share_out(table, 2, share_prefix=True) == [[0, 1], [3, 2]]
    assert sorted(map(sorted, share_out(table, 4, share_prefix=True))) == [[0], [1], [2], [3]]


def test_rows_that_do_not_count_are_in_no_part():
    table = [[2, 9, 0, 0], [2, 1, 0, 1], [2, 4, 1, 0]]
    assert share_out(table, 2, share_prefix=False) == [[1], []]
    assert share_out(table[:1], 2, share_prefix=True) == [[], []]


def micro(ids, advantages):
    """A micro-batch whose completions hold one token, their row's number."""
    n = len(ids)
    ones = torch.ones(n, 1, dtype=torch.long)
    return {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": torch.tensor(ids).unsqueeze(1), "completion_mask": ones,
        "loss_mask": ones.bool(), "advantages": torch.tensor(advantages), "group_ids": torch.zeros(n, dtype=torch.long),
        "window": Window(torch.tensor(4), torch.tensor(4), None, 1), "num_items_in_batch": torch.tensor(4),
    }  # fmt: skip


def deal(window, per_window, drop_still, load=Packed(False)):  # noqa: B008
    """Each micro-batch in one part."""
    facts = row_facts(True, drop_still)
    dealt = deal_windows(window, per_window=per_window, facts=facts, drop_still=drop_still, load=load)
    assert [len(parts) for parts in dealt] == [1] * len(window)
    return [part for parts in dealt for part in parts]


@pytest.mark.parametrize("load", [Packed(False), Padded()])
def test_still_rows_are_dropped_and_a_micro_batch_stays(load):
    """Three of four rows have advantage 0: one is computed, and the other micro-batch holds a row outside the loss."""
    window = [micro([0, 1], [0.0, 2.0]), micro([2, 3], [0.0, 0.0])]
    first, second = deal(window, 2, True, load)
    assert (first["completion_ids"].tolist(), first["advantages"].tolist()) == ([[1]], [2.0])
    assert (len(second["prompt_ids"]), second["loss_mask"].any().item(), second["completion_mask"].any().item()) == (
        1,
        False,
        False,
    )
    assert (first["window"].num_tokens, second["window"].num_rows) == (4, 4)  # the normalizer still counts them
    whole = deal(window, 2, False, load)
    assert sorted(row for part in whole for row in part["completion_ids"].squeeze(1).tolist()) == [0, 1, 2, 3]


def test_rows_stay_in_their_window():
    windows = [micro([0, 1], [1.0, 2.0]), micro([2, 3], [3.0, 4.0])]
    dealt = deal(windows, 1, True)
    assert [sorted(part["completion_ids"].squeeze(1).tolist()) for part in dealt] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LossSpec(), None),
        (LossSpec(policy_loss="gspo"), None),
        (LossSpec(beta=0.1, kl_placement="loss"), "the kl term acts"),
        (LossSpec(entropy_coef=0.1), "the entropy term acts"),
        (LossSpec(policy_loss="dro"), "the policy term acts"),
        (LossSpec(policy_loss="real"), "compares the rows"),
        (LossSpec(policy_loss="kl_cov"), "compares the rows"),
    ],
)
def test_what_acts_where_the_advantage_is_zero(spec, words):
    reason = what_moves_still_rows(spec)
    assert reason is None if words is None else words in reason


def test_an_own_loss_is_tried_out():
    """Nobody declared that this loss pulls at rows without an advantage."""

    @register_policy_loss("pulls", requires={"advantages", "old_logps"}, formula="-A r + 0.1 r", source="here")
    def pulls(batch, spec):
        ratio = batch.ratio(spec.log_ratio_clamp)
        return PolicyTerm(per_token=-batch.advantages * ratio + 0.1 * ratio)

    try:
        assert "the policy term acts" in what_moves_still_rows(LossSpec(policy_loss="pulls"))
    finally:
        del POLICY_LOSSES.entries["pulls"]
