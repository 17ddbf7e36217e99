"""Objectives for stale data by hand: which tokens REC, sPPO and M2PO keep, and what they are in terms of the others."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import difference, run, tensors

from trl_lossplus import LossPlusError, LossSpec
from trl_lossplus.functional import policy_stale as stale
from trl_lossplus.functional import policy_trust_region as region

PLUS, MINUS = torch.tensor([[1.0]]), torch.tensor([[-1.0]])
RATIOS = torch.tensor([[0.25, 0.5, 1.0, 2.0, 4.0]])


def gradient(term_of, logps: torch.Tensor) -> torch.Tensor:
    logps = logps.clone().requires_grad_()
    return torch.autograd.grad(term_of(logps).per_token.sum(), logps)[0]


@pytest.mark.parametrize(
    ("clip", "up", "down"),
    [
        ("none", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        ("one_side", [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]),
        ("two_side", [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]),
        ("ring", [1, 0, 1, 0, 0], [0, 0, 1, 0, 1]),
    ],
)
@pytest.mark.parametrize("weight", ["none", "importance", "advantage"])
def test_rec(clip, up, down, weight):
    """Ratios 1/4 to 4, ranges [.8, 1.2] and the ring's .4 and 3: the gradient is -w A on the tokens kept; temperature 2."""
    for a, kept in ((PLUS, up), (MINUS, down)):
        keep = stale.rec_keep(RATIOS, a, clip=clip)
        got = gradient(lambda lp, a=a, k=keep: stale.rec(RATIOS, a, lp, k, weight=weight, temperature=2.0), RATIOS.log() - 3)
        w = {"none": torch.ones(5), "importance": RATIOS[0], "advantage": torch.full((5,), math.exp(a.item() / 2))}[weight]
        assert torch.allclose(got, -a * w * torch.tensor(kept))
        assert stale.rec(RATIOS, a, RATIOS.log(), keep).stats["rec_dropped"].tolist() == [[not k for k in kept]]


def test_rec_bounds_are_inside():
    """Ratios .8, 1.2, .4 and 3 exactly: kept."""
    edges = torch.tensor([[0.5, 1.5, 0.25, 3.0]])
    options = {"epsilon_low": 0.5, "epsilon_high": 0.5, "ring_low": 0.75, "ring_high": 2.0}
    assert stale.rec_keep(edges, PLUS, clip="ring", **options).tolist() == [[True, True, True, False]]
    assert stale.rec_keep(edges, MINUS, clip="ring", **options).tolist() == [[True, True, False, True]]
    assert stale.rec_keep(edges, PLUS, clip="two_side", **options).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"rec_clip": "none"}, {"policy_loss": "reinforce"}),
        ({"rec_weight": "importance"}, {"policy_loss": "ppo_clip"}),
        ({"rec_clip": "two_side", "rec_weight": "importance"}, {"policy_loss": "mis", "is_ratio_min": 0.8, "is_ratio_max": 1.2}),
        ({"rec_clip": "none", "rec_weight": "importance"}, {"policy_loss": "tis", "is_ratio_max": None}),
    ],
    ids=str,
)
def test_rec_in_terms_of_the_others(options, same):
    """Its gradient under some settings is that of another objective, on random tensors."""
    batch = tensors(2)
    ours, right = run(batch, LossSpec(policy_loss="rec", **options))[1], run(batch, LossSpec(**same))[1]
    assert right.abs().sum() > 0.1
    assert difference(ours, right) < 1e-5


REC_OTHERS = {
    "epsilon": 0.4, "epsilon_high": 0.05, "importance_sampling_level": "sequence", "log_ratio_clamp": 0.01, "rec_ring_low": 0.3,
    "rec_ring_high": 0.3, "rec_temperature": 3.0,
}  # fmt: skip


@pytest.mark.parametrize("weight", ["none", "importance", "advantage"])
@pytest.mark.parametrize("clip", ["none", "one_side", "two_side", "ring"])
def test_what_rec_reads(clip, weight):
    """A setting is among `policy_options` where another value of it moves the gradient, and only there; a spec refuses its own."""
    batch = tensors(2, spread=1.0)
    spec = LossSpec(policy_loss="rec", rec_clip=clip, rec_weight=weight, epsilon=0.2)
    before = run(batch, spec)[1]
    for name, value in REC_OTHERS.items():
        if name not in spec.policy_options and name.startswith("rec_"):
            with pytest.raises(LossPlusError, match=f"{name}={value} with .*: nothing reads it. Set "):
                replace(spec, **{name: value})
            continue
        moved = difference(run(batch, replace(spec, **{name: value}))[1], before) > 1e-4
        assert moved == (name in spec.policy_options), name


def test_a_ring_that_touches_is_no_ring():
    """With ring bounds at the clip range every token stays that one_side keeps (A is not 0): refused; just beyond it: allowed."""
    ratios = torch.tensor([[0.3, 0.7, 0.8, 0.95, 1.0, 1.1, 1.5, 1.7, 3.0]])
    for low, high in ((0.25, 0.5), (0.1, 0.2)):
        options = {"epsilon_low": 0.25, "epsilon_high": 0.5, "ring_low": low, "ring_high": high}
        for a in (PLUS, MINUS):
            ring = stale.rec_keep(ratios, a, clip="ring", **options)
            assert ring.tolist() == stale.rec_keep(ratios, a, clip="one_side", **options).tolist()
        with pytest.raises(
            LossPlusError, match=f"rec_ring_low={low} with epsilon=0.25 and rec_clip='ring': it must be > epsilon"
        ):
            LossSpec(policy_loss="rec", rec_clip="ring", epsilon=0.25, epsilon_high=0.5, rec_ring_low=low)
        with pytest.raises(LossPlusError, match=f"rec_ring_high={high} with epsilon_high=0.5 and rec_clip='ring': it must be >"):
            LossSpec(policy_loss="rec", rec_clip="ring", epsilon=0.25, epsilon_high=0.5, rec_ring_high=high)
    LossSpec(policy_loss="rec", rec_clip="ring", epsilon=0.25, epsilon_high=0.5, rec_ring_low=0.26, rec_ring_high=0.51)
    with pytest.raises(LossPlusError, match=r"rec_ring_low=0.6 with epsilon=0.7 and rec_clip='ring'"):
        LossSpec(policy_loss="rec", rec_clip="ring", epsilon=0.7)
    LossSpec(policy_loss="rec", rec_clip="two_side", epsilon=0.7)


def test_rec_with_a_ratio_a_row():
    """Trinity-RFT's gspo-one-side with GSPO's weight: over each row the same gradient as GSPO's, through its mean."""
    batch = tensors(2)
    batch |= {"advantages": batch["advantages"][:, 0], "token_weights": None, "rollout_weights": None}
    common = {"importance_sampling_level": "sequence", "epsilon": 0.05}
    ours = run(batch, LossSpec(policy_loss="rec", rec_weight="importance", **common))[1].sum(-1)
    right = run(batch, LossSpec(policy_loss="ppo_clip", **common))[1].sum(-1)
    assert (right == 0).any(), "a row is clipped"
    assert right.abs().sum() > 0.1
    assert difference(ours, right) < 1e-5


def test_sppo():
    """Ratios 1/2, .8, 1, 1.2, 2 and a range of [1 / 1.25, 1.5], A = -2: 2 log of the clipped ratio; gradient 2 inside, 0 outside."""
    d = torch.tensor([[0.5, 0.81, 1.0, 1.2, 2.0]]).log()
    options = {"epsilon_low": 0.25, "epsilon_high": 0.5}
    term = stale.sppo(d, 2 * MINUS, **options)
    right = [2 * math.log(x) for x in (0.8, 0.81, 1.0, 1.2, 1.5)]
    assert term.per_token[0].tolist() == pytest.approx(right, abs=1e-6)
    assert gradient(lambda x: stale.sppo(x, 2 * MINUS, **options), d).tolist() == [[0, 2, 2, 2, 0]]
    assert term.stats["sppo_outside"].tolist() == [[True, False, False, False, True]]
    batch, wide = tensors(3), 0.25 / 1.25  # 1 - 1/5 = 1 / 1.25
    sppo = run(batch, LossSpec(policy_loss="sppo", epsilon=0.25))[1]
    rec = run(batch, LossSpec(policy_loss="rec", rec_clip="two_side", epsilon=wide, epsilon_high=0.25))[1]
    assert difference(sppo, rec) < 1e-5


M2_D = torch.tensor([[0.1, 0.2, 0.5, -3.0], [-0.3, 2.0, 9.0, 0.0]])
M2_A = torch.tensor([[1.0], [-1.0]])
M2_MASK = torch.tensor([[True, True, True, True], [True, True, False, True]])


@pytest.mark.parametrize(
    ("threshold", "dropped"),
    [
        (0.2, [[0, 0, 0, 0], [0, 0, 0, 0]]),
        (0.09, [[0, 0, 1, 0], [0, 0, 0, 0]]),
        (0.04, [[0, 0, 1, 0], [1, 0, 0, 0]]),
        (0.02, [[0, 1, 1, 0], [1, 0, 0, 0]]),
        (0.0, [[1, 1, 1, 0], [1, 0, 0, 0]]),
    ],
)
def test_m2po(threshold, dropped):
    """
    Along A moved .1, .2, .5 (A > 0) and -.3 (A < 0): squares .01, .04, .09, .25 with means .01, .025, .0467, .0975 from the smallest
    up. Those that moved against A, masked ones and ones that stood still never leave.
    """
    got = stale.m2po_dropped(M2_D, M2_A, M2_MASK, threshold=threshold)
    assert got.int().tolist() == dropped
    slope = gradient(lambda d: stale.m2po(d.exp(), M2_A, got), M2_D)
    assert torch.allclose(slope, -M2_D.exp() * M2_A * ~got)


def test_m2po_ties_leave_together():
    """Squares .01, .09, .09: means .01, .05, .0633. A bound of .05 could keep one of the two; both leave."""
    d, mask = torch.tensor([[0.1, 0.3, 0.3]]), torch.ones(1, 3, dtype=torch.bool)
    assert stale.m2po_dropped(d, PLUS, mask, threshold=0.055).tolist() == [[False, True, True]]
    assert stale.m2po_dropped(d, PLUS, mask, threshold=0.07).tolist() == [[False, False, False]]
    assert stale.m2po_dropped(d, PLUS, ~mask).tolist() == [[False, False, False]]


def test_m2po_bounds_the_step():
    """What stays has a mean square of at most the threshold, and one more token would have more; on random tensors."""
    g = torch.Generator().manual_seed(0)
    for threshold in (0.01, 0.04, 0.1):
        d, a = 0.5 * torch.randn(16, 40, generator=g), torch.randn(16, 1, generator=g)
        mask = torch.rand(16, 40, generator=g) > 0.2
        dropped = stale.m2po_dropped(d, a, mask, threshold=threshold)
        along = mask & (d * a > 0)
        assert not (dropped & ~along).any()
        kept, left = d[along & ~dropped] ** 2, d[dropped] ** 2
        assert kept.mean() <= threshold + 1e-6
        assert left.min() >= kept.max()
        assert torch.cat([kept, left.min()[None]]).mean() > threshold


def test_ipo_by_sign():
    """Moves +.25, -.2, +.02 of a probability, threshold .14: A > 0 drops the first, A < 0 the second."""
    old, new = torch.tensor([[0.5, 0.5, 0.01]]).log(), torch.tensor([[0.75, 0.3, 0.03]]).log()
    for a, kept in ((PLUS, [0, 1, 1]), (MINUS, [1, 0, 1])):
        got = gradient(lambda lp, a=a: region.ipo(lp - old, a, lp, old, threshold=0.14, kl_coef=0.5, by_sign=True), new)
        assert torch.allclose(got, -a * (new - old).exp() * torch.tensor([kept]) + (new - old), rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rec_clip": "both"}, "rec_clip='both' is not known"),
        ({"rec_weight": "ratio"}, "rec_weight='ratio' is not known"),
        ({"rec_ring_low": 1.5}, r"rec_ring_low=1.5 .*in \[0, 1\]"),
        ({"rec_temperature": 0.0}, "rec_temperature=0.0 is out of range"),
        ({"policy_loss": "rec", "rec_ring_high": 3.0}, "rec_ring_high=3.0 with rec_clip='one_side': nothing reads it"),
        ({"policy_loss": "rec", "rec_temperature": 2.0}, "rec_temperature=2.0 with rec_weight='none': nothing reads it"),
        ({"m2_threshold": -1.0}, "m2_threshold=-1.0 .*>= 0"),
        ({"opmd_tau": math.inf}, "opmd_tau=inf is out of range"),
        ({"asymre_shift": -math.inf}, "asymre_shift=-inf is out of range"),
    ],
)
def test_ranges(fields, message):
    with pytest.raises(LossPlusError, match=message):
        LossSpec(**fields)
