"""Token weights: from a user's function to the policy term."""

import pytest
import torch
from toyrun import SeeLoss, fixed_rollout, letter_reward, logged, trainer

from trl_lossplus import LossPlusError
from trl_lossplus.trainers.token_weights import evaluate, spans_to_weights

WORDS = {1: "red", 2: "blue", 3: "green"}


def decode(ids):
    return " ".join(WORDS[i] for i in ids if i in WORDS)


def test_spans_of_characters():
    """ "red blue green": characters 4 to 8 are "blue", and touch token 1 alone; a later span wins; a special token gets 1."""
    assert spans_to_weights([(4, 8, 3.0)], [1, 2, 3], decode) == [1.0, 3.0, 1.0]
    assert spans_to_weights([(0, 14, 2.0), (4, 5, 0.0)], [1, 2, 3, 9], decode) == [2.0, 0.0, 2.0, 1.0]


def test_what_is_refused():
    def call(rows):
        return evaluate(lambda **kw: rows, ["p"] * 2, ["c"] * 2, [[1, 2], [3]], {}, decode)

    assert call([[0.5, 2], None]) == [[0.5, 2.0], [1.0]]
    for rows, words in (
        ([[1.0, 1.0]], "returned 1 lists for 2 completions"),
        (3.0, "returned float lists"),
        ([[1.0], [1.0]], "row 0: 1 weights for a completion of 2 tokens"),
        ([[1.0, float("nan")], [1.0]], "row 0: weight nan of token 1"),
        ([[1.0, 1.0], "x"], "row 1: a str"),
    ):
        with pytest.raises(LossPlusError, match=words):
            call(rows)


def test_the_policy_term_is_weighted_through_the_trainer(toy, tmp_path):
    """Weights of 0 on all tokens but the first: the loss is the first tokens' alone over all tokens; columns reach the function."""
    seen_columns = {}

    def first_only(prompts, completions, completion_ids, keyword, **columns):
        seen_columns["keyword"] = keyword
        return [[1.0] + [0.0] * (len(ids) - 1) for ids in completion_ids]

    run = trainer(
        toy, tmp_path, reward=letter_reward, rollout=fixed_rollout, extra={"token_weight_func": first_only}, max_steps=1
    )
    seen = SeeLoss(run)
    run.train()
    micro = seen.inputs[0]
    expected = -micro["advantages"].sum().item() / micro["loss_mask"].sum().item()
    assert logged(run, "loss/policy")[0] == pytest.approx(expected, abs=1e-6)
    assert len(seen_columns["keyword"]) == 8
    assert torch.equal(micro["token_weights"][:, 0], torch.ones(8))
