"""PPOPlusTrainer: the three critics, what is stored, warm-up, saving, resuming, refusals."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from toyrun import SeeLoss, StopAt, apart, fixed_rollout, letter_reward, logged, trainer, weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MixtralConfig, MixtralForCausalLM, Trainer

from trl_lossplus import LossPlusError, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.trainers.critic import Critic
from trl_lossplus.trainers.value_pass import values_at_tokens, whole

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
CRITICS = {"adapter": {"critic": "adapter"}, "shared": {"critic": "shared"}, "model": {"critic": "model"}}


def ppo(toy, out, critic="adapter", lora=None, **fields):
    lora = critic == "adapter" if lora is None else lora
    extra = {"peft_config": LoraConfig(**LORA)} if lora else {}
    fields = {"rollout": fixed_rollout, "reward": letter_reward, **fields}
    return trainer(
        toy, out, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig, extra=extra, critic=critic,
        num_generations=fields.pop("num_generations", 1), **fields,
    )  # fmt: skip


def parts(run):
    """Weights of the policy and of the critic."""
    everything = weights(run)
    mine = {name: tensor for name, tensor in everything.items() if run.critic.own(name)}
    return {name: tensor for name, tensor in everything.items() if name not in mine}, mine


def test_f3_values_are_of_the_state_before_each_token():
    """F3: a stub critic whose value is the position, prompt 3, response 2: values [2, 3], and 4 after the last token."""
    positions = torch.arange(5.0).unsqueeze(0)
    assert values_at_tokens(positions, 3).tolist() == [[2.0, 3.0, 4.0]]


class PositionCritic(Critic):
    """V(position) = position, counted from the first token that is not padding."""

    def values(self, model, rows):
        positions = (whole(rows)[1].cumsum(1) - 1).clamp(min=0).float()
        return values_at_tokens(positions, rows["prompt_ids"].shape[1])

    def own(self, name):
        return "value_head" in name

    def save(self, folder, state_dict):
        pass


def test_f3_through_the_rollout(toy, tmp_path):
    """Old values stored with the rollout: position of the token before each; with bootstrapping the one after the last counts."""
    run = ppo(toy, tmp_path, critic="shared", truncated_completions="bootstrap", max_steps=1, gae_lambda=1.0)
    run.critic = PositionCritic(run.model)
    rollouts = []
    make = run.make_rollout
    run.make_rollout = lambda out, rewards: rollouts.append(make(out, rewards)) or rollouts[-1]
    run.train()
    (out,) = rollouts
    prompts = out["prompt_mask"].sum(1)
    lengths = out["completion_mask"].sum(1)
    for i in range(8):
        expected = torch.arange(prompts[i] - 1, prompts[i] - 1 + lengths[i]).float()
        assert torch.equal(out["old_values"][i, : lengths[i]], expected)
    assert not out["ended"].any()  # fixed completions hold no end token
    reward = torch.tensor(letter_reward(run.processing_class.batch_decode(out["completion_ids"], skip_special_tokens=True)))
    # gamma = lambda = 1: the return of the first token is the whole reward and the value after the last token
    assert torch.allclose(out["returns"][:, 0], reward + (prompts - 1 + lengths).float(), atol=1e-4)


@pytest.mark.parametrize("critic", CRITICS)
def test_f7_one_step_moves_policy_and_critic(toy, tmp_path, critic):
    """F7: policy, critic and head all change; the stored values are those of the untrained critic, and carry no gradient."""
    run = ppo(toy, tmp_path, critic, max_steps=1)
    policy, mine = parts(run)
    seen = SeeLoss(run)
    run.train()
    after_policy, after_mine = parts(run)
    assert not seen.inputs[0]["old_values"].requires_grad
    assert seen.inputs[0]["old_values"].abs().max() > 0
    assert apart(policy, after_policy) > 1e-4
    moved = [name for name, tensor in mine.items() if not torch.equal(tensor, after_mine[name])]
    assert any("value_head" in name or "score" in name for name in moved)
    if critic == "adapter":
        assert any("lora_B.critic" in name for name in moved)
    if critic == "model":
        assert any("layers" in name for name in moved)
    assert logged(run, "value/clip_ratio") == [0.0]
    assert "loss/value" in run.state.log_history[0]


def test_shared_critic_detached_leaves_the_trunk_to_the_policy(toy, tmp_path):
    """critic_detach: with advantages 0 (constant reward and values whitened away) only the head has a gradient."""

    def gradients(detach):
        run = ppo(toy, tmp_path, "shared", lora=False, critic_detach=detach, critic_warmup_steps=1, max_steps=1)
        found = {}
        inner = run.micro_loss

        def look(model, inputs):
            loss = inner(model, inputs)
            names = [n for n, p in model.named_parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, [p for _, p in model.named_parameters() if p.requires_grad], retain_graph=True)
            found.update({n: g.abs().max().item() for n, g in zip(names, grads, strict=True)})
            return loss

        run.micro_loss = look
        run.train()
        return found

    attached, detached = gradients(False), gradients(True)
    assert attached["lora_value_head.weight"] > 0
    assert detached["lora_value_head.weight"] > 0
    assert max(value for name, value in attached.items() if "layers" in name) > 0
    assert max(value for name, value in detached.items() if "value_head" not in name) == 0


@pytest.mark.parametrize("critic", CRITICS)
def test_f11_critic_warmup(toy, tmp_path, critic):
    """F11: for 2 steps the policy's weights are bit-identical (weight decay included) while the critic moves; then both do."""
    run = ppo(toy, tmp_path, critic, critic_warmup_steps=2, max_steps=2, weight_decay=0.1)
    policy, mine = parts(run)
    run.train()
    after_policy, after_mine = parts(run)
    assert all(torch.equal(policy[name], after_policy[name]) for name in policy)
    assert apart(mine, after_mine) > 1e-4
    longer = ppo(toy, tmp_path, critic, critic_warmup_steps=2, max_steps=3)
    policy, _ = parts(longer)
    longer.train()
    assert apart(policy, parts(longer)[0]) > 1e-4


def test_learning_rates_and_schedules_are_the_critic_s_own(toy, tmp_path):
    """Two roles of parameter groups: the policy falls linearly after its warm-up, the critic stays constant."""
    run = ppo(
        toy, tmp_path, max_steps=4, learning_rate=1e-3, lr_scheduler_type="linear", critic_learning_rate=5e-3,
        critic_lr_scheduler_type="constant", critic_warmup_steps=1,
    )  # fmt: skip
    rates = []
    inner = run.micro_loss

    def look(model, inputs):
        rates.append({group["role"]: group["lr"] for group in run.optimizer.param_groups})
        return inner(model, inputs)

    run.micro_loss = look
    run.train()
    assert [rate["critic"] for rate in rates] == [5e-3] * 4
    assert [rate["policy"] for rate in rates] == pytest.approx([0.0, 0.75e-3, 0.5e-3, 0.25e-3])


def test_i3_the_reference_does_not_see_the_critic(toy, tmp_path):
    """I3: the reference's log-probs of a fixed batch are bit-identical before and after 3 steps with a critic."""
    run = ppo(toy, tmp_path, beta=0.05, max_steps=4)
    seen = SeeLoss(run)
    run.train()
    first = seen.inputs[0]

    def reference(model):
        run.model.eval()
        with torch.no_grad(), model.disable_adapter():
            return run.policy_forward(model, first)[0]

    trained = reference(run.model)
    fresh = ppo(toy, tmp_path, beta=0.05)
    assert torch.equal(trained, reference(fresh.model))
    assert logged(run, "kl")[0] == 0.0
    assert logged(run, "kl")[-1] != 0.0


@pytest.mark.parametrize("critic", CRITICS)
def test_interrupted_and_resumed_is_bit_identical(toy, tmp_path, critic):
    """Stopped at step 3 and resumed: policy, critic and coefficient at step 6 are those of the uninterrupted run, bit for bit."""
    fields = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "rollout": None, "kl_placement": "reward",
        "kl_reward_coef": 0.1, "kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 30.0, "lr_scheduler_type": "linear",
    }  # fmt: skip
    whole = ppo(toy, tmp_path / "whole", critic, **fields)
    whole.train()
    first = ppo(toy, tmp_path / "parts", critic, callbacks=[StopAt(3)], **fields)
    first.train()
    second = ppo(toy, tmp_path / "parts", critic, **fields)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert second.state.global_step == 6
    expected, got = weights(whole), weights(second)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert second.kl_controller.coef == whole.kl_controller.coef != 0.1


def test_f8_the_saved_policy_is_plain_and_the_critic_a_start(toy, tmp_path):
    """F8: the head is in the optimizer and moves; saved and loaded it is bit-equal; the policy adapter loads with PEFT alone."""
    run = ppo(toy, tmp_path, max_steps=2)
    head = run.model.lora_value_head.weight.detach().clone()
    run.train()
    assert any(p is run.model.lora_value_head.weight for group in run.optimizer.param_groups for p in group["params"])
    assert not torch.equal(head, run.model.lora_value_head.weight)
    run.save_model(str(tmp_path / "final"))
    assert json.loads((tmp_path / "final" / "critic" / "critic.json").read_text()) == {"critic": "adapter"}
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy), str(tmp_path / "final"))
    saved = {n: p for n, p in plain.named_parameters() if "lora_" in n}
    policy, mine = parts(run)
    assert saved.keys() == policy.keys()
    assert all(torch.equal(saved[name], policy[name]) for name in saved)
    again = ppo(toy, tmp_path, critic_model_name_or_path=str(tmp_path / "final" / "critic"))
    _, start = parts(again)
    assert start.keys() == mine.keys()
    assert all(torch.equal(start[name], mine[name]) for name in mine)


@pytest.mark.parametrize("critic", ["shared", "model"])
def test_full_fine_tuning_saves_a_plain_model(toy, tmp_path, critic):
    """The final folder loads with AutoModelForCausalLM and holds no key of the critic; the critic loads again as a start."""
    run = ppo(toy, tmp_path, critic, max_steps=1)
    run.train()
    run.save_model(str(tmp_path / "final"))
    keys = load_file(tmp_path / "final" / "model.safetensors").keys()
    assert not [key for key in keys if "critic" in key or "value_head" in key]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    policy, mine = parts(run)
    assert all(torch.equal(p, policy[name]) for name, p in plain.named_parameters())
    again = ppo(toy, tmp_path, critic, critic_model_name_or_path=str(tmp_path / "final" / "critic"))
    _, start = parts(again)
    assert start.keys() == mine.keys()
    assert all(torch.equal(start[name], mine[name]) for name in mine)


def test_a_reward_model_is_a_start(toy, tmp_path):
    """critic=model from a sequence-classification model keeps its trained head; from a causal one the head is new and small."""
    reward_model = AutoModelForSequenceClassification.from_pretrained(toy, num_labels=1)
    torch.nn.init.constant_(reward_model.score.weight, 0.25)
    reward_model.save_pretrained(tmp_path / "reward")
    started = ppo(toy, tmp_path, "model", critic_model_name_or_path=str(tmp_path / "reward"))
    assert (started.critic.model.score.weight == 0.25).all()
    new = ppo(toy, tmp_path, "model")
    assert new.critic.model.score.weight.std().item() == pytest.approx(0.1 / 32**0.5, rel=0.5)


def test_the_base_model_exists_once(toy, tmp_path):
    """One base model serves policy, critic and reference: parameters = base + two adapters + head."""
    run = ppo(toy, tmp_path, beta=0.05)
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(toy).parameters())
    adapter = sum(p.numel() for name, p in run.model.named_parameters() if ".default." in name)
    assert sum(p.numel() for p in run.model.parameters()) == base + 2 * adapter + 32
    assert run.ref_model is None


def test_missing_eos_and_truncation(toy, tmp_path):
    """missing_eos_penalty is taken off completions without an end token; the group's statistics keep the raw reward."""

    def ending(prompts, trainer):
        out = fixed_rollout(prompts, trainer)
        out["completion_ids"][0] = [10, trainer._tokenizer.eos_token_id]
        return out

    run = ppo(toy, tmp_path, rollout=ending, missing_eos_penalty=2.0, max_steps=1, advantage_normalization="none", gae_lambda=1.0)
    seen = SeeLoss(run)
    run.train()
    micro = seen.inputs[0]
    ended = micro["ended"]
    assert ended.sum() == 1
    text = run.processing_class.batch_decode(micro["completion_ids"], skip_special_tokens=True)
    reward = torch.tensor(letter_reward(text)) - torch.where(ended, 0.0, 2.0)
    assert torch.allclose(micro["returns"][:, 0], reward, atol=1e-5)
    assert torch.allclose(micro["advantages"][:, 0], reward - micro["old_values"][:, 0], atol=1e-5)


def test_advantages_are_whitened_over_the_rollout_once(toy, tmp_path):
    run = ppo(toy, tmp_path, max_steps=1)
    assert run.spec.advantage_normalization == "rollout"
    seen = SeeLoss(run)
    run.train()
    tokens = seen.inputs[0]["advantages"][seen.inputs[0]["loss_mask"]]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.var().item() == pytest.approx(1, rel=1e-5)


def test_several_epochs_use_the_rollout_s_values(toy, tmp_path):
    """num_iterations 2 over 2 minibatches: 4 optimizer steps a rollout, all with the log-probs and values of the rollout."""
    run = ppo(toy, tmp_path, num_iterations=2, steps_per_generation=2, max_steps=4)
    assert run.args.optimizer_steps_per_rollout == 4
    seen = SeeLoss(run)
    run.train()
    for i in (0, 1):
        first, second = seen.inputs[i], seen.inputs[i + 2]
        for name in ("old_values", "returns", "advantages", "old_per_token_logps"):
            assert torch.equal(first[name], second[name]), name
    assert logged(run, "value/explained_variance") != []


def test_unscored_completions_do_not_train(toy, tmp_path):
    """A completion that no reward function scored: advantage 0, and its return is its value, so the critic is not pulled."""
    run = ppo(
        toy, tmp_path, reward=lambda completions, **kw: [None] + [1.0] * (len(completions) - 1), max_steps=1,
        advantage_normalization="none",
    )  # fmt: skip
    seen = SeeLoss(run)
    run.train()
    micro = seen.inputs[0]
    row = (~micro["scored"]).nonzero().item()
    assert (micro["advantages"][row] == 0).all()
    assert torch.equal(micro["returns"][row], micro["old_values"][row])


def test_a_mixture_of_experts_trains(tmp_path, toy):
    """An MoE base: adapter on attention, shared and model critics all take a step."""
    from trl_lossplus.toy import toy_tokenizer

    tokenizer = toy_tokenizer()
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path / "moe"
    MixtralForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    for critic in CRITICS:
        lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
        run = trainer(
            str(path), tmp_path, reward=letter_reward, rollout=fixed_rollout, trainer_class=PPOPlusTrainer,
            config_class=PPOPlusConfig, extra=lora if critic == "adapter" else {}, critic=critic, num_generations=1, max_steps=1,
        )  # fmt: skip
        before = weights(run)
        run.train()
        assert apart(before, weights(run)) > 1e-5
        assert "loss/value" in run.state.log_history[0]


def test_refusals(toy, tmp_path):
    with pytest.raises(LossPlusError, match="critic='adapter' needs a policy with a LoRA adapter"):
        ppo(toy, tmp_path, "adapter", lora=False)
    with pytest.raises(LossPlusError, match="critic_model_name_or_path='nowhere' cannot be loaded as a critic"):
        ppo(toy, tmp_path, "model", critic_model_name_or_path="nowhere")
    with pytest.raises(LossPlusError, match="there is no value_head.safetensors in it"):
        ppo(toy, tmp_path, "shared", critic_model_name_or_path=str(tmp_path))
    run = ppo(toy, tmp_path, "shared")
    run._is_vlm = True
    with pytest.raises(LossPlusError, match="vision-language"):
        run._refuse_vision()


def test_a_critic_of_another_kind_is_refused(toy, tmp_path):
    """As a start, and in a checkpoint: by one line that names both kinds, before anything is loaded."""
    saved = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    ppo(toy, tmp_path, "adapter", **saved).train()
    ppo(toy, tmp_path / "shared", "shared", lora=True, **saved).train()
    for other, kind, folder in (("shared", "adapter", tmp_path), ("adapter", "shared", tmp_path / "shared")):
        checkpoint = str(folder / "checkpoint-1")
        with pytest.raises(
            LossPlusError, match=f"holds a critic of kind '{kind}', and critic is '{other}'. Set critic='{kind}', or"
        ):
            ppo(toy, tmp_path / "new", other, lora=True, critic_model_name_or_path=f"{checkpoint}/critic")
        with pytest.raises(LossPlusError, match=f"checkpoint-1' holds a critic of kind '{kind}', and critic is '{other}'.$"):
            ppo(toy, tmp_path / "new", other, lora=True, max_steps=2).train(resume_from_checkpoint=checkpoint)


def test_vllm_gets_no_parameter_of_the_critic(toy, tmp_path):
    """What is sent to vLLM: every parameter of the policy, none of the critic."""
    run = ppo(toy, tmp_path, "model")

    class Generation:
        def _iter_named_params(self):
            return iter(run.model.named_parameters())

    run.vllm_generation = Generation()
    run.hide_from_vllm(run.critic.own)
    sent = {name for name, _ in run.vllm_generation._iter_named_params()}
    assert sent == {name for name, _ in AutoModelForCausalLM.from_pretrained(toy).named_parameters()}


def test_a_scheduler_that_is_no_function_of_the_step_is_refused(toy, tmp_path, monkeypatch):
    run = ppo(toy, tmp_path, "shared", critic_warmup_steps=1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.create_optimizer())
    monkeypatch.setattr(Trainer, "create_scheduler", lambda self, steps, optimizer=None: plateau)
    with pytest.raises(LossPlusError, match="cannot be combined with critic_warmup_steps"):
        run.create_scheduler(3)
