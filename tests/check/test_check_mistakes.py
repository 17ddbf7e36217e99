"""A mistake is caught, and the first quantity that it changes is named."""

import dataclasses

import mistakes
import pytest
import torch

import trl_lossplus.loss
from trl_lossplus import GRPOPlusTrainer, LossPlusError
from trl_lossplus.functional import advantages, kl
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Entry
from trl_lossplus.trainers import grpo, minibatch, normalize, resample

PLAIN = ["--plain", "mistakes:plain_clip"]
SMALL = ["--per_device_train_batch_size", 8, "--max_completion_length", 5]


@pytest.fixture
def caught(checked):
    """Runs the check, which must find the quantity at the place named."""

    def run(quantity, section, *words):
        code, last, text = checked(*SMALL, *words)
        assert code == 1, text
        assert last.startswith(f"DIFFERS: the first quantity is {quantity!r} in {section}"), last
        assert "Everything before it agrees." in last
        return last

    return run


def test_a_right_loss_of_ones_own(checked):
    code, last, text = checked(*SMALL, "--policy_loss", "mistakes:right", *PLAIN)
    assert code == 0, text
    code, last, text = checked(
        *SMALL, "--advantage_estimator", "mistakes:median_advantage", "--plain_estimator", "mistakes:plain_median"
    )
    assert code == 0, text


@pytest.mark.parametrize("words", [["--policy_loss", "mistakes:right"], ["--advantage_estimator", "mistakes:median_advantage"]])
def test_no_plain_version_is_said(checked, words):
    code, last, text = checked(*SMALL, *words)
    assert code == 2
    assert last.startswith("NOT CHECKED: ")
    assert "has no plain version: give one with --plain" in last


def test_min_and_max_swapped(caught):
    last = caught("policy loss", "optimizer step 2", "--policy_loss", "mistakes:swapped", *PLAIN)
    assert ", row " in last
    assert ", token " in last


def test_epsilon_off(caught):
    caught("policy loss", "optimizer step 2", "--policy_loss", "mistakes:wider", *PLAIN)


def test_mask_forgotten_in_a_mean(caught):
    caught("policy loss", "optimizer step 2", "--policy_loss", "mistakes:unmasked", "--plain", "trl_lossplus.check.plain:gspo")


def registered(monkeypatch, name):
    """A loss of this file that reads the reference's log-probs, under its own name."""
    func = getattr(mistakes, name)
    entry = Entry(name, func, frozenset({"advantages", "old_logps", "ref_logps"}), "", "")
    monkeypatch.setitem(POLICY_LOSSES.entries, name, entry)
    return ["--policy_loss", name, "--beta", 0.1]


def test_sign_of_the_kl_in_ones_own_loss(caught, checked, monkeypatch):
    plain = ["--plain", "mistakes:plain_own_kl"]
    code, _, text = checked(*SMALL, *registered(monkeypatch, "own_kl"), *plain)
    assert code == 0, text
    caught("policy loss", "optimizer step 2", *registered(monkeypatch, "own_kl_sign"), *plain)


def test_mean_before_mask_in_ones_own_loss(caught, checked):
    plain = ["--plain", "mistakes:plain_row_mean"]
    code, _, text = checked(*SMALL, "--policy_loss", "mistakes:row_mean", *plain)
    assert code == 0, text
    caught("policy loss", "optimizer step 2", "--policy_loss", "mistakes:mean_before_mask", *plain)


def test_mask_forgotten_in_the_trainer(caught, monkeypatch):
    monkeypatch.setattr(minibatch, "token_mask", lambda micro: micro["completion_mask"].bool())  # tool tokens too
    caught("mask", "rollout 1")


FILL = resample.fill
SLIPS = {
    "rollout 1": lambda flat: FILL(flat)[::-1],  # groups in each other's place
    "rollout 2": lambda flat: [(0, j) for j in range(len(flat[0]))],  # none replaced, where the first are flat
}


@pytest.mark.parametrize("section", SLIPS)
def test_flat_groups_replaced_wrongly(caught, monkeypatch, section):
    monkeypatch.setattr(resample, "fill", SLIPS[section])
    caught("mask", section, "--zero_std_groups", "resample", "--resample_max_tries", 2)


def test_another_tensor_read(caught, monkeypatch):
    entry = Entry("of_reference", mistakes.reads_the_reference, frozenset({"advantages", "old_logps", "ref_logps"}), "", "")
    monkeypatch.setitem(POLICY_LOSSES.entries, "of_reference", entry)
    words = ["--policy_loss", "of_reference", "--beta", 0.1, "--plain", "mistakes:plain_ratio"]
    caught("policy loss", "optimizer step 3", *words)


def test_sign_of_kl(caught, monkeypatch):
    monkeypatch.setitem(kl.KL_ESTIMATORS, "k1", lambda d, clamp: -d)
    caught("KL", "optimizer step 2", "--beta", 0.1, "--kl_estimator", "k1")
    caught("KL at the rollout", "rollout 2", "--kl_placement", "reward", "--kl_reward_coef", 0.1)


def test_mean_before_mask(caught, monkeypatch):
    def careless(mode, per_token, mask, window=None, **more):
        return per_token.mean() * per_token.shape[0] / window.num_rows

    monkeypatch.setattr(trl_lossplus.loss, "aggregate", careless)
    caught("policy term", "optimizer step 1")


def test_normalizer_of_the_micro_batch(caught, monkeypatch):
    inner = grpo.compute_loss
    monkeypatch.setattr(grpo, "compute_loss", lambda batch, spec, window: inner(batch, spec, None))
    caught("policy term", "optimizer step 1")


def test_wrong_advantage_normalization(caught, monkeypatch):
    inner = normalize.whiten

    def by_variance(x, mask, *, variance=None, **more):
        return inner(x, mask, variance=variance**2, **more)

    monkeypatch.setattr(normalize, "whiten", by_variance)
    caught("advantages", "optimizer step 1", "--advantage_normalization", "rollout")
    caught("advantages", "optimizer step 1", "--advantage_normalization", "learner")


def replaced(monkeypatch, name, func):
    entry = ADVANTAGE_ESTIMATORS.get(name)
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS.entries, name, dataclasses.replace(entry, func=func))


def test_deviation_of_the_whole_batch(caught, monkeypatch):
    def wrong(rewards, group_ids, *, scale_rewards="group", **options):
        return advantages.grpo(rewards, group_ids, scale_rewards="batch", **options)

    replaced(monkeypatch, "grpo", wrong)
    caught("advantage of the row", "rollout 1")


def test_gae_lambda_off(caught, monkeypatch):
    def wrong(rewards, values, mask, **options):
        return advantages.gae(rewards, values, mask, **{**options, "gae_lambda": 0.9})

    replaced(monkeypatch, "gae", wrong)
    caught("advantages, raw", "rollout 1", "--trainer", "ppo")


def test_smaller_of_the_value_losses(caught, monkeypatch):
    inner = trl_lossplus.loss.value_loss

    def wrong(values, returns, old_values, **options):
        _, clipped = inner(values, returns, old_values, **options)
        plain = 0.5 * (values - returns) ** 2
        moved = values.clamp(old_values - 0.01, old_values + 0.01)
        return torch.minimum(plain, 0.5 * (moved - returns) ** 2), clipped

    monkeypatch.setattr(trl_lossplus.loss, "value_loss", wrong)
    caught("value loss", "optimizer step 2", "--trainer", "ppo", "--cliprange_value", 0.01)


def test_stale_old_log_probs(caught, monkeypatch):
    inner, first = GRPOPlusTrainer.make_rollout, []

    def stale(self, out, rewards):
        first.append(out["old_per_token_logps"].clone())
        width = out["old_per_token_logps"].shape[1]
        old = torch.nn.functional.pad(first[0], (0, 6))[:, :width]
        return inner(self, {**out, "old_per_token_logps": old}, rewards)

    monkeypatch.setattr(GRPOPlusTrainer, "make_rollout", stale)
    caught("old log-probs", "rollout 2")


def test_bad_input():
    from trl_lossplus.check.run import main

    for words, message in (
        (["--epsilom", "0.3"], "--epsilon"),
        (["--policy_loss", "gspoo"], "gspo"),
        (["--plain", "nowhere:loss"], "cannot be imported"),
        (["--config", "/nowhere.yaml"], "No such file"),
        (["--use_vllm", "true"], "use_vllm"),
        (["--plain", "mistakes:too_short"], "1 losses for a completion of"),
    ):
        with pytest.raises(LossPlusError, match=message):
            main(words)


def test_a_recipe(checked, tmp_path):
    """The loss is the recipe's; batch sizes and schedule are the check's."""
    path = tmp_path / "recipe.yaml"
    path.write_text("policy_loss: gspo\nepsilon: 0.05\nper_device_train_batch_size: 512\nmax_completion_length: 4096\n")
    code, last, text = checked("--config", path)
    assert code == 0, text
    assert "not part of the loss: per_device_train_batch_size, max_completion_length" in text
    assert "policy_loss gspo" in text
    assert "clipped below 0.95" in text
