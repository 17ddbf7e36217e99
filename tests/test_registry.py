"""Registering losses and estimators, naming them by their path, and the contract that a user's function is held to."""

import sys
import types

import pytest
import torch
from helpers import run, tensors

from trl_lossplus import (
    LossPlusError,
    LossSpec,
    PolicyTerm,
    compute_advantages,
    register_advantage_estimator,
    register_policy_loss,
)
from trl_lossplus.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, TENSORS


@pytest.fixture(autouse=True)
def _clean_registries(monkeypatch):
    for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        registry.names()
        monkeypatch.setattr(registry, "entries", dict(registry.entries))


@pytest.fixture
def module(monkeypatch):
    """An importable module `user_losses`, to be filled."""
    module = types.ModuleType("user_losses")
    monkeypatch.setitem(sys.modules, "user_losses", module)
    return module


def half_clip(batch, spec):
    """-A * min(r, 2)"""
    return PolicyTerm(-batch.advantages * batch.ratio(spec.log_ratio_clamp).clamp(max=2))


def test_decorator_returns_the_function_and_makes_it_usable():
    """The ten lines of the design: register, name, compute: ratio e -> clamped to 2, A=3 -> loss -6, gradient 0."""
    decorate = register_policy_loss("my_loss", requires={"old_logps", "advantages"}, formula="-A * min(r, 2)", source="me")
    assert decorate(half_clip) is half_clip
    entry = POLICY_LOSSES.get("my_loss")
    assert (entry.formula, entry.source, entry.requires) == ("-A * min(r, 2)", "me", frozenset({"old_logps", "advantages"}))
    assert "my_loss" in POLICY_LOSSES.names()
    batch = {"logps": torch.tensor([[0.0]]), "old_logps": torch.tensor([[-1.0]]), "advantages": torch.tensor([3.0])}
    out, gradient = run(batch | {"mask": torch.ones(1, 1, dtype=torch.bool)}, LossSpec(policy_loss="my_loss"))
    assert (out.loss.item(), gradient.item()) == (-6.0, 0.0)


def test_taken_names():
    """A name that is taken is an error that tells the remedy; replace=True takes it, for that name only."""
    register_policy_loss("my_loss", requires={"advantages"})(half_clip)
    for name in ("my_loss", "ppo_clip"):
        with pytest.raises(LossPlusError, match=f"policy_loss '{name}' is registered already.*replace=True"):
            register_policy_loss(name, requires={"advantages"})(half_clip)
    register_policy_loss("my_loss", requires={"old_logps", "advantages"}, replace=True)(half_clip)
    assert POLICY_LOSSES.get("my_loss").requires == frozenset({"old_logps", "advantages"})
    assert POLICY_LOSSES.get("ppo_clip").func is not half_clip
    with pytest.raises(LossPlusError, match="advantage_estimator 'grpo' is registered already"):
        register_advantage_estimator("grpo")(lambda rewards, group_ids: rewards)


def test_requires_must_be_tensors_that_exist():
    """`old_logprobs` is not a tensor of ours: the nearest is named."""
    with pytest.raises(LossPlusError, match="requires='old_logprobs' is not known. Did you mean 'old_logps'.*rollout_weights"):
        register_policy_loss("my_loss", requires={"old_logprobs"})


def test_docstring_is_the_formula_if_none_is_given():
    """explain always has something to show."""
    register_policy_loss("my_loss", requires={"advantages"})(half_clip)
    assert POLICY_LOSSES.get("my_loss").formula == "-A * min(r, 2)"


def test_builtin_entries_are_complete():
    """Ours all have a formula, a source and tensors that exist."""
    for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        for name in registry.names():
            entry = registry.get(name)
            assert entry.formula
            assert entry.source
            assert entry.requires <= TENSORS.keys()


def test_function_by_its_path(module):
    """
    `user_losses:half_clip`, never registered: usable, reads old_logps and advantages (and nothing else); as by its name if it is
    registered. An estimator by its path reads the group ids.
    """
    module.half_clip = half_clip
    spec = LossSpec(policy_loss="user_losses:half_clip")
    assert spec.required() == {"logps", "mask", "old_logps", "advantages"}
    assert ADVANTAGE_ESTIMATORS.get("user_losses:half_clip").requires == {"group_ids"}
    batch = tensors()
    module.other = lambda batch, spec: PolicyTerm(batch.ref_logps)
    with pytest.raises(LossPlusError, match="'user_losses:other' reads ref_logps, which it did not declare"):
        run(batch, LossSpec(policy_loss="user_losses:other"))
    out, gradient = run(batch, spec)
    register_policy_loss("my_loss", requires={"old_logps", "advantages", "ref_logps"})(half_clip)
    named, named_gradient = run(batch, LossSpec(policy_loss="my_loss"))
    assert torch.equal(out.loss, named.loss)
    assert torch.equal(gradient, named_gradient)
    assert "ref_logps" in spec.required(), "declared now, and found by the path too"
    assert LossSpec.from_yaml(spec.to_yaml()) == spec


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.x:f", "policy_loss='no_such_package.x:f': module 'no_such_package.x' cannot be imported"),
        ("user_losses:half_clop", "function='half_clop' is not known. Did you mean 'half_clip'.*Allowed: half_clip"),
        ("user_losses:number", "function='number' is not known"),
        ("user_losses:", "function='' is not known"),
        ("user_losses.half_clip", "Allowed: .*package.module:function"),
    ],
)
def test_bad_paths(module, path, message):
    """A module or function that is not there is an error that names the field and what is there, never the stock loss."""
    module.half_clip, module.number = half_clip, 3
    with pytest.raises(LossPlusError, match=message):
        LossSpec(policy_loss=path)


@pytest.mark.parametrize("path", [":half_clip", ".losses:half_clip"])
def test_paths_without_a_module(path):
    """An empty or relative module is a LossPlusError too."""
    with pytest.raises(LossPlusError, match="policy_loss="):
        LossSpec(policy_loss=path)


BAD_RETURNS = {
    "None": (lambda per_token: None, "returned NoneType; it must return a PolicyTerm"),
    "tensor": (lambda per_token: per_token, "returned Tensor; it must return a PolicyTerm"),
    "tuple": (lambda per_token: (per_token, {}), "returned tuple; it must return a PolicyTerm"),
    "scalar": (lambda per_token: PolicyTerm(per_token.mean()), r"shape \(\); it must be \(8, 6\) or \(8, 1\).*not reduced"),
    "rows": (lambda per_token: PolicyTerm(per_token.sum(-1)), r"shape \(8,\); it must be"),
    "transposed": (lambda per_token: PolicyTerm(per_token.T), r"shape \(6, 8\); it must be"),
}


@pytest.mark.parametrize("kind", BAD_RETURNS)
def test_wrong_returns_of_a_users_loss(kind):
    """Not a PolicyTerm, or reduced, or transposed -> an error that names the loss and what it must return."""
    change, message = BAD_RETURNS[kind]
    register_policy_loss("my_loss", requires={"old_logps", "advantages"})(
        lambda batch, spec: change(half_clip(batch, spec).per_token)
    )
    with pytest.raises(LossPlusError, match=f"policy_loss 'my_loss' returned .*{message.removeprefix('returned ')}"):
        run(tensors(), LossSpec(policy_loss="my_loss"))


def test_one_value_a_row_and_statistics():
    """(B, 1) losses and statistics of both shapes are taken: mean over valid tokens, over rows, and the largest row mean."""

    def loss(batch, spec):
        ratio = batch.ratio()
        row = batch.mask.sum(-1, keepdim=True).float()
        return PolicyTerm(-batch.logps.mean(-1, keepdim=True), {"ratio": ratio, "length": row, "length_max": row.expand(8, 6)})

    register_policy_loss("my_loss", requires={"old_logps"})(loss)
    batch = tensors()
    out, _ = run(batch, LossSpec(policy_loss="my_loss"))
    ratios = (batch["logps"] - batch["old_logps"]).exp()[batch["mask"]]
    assert out.stats["ratio"].item() == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert [out.stats["length"].item(), out.stats["length_max"].item()] == pytest.approx([30 / 8, 6.0])


@pytest.mark.parametrize("read", [lambda b: b.old_logps, lambda b: b.ratio(), lambda b: b.log_ratio(20.0), lambda b: b.ref_logps])
def test_undeclared_reads(read):
    """A tensor that was not declared, also by way of ratio(), is an error that names it, not a stale tensor."""
    register_policy_loss("my_loss", requires={"advantages"})(lambda batch, spec: PolicyTerm(read(batch)))
    with pytest.raises(
        LossPlusError, match="'my_loss' reads (old_logps|ref_logps), which it did not declare.*Declared: advantages, logps, mask"
    ):
        run(tensors(), LossSpec(policy_loss="my_loss"))


def test_a_users_advantage_estimator(module):
    """Registered, or by its path: s - min of all, spread over the valid tokens; (B, T) results are taken as they are."""
    module.above_least = lambda rewards, group_ids: rewards - rewards.min()
    register_advantage_estimator("above_least", requires={"group_ids"})(module.above_least)
    mask, ids = torch.tensor([[True, True], [True, False]]), torch.tensor([0, 0])
    for name in ("above_least", "user_losses:above_least"):
        ours = compute_advantages(name, torch.tensor([3.0, 1.0]), mask, ids).advantages
        assert ours.tolist() == [[2.0, 2.0], [0.0, 0.0]]
        assert LossSpec(advantage_estimator=name).advantage_estimator == name
    register_advantage_estimator("tokens")(lambda rewards, group_ids: rewards[:, None] * torch.tensor([[1.0, 2.0]]))
    assert compute_advantages("tokens", torch.tensor([3.0, 1.0]), mask, ids).advantages.tolist() == [[3.0, 6.0], [1.0, 0.0]]


@pytest.mark.parametrize("result", [torch.zeros(5), torch.zeros(2, 2), None, [1.0, 2.0]], ids=["rows", "tokens", "none", "list"])
def test_wrong_returns_of_a_users_estimator(result):
    """A result of the wrong shape or type -> a LossPlusError that names the estimator."""
    register_advantage_estimator("mine")(lambda rewards, group_ids: result)
    with pytest.raises(LossPlusError, match=r"advantage_estimator 'mine' returned .*must be .*for mask \(2, 3\)"):
        compute_advantages("mine", torch.zeros(2), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0]))


@pytest.mark.parametrize("name", ["grpo", "gdpo"])
def test_reward_weights_of_the_wrong_length(name):
    """Three weights for two reward functions -> a LossPlusError."""
    mask, ids = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    with pytest.raises(LossPlusError, match=r"reward_weights has shape \(3,\); with rewards of shape \(2, 2\)"):
        compute_advantages(name, torch.eye(2), mask, ids, reward_weights=torch.ones(3))


@pytest.mark.parametrize("name", ["grpo", "gdpo"])
def test_reward_weights_as_a_list(name):
    """A list of weights is as good as a tensor."""
    rewards, mask, ids = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.ones(2, 1, dtype=torch.bool), torch.tensor([0, 0])
    listed, tensor = (
        compute_advantages(name, rewards, mask, ids, reward_weights=w) for w in ([1.0, 2.0], torch.tensor([1.0, 2.0]))
    )
    assert torch.equal(listed.advantages, tensor.advantages)
