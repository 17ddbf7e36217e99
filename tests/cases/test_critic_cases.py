"""Cases F1, F2, F5, C10, and G1 and A8 for the value term: GAE and the value loss, in tensors alone."""

import pytest
import torch
from helpers import MODES, difference, full_spec, length_mask, rows, step_window, tensors

from trl_lossplus import LossBatch, LossPlusError, LossSpec, Window, compute_advantages, compute_loss
from trl_lossplus.functional.advantages import gae
from trl_lossplus.functional.masking import select
from trl_lossplus.functional.value import value_loss
from trl_lossplus.trainers.rollout import kl_penalty_rows, rollout_kl, token_reward_table

POISON = [float("nan"), float("inf"), float("-inf")]
CRITIC = ("values", "old_values", "returns")
HOLES = length_mask((6, 3, 1, 5, 2, 6, 4, 3)) & (torch.arange(6) != 2) & (torch.arange(8) != 4)[:, None]


def critic_tensors(seed: int = 0, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """`tensors` and the critic's three, spread so that the clip range .2 decides some tokens and not others."""
    batch, g = tensors(seed, mask), torch.Generator().manual_seed(100 + seed)
    old, moved, target = (torch.randn(batch["mask"].shape, generator=g) for _ in range(3))
    return batch | {"old_values": old, "values": old + 0.4 * moved, "returns": old + target}


def run(batch: dict, spec: LossSpec, window: Window | None = None):
    """(LossOutput, gradient for the log-probs, gradient for the values) of the whole loss."""
    logps, values = (batch[name].detach().clone().requires_grad_() for name in ("logps", "values"))
    out = compute_loss(LossBatch(**batch | {"logps": logps, "values": values}), spec, window)
    return out, *torch.autograd.grad(out.loss, (logps, values))


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


def test_f1_nothing_is_bootstrapped_from_padding():
    """mask [1,1,0], r [0,1,0], V [0,0,100], gamma 1, lambda .95 -> A = [.95,1,0] ([5.7,6,0] is the bug)."""
    mask = row(1, 1, 0).bool()
    for junk in (100.0, float("nan"), float("inf")):
        ours = gae(row(0, 1, junk), row(0, 0, junk), mask, gamma=1.0, gae_lambda=0.95)
        assert ours.advantages[0].tolist() == pytest.approx([0.95, 1.0, 0.0])
        assert ours.returns[0].tolist() == pytest.approx([0.95, 1.0, 0.0])


def test_f2_masked_tokens_inside_a_row_are_passed_over():
    """mask [1,0,0,1], r [0,0,0,1], V [.5,9,9,.2] -> A = [.46,0,0,.8], returns A + V = [.96,0,0,1]."""
    ours = gae(row(0, 0, 0, 1), row(0.5, 9, 9, 0.2), row(1, 0, 0, 1).bool(), gamma=1.0, gae_lambda=0.95)
    assert ours.advantages[0].tolist() == pytest.approx([0.46, 0.0, 0.0, 0.8])
    assert ours.returns[0].tolist() == pytest.approx([0.96, 0.0, 0.0, 1.0])
    by_name = compute_advantages(
        "gae", torch.tensor([1.0]), row(1, 0, 0, 1).bool(), torch.tensor([7]), values=row(0.5, 9, 9, 0.2)
    )
    assert torch.equal(by_name.advantages, ours.advantages), "one reward a completion belongs to its last valid token"


def test_f2_gamma_discounts_a_valid_token():
    """gamma .5, lambda .5, the row of F2: A_3 = .8, A_0 = .5 * .2 - .5 + .25 * .8 = -.2: one step apart, not three."""
    ours = gae(row(0, 0, 0, 1), row(0.5, 9, 9, 0.2), row(1, 0, 0, 1).bool(), gamma=0.5, gae_lambda=0.5)
    assert ours.advantages[0].tolist() == pytest.approx([-0.2, 0.0, 0.0, 0.8])


def test_a_lambda_of_the_critics_own():
    """VAPO: advantages under lambda .95 as in F2, returns under 1: the sum of the rewards, [1,0,0,1]."""
    args = (row(0, 0, 0, 1), row(0.5, 9, 9, 0.2), row(1, 0, 0, 1).bool())
    ours = gae(*args, gae_lambda=0.95, gae_lambda_critic=1.0)
    assert ours.advantages[0].tolist() == pytest.approx([0.46, 0.0, 0.0, 0.8])
    assert ours.returns[0].tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0])
    assert gae(*args, gae_lambda=1.0, gae_lambda_critic=0.0).returns[0].tolist() == pytest.approx([0.2, 0.0, 0.0, 1.0])


def test_bootstrap_is_the_value_after_the_last_valid_token():
    """Rows of F2, the first cut off with value 2 after it: A_3 = 1 + 2 - .2 = 2.8, A_0 = -.3 + .95 * 2.8; the other as before."""
    r, v, mask = (x.expand(2, 4) for x in (row(0, 0, 0, 1), row(0.5, 9, 9, 0.2), row(1, 0, 0, 1).bool()))
    ours = gae(r, v, mask, gae_lambda=0.95, bootstrap=torch.tensor([2.0, 0.0]))
    assert ours.advantages[0].tolist() == pytest.approx([2.36, 0.0, 0.0, 2.8])
    assert ours.advantages[1].tolist() == pytest.approx([0.46, 0.0, 0.0, 0.8])


def test_gae_reads_values_and_they_are_constants():
    """Without values an error that says so; given ones get no gradient from advantages or returns."""
    mask, ids = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 1])
    with pytest.raises(LossPlusError, match=r"advantage_estimator 'gae': it needs values \(B, T\); they are None"):
        compute_advantages("gae", torch.zeros(2), mask, ids)
    values = torch.randn(2, 3).requires_grad_()
    ours = compute_advantages("gae", torch.ones(2), mask, ids, values=values)
    assert not ours.advantages.requires_grad
    assert not ours.returns.requires_grad


def test_f5_value_loss():
    """v=1,1; old 0; return .3,2; clip .2; 0.5*max -> [.245,1.62], clip fraction .5, gradient [.7,0]."""
    values = row(1, 1).requires_grad_()
    loss, clipped = value_loss(values, row(0.3, 2), row(0, 0), cliprange=0.2)
    assert loss[0].tolist() == pytest.approx([0.245, 1.62])
    assert clipped.tolist() == [[False, True]]
    assert torch.autograd.grad(loss.sum(), values)[0][0].tolist() == pytest.approx([0.7, 0.0])


@pytest.mark.parametrize("mask", [row(1, 1), row(1, 1, 0, 1)], ids=["whole", "with a masked row's rest"])
def test_f5_through_compute_loss(mask):
    """The same with vf_coef .5 and token mean: term .5 * (.245 + 1.62) / 2, gradient .5 * [.7,0] / 2, clip fraction .5."""
    width, mask = mask.shape[1], mask.bool() & (torch.arange(mask.shape[1]) < 2)
    fill = lambda *x: torch.cat([row(*x), row(*[float("nan")] * (width - 2))], 1) if width > 2 else row(*x)  # noqa: E731
    batch = {"logps": fill(-1, -1), "old_logps": None, "advantages": torch.zeros(1), "mask": mask}
    batch |= {"values": fill(1, 1), "old_values": fill(0, 0), "returns": fill(0.3, 2)}
    out, _, gradient = run(batch, LossSpec(vf_coef=0.5))
    assert out.terms["value"].item() == pytest.approx(0.5 * (0.245 + 1.62) / 2)
    assert out.loss.item() == pytest.approx(out.terms["value"].item())
    assert gradient[0, :2].tolist() == pytest.approx([0.175, 0.0])
    assert torch.equal(gradient[0, 2:], torch.zeros(width - 2))
    stats = {
        name: out.stats[f"value/{name}"].item() for name in ("clip_ratio", "mean", "return_mean", "error_mean", "error_square")
    }
    assert stats == pytest.approx(
        {"clip_ratio": 0.5, "mean": 1.0, "return_mean": 1.15, "error_mean": 0.15, "error_square": 0.745}
    )
    assert out.per_token["value"][0, :2].tolist() == pytest.approx([0.245, 1.62])


@pytest.mark.parametrize(("delta", "right"), [(1.0, [0.245, 0.5]), (0.5, [0.225, 0.375]), (10.0, [0.245, 0.5])])
def test_huber(delta, right):
    """Half the doubled Huber loss of the errors .7 and -1, unclipped: x^2/2 within delta, delta (|x| - delta/2) beyond."""
    loss, clipped = value_loss(row(1, 1), row(0.3, 2), kind="huber", huber_delta=delta)
    assert loss[0].tolist() == pytest.approx(right)
    assert not clipped.any()


def test_value_loss_of_wrong_settings():
    """An unknown kind lists the kinds; clipping needs old values."""
    with pytest.raises(LossPlusError, match="value_loss='hubert' is not known. Did you mean 'huber'.*Allowed: huber, mse"):
        value_loss(row(1), row(1), kind="hubert")
    with pytest.raises(ValueError, match="old_values"):
        value_loss(row(1), row(1), cliprange=0.2)


@pytest.mark.parametrize("values", [(0.0, 0.0, 0.0, 0.0), (3.0, -1.0, 7.0, 0.5)], ids=["no values", "values"])
def test_c10_token_level_kl_in_the_rewards(values):
    """
    d = [.5,-1,(9),2], beta .1, score 1, gamma = lambda = 1 -> A_t = 1 - .1 * sum over s >= t of d_s - V_t: [.85,.9,0,.8] less V;
    the sequence-level form is 1 - .1 * 1.5 at every token.
    """
    mask, d, v = row(1, 1, 0, 1).bool(), row(0.5, -1, 9, 2), row(*values)
    spec = LossSpec(
        advantage_estimator="gae", kl_placement="reward", kl_reward_coef=0.1, kl_estimator="k1", kl_reward_level="token"
    )
    kl = rollout_kl(spec, d - 1, torch.full((1, 4), -1.0).masked_fill(~mask, float("nan")), mask)
    options = {"gamma": 1.0, "gae_lambda": 1.0}
    table = token_reward_table(torch.tensor([1.0]), kl, 0.1, mask)
    assert table[0].tolist() == pytest.approx([-0.05, 0.1, 0.0, 0.8])
    ours = compute_advantages("gae", table, mask, torch.tensor([0]), values=v, **options)
    assert torch.allclose(ours.advantages, select(row(0.85, 0.9, 0, 0.8) - v, mask), atol=1e-6)
    assert torch.allclose(ours.returns, row(0.85, 0.9, 0, 0.8), atol=1e-6)
    whole = token_reward_table(torch.tensor([1.0]) - kl_penalty_rows(kl, mask, 0.1), None, 0.0, mask)
    ours = compute_advantages("gae", whole, mask, torch.tensor([0]), values=v, **options)
    assert torch.allclose(ours.returns, row(0.85, 0.85, 0, 0.85), atol=1e-6), "constant over t"


@pytest.mark.parametrize("kind", ["mse", "huber"])
@pytest.mark.parametrize("mode", MODES)
def test_g1_nothing_leaks_from_masked_values(mode, kind):
    """NaN, +-inf at masked positions of values, old values, returns, or all (row 4 fully masked) -> bitwise the clean loss."""
    batch, spec = critic_tensors(1, HOLES), full_spec(aggregation=mode, vf_coef=0.5, value_loss=kind, huber_delta=0.3)
    clean = run(batch, spec)
    assert torch.isfinite(clean[0].loss)
    assert clean[2][HOLES].abs().sum() > 0
    assert torch.equal(clean[2][~HOLES], torch.zeros(int((~HOLES).sum())))
    assert 0 < clean[0].stats["value/clip_ratio"].item() < 1
    for names in (*((name,) for name in CRITIC), CRITIC):
        for junk in POISON:
            dirty = run({k: x.masked_fill(~HOLES, junk) if k in names else x for k, x in batch.items()}, spec)
            assert torch.equal(dirty[0].loss, clean[0].loss), (names, junk)
            assert all(torch.equal(a, b) for a, b in zip(dirty[1:], clean[1:], strict=True)), (names, junk)
            assert all(torch.equal(dirty[0].terms[k], clean[0].terms[k]) for k in clean[0].terms), (names, junk)
            assert all(torch.equal(dirty[0].stats[k], clean[0].stats[k]) for k in clean[0].stats), (names, junk)


@pytest.mark.parametrize("tensor", ["rewards", "values", "both"])
def test_g1_nothing_leaks_into_gae(tensor):
    """The same for the rewards and values of GAE: bitwise the clean advantages and returns, 0 where masked."""
    batch = critic_tensors(2, HOLES)
    args = {"rewards": batch["returns"], "values": batch["old_values"]}
    clean = gae(**args, mask=HOLES, gamma=0.99, gae_lambda=0.9, gae_lambda_critic=1.0)
    for junk in POISON:
        dirty = {k: x.masked_fill(~HOLES, junk) if tensor in (k, "both") else x for k, x in args.items()}
        ours = gae(**dirty, mask=HOLES, gamma=0.99, gae_lambda=0.9, gae_lambda_critic=1.0)
        assert torch.equal(ours.advantages, clean.advantages)
        assert torch.equal(ours.returns, clean.returns)
    for x in clean:
        assert torch.equal(x[~HOLES], torch.zeros(int((~HOLES).sum())))


def test_g1_fully_masked_batch():
    """No valid token, NaN everywhere -> the value term is 0, connected to the values, with gradient exactly 0."""
    batch = critic_tensors(0, torch.zeros(3, 5, dtype=torch.bool))
    batch = {k: torch.full_like(x, float("nan")) if x.is_floating_point() else x for k, x in batch.items()}
    out, _, gradient = run(batch, LossSpec(vf_coef=0.5))
    assert out.terms["value"].item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 5))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_a8_every_split_gives_the_same_value_gradient(mode, parts, world_size):
    """8 rows as 1x8, 2x4, 4x2, 8x1, trimmed, on 1 and 2 processes -> one value term and gradient, to 1e-6; the others alike."""
    batch, spec = critic_tensors(5), full_spec(aggregation=mode, vf_coef=0.5)
    out, logps_gradient, values_gradient = run(batch, spec)
    terms, ours = dict.fromkeys(out.terms, 0.0), [torch.zeros(8, 6), torch.zeros(8, 6)]
    for index in torch.arange(8).chunk(parts):
        width = int(batch["mask"][index].sum(-1).max())
        part = {name: x if x.dim() == 1 else x[:, :width] for name, x in rows(batch, index).items()}
        share, *gradients = run(part, spec, step_window(batch["mask"], batch["group_ids"], index, world_size))
        for name, term in share.terms.items():
            terms[name] += term.detach() / world_size
        for whole, gradient in zip(ours, gradients, strict=True):
            whole[index, :width] += gradient / world_size
    assert terms.keys() == {"policy", "kl", "entropy", "value"}
    assert difference(ours[1], values_gradient) < 1e-6
    assert difference(ours[0], logps_gradient) < 1e-6
    assert all(difference(terms[name], out.terms[name]) < 1e-5 for name in terms)
