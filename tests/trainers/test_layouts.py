"""Layouts in the trainer: the same weights, whatever the layout and the split."""

import pytest
import torch
from toyrun import apart, fixed_rollout, letter_reward, logged, trainer, weights

from trl_lossplus import LossPlusError

KL = {"beta": 0.1, "num_iterations": 2}
LOSSES = {
    "default": {},
    "kl, two passes": KL,
    "gspo": {"policy_loss": "gspo", **KL},
    "seq_mean": {"policy_loss": "ppo_clip", "loss_aggregation": "seq_mean_token_mean", "num_iterations": 2},
    "prompt_mean": {"policy_loss": "ppo_clip", "loss_aggregation": "prompt_mean", "num_iterations": 2},
    "checkpointing": {"gradient_checkpointing": True, **KL},
}


def run(toy, out, **fields):
    trained = trainer(toy, out, reward=letter_reward, rollout=fixed_rollout, **fields)
    trained.train()
    return trained


@pytest.fixture(scope="module")
def padded(toy, tmp_path_factory):
    done = {}

    def get(name):
        if name not in done:
            done[name] = run(toy, tmp_path_factory.mktemp("padded"), **LOSSES[name])
        return done[name]

    return get


@pytest.mark.parametrize("layout", ["packed", "shared_prefix", "auto"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_layout_trains_to_the_same_weights(toy, tmp_path, padded, name, layout):
    reference = padded(name)
    trained = run(toy, tmp_path, microbatch_layout=layout, **LOSSES[name])
    assert apart(weights(trained), weights(reference)) < 1e-5
    for metric in ("loss", "entropy", "grad_norm"):
        assert logged(trained, metric) == pytest.approx(logged(reference, metric), rel=1e-3, abs=1e-5)
