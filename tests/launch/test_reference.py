"""The reference of a LoRA policy: base, frozen copy, or an adapter that follows (I6); nothing to train is refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toyrun import StopAt, apart, fixed_rollout, letter_reward, logged, trainer
from transformers import AutoModelForCausalLM

from trl_lossplus import LossPlusError, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.trainers.reference import pairs

LORA = LoraConfig(r=4, target_modules="all-linear")
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "beta": 0.1}


def trained_adapter(toy):
    """A PeftModel whose adapter is not zero."""
    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(toy), LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def run(model, out, **settings):
    fields = {"learning_rate": 0.3, "optim": "sgd", **settings}
    return trainer(model, out, reward=letter_reward, rollout=fixed_rollout, **fields)


def adapters(trained):
    """The reference's and the policy's parameters."""
    found = pairs(trained.model)
    return {name: ref.detach().clone() for name, ref, _ in found}, {name: own.detach().clone() for name, _, own in found}


class Remember:
    """Both adapters after each step, as a callback sees them before the reference moves."""

    def __init__(self, trained):
        self.policies = []
        inner = trained.reference_adapter.on_step_end

        def on_step_end(*args, **kwargs):
            self.policies.append(adapters(trained)[1])
            return inner(*args, **kwargs)

        trained.reference_adapter.on_step_end = on_step_end


@pytest.mark.parametrize("start", ["new", "trained"])
def test_i6_the_reference_follows_the_adapter(toy, tmp_path, start):
    """I6: every second step, reference = half of itself and half of the policy; it starts as the policy and is not trained."""
    extra = {"peft_config": LORA} if start == "new" else {}
    trained = run(toy if start == "new" else trained_adapter(toy), tmp_path, extra=extra, max_steps=5, **SYNC)
    assert trained.args.sync_ref_model
    first, policy = adapters(trained)
    assert apart(first, policy) == 0.0
    seen = Remember(trained)
    trained.train()
    expected = first
    for step in (2, 4):
        expected = {name: 0.5 * value + 0.5 * seen.policies[step - 1][name] for name, value in expected.items()}
    reference, policy = adapters(trained)
    assert apart(reference, expected) < 1e-7
    assert apart(reference, first) > 1e-3
    assert apart(reference, policy) > 1e-3
    kl = logged(trained, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 0
    in_optimizer = {id(p) for group in trained.optimizer.param_groups for p in group["params"]}
    assert not any(id(parameter) in in_optimizer or parameter.requires_grad for _, parameter, _ in pairs(trained.model))


def test_alpha_one_makes_the_reference_the_policy(toy, tmp_path):
    """With alpha 1 every step, the KL at each rollout is 0, as on-policy against itself."""
    settings = {**SYNC, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trained = run(toy, tmp_path, extra={"peft_config": LORA}, max_steps=3, **settings)
    trained.train()
    assert logged(trained, "kl") == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)


def test_the_reference_is_saved_and_restored(toy, tmp_path):
    """Stopped at step 3 and resumed, the run ends with the weights and the reference of an uninterrupted one."""
    settings = {**SYNC, "max_steps": 5, "save_strategy": "steps", "save_steps": 3, "extra": {"peft_config": LORA}}
    torch.manual_seed(0)
    whole = run(toy, tmp_path / "whole", **settings)
    whole.train()
    torch.manual_seed(0)
    cut = run(toy, tmp_path / "cut", callbacks=[StopAt(3)], **settings)
    cut.train()
    torch.manual_seed(0)
    again = run(toy, tmp_path / "cut", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    for one, other in zip(adapters(whole), adapters(again), strict=True):
        assert apart(one, other) == 0.0
    assert logged(again, "kl")[-1] == logged(whole, "kl")[-1]


def test_a_checkpoint_without_reference_warns(toy, tmp_path, caplog):
    """A missing file is one warning."""
    trained = run(toy, tmp_path, extra={"peft_config": LORA}, **SYNC)
    with caplog.at_level("WARNING"):
        trained.reference_adapter.load(str(tmp_path))
    assert "reference_adapter.safetensors" in caplog.text


def test_ppo_with_an_adapter_critic_and_a_reference_that_follows(toy, tmp_path):
    """Three adapters: policy and critic are trained, the reference follows."""
    trained = run(
        toy, tmp_path, extra={"peft_config": LORA}, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig,
        critic="adapter", max_steps=3, **SYNC,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    trained.train()
    after = dict(trained.model.named_parameters())
    moved = {name.split("lora_B.")[1].split(".")[0] for name in after if "lora_B" in name and not after[name].equal(before[name])}
    assert moved == {"default", "critic", "ref"}


def test_without_sync_the_reference_is_the_base_or_a_frozen_copy(toy, tmp_path):
    """A new adapter: none is added. A trained one: TRL's copy of it, which stays."""
    new = run(toy, tmp_path / "new", extra={"peft_config": LORA}, beta=0.1)
    assert "ref" not in new.model.peft_config
    copied = run(trained_adapter(toy), tmp_path / "copied", beta=0.1)
    first = adapters(copied)[0]
    copied.train()
    assert apart(adapters(copied)[0], first) == 0.0
    assert logged(copied, "kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert logged(copied, "kl")[2] > 0


def test_sync_without_kl_is_refused(toy, tmp_path):
    """Nothing would follow."""
    with pytest.raises(LossPlusError, match=r"sync_ref_model=True: there is no KL"):
        run(toy, tmp_path, extra={"peft_config": LORA}, sync_ref_model=True)


def test_a_model_without_trainable_parameters_is_refused(toy, tmp_path):
    """A PeftModel loaded for inference is refused before training, and the message says what to pass."""
    from peft import PeftModel

    trained_adapter(toy).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy), tmp_path / "adapter")
    with pytest.raises(LossPlusError, match=r"no parameter has requires_grad.*is_trainable=True"):
        run(model, tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy), tmp_path / "adapter", is_trainable=True)
    assert run(loaded, tmp_path).model is not None
