"""PPO in packed layouts: the critic's rows are the policy's, and the weights those of padded rows."""

import pytest
import torch
from peft import LoraConfig
from toyrun import apart, fixed_rollout, letter_reward, logged, trainer, weights
from transformers import GPT2Config, GPT2ForSequenceClassification

from trl_lossplus import LossPlusError, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.trainers.critic import MODEL
from trl_lossplus.trainers.packing import Packing

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
COMMON = {"vf_coef": 0.5, "optim": "sgd", "learning_rate": 0.3, "truncated_completions": "bootstrap", "num_generations": 4}
TWO_PASSES = {"num_iterations": 2, "beta": 0.05, "gradient_accumulation_steps": 2}
# What differs from one on-policy micro-batch a step, whose passes are those of the rollout too.
WAYS = {
    "one pass": {},
    "one pass, KL in the reward, checkpointing": {
        "kl_placement": "reward",
        "kl_reward_coef": 0.1,
        "gradient_checkpointing": True,
    },
    "two passes": TWO_PASSES,
    "a step across rollouts": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "gspo": {"policy_loss": "gspo", **TWO_PASSES},
    "groups of one": {"num_generations": 1},
}
CRITICS = ("shared", "adapter", "model")


def ppo(toy, out, critic, **fields):
    extra = {"peft_config": LoraConfig(**LORA)} if critic == "adapter" else {}
    run = trainer(toy, out, reward=letter_reward, rollout=fixed_rollout, trainer_class=PPOPlusTrainer,
                  config_class=PPOPlusConfig, extra=extra, critic=critic, **{**COMMON, **fields})  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(run.model.named_parameters()):
            if "lora_B" in name or "value_head" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return run


def trained(toy, out, critic, **fields):
    run = ppo(toy, out, critic, **fields)
    run.train()
    return run


CELLS = [
    ("one pass", "shared", "shared_prefix"), ("one pass", "model", "packed"),
    ("one pass, KL in the reward, checkpointing", "adapter", "shared_prefix"), ("two passes", "shared", "packed"),
    ("two passes", "adapter", "shared_prefix"), ("two passes", "model", "shared_prefix"), ("gspo", "adapter", "packed"),
    ("a step across rollouts", "shared", "shared_prefix"), ("groups of one", "adapter", "shared_prefix"),
    ("groups of one", "shared", "packed"),
]  # fmt: skip


@pytest.mark.parametrize("budget", [None, 30])
@pytest.mark.parametrize(("way", "critic", "layout"), CELLS)
def test_a_layout_trains_policy_and_critic_to_the_same_weights(toy, tmp_path, way, critic, layout, budget):
    padded = trained(toy, tmp_path / "a", critic, **WAYS[way])
    packed = trained(toy, tmp_path / "b", critic, microbatch_layout=layout, max_tokens_per_microbatch=budget, **WAYS[way])
    assert packed.packed.share_prefix == (layout == "shared_prefix")
    assert packed.packs_critic
    assert apart(weights(packed), weights(padded)) < 1e-5
    for name in ("loss", "loss/value", "value/explained_variance", "value/mean"):
        assert logged(packed, name) == pytest.approx(logged(padded, name), rel=1e-3, abs=1e-4), name


def test_every_pass_of_policy_and_critic_is_packed(toy, tmp_path):
    """No pass of the trunk has an attention mask or more than one row, and none has more than 30 tokens."""
    run = ppo(toy, tmp_path, "model", microbatch_layout="shared_prefix", max_tokens_per_microbatch=30, **TWO_PASSES)
    seen = []
    for model in (run.model.base_model, getattr(run.model, MODEL).base_model):
        model.register_forward_hook(lambda m, a, kwargs, o: seen.append(kwargs), with_kwargs=True)
    run.packed.proven = True  # the comparison with the padded layout is left out
    run.train()
    assert len(seen) > 20
    assert all("attention_mask" not in kwargs and kwargs["input_ids"].shape[0] == 1 for kwargs in seen)
    assert max(kwargs["input_ids"].numel() for kwargs in seen) <= 30


def test_a_critic_that_cannot_be_packed_is_padded(toy, tmp_path, caplog):
    """A GPT-2 critic beside a Llama policy: one line, packed policy, and the weights of a padded run."""
    path = tmp_path / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=44, n_embd=16, n_layer=1, n_head=2, num_labels=1, pad_token_id=0, bos_token_id=1,
                        eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    GPT2ForSequenceClassification(config).save_pretrained(path)
    fields = {"critic_model_name_or_path": str(path), **TWO_PASSES}
    packed = trained(toy, tmp_path / "a", "model", microbatch_layout="shared_prefix", max_tokens_per_microbatch=60, **fields)
    assert not packed.packs_critic
    assert "microbatch_layout: the critic's rows are padded, since gpt2 has no rotary positions" in caplog.text
    assert apart(weights(packed), weights(trained(toy, tmp_path / "b", "model", **fields))) < 1e-5


def test_values_that_are_wrong_stop_at_the_start(toy, tmp_path, monkeypatch):
    """Values of the place after: the comparison at the first rollout names them, before a step is taken."""
    right = Packing.at_tokens
    monkeypatch.setattr(Packing, "at_tokens", lambda packing, values: right(packing, values.roll(-1, 1)))
    run = ppo(toy, tmp_path, "shared", microbatch_layout="packed")
    with pytest.raises(
        LossPlusError, match=r"microbatch_layout='packed' is not exact for this model: its values are .* Take padded"
    ):
        run.train()


def test_still_rows_are_not_skipped_with_a_critic(toy, tmp_path):
    with pytest.raises(LossPlusError, match="skip_still_rows=True would change the gradient: the value term acts"):
        ppo(toy, tmp_path, "shared", microbatch_layout="shared_prefix", skip_still_rows=True)
