"""Our loss, gradient and metrics against the installed TRL's `_compute_loss`, over the grid of its options."""

import itertools
import math

import pytest
import torch
from harness import plus_loss, rollout, trl_loss

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
CLIPPED = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo"}
KL = [{}, {"beta": 0.05}, {"beta": 0.05, "use_bias_correction_kl": False}]
TOLERANCE = 1e-6


def close(ours, theirs, what, summands=0.1):
    """Equal to 1e-6 relative to the largest entry, or for a nearly cancelled sum to its summands (losses of order 0.1 to 1)."""
    scale = max(theirs.abs().max().item(), summands)
    assert (ours - theirs).abs().max().item() <= TOLERANCE * scale, what


def compare(fields, make, mode="train"):
    theirs, ours = make(), make()
    if mode == "eval":
        for batch in (theirs, ours):
            batch[0].requires_grad_(False)
    (loss_trl,), metrics_trl = trl_loss(fields, [theirs], mode)
    (loss_plus,), metrics_plus = plus_loss(fields, [ours], mode)
    close(loss_plus.detach(), loss_trl.detach(), f"loss {fields}")
    if mode == "train":
        loss_trl.backward()
        loss_plus.backward()
        close(ours[0].grad, theirs[0].grad, f"gradient {fields}", summands=1e-3)
        if fields.get("entropy_coef"):
            close(ours[1].grad, theirs[1].grad, f"entropy gradient {fields}", summands=1e-6)
    mask = theirs[2]["completion_mask"] * theirs[2].get("tool_mask", 1)
    for name, values in metrics_trl.items():
        assert name in metrics_plus, f"metric {name} {fields}"
        by_row = fields.get("importance_sampling_level") == "sequence" or name == "vespo/phi_seq_mean"
        if by_row and theirs[2]["advantages"].dim() == 1:  # with advantages by token these are means over tokens
            values = without_empty_rows(name, values, mask)
        assert values == pytest.approx(metrics_plus[name], rel=2e-6, abs=1e-7), f"metric {name} {fields}"


def without_empty_rows(name, values, mask):
    """
    TRL's mean over rows with the rows without tokens taken out: there the ratio is 1, phi is 1 and nothing is clipped.

    TRL counts such rows, which dilutes a sequence-level clip fraction; ours is over the rows that are in the loss.
    """
    if not (name.startswith("clip_ratio") and name.endswith("_mean")) and name not in ("cispo_clip_ratio", "vespo/phi_seq_mean"):
        return values
    rows, empty = len(mask), int((mask.sum(1) == 0).sum())
    filled = 1.0 if name == "vespo/phi_seq_mean" else 0.0
    return [(value * rows - filled * empty) / (rows - empty) for value in values]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_objectives(loss_type):
    """Level x KL and its correction x delta x asymmetric range x on- and off-policy x advantages by row and by token."""
    count = 0
    deltas = [{}, {"delta": 1.3}] if loss_type in CLIPPED else [{}]
    highs = [{}, {"epsilon_high": 0.28}] if loss_type in CLIPPED | {"cispo"} else [{}]
    for level, kl, delta, high, old, wide in itertools.product(
        ["token", "sequence"], KL, deltas, highs, [True, False], [False, True]
    ):
        if loss_type == "vespo" and level == "sequence":
            continue  # TRL's vespo ignores the level; ours refuses the pair unless the KL reads it
        fields = {"loss_type": loss_type, "importance_sampling_level": level, **kl, **delta, **high}
        compare(fields, lambda old=old, wide=wide: rollout(seed=3, old=old, wide=wide))
        count += 1
    assert count == (2 - (loss_type == "vespo")) * 3 * len(deltas) * len(highs) * 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masks_entropy_and_modes(loss_type):
    """Entropy bonus (none, fixed, adaptive) x top-entropy quantile x off-policy mask x tool mask x KL x train and eval."""
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.9}
    count = 0
    for entropy, quantile, threshold, tool, kl, mode in itertools.product(
        [{}, {"entropy_coef": 0.01}, adaptive], [1.0, 0.4], [None, 0.05], [False, True], KL[:2], ["train", "eval"]
    ):
        fields = {"loss_type": loss_type, "top_entropy_quantile": quantile, **entropy, **kl}
        if threshold is not None:
            fields["off_policy_mask_threshold"] = threshold
        compare(fields, lambda tool=tool: rollout(seed=5, tool=tool), mode)
        count += 1
    assert count == 96


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("vllm", ["token_truncate", "sequence_mask"])
def test_vllm_weights(loss_type, vllm):
    """Importance weights for vLLM, by token and by sequence, with and without the off-policy mask on sampler log-probs."""
    for threshold in (None, 0.05):
        fields = {"loss_type": loss_type, "use_vllm": True, "vllm_importance_sampling_mode": vllm, "beta": 0.05}
        if threshold is not None:
            fields["off_policy_mask_threshold"] = threshold
        compare(fields, lambda: rollout(seed=7, vllm=vllm))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_accumulation(loss_type):
    """Four micro-batches with equal token counts: one optimizer step of TRL's is ours, metrics included."""
    lengths = [3, 3, 3, 3]
    fields = {"loss_type": loss_type, "gradient_accumulation_steps": 4, "beta": 0.05, "entropy_coef": 0.01}

    def make():
        batches = [rollout(seed=i, rows=4, lengths=lengths) for i in range(4)]
        for _, _, inputs in batches:
            inputs["num_items_in_batch"] = torch.tensor(48)
        return batches

    theirs, ours = make(), make()
    losses_trl, metrics_trl = trl_loss(fields, theirs)
    losses_plus, metrics_plus = plus_loss(fields, ours)
    sum(losses_trl).backward()
    sum(losses_plus).backward()
    close(sum(losses_plus).detach(), sum(losses_trl).detach(), "loss")
    for a, b in zip(ours, theirs, strict=True):
        close(a[0].grad, b[0].grad, "gradient", summands=1e-3)
        close(a[1].grad, b[1].grad, "entropy gradient", summands=1e-6)
    # TRL logs the policy loss of these three divided by the accumulation steps; ours is the optimizer step's for all.
    shrunk = loss_type in {"dapo", "cispo", "vespo"}
    for name in ("kl", "entropy", "policy_loss"):
        divisor = 1 if name == "policy_loss" and shrunk else 4
        assert metrics_plus[name] == pytest.approx([sum(metrics_trl[name]) / divisor], rel=2e-6), name


def test_cispo_in_trl_bounds_the_ratio_at_epsilon():
    """TRL's cispo without epsilon_high bounds the ratio at epsilon = 0.2; as long as loss_type names it, so do we."""
    fields = {"loss_type": "cispo"}
    compare(fields, lambda: rollout(seed=3))


def test_c5_trl_overflows_and_we_do_not():
    """C5: ref - logp = +100. TRL's loss is infinite; ours is finite with a finite gradient."""
    fields = {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}

    def make():
        logps, entropies, inputs = rollout(seed=1)
        inputs["ref_per_token_logps"][0, 0] = logps[0, 0].item() + 100
        return logps, entropies, inputs

    (theirs,), _ = trl_loss(fields, [make()])
    batch = make()
    (ours,), _ = plus_loss(fields, [batch])
    assert math.isinf(theirs.item())
    ours.backward()
    assert math.isfinite(ours.item())
    assert torch.isfinite(batch[0].grad).all()


def test_g1_trl_is_poisoned_by_a_masked_nan_and_we_are_not():
    """G1: NaN in an old log-prob at a masked position. TRL's loss is NaN; ours equals the clean one, bit for bit."""
    fields = {"loss_type": "dapo"}

    def make(poison):
        logps, entropies, inputs = rollout(seed=1)
        if poison:
            inputs["old_per_token_logps"][2, 4] = float("nan")
            assert inputs["completion_mask"][2, 4] == 0
        return logps, entropies, inputs

    (theirs,), _ = trl_loss(fields, [make(True)])
    dirty, clean = make(True), make(False)
    (ours,), _ = plus_loss(fields, [dirty])
    (expected,), _ = plus_loss(fields, [clean])
    ours.backward()
    expected.backward()
    assert math.isnan(theirs.item())
    assert ours.item() == expected.item()
    assert torch.equal(dirty[0].grad, clean[0].grad)


def test_a2_trl_normalizes_by_the_generation_batch_and_we_by_the_step():
    """A2: micro-batches of 1, 1, 9, 9 tokens, two to a step, A = 1, ratio 1: each step's loss is -1. TRL: -0.2 and -1.8."""
    fields = {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_generations": 2}

    def make():
        batches = [rollout(seed=i, rows=1, width=9, lengths=[n], old=False) for i, n in enumerate([1, 1, 9, 9])]
        for _, _, inputs in batches:
            inputs["advantages"] = torch.ones(1)
            inputs["num_items_in_batch"] = torch.tensor(20)
        return batches

    theirs, _ = trl_loss(fields, make())
    ours, metrics = plus_loss(fields, make())
    steps = [sum(losses[i : i + 2]).item() for losses in (theirs, ours) for i in (0, 2)]
    assert steps == pytest.approx([-0.2, -1.8, -1.0, -1.0], rel=1e-6)
    assert metrics["loss/policy"] == pytest.approx([-1.0, -1.0], rel=1e-6)
