"""
Gradients of policy adapter, critic adapter and head against a float64 reference: two separate models, the loss written out.

The reference shares nothing with the package: each model is its own PEFT copy, log-probs come from log_softmax of the logits, and the
loss is a double loop's worth of plain tensor arithmetic over the whole optimizer step.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toyrun import SeeLoss, fixed_rollout, letter_reward, trainer
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_lossplus import PPOPlusConfig, PPOPlusTrainer

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "task_type": "CAUSAL_LM"}


class KeepGradients(TrainerCallback):
    """The gradients of the first optimizer step."""

    grads = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.grads is None:
            self.grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def shake(model, seed=1):
    """Adapters that do something: B not zero, A and the head larger."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            scale = {"lora_A": 0.2, "lora_B": 0.1, "lora_value_head": 0.1}
            for part, size in scale.items():
                if part in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


def reference(toy, state, micro_batches, settings):
    """Gradients by name of the trainer's parameters, in float64."""
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float64), LoraConfig(**LORA)).double()
    critic = copy.deepcopy(policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.copy_(state[name])
        for name, parameter in critic.named_parameters():
            if "lora_" in name:
                parameter.copy_(state[name.replace(".default.", ".critic.")])
    head = state["lora_value_head.weight"].double().clone().requires_grad_()
    total = sum(int(m["loss_mask"].sum()) for m in micro_batches)
    loss = 0.0
    for m in micro_batches:
        ids = torch.cat([m["prompt_ids"], m["completion_ids"]], 1)
        attention = torch.cat([m["prompt_mask"], m["completion_mask"]], 1)
        first = m["prompt_ids"].shape[1] - 1
        logits = policy(input_ids=ids, attention_mask=attention).logits[:, first:-1]
        logps = torch.log_softmax(logits, -1).gather(-1, m["completion_ids"].unsqueeze(-1)).squeeze(-1)
        hidden = critic.get_base_model().model(input_ids=ids, attention_mask=attention).last_hidden_state
        values = (hidden @ head[0])[:, first:-1]
        for i, t in m["loss_mask"].nonzero().tolist():
            advantage, returns, old_value = (m[k][i, t].double() for k in ("advantages", "returns", "old_values"))
            old = m["old_per_token_logps"][i, t].double() if "old_per_token_logps" in m else logps[i, t].detach()
            ratio = (logps[i, t] - old).exp()
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / total
            kept = old_value + (values[i, t] - old_value).clamp(-0.2, 0.2)
            square = torch.maximum((values[i, t] - returns) ** 2, (kept - returns) ** 2)
            loss = loss + settings["vf_coef"] * 0.5 * square / total
    loss.backward()
    grads = {n: p.grad for n, p in policy.named_parameters() if "lora_" in n}
    grads |= {n.replace(".default.", ".critic."): p.grad for n, p in critic.named_parameters() if "lora_" in n}
    grads["lora_value_head.weight"] = head.grad
    return grads


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("uses", [1, 2], ids=["on-policy", "two passes"])
def test_gradients_equal_two_separate_models(toy, tmp_path, checkpointing, accumulation, uses):
    """
    To 1e-5 of each tensor's largest entry. Two passes over the rollout: ratios are computed from stored log-probs. On-policy without
    accumulation: the loss's forward passes are taken at the rollout.
    """
    settings = {
        "per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation, "max_steps": 1,
        "max_grad_norm": 0.0, "vf_coef": 0.7, "num_iterations": uses, "num_generations": 1, "beta": 0.0,
    }  # fmt: skip
    if checkpointing is not None:
        settings |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    keep = KeepGradients()
    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig,
        extra={"peft_config": LoraConfig(**LORA)}, callbacks=[keep], **settings,
    )  # fmt: skip
    shake(run.model)
    state = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    seen = SeeLoss(run)
    run.train()
    assert len(seen.inputs) == accumulation
    expected = reference(toy, state, seen.inputs, settings)
    assert keep.grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.abs().max() > 1e-7, name
        assert (keep.grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
