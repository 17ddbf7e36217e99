"""Layouts in the trainer: the same weights, whatever the layout and the split."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from toyrun import apart, fixed_rollout, letter_reward, logged, rollout_with_tools, trainer, weights
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from trl.trainer.utils import add_fused_lm_head

from trl_lossplus import LossPlusError
from trl_lossplus.trainers import layouts
from trl_lossplus.trainers.packing import pack
from trl_lossplus.trainers.segment_attention import Segment, UnsupportedAttention, by_lengths

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


@pytest.mark.parametrize(
    ("name", "layout"),
    [("default", "auto"), *((name, layout) for name in LOSSES for layout in ("packed", "shared_prefix"))],
)
def test_a_layout_trains_to_the_same_weights(toy, tmp_path, padded, name, layout):
    reference = padded(name)
    trained = run(toy, tmp_path, microbatch_layout=layout, **LOSSES[name])
    assert apart(weights(trained), weights(reference)) < 1e-5
    for metric in ("loss", "entropy", "grad_norm"):
        assert logged(trained, metric) == pytest.approx(logged(reference, metric), rel=1e-3, abs=1e-5)


ESTIMATORS = {
    "remax": {"advantage_estimator": "remax", "gamma": 0.9, "num_iterations": 2},
    "optimal_token_baseline": {"advantage_estimator": "optimal_token_baseline", "num_iterations": 2},
    "tir_optimal_token_baseline": {"advantage_estimator": "tir_optimal_token_baseline", "handle_zero_tail": True},
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_that_read_more_than_rewards(toy, tmp_path, name):
    """A greedy completion a prompt, or sums of squared probabilities, with a tool's tokens inside: the same weights in every layout."""
    settings = {"reward": letter_reward, "rollout": rollout_with_tools, "max_steps": 2, **ESTIMATORS[name]}
    runs = {}
    for layout in ("padded", "packed", "shared_prefix"):
        runs[layout] = trainer(toy, tmp_path / layout, microbatch_layout=layout, **settings)
        runs[layout].train()
    assert apart(weights(runs["padded"]), weights(trainer(toy, tmp_path / "start"))) > 1e-3
    for layout in ("packed", "shared_prefix"):
        assert apart(weights(runs[layout]), weights(runs["padded"])) < 1e-5
        for metric in ("loss", "grad_norm"):
            assert logged(runs[layout], metric) == pytest.approx(logged(runs["padded"], metric), rel=1e-3, abs=1e-5)


def half_flat(prompts, completions, **kwargs):
    """Every other group's rewards are equal."""
    return [0.5 if row // 4 % 2 else len(text) / 10 for row, text in enumerate(completions)]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_rows_without_advantage_are_not_computed(toy, tmp_path, layout):
    """Half of the groups are flat: the same weights from half of the rows."""
    every = trainer(toy, tmp_path / "all", reward=half_flat, rollout=fixed_rollout, gradient_accumulation_steps=2)
    every.train()
    some = trainer(toy, tmp_path / "some", reward=half_flat, rollout=fixed_rollout, gradient_accumulation_steps=2,
                   microbatch_layout=layout, skip_still_rows=True)  # fmt: skip
    some.train()
    assert apart(weights(some), weights(every)) < 1e-5
    assert logged(some, "frac_rows_computed") == [0.5] * 3
    assert logged(some, "loss") == pytest.approx(logged(every, "loss"), abs=1e-5)


def test_no_row_moves_the_weights(toy, tmp_path):
    """Every group is flat: nothing is computed but one prompt a micro-batch, and the weights stay."""
    still = trainer(toy, tmp_path, reward=lambda completions, **kw: [1.0] * len(completions), rollout=fixed_rollout,
                    microbatch_layout="shared_prefix", skip_still_rows=True, max_steps=1)  # fmt: skip
    before = weights(still)
    still.train()
    assert apart(weights(still), before) == 0.0
    assert logged(still, "frac_rows_computed") == [0.0]


@pytest.mark.parametrize("rows", [16, 4])
def test_layout_and_split_together(toy, tmp_path, rows):
    """16 rows a step as one micro-batch and as four, packed, against padded in two."""
    settings = {"policy_loss": "gspo", "beta": 0.1, "num_iterations": 2, "optim": "sgd", "learning_rate": 0.3}
    reference = run(toy, tmp_path / "a", gradient_accumulation_steps=2, **settings)
    split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 16 // rows}
    trained = run(toy, tmp_path / "b", microbatch_layout="shared_prefix", **split, **settings)
    assert apart(weights(trained), weights(reference)) < 1e-5


def test_windows_across_rollouts_keep_their_rows(toy, tmp_path):
    """Two steps' worth of accumulation over rollouts of three micro-batches: rows are packed, and not dealt anew."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "beta": 0.1}
    reference = run(toy, tmp_path / "a", **settings)
    trained = run(toy, tmp_path / "b", microbatch_layout="packed", **settings)
    assert apart(weights(trained), weights(reference)) < 1e-5


def test_a_layout_that_is_wrong_stops_at_the_start(toy, tmp_path, monkeypatch):
    """Segments that let rows see each other: the first rollout shows it, before a step is taken."""

    def one_segment(*args, **kwargs):
        packing = pack(*args, **kwargs)
        return dataclasses.replace(packing, segments=(Segment(0, packing.input_ids.shape[1], 0, 0),))

    monkeypatch.setattr(layouts, "pack", one_segment)
    with pytest.raises(
        LossPlusError, match=r"microbatch_layout='packed' is not exact for this model: its log-probs are .* Take padded"
    ):
        run(toy, tmp_path, microbatch_layout="packed")


def test_a_model_without_rotary_positions(tmp_path, caplog):
    """GPT-2 counts positions from the padding on: by name an error, with auto the padded layout and a line that says why."""
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    reason = layouts.why_not(GPT2LMHeadModel(config), is_vision=False, auxiliary_loss=False, any_length=False)
    assert "gpt2 has no rotary positions" in reason
    with pytest.raises(LossPlusError, match=r"microbatch_layout='packed' is not exact here: gpt2 has no rotary"):
        layouts.choose("packed", reason)
    assert layouts.choose("auto", reason) is None
    assert "auto takes padded, since gpt2 has no rotary positions" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of kind linear_attention"),
        ({"attention_dropout": 0.1}, "attention dropout of 0.1"),
        ({"attn_implementation": "eager"}, "attn_implementation is 'eager'"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, "a sliding window of 8 tokens"),
    ],
)
def test_models_that_cannot_be_packed(changes, words):
    config = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2, use_sliding_window="sliding_window" in changes, **changes)  # fmt: skip
    config.layer_types = changes.get("layer_types", config.layer_types)
    model = SimpleNamespace(config=config)
    config._attn_implementation = changes.get("attn_implementation", "sdpa")
    reason = layouts.why_not(model, is_vision=False, auxiliary_loss=False, any_length=True)
    assert reason is None if words is None else words in reason
    config._attn_implementation = "kernels-community/vllm-flash-attn3"
    assert (words or "") in (
        layouts.why_not(model, is_vision=False, auxiliary_loss=False, any_length=True) or ""
    ) or "eager" in words
    assert "images" in layouts.why_not(model, is_vision=True, auxiliary_loss=False, any_length=False)
    assert "router" in layouts.why_not(model, is_vision=False, auxiliary_loss=True, any_length=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beta": 0.1}, "the kl term acts on rows whose advantage is 0"),
        ({"entropy_coef": 0.1}, "the entropy bonus acts on every row"),
        ({"policy_loss": "dro"}, "the policy term acts"),
    ],
)
def test_rows_that_move_the_weights_are_not_skipped(toy, tmp_path, fields, words):
    with pytest.raises(LossPlusError, match=rf"skip_still_rows=True would change the gradient: {words}"):
        trainer(toy, tmp_path, skip_still_rows=True, **fields)


def test_the_model_is_saved_as_it_came(toy, tmp_path):
    """The attention function of ours is not in the saved configuration, and generation uses the model's own."""
    trained = trainer(toy, tmp_path, microbatch_layout="shared_prefix", max_steps=1)
    trained.train()
    trained.save_model(str(tmp_path / "model"))
    assert "lossplus" not in (tmp_path / "model/config.json").read_text()


def flash_stand_in(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **others):
    """
    What flash attention computes, where it is not installed: rows of many lengths by where they begin, padded ones by a mask (B, N).

    It asserts what transformers hands down: no mask with lengths, as many keys as queries, the longest length, no keyword of ours.
    """
    assert "segments" not in others
    n, groups = query.shape[2], query.shape[1] // key.shape[1]
    sees = torch.ones(n, n, dtype=torch.bool).tril()
    if cu_seq_lens_q is not None:
        assert attention_mask is None
        assert torch.equal(others["cu_seq_lens_k"], cu_seq_lens_q)
        assert cu_seq_lens_q.dtype == torch.int32
        assert max_length_q == others["max_length_k"] == cu_seq_lens_q.diff().max()
        row = torch.bucketize(torch.arange(n), cu_seq_lens_q[1:], right=True)
        sees = sees & (row[:, None] == row)
    elif attention_mask is not None:
        sees = (sees & attention_mask[:, None, :].bool() | torch.eye(n, dtype=torch.bool)).unsqueeze(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling).transpose(
        1, 2
    ), None


def flash_model(toy, monkeypatch):
    """The toy with flash attention by name, and the stand-in for it."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash_stand_in)
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize("asked", ["packed", "auto"])
def test_flash_attention_is_told_where_rows_begin(toy, tmp_path, monkeypatch, padded, asked):
    """auto takes packed; lengths reach each layer, also under checkpointing and in the passes without gradient: the same weights."""
    settings = {**LOSSES["seq_mean"], "gradient_checkpointing": True, "microbatch_layout": asked, "max_tokens_per_microbatch": 40}
    tokenizer = AutoTokenizer.from_pretrained(toy)
    trained = trainer(flash_model(toy, monkeypatch), tmp_path, reward=letter_reward, rollout=fixed_rollout,
                      extra={"processing_class": tokenizer}, **settings)  # fmt: skip
    assert not trained.packed.share_prefix
    trained.train()
    assert apart(weights(trained), weights(padded("seq_mean"))) < 1e-5


def test_flash_attention_shares_no_prompt(toy, tmp_path, monkeypatch):
    with pytest.raises(LossPlusError, match="microbatch_layout='shared_prefix' is not exact here: flash attention has no rows"):
        trainer(flash_model(toy, monkeypatch), tmp_path, microbatch_layout="shared_prefix")
    with pytest.raises(UnsupportedAttention, match="no rows that share a prompt"):
        by_lengths((Segment(0, 2, 0, 0), Segment(2, 4, 0, 2)), torch.device("cpu"))


FAMILIES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "gemma": (GemmaConfig, {"head_dim": 8}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 8, "sliding_window": 64}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Log-probs and gradients of packed rows are the padded ones, on every family; a rotary model sees no left padding."""
    config_class, more = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, **more)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).double().eval()
    add_fused_lm_head(model)
    draw = torch.Generator().manual_seed(1)
    prompts, completions = torch.randint(1, 50, (4, 5), generator=draw), torch.randint(1, 50, (4, 6), generator=draw)
    prompts[1] = prompts[0]
    prompt_mask = torch.arange(5) >= torch.tensor([0, 0, 2, 3])[:, None]
    completion_mask = torch.arange(6) < torch.tensor([6, 2, 4, 1])[:, None]
    direction = torch.randn(4, 6, generator=draw)

    def gradient(logps):
        (logps * direction).sum().backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return found

    ids, mask = torch.cat([prompts, completions], 1), torch.cat([prompt_mask, completion_mask], 1).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :5] = -100
    padded = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -6:]
    theirs = gradient(padded)
    packed = layouts.PackedForward(share_prefix=True)
    packed.attach(model)
    packing = packed.pack(
        {"prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": completions, "completion_mask": completion_mask}
    )
    with packed.reading(packing.states):
        found = model(input_ids=packing.input_ids, position_ids=packing.position_ids, segments=packing.segments,
                      shift_labels=packing.labels.unsqueeze(0), fused_lm_head=True).log_probs  # fmt: skip
    ours = packing.scatter(found[0])
    assert (ours - padded).abs().max() < 1e-6
    assert (gradient(ours) - theirs).norm() < 1e-6 * theirs.norm()
