"""Where old values come from, what a critic's pass leaves out, and that neither changes a number."""

import pytest
import torch
from peft import LoraConfig
from toyrun import fixed_rollout, letter_reward, logged, trainer, weights
from transformers import GPT2Config, GPT2LMHeadModel

from trl_lossplus import PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.toy import toy_model, toy_tokenizer
from trl_lossplus.trainers.adapters import active_adapter
from trl_lossplus.trainers.budget import Padded
from trl_lossplus.trainers.critic import HEAD, trunk_of
from trl_lossplus.trainers.rollout_pass import chunks, placed
from trl_lossplus.trainers.value_pass import checkpointed_layers, keeping, values_at_tokens, whole

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
CHECKPOINTING = {"gradient_checkpointing": True}
KL_REWARD = {"kl_placement": "reward", "kl_reward_coef": 0.1}
# Configurations, and the forward passes of the trunk that 2 optimizer steps take: with an adapter critic and with a shared one.
WAYS = {
    "one micro-batch, one update": ({}, 4, 2),
    "the same, KL in the reward": (KL_REWARD, 6, 4),  # and the reference's
    "one rollout a micro-batch, two a step": ({"steps_per_generation": 1, "gradient_accumulation_steps": 2}, 8, 4),
    "two micro-batches a step": ({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, 12, 8),
    "two updates a rollout, KL in the loss": ({"num_iterations": 2, "beta": 0.1}, 7, 4),  # the log-probs', the reference's
}


def ppo(model, out, critic="adapter", lora=True, **fields):
    fields = {"rollout": fixed_rollout, "reward": letter_reward, "num_generations": 1, **fields}
    return trainer(
        model, out, trainer_class=PPOPlusTrainer, config_class=PPOPlusConfig,
        extra={"peft_config": LoraConfig(**LORA)} if lora else {}, critic=critic, **fields,
    )  # fmt: skip


def shake(model):
    """Adapters that do something, and differently."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def values_by_hand(run, inputs):
    """(B, T) values of the critic as it is: base model, the critic's adapter, the head; nothing of the trainer's passes."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad(), active_adapter(run.model, "critic" if run.critic.kind == "adapter" else "default"):
        hidden = trunk_of(run.model)(input_ids=ids, attention_mask=mask).last_hidden_state
    return (hidden @ getattr(run.model, HEAD).weight[0])[:, inputs["prompt_ids"].shape[1] - 1 : -1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_old_values_are_the_critic_s_at_the_rollout(toy, tmp_path, critic, way):
    """Equal to a pass by hand to 1e-6, whichever pass they came from, and constants; and no pass is taken that need not be."""
    settings, *passes = WAYS[way]
    run = ppo(toy, tmp_path, critic, max_steps=2, **settings)
    shake(run.model)
    count = []
    trunk_of(run.model).register_forward_hook(lambda *_: count.append(1))
    by_hand, inner = {}, run.make_rollout

    def make(out, rewards):
        result = inner(out, rewards)
        taken = len(count)
        values = values_by_hand(run, out)
        del count[taken:]
        by_hand.update(zip(result["row"].tolist(), values, strict=True))
        return result

    seen = []

    def look(model, inputs, inner=run.micro_loss):
        before = {row: by_hand[row] for row in inputs["row"].tolist()}
        loss = inner(model, inputs)
        seen.append((inputs, before))
        return loss

    run.make_rollout, run.micro_loss = make, look
    run.train()
    assert len(count) == passes[critic == "shared"]
    for inputs, before in seen:
        assert not inputs["old_values"].requires_grad
        assert not {"values", "logps", "entropies"} & inputs.keys()  # no graph outlives its step
        for row, old, mask in zip(inputs["row"].tolist(), inputs["old_values"], inputs["loss_mask"], strict=True):
            assert (old - before[row][: len(old)])[mask].abs().max() < 1e-6


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_one_pass_gives_what_two_give(toy, tmp_path, monkeypatch, critic):
    """Three optimizer steps with the rollout's values from the loss's own pass, and from a pass before it: weights to 1e-6."""

    def train(folder):
        run = ppo(toy, tmp_path / folder, critic, max_steps=3, optim="sgd", learning_rate=0.3, **KL_REWARD, **CHECKPOINTING)
        shake(run.model)
        start = weights(run)
        run.train()
        return run, start

    one, start = train("one")
    monkeypatch.setattr(PPOPlusConfig, "one_pass", False)
    two, _ = train("two")
    a, b = weights(one), weights(two)
    assert max((a[name] - start[name]).abs().max() for name in a) > 1e-2
    assert max((a[name] - b[name]).abs().max() for name in a) < 1e-6
    for name in ("loss", "value/explained_variance", "kl_rollout"):
        assert logged(one, name)[:3] == pytest.approx(logged(two, name)[:3], abs=1e-5), name


def test_kept_activations_change_no_bit(toy, tmp_path):
    """critic_gradient_checkpointing unset (the last layer keeps its own), on, off; reentrant too: the weights are bit-identical."""
    ways = [{}, {"critic_gradient_checkpointing": True}, {"critic_gradient_checkpointing": False}]
    ways += [{**way, "gradient_checkpointing_kwargs": {"use_reentrant": True}} for way in ways]
    found = []
    for i, way in enumerate(ways):
        run = ppo(toy, tmp_path / str(i), max_steps=2, **CHECKPOINTING, **way)
        shake(run.model)
        run.train()
        found.append(weights(run))
    plain = ppo(toy, tmp_path / "plain", max_steps=2)
    shake(plain.model)
    plain.train()
    for name, expected in weights(plain).items():
        assert all(torch.equal(other[name], expected) for other in found), name


@pytest.mark.parametrize(("asked", "recomputed"), [(None, [4, 3]), (True, [4, 4]), (False, [4, 0])], ids=["unset", "on", "off"])
def test_which_layers_are_recomputed(tmp_path, asked, recomputed):
    """Of 4 layers, forward passes in the backward pass: all of the policy's; of the critic's by the setting."""
    path = tmp_path / "model"
    toy_model(32, 4).save_pretrained(path)
    toy_tokenizer().save_pretrained(path)
    run = ppo(str(path), tmp_path, max_steps=1, critic_gradient_checkpointing=asked, **CHECKPOINTING)
    calls, inner = [], run.micro_loss

    def look(model, inputs):
        loss = inner(model, inputs)
        calls.clear()
        return loss

    for layer in checkpointed_layers(run.model):
        layer.input_layernorm.register_forward_hook(lambda *_, at=layer.mlp.down_proj: calls.extend(at.active_adapters))
    run.micro_loss = look
    run.train()
    assert [calls.count("default"), calls.count("critic")] == recomputed


def test_keeping_is_undone():
    model = toy_model(32, 2)
    model.gradient_checkpointing_enable()
    layers = checkpointed_layers(model)

    def fail():
        assert [layer.gradient_checkpointing for layer in layers] == [True, False]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), keeping(layers[-1:]):
        fail()
    assert [layer.gradient_checkpointing for layer in layers] == [True, True]


def padded_rollout():
    """5 rows of prompts of 1 to 6 and completions of 0 to 7 tokens, in columns for 8 and 9."""
    generator = torch.Generator().manual_seed(0)
    prompts, completions = torch.tensor([6, 1, 3, 2, 4]), torch.tensor([2, 7, 0, 5, 1])
    return {
        "prompt_ids": torch.randint(4, 30, (5, 8), generator=generator),
        "prompt_mask": (torch.arange(8) >= 8 - prompts.unsqueeze(1)).long(),
        "completion_ids": torch.randint(4, 30, (5, 9), generator=generator),
        "completion_mask": (torch.arange(9) < completions.unsqueeze(1)).long(),
    }, completions


def small_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=1, n_head=2)).eval()


@pytest.mark.parametrize(("model", "left"), [(toy_model(32, 2), True), (small_gpt2(), False)], ids=["rotary", "absolute"])
def test_a_pass_by_length_gives_the_padded_pass(model, left):
    """Values at every token and after the last equal those of one padded pass, in fewer positions; rows keep their order."""
    rollout, completions = padded_rollout()
    shapes = []

    def take(ids, mask):
        shapes.append(tuple(ids.shape))
        with torch.no_grad():
            return model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state.sum(-1)

    expected = values_at_tokens(take(*whole(rollout)), 8)
    parts = chunks(rollout, rows=2, load=Padded(), left=left)
    found = [values_at_tokens(take(*whole(chunk)), chunk["prompt_ids"].shape[1]) for _, chunk in parts]
    got = placed(parts, found, (5, 10))
    # by length: rows 2 (3 + 0) and 4 (4 + 1), 3 (2 + 5) and 0 (6 + 2), 1 (1 + 7); a completion column at least
    assert shapes[1:] == ([(2, 4 + 1), (2, 6 + 5), (1, 1 + 7)] if left else [(2, 8 + 1), (2, 8 + 5), (1, 8 + 7)])
    assert got.shape == expected.shape == (5, 10)
    for i, length in enumerate(completions.tolist()):
        assert torch.allclose(got[i, : length + 1], expected[i, : length + 1], atol=1e-5)


def test_a_shared_critic_looks_away_from_the_reference(toy, tmp_path):
    """A watched pass gives values under the policy's adapter, and none with the adapters off, as the reference runs."""
    run = ppo(toy, tmp_path, "shared")
    inputs = {"input_ids": torch.tensor([[4, 5, 6]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    assert [values.shape for values in run.critic.watch(lambda: run.model(**inputs))[1]] == [(1, 3)]
    with run.model.disable_adapter():
        assert run.critic.watch(lambda: run.model(**inputs))[1] == []


def test_one_pass_is_for_one_update_of_one_micro_batch(tmp_path):
    common = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 8}
    for fields, expected in (
        ({}, True),
        ({"num_iterations": 2}, False),
        ({"gradient_accumulation_steps": 2}, False),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, True),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2}, False),  # on-policy, and used twice
        ({"steps_per_generation": 4}, False),
    ):
        assert PPOPlusConfig(str(tmp_path), **common, **fields).one_pass is expected, fields


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_an_objective_over_the_step_changes_no_value(toy, tmp_path, critic):
    """Its pass at each step's start is of other rows than the next rollout's old values, and not needed where the loss's was taken."""
    way = {"steps_per_generation": 2, "gradient_accumulation_steps": 2}
    for settings, passes in ((way, (16, 12)), ({}, (4, 2))):
        run = ppo(toy, tmp_path / str(len(settings)), critic, max_steps=2, policy_loss="clip_cov", **settings)
        shake(run.model)
        count, seen, inner = [], [], run.make_rollout
        trunk_of(run.model).register_forward_hook(lambda *_, to=count: to.append(1))

        def make(out, rewards, run=run, inner=inner, count=count, seen=seen):
            result = inner(out, rewards)
            taken = len(count)
            seen.append((result["old_values"] - values_by_hand(run, out))[result["loss_mask"]].abs().max())
            del count[taken:]
            return result

        run.make_rollout = make
        run.train()
        assert len(seen) == 2
        assert max(seen) < 1e-6
        assert len(count) == passes[critic == "shared"]
