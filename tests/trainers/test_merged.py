"""Generation by a copy of the weights with the LoRA adapters in it."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from toyrun import letter_reward, trainer
from transformers import AutoModelForCausalLM, LlamaConfig

from trl_lossplus import LossPlusError, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.trainers.adapters import tuner_layers
from trl_lossplus.trainers.merged import merged, why_not_merged

TINY = LlamaConfig(
    vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    tie_word_embeddings=True,
)  # fmt: skip
IDS = torch.tensor([[1, 5, 9, 2]])


def adapted(**fields) -> PeftModel:
    torch.manual_seed(0)
    settings = {
        "r": 2,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
        "lora_dropout": 0.5,
        **fields,
    }
    return get_peft_model(AutoModelForCausalLM.from_config(TINY), LoraConfig(**settings))


def all_weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_the_same_logits_and_the_weights_as_they_were(fields):
    """Within: the adapters' model without its dropout, in training mode too, and no product with an adapter. After: the same bits."""
    model = adapted(**fields)
    before, calls = all_weights(model), []
    for name, module in model.named_modules():
        if "lora_A.default" in name:
            module.register_forward_hook(lambda *args: calls.append(1))
    with torch.no_grad():
        expected = model.eval()(IDS).logits
        base = model.get_base_model()
        with model.disable_adapter():
            assert (model(IDS).logits - expected).abs().max() > 0.01
        calls.clear()
        with merged(model):
            found = base.train()(IDS).logits
            assert not calls
        after = base.eval()(IDS).logits
    assert len(calls) == 2 * 7 * (2 if "use_dora" in fields else 1)  # two layers of seven products; DoRA takes a norm too
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)
    assert torch.equal(after, expected)
    assert all(torch.equal(value, before[name]) for name, value in all_weights(model).items())


def test_the_active_adapter_alone():
    """A second adapter (a critic's) has no part in it."""
    model = adapted()
    model.add_adapter("value", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    with torch.no_grad():
        expected = model.eval()(IDS).logits
        with merged(model):
            torch.testing.assert_close(model(IDS).logits, expected, atol=2e-6, rtol=2e-5)


def test_the_weights_are_back_after_an_error():
    model = adapted()
    before = all_weights(model)
    broken = next(p for name, p in model.named_parameters() if "lora_B" in name and "layers.1" in name)
    with pytest.raises(KeyError), merged(model):
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in all_weights(model).items())
    broken.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"), merged(model):
        pass
    base = {name: value for name, value in all_weights(model).items() if "lora_" not in name}
    assert all(torch.equal(value, before[name]) for name, value in base.items())
    assert not any(layer.merged for layer in tuner_layers(model))


@pytest.mark.parametrize(
    "kind",
    [{}, {"trainer_class": PPOPlusTrainer, "config_class": PPOPlusConfig, "critic": "adapter"}, {"advantage_estimator": "remax"}],
    ids=["grpo", "ppo", "remax"],
)
def test_through_the_trainer(toy, tmp_path, kind):
    """Merged in each rollout and never in the loss; the frozen weights end as they began; the same tokens as without it."""
    runs = {}
    for merge in (True, False):
        torch.manual_seed(0)
        extra = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)}
        run = trainer(toy, tmp_path / str(merge), reward=letter_reward, extra=extra, max_steps=2, merged_generation=merge, **kind)
        layer, states = tuner_layers(run.model)[0], []
        generate, loss = run._generate_single_turn, run._compute_loss
        run._generate_single_turn = lambda *a, _g=generate, _l=layer, _s=states: (_s.append(("rollout", _l.merged)), _g(*a))[1]
        run._compute_loss = lambda *a, _g=loss, _l=layer, _s=states, **k: (_s.append(("loss", _l.merged)), _g(*a, **k))[1]
        frozen = {name: p.detach().clone() for name, p in run.model.named_parameters() if not p.requires_grad}
        run.train()
        assert {state for kind, state in states if kind == "rollout"} == {merge}
        assert {state for kind, state in states if kind == "loss"} == {False}
        now = dict(run.model.named_parameters())
        assert frozen
        assert all(torch.equal(now[name], value) for name, value in frozen.items())
        runs[merge] = [entry["reward"] for entry in run.state.log_history if "reward" in entry]
    assert runs[True] == runs[False]


def test_refused(toy, tmp_path):
    with pytest.raises(LossPlusError, match="merged_generation=True: the model has no LoRA adapter. Set it to False"):
        trainer(toy, tmp_path, merged_generation=True)


def test_why_not():
    """Weights in parts, quantized, or tied to a layer that the adapter does not act on; a rollout function; adapters that are off."""
    assert why_not_merged(adapted(), sharded=False) is None
    assert "a part of each weight" in why_not_merged(adapted(), sharded=True)
    assert "rollout_func" in why_not_merged(adapted(), sharded=False, rollout_func=True)
    tied = adapted(target_modules=["embed_tokens", "q_proj"])
    assert "embed_tokens" in why_not_merged(tied, sharded=False)
    assert "(tied)" in why_not_merged(tied, sharded=False)
    quantized = adapted()
    quantized.get_base_model().is_quantized = True
    assert "quantized" in why_not_merged(quantized, sharded=False)
    off = adapted()
    off.disable_adapter_layers()
    assert "no LoRA adapter" in why_not_merged(off, sharded=False)
