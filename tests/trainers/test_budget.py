"""Micro-batches by a budget of tokens: what rows cost, how they are cut, and the same weights whatever the budget."""

import pytest
import torch
from toyrun import apart, fixed_rollout, letter_reward, logged, trainer, weights
from transformers import AutoTokenizer

from trl_lossplus import GRPOPlusConfig, LossPlusError, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.trainers.adapters import base_of
from trl_lossplus.trainers.budget import Packed, Padded, cost, cut, least, stretches, too_large
from trl_lossplus.trainers.dealing import deal, share_out
from trl_lossplus.trainers.rollout_pass import chunks, placed

# Prompt, completion, group, counts: groups 0 (prompt 3) and 1 (prompt 5).
TABLE = [[3, 4, 0, 1], [3, 1, 0, 1], [3, 2, 0, 1], [5, 6, 1, 1], [5, 0, 1, 1]]


def test_what_rows_cost():
    """Padded: rows x (longest prompt + longest completion, a column at least); packed: each token; a prompt once a stretch of its group."""
    assert cost(TABLE, range(5), Padded()) == 5 * (5 + 6)
    assert cost(TABLE, range(5), Padded(multiple=4)) == 5 * (8 + 8)
    assert cost(TABLE, [4], Padded()) == 5 + 1
    assert cost(TABLE, range(5), Packed(False)) == 7 + 4 + 5 + 11 + 5
    assert cost(TABLE, range(5), Packed(True)) == 3 + 4 + 1 + 2 + 5 + 6 + 0
    assert cost(TABLE, [0, 3, 1], Packed(True)) == 7 + 11 + 4  # the group's rows are not neighbours


def test_stretches_within_a_cap_and_of_a_number():
    """Packed costs 7, 4, 5, 11, 5 in order: within 12; the row of 11 is alone within 10; three stretches cost at least 16."""
    assert cut(TABLE, range(5), 12, Packed(False)) == [[0, 1], [2], [3], [4]]
    assert cut(TABLE, range(5), 10, Packed(False)) == [[0], [1, 2], [3], [4]]
    assert stretches(TABLE, range(5), 3, Packed(False)) == [[0], [1, 2], [3, 4]]  # 7, 4 + 5, 11 + 5
    assert stretches(TABLE, range(2), 3, Packed(False)) == [[0], [1], []]
    assert [len(part) for part in stretches([[1, 0, 0, 1]] * 5, range(5), 4, Padded())] == [1, 1, 2, 1]  # no part without a row


@pytest.mark.parametrize("load", [Padded(), Packed(False), Packed(True)])
@pytest.mark.parametrize("budget", [5, 12, 17, 40, 1000])
def test_every_part_is_within_the_budget(load, budget):
    """Drawn rows in groups of 4 on three processes: as many parts each, none over the budget but a row alone, every row once."""
    draw = torch.Generator().manual_seed(budget)
    tables = []
    for _ in range(3):
        prompts = torch.randint(1, 9, (5,), generator=draw).tolist()
        tables.append([[prompts[row // 4], int(torch.randint(0, 12, (), generator=draw)), row // 4, 1] for row in range(20)])
    n = least(lambda n: not any(too_large(table, deal(table, 2 * n, load, budget), budget, load) for table in tables))
    for table in tables:
        parts = deal(table, 2 * n, load, budget)
        assert len(parts) == 2 * n
        assert sorted(row for part in parts for row in part) == list(range(20))
        assert all(cost(table, part, load) <= budget or len(part) == 1 for part in parts)
    assert n == 1 or any(too_large(table, deal(table, 2 * n - 2, load, budget), budget, load) for table in tables)


def test_a_group_is_cut_where_it_is_over_the_budget():
    """Prompt 10, completions 4, 3, 2, 1: 20 tokens; within 17 as 10 + 4 + 2 and 10 + 3 + 1, within 13 each alone or 14 refused."""
    table = [[10, length, 0, 1] for length in (4, 3, 2, 1)]
    assert share_out(table, 2, True, 17) == [[0, 2], [1, 3]]
    assert sorted(share_out(table, 4, True, 13)) == [[0], [1], [2], [3]]


def test_chunks_of_a_rollout():
    """Rows of 3 + 1, 3 + 4, 1 + 2 and 1 + 1 tokens in columns for 4 + 5: padded by length, packed in order, and put back in place."""
    mask = {"prompt_mask": torch.tensor([[0, 1, 1, 1]] * 2 + [[0, 0, 0, 1]] * 2),
            "completion_mask": torch.arange(5) < torch.tensor([1, 4, 2, 1])[:, None]}  # fmt: skip
    rollout = {**mask, "prompt_ids": mask["prompt_mask"] * 7, "completion_ids": torch.arange(20).view(4, 5)}
    padded = chunks(rollout, rows=1, load=Padded(), left=True, budget=8)
    assert [index.tolist() for index, _ in padded] == [[3, 2], [0], [1]]
    assert [tuple(c["prompt_ids"].shape) + tuple(c["completion_ids"].shape) for _, c in padded] == [(2, 1, 2, 2), (1, 3, 1, 1), (1, 3, 1, 4)]  # fmt: skip
    packed = chunks(rollout, rows=1, load=Packed(True), left=True, budget=8)
    assert [index.tolist() for index, _ in packed] == [[0, 1], [2, 3]]
    ids = placed(padded, [chunk["completion_ids"] for _, chunk in padded], (4, 5))
    assert torch.equal(ids * mask["completion_mask"], rollout["completion_ids"] * mask["completion_mask"])
    assert (
        len(chunks(rollout, rows=1, load=Packed(True), left=True, budget=8, most=lambda n: n + 1)) == 3
    )  # as another process needs


def watched(run):
    """The tokens of each forward pass of the policy's layers."""
    seen = []
    base_of(run.model).base_model.register_forward_hook(lambda m, a, k, o: seen.append(k["input_ids"].numel()), with_kwargs=True)
    return seen


KL = {"beta": 0.1, "num_iterations": 2, "optim": "sgd", "learning_rate": 0.3}
SPLITS = {"one micro-batch": 16, "two micro-batches": 8}


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """Weights, log and passes of one micro-batch of 16 rows a step, padded."""
    run = trainer(toy, tmp_path_factory.mktemp("whole"), reward=letter_reward, rollout=fixed_rollout,
                  per_device_train_batch_size=16, **KL)  # fmt: skip
    run.train()
    return run


@pytest.mark.parametrize("rows", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_a_budget_changes_no_weight(toy, tmp_path, whole, layout, rows):
    """Three optimizer steps of 16 rows in parts of at most 40 tokens, every pass: weights to 1e-5, and the logged numbers."""
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, per_device_train_batch_size=rows,
                  gradient_accumulation_steps=16 // rows, microbatch_layout=layout, max_tokens_per_microbatch=40, **KL)  # fmt: skip
    seen = watched(run)
    run.train()
    assert apart(weights(run), weights(whole)) < 1e-5
    assert max(seen) <= 40
    assert len(seen) > 3 * 2  # each step in several parts
    for name in ("loss", "entropy", "kl", "grad_norm", "ratio/max", "clip_ratio/region_mean", "loss/policy", "share/grad/kl"):
        assert logged(run, name) == pytest.approx(logged(whole, name), rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_a_row_over_the_budget_is_run_alone(toy, tmp_path, whole, caplog, layout):
    """A budget of one token: each row a part, the same weights, and one line for the whole run."""
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, per_device_train_batch_size=16,
                  microbatch_layout=layout, max_tokens_per_microbatch=1, **KL)  # fmt: skip
    run.train()
    assert apart(weights(run), weights(whole)) < 1e-5
    assert caplog.text.count("max_tokens_per_microbatch=1: some rows are longer; each of them is run alone.") == 1


def edge_rollout(prompts, trainer):
    """Prompts of 1 to 4 tokens; completions that are an end token alone, end with the padding token, hold it, or end by nothing; groups alike."""
    end = trainer.processing_class.eos_token_id
    completions = [[end], [5, 6, end], [7, end, 8, 9], [5, 5, 5, 5, 5, 5]]
    place = [(trainer.accelerator.process_index * len(prompts) + i) for i in range(len(prompts))]
    return {
        "prompt_ids": [[4 + (i // trainer.num_generations) % 3] * (1 + i // trainer.num_generations % 4) for i in place],
        "completion_ids": [completions[i % 4] for i in place],
        "logprobs": None,
    }


def pad_is_end(toy):
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


EDGES = {
    "pad is end": {},
    "rows that were cut off are empty": {"mask_truncated_completions": True, "loss_aggregation": "seq_mean_token_mean"},
    "groups without spread are out": {"zero_std_groups": "drop"},
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_edges(toy, tmp_path, layout, edge):
    """The same weights with a budget of 12 tokens as without, and they are numbers."""

    def run(folder, **fields):
        extra = {"processing_class": pad_is_end(toy)}
        done = trainer(
            toy, tmp_path / folder, reward=letter_reward, rollout=edge_rollout, extra=extra, **EDGES[edge], **KL, **fields
        )
        done.train()
        return weights(done)

    expected = run("whole")
    got = run("parts", microbatch_layout=layout, max_tokens_per_microbatch=12)
    assert apart(got, expected) < 1e-5
    assert all(torch.isfinite(weight).all() for weight in got.values())


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_no_row_is_in_the_loss(toy, tmp_path, layout):
    """Every completion is cut off and masked: parts without tokens, a loss of 0, and weights that stay."""
    run = trainer(toy, tmp_path, reward=letter_reward, rollout=lambda p, trainer: {**edge_rollout(p, trainer), "completion_ids": [[5] * 6] * len(p)},
                  mask_truncated_completions=True, microbatch_layout=layout, max_tokens_per_microbatch=9)  # fmt: skip
    before = weights(run)
    run.train()
    assert apart(weights(run), before) == 0.0
    assert logged(run, "loss") == [0.0] * 3


def test_still_rows_cost_nothing(toy, tmp_path):
    """Half of the groups are flat: half of the rows in parts of at most 30 tokens, and the weights of computing all."""

    def half_flat(prompts, completions, **kwargs):
        return [0.5 if row // 4 % 2 else len(text) / 10 for row, text in enumerate(completions)]

    every = trainer(toy, tmp_path / "all", reward=half_flat, rollout=fixed_rollout, per_device_train_batch_size=16)
    every.train()
    some = trainer(toy, tmp_path / "some", reward=half_flat, rollout=fixed_rollout, per_device_train_batch_size=16,
                   microbatch_layout="shared_prefix", skip_still_rows=True, max_tokens_per_microbatch=30)  # fmt: skip
    some.train()
    assert apart(weights(some), weights(every)) < 1e-5
    assert logged(some, "frac_rows_computed") == [0.5] * 3


@pytest.mark.parametrize("critic", ["shared", "model"])
def test_ppo_with_a_budget(toy, tmp_path, critic):
    """Values from chunks of the pass that takes log-probs, and from a critic's own: the weights of whole micro-batches."""
    ppo = {
        "trainer_class": PPOPlusTrainer,
        "config_class": PPOPlusConfig,
        "critic": critic,
        "vf_coef": 0.5,
        "num_generations": 4,
        **KL,
    }
    whole = trainer(toy, tmp_path / "whole", reward=letter_reward, rollout=fixed_rollout, **ppo)
    whole.train()
    parts = trainer(toy, tmp_path / "parts", reward=letter_reward, rollout=fixed_rollout, max_tokens_per_microbatch=24, **ppo)
    seen = watched(parts)
    parts.train()
    assert max(seen) <= 24
    assert apart(weights(parts), weights(whole)) < 1e-5
    assert logged(parts, "value/explained_variance") == pytest.approx(logged(whole, "value/explained_variance"), abs=1e-4)


def test_an_objective_over_the_step_and_evaluation(toy, tmp_path):
    """clip_cov looks at all parts of a step; an evaluation in parts logs what a whole one does."""
    settings = {"policy_loss": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_min": 0.05, "clip_cov_max": 9.0, **KL}
    found = []
    for folder, fields in (("whole", {}), ("parts", {"max_tokens_per_microbatch": 24, "microbatch_layout": "packed"})):
        run = trainer(
            toy,
            tmp_path / folder,
            reward=letter_reward,
            rollout=fixed_rollout,
            per_device_eval_batch_size=8,
            **settings,
            **fields,
        )
        run.train()
        found.append((weights(run), run.evaluate(run.train_dataset.select(range(4)))))
    assert apart(found[0][0], found[1][0]) < 1e-5
    assert found[1][1]["eval_loss"] == pytest.approx(found[0][1]["eval_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch=0: it must be >= 1, or None"),
        ({"max_tokens_per_microbatch": 64, "top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5 is taken over a whole"),
        ({"max_tokens_per_microbatch": 64, "optim": "lomo"}, "optim='lomo' updates the weights in each backward pass"),
        ({"max_tokens_per_microbatch": 2.5}, "it must be a whole number or None"),
    ],
)  # fmt: skip
def test_budgets_that_are_refused(tmp_path, fields, words):
    with pytest.raises(LossPlusError, match=words):
        GRPOPlusConfig(str(tmp_path), use_cpu=True, bf16=False, **fields)
