"""Generation with a group's prompt once and without rows that have ended: the tokens of `generate`, for less."""

import pytest
import torch
from peft import LoraConfig
from toyrun import letter_reward, trainer
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
)
from transformers.cache_utils import DynamicCache

from trl_lossplus import LossPlusError
from trl_lossplus.trainers import generation
from trl_lossplus.trainers.adapters import base_of
from trl_lossplus.trainers.generation import compact
from trl_lossplus.trainers.roomy_cache import ROOM, make_room

SMALL = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.6,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "gemma3, a window shorter than the row": Gemma3TextConfig(
        **SMALL, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.6),
}
PAD, ENDS = 0, [3, 4, 5, 6, 7, 8]


def model_of(config):
    torch.manual_seed(2)
    return AutoModelForCausalLM.from_config(config).eval()


def prompts():
    """Three groups of four rows, prompts of 2, 5 and 7 tokens, padded on the left."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(9, 24, (n,), generator=draw) for n in (2, 5, 7) for _ in range(1)]
    ids = torch.stack([torch.cat([torch.full((7 - len(row),), PAD), row]) for row in rows]).repeat_interleave(4, 0)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def config(**fields):
    return GenerationConfig(
        **{"max_new_tokens": 12, "pad_token_id": PAD, "eos_token_id": ENDS, "do_sample": True, "top_k": 0, **fields}
    )


def embedded(model):
    """Counts the tokens that a model computes, by forward pass."""
    counts = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: counts.append(out.shape[:2].numel()))
    return counts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mixed", [False, True])
def test_the_most_likely_tokens_are_those_of_generate(name, mixed):
    """Rows of three lengths that end at different steps, in groups and not."""
    model, given = model_of(MODELS[name]), prompts()
    if mixed:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
        given = {key: value[order] for key, value in given.items()}
    settings = config(do_sample=False, eos_token_id=[*ENDS, 12, 13])
    expected = model.generate(**given, generation_config=settings)
    with compact(model):
        found = model.generate(**given, generation_config=settings)
    assert "generate" not in model.__dict__
    assert torch.equal(found, expected)
    assert len(set((found[:, 7:] != PAD).sum(1).tolist())) > 1  # rows ended at different steps


def test_what_is_computed_counted_by_hand():
    """Three distinct prompts of 7 padded columns once, then at each step a token of each row that has not ended."""
    model, given = model_of(MODELS["llama"]), prompts()
    counts = embedded(model)
    torch.manual_seed(5)
    with compact(model):
        found = model.generate(**given, generation_config=config())
    ended = torch.isin(found[:, 7:], torch.tensor(ENDS))
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, found.shape[1] - 7)
    assert counts == [3 * 7] + [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]
    for row, length in zip(found[:, 7:], lengths, strict=True):
        assert (row[length:] == PAD).all()


def test_sampled_tokens_have_the_model_s_distribution():
    """4,000 rows of one prompt: the shares of first tokens, and of second tokens after each, are the model's, within 4.5 deviations."""
    model = model_of(LlamaConfig(**{**SMALL, "vocab_size": 5, "initializer_range": 0.3}))
    ids, rows = torch.tensor([[1, 2, 3]]), 4000
    torch.manual_seed(0)
    with compact(model):
        found = model.generate(
            ids.expand(rows, 3),
            attention_mask=torch.ones(rows, 3, dtype=torch.long),
            generation_config=config(max_new_tokens=2, eos_token_id=4, temperature=0.7),
        )[:, 3:]
    with torch.no_grad():
        for before in (None, *range(4)):
            chosen = found if before is None else found[found[:, 0] == before]
            prefix = ids if before is None else torch.cat([ids, torch.tensor([[before]])], 1)
            expected = (model(prefix).logits[0, -1] / 0.7).softmax(-1)
            share = torch.bincount(chosen[:, 0 if before is None else 1], minlength=5) / len(chosen)
            deviation = (expected * (1 - expected) / len(chosen)).sqrt()
            assert ((share - expected).abs() < 4.5 * deviation).all(), before


def test_a_process_that_is_done_runs_on_with_the_others(monkeypatch):
    """As under ZeRO-3: further forward passes until every process has ended change nothing."""
    model, given = model_of(MODELS["llama"]), prompts()
    settings = config(do_sample=False, eos_token_id=[*ENDS, 12, 13], max_new_tokens=6)
    expected = model.generate(**given, generation_config=settings)
    more = [3]

    def others(finished, synced, device):
        more[0] -= finished
        return not finished or more[0] >= 0

    monkeypatch.setattr(model, "_has_unfinished_sequences", others)
    counts = embedded(model)
    with compact(model):
        found = model.generate(**given, generation_config=settings)
    assert torch.equal(found, expected)
    assert counts[-3:] == [1, 1, 1]
    assert len(counts) == 6 + 3


@pytest.mark.parametrize("lora", [False, True])
def test_through_the_trainer(toy, tmp_path, lora):
    """A run trains, computes each distinct prompt once a rollout, and leaves `generate` as it was."""
    extra = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")} if lora else {}
    trained = trainer(toy, tmp_path, reward=letter_reward, extra=extra, max_steps=2, compact_generation=True)
    policy, first = base_of(trained.model), []
    inner = policy._prefill

    def prefill(ids, *args, **kwargs):
        first.append(ids.shape[0])
        return inner(ids, *args, **kwargs)

    policy._prefill = prefill
    trained.train()
    assert first == [2, 2]  # 8 rows in groups of 4
    assert "generate" not in policy.__dict__
    assert trained.state.log_history[0]["completions/mean_length"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs has num_beams"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_transformers_continuous_batching": True}, "continuous_batching schedules rows itself"),
    ],
)
def test_refused_by_name(toy, tmp_path, fields, message):
    with pytest.raises(LossPlusError, match=f"compact_generation=True: .*{message}"):
        trainer(toy, tmp_path, compact_generation=True, **fields)


def test_a_rollout_function_makes_its_own(toy, tmp_path):
    with pytest.raises(LossPlusError, match="rollout_func makes the completions"):
        trainer(toy, tmp_path, rollout=lambda prompts, trainer: {}, compact_generation=True)


def test_another_kind_of_cache_is_refused():
    """Mamba's state is no cache of keys that rows are chosen from."""
    model = model_of(MambaConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, state_size=4))
    with compact(model), pytest.raises(LossPlusError, match="layers whose cache is a LinearAttentionLayer"):
        model.generate(**prompts(), generation_config=config())


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [(0.0, [1, 0]), (0.2499, [1, 0]), (0.25, [3, 0]), (0.9999, [3, 0]), (1 - 2**-53, [3, 0])],
)
def test_the_token_that_a_uniform_number_draws(monkeypatch, uniform, expected):
    """Probabilities 0, 1/4, 0, 3/4, 0: a token without probability is never drawn, whatever the number; nor past the last one."""
    scores = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]).log()
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, device: torch.full(shape, uniform, dtype=dtype))
    assert generation._draw(scores, sample=True).tolist() == expected
    assert generation._draw(scores, sample=False).tolist() == [3, 0]


def test_a_cache_with_room_holds_what_transformers_holds():
    """Through growth over more than one room, a choice of rows in between, and rows twice; the buffer moves once a room."""
    torch.manual_seed(0)
    plain, roomy = DynamicCache(), DynamicCache()
    first = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 6)
    for cache in (plain, roomy):
        cache.update(*first, 0)
    make_room(roomy)
    rows, places = torch.tensor([2, 0, 0]), set()
    for step in range(2 * ROOM):
        new = torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1, 6)
        pairs = zip(plain.update(*new, 0), roomy.update(*new, 0), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        places.add(roomy.layers[0].keys.data_ptr())
        assert roomy.get_seq_length() == plain.get_seq_length() == 6 + step
        if step == 10:
            for cache in (plain, roomy):
                cache.batch_select_indices(rows)
    assert len(places) <= 4  # the first room, after the choice of rows, and twice more
    assert torch.equal(plain.layers[0].values, roomy.layers[0].values)
