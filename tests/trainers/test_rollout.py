"""What a rollout stores: rewards, KL in the reward, advantages, group statistics, the KL coefficient."""

import json

import pytest
import torch
from toyrun import SeeLoss, StopAt, fixed_rollout, letter_reward, logged, trainer, weights

from trl_lossplus import LossPlusError, LossSpec
from trl_lossplus.trainers.rollout import kl_penalty_rows, rollout_kl, score_rollout, token_kl_advantages


def test_c3_kl_is_taken_off_the_reward():
    """C3: R = [1, 0], sum of d = [2, 0], beta .1: rewards [.8, 0], so the centred advantages are [.4, -.4]."""
    spec = LossSpec(kl_placement="reward", kl_reward_coef=0.1, kl_estimator="k1", scale_rewards="none")
    mask = torch.tensor([[True, True, False], [True, False, False]])
    old = torch.tensor([[-1.0, -1.0, float("nan")], [-1.0, 5.0, 5.0]])
    ref = torch.tensor([[-2.5, -1.5, 0.0], [-1.0, 0.0, 0.0]])
    penalty = kl_penalty_rows(rollout_kl(spec, old, ref, mask), mask, 0.1)
    assert penalty.tolist() == pytest.approx([0.2, 0.0])
    scored = score_rollout(spec, {"scale_rewards": "none"}, torch.tensor([[1.0], [0.0]]), torch.ones(1), 2, penalty)
    assert scored.rewards.tolist() == pytest.approx([0.8, 0.0])
    assert scored.mean.tolist() == pytest.approx([0.5, 0.5])  # of the rewards before the penalty
    assert scored.advantages.tolist() == pytest.approx([0.4, -0.4])


def test_c10_token_level_kl():
    """C10: A_t holds -beta * sum over s >= t of d_s; masked tokens are passed over."""
    kl = torch.tensor([[0.5, -1.0, 9.0, 2.0]])
    mask = torch.tensor([[True, True, False, True]])
    advantages = token_kl_advantages(torch.tensor([1.0]), kl, mask, 0.1)
    assert advantages.tolist()[0] == pytest.approx([1 - 0.15, 1 - 0.1, 0.0, 1 - 0.2])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_in_the_reward_through_the_trainer(toy, tmp_path, level):
    """After an update the KL is not 0; the advantages that the loss got are those worked out from the rewards and the log-probs."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, kl_placement="reward", kl_reward_coef=0.5,
        kl_reward_level=level, scale_rewards="none", num_iterations=2, max_steps=4,
    )  # fmt: skip
    seen = SeeLoss(run)
    run.train()
    second = seen.inputs[2]  # the second rollout's first pass
    mask = second["loss_mask"]
    d = torch.where(mask, second["old_per_token_logps"] - second["ref_per_token_logps"], torch.zeros(()))
    assert d.abs().max() > 1e-4
    texts = run.processing_class.batch_decode(second["completion_ids"], skip_special_tokens=True)
    reward = torch.tensor(letter_reward(texts))
    if level == "sequence":
        reward = reward - 0.5 * d.sum(1)
    expected = torch.stack(
        [r - reward[second["group_ids"] == g].mean() for r, g in zip(reward, second["group_ids"], strict=True)]
    )
    if level == "token":
        to_go = d.flip(1).cumsum(1).flip(1)
        assert torch.allclose(second["advantages"], torch.where(mask, expected[:, None] - 0.5 * to_go, 0.0), atol=1e-5)
    else:
        assert torch.allclose(second["advantages"], expected, atol=1e-5)
    assert "loss/kl" not in seen.inputs[0]
    assert run.beta != 0.0  # TRL's flag for having a reference
    assert run.args.beta == 0.0


def test_e6_rows_are_told_by_group_id():
    """E6: permuting the rows permutes the advantages (rows of a group need not be neighbours)."""
    from trl_lossplus import compute_advantages

    rewards = torch.tensor([1.0, 0.0, 3.0, 2.0, 5.0, 5.0])
    ids = torch.tensor([7, 7, 2, 2, 7, 2])
    mask = torch.ones(6, 1, dtype=torch.bool)
    whole = compute_advantages("grpo", rewards, mask, ids).advantages
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.allclose(compute_advantages("grpo", rewards[order], mask, ids[order]).advantages, whole[order])


def test_none_rewards(toy, tmp_path):
    """None: no advantage, out of the group's statistics, counted in a metric."""

    def reward(completions, **kwargs):
        return [None if i % 4 == 0 else float(i % 4) for i in range(len(completions))]

    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout, scale_rewards="none", max_steps=1)
    seen = SeeLoss(run)
    run.train()
    assert logged(run, "group_reward/unscored") == [2.0]
    assert logged(run, "group_reward/std") == pytest.approx([1.0])  # of 1, 2, 3
    assert sorted(seen.inputs[0]["advantages"].tolist()) == pytest.approx([-1, -1, 0, 0, 0, 0, 1, 1])
    assert (~seen.inputs[0]["scored"]).sum() == 2


def test_group_statistics_are_by_group_under_batch_scaling(toy, tmp_path):
    """scale_rewards=batch divides by the batch's std, but the share of flat groups is still counted by group."""

    def reward(prompts, completions, **kwargs):
        return [float(i // 4) for i in range(len(completions))]  # flat groups at two levels

    run = trainer(toy, tmp_path, reward=reward, rollout=fixed_rollout, scale_rewards="batch", max_steps=1)
    run.train()
    assert logged(run, "frac_reward_zero_std") == [1.0]
    assert logged(run, "group_reward/mean_max") == [1.0]
    assert logged(run, "reward_std")[0] > 0.5


def test_l1_no_signal_is_said_once(toy, tmp_path, caplog):
    """L1: all groups without spread: every advantage 0, and one warning that says so."""
    run = trainer(toy, tmp_path, reward=lambda completions, **kw: [0.35] * len(completions), rollout=fixed_rollout)
    before = weights(run)
    run.train()
    assert [r.message for r in caplog.records if "No signal" in r.message] != []
    assert sum("No signal" in r.message for r in caplog.records) == 1
    assert all(torch.equal(before[name], after) for name, after in weights(run).items())


def test_completions_table_shows_the_advantages_that_were_used(toy, tmp_path):
    """Learner-side normalization happens after TRL filled its table: the table holds the normalized ones, in generation order."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, advantage_normalization="learner",
        log_completions=True, max_steps=1,
    )  # fmt: skip
    seen = SeeLoss(run)
    run.train()
    micro = seen.inputs[0]
    shown = list(run._logs["advantages"])
    used = {row: adv[0].item() for row, adv in zip(micro["row"].tolist(), micro["advantages"], strict=True)}
    assert shown == pytest.approx([used[row] for row in range(8)], abs=1e-6)
    assert max(map(abs, shown)) > 0.5


def test_rollout_side_whitening(toy, tmp_path):
    """advantage_normalization=rollout: mean 0 and variance 1 over the rollout's tokens, not over each optimizer step's."""
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, advantage_normalization="rollout",
        steps_per_generation=2, max_steps=2,
    )  # fmt: skip
    seen = SeeLoss(run)
    run.train()
    tokens = torch.cat([micro["advantages"][micro["loss_mask"]] for micro in seen.inputs])
    first = seen.inputs[0]["advantages"][seen.inputs[0]["loss_mask"]]
    assert len(seen.inputs) == 2
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.var().item() == pytest.approx(1, rel=1e-5)
    assert abs(first.mean().item()) > 1e-3


ADAPTIVE = {"beta": 0.1, "kl_controller": "adaptive", "kl_target": 0.02, "kl_horizon": 50.0, "num_iterations": 2}


def test_adaptive_coefficient_follows_the_rollout_s_kl(toy, tmp_path):
    """Updated once a rollout from the token-weighted KL; the loss of a rollout uses the coefficient from before its update."""
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=6, **ADAPTIVE)
    run.train()
    coef, expected = 0.1, []
    for kl in logged(run, "kl_rollout"):
        expected.append(coef)
        coef *= 1 + min(max(kl / 0.02 - 1, -0.2), 0.2) * 8 / 50
    assert logged(run, "kl_coef") == pytest.approx(expected, rel=1e-6)
    assert len(expected) == 3
    assert run.kl_controller.coef == pytest.approx(coef, rel=1e-6)
    entries = [entry for entry in run.state.log_history if "loss/kl" in entry]
    second_pass = entries[3]
    assert second_pass["loss/kl"] == pytest.approx(expected[1] * second_pass["kl"], rel=1e-5)


def test_d1_controller_survives_a_checkpoint(toy, tmp_path, caplog):
    """D1: saved, resumed: the coefficient is bit-equal; without its file there is a warning and the configured value."""
    fields = {**ADAPTIVE, "save_strategy": "steps", "save_steps": 4}
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=8, callbacks=[StopAt(4)], **fields)
    run.train()
    saved = run.kl_controller.coef
    assert saved != 0.1
    again = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=8, **fields)
    again.load_plus_state(str(tmp_path / "checkpoint-4"))
    assert again.kl_controller.coef == saved
    state = tmp_path / "checkpoint-4" / "kl_controller.json"
    assert json.loads(state.read_text()) == {"kind": "adaptive", "coef": saved, "start": 0.1}
    state.unlink()
    (tmp_path / "checkpoint-4" / "lossplus_state_0.pt").unlink()
    fresh = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, max_steps=8, **fields)
    fresh.load_plus_state(str(tmp_path / "checkpoint-4"))
    assert fresh.kl_controller.coef == 0.1
    assert any("kl_controller.json" in record.message for record in caplog.records)


def test_i7_resume_in_the_middle_of_a_buffer(toy, tmp_path):
    """I7: num_iterations 2, stopped after the first pass: resumes, and the reference's log-probs are those from before."""
    fields = {"beta": 0.05, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "rollout": fixed_rollout}
    first = trainer(toy, tmp_path, reward=letter_reward, max_steps=4, callbacks=[StopAt(3)], **fields)
    seen = SeeLoss(first)
    first.train()
    resumed = trainer(toy, tmp_path, reward=letter_reward, max_steps=4, **fields)
    after = SeeLoss(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 4
    assert len(after.inputs) == 1

    def by_row(inputs):
        order = inputs["row"].argsort()
        return inputs["ref_per_token_logps"][order], inputs["loss_mask"][order]

    (before, mask), (now, _) = by_row(seen.inputs[2]), by_row(after.inputs[0])
    assert torch.equal(before[mask], now[mask])


def test_infinite_reward_is_refused(toy, tmp_path):
    """One clear line that names the function, the completion and the value."""
    run = trainer(
        toy, tmp_path, reward=lambda completions, **kw: [0.0, float("inf")] * (len(completions) // 2), rollout=fixed_rollout
    )
    with pytest.raises(LossPlusError, match=r"reward function '<lambda>' returned inf for completion 1 of 8"):
        run.train()
