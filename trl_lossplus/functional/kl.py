"""
KL estimators: per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

With d = logp - ref_logp of a token that the policy sampled:

    k1  = d                    unbiased value, high variance; as a loss its expected gradient is 0
    k2  = d^2 / 2              biased value; as a loss its expected gradient is that of the reverse KL
    k3  = exp(-d) + d - 1      unbiased, never negative; as a loss its gradient is that of the *forward* KL
    abs = |d|
    X+  = the value of X with the gradient of k2 (straight-through): the reverse KL's gradient, whatever the value

Sources: J. Schulman, "Approximating KL divergence" (2020) for k1, k2, k3; the gradients by exact expectation over a small
categorical distribution (tests/cases/test_kl_cases.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import fused
from .errors import LossPlusError, unknown_name


def k1(d: Tensor, clamp: float) -> Tensor:
    """d."""
    return d


def k2(d: Tensor, clamp: float) -> Tensor:
    """d^2 / 2."""
    return 0.5 * d**2


def k3(d: Tensor, clamp: float) -> Tensor:
    """exp(-d) + d - 1, where d is bounded below by -clamp: beyond it the value is constant and the gradient 0."""
    return fused.k3(d, clamp)


def absolute(d: Tensor, clamp: float) -> Tensor:
    """|d|."""
    return d.abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, float], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
BUILT_IN = frozenset(KL_ESTIMATORS)
KL_FORMULAS = {"k1": "d", "k2": "d^2 / 2", "k3": "exp(-d) + d - 1", "abs": "|d|"}
KL_ALIASES = {"kl": "k1", "kl_div": "k1", "mse": "k2", "biased_kl": "k2", "low_var_kl": "k3"}


def register_kl_estimator(
    name: str, *, formula: str = "", replace: bool = False
) -> Callable[[Callable[[Tensor, float], Tensor]], Callable[[Tensor, float], Tensor]]:
    """
    A decorator that makes a function of d = logp - ref_logp a `kl_estimator`, and returns it unchanged.

    The function takes d (B, T), connected to the policy, and `log_ratio_clamp`; it returns (B, T) in nats. `name` with a `+` has its
    value and the gradient of k2. As a loss its gradient is its own; nothing corrects it.

    Args:
        name: letters, digits and underscores. formula: shown by `trl-lossplus explain` and `list`. replace: allow a name of the
            user's that is taken.

    Raises:
        LossPlusError: a name that is taken, or that is none.
    """
    if not name.isidentifier():
        raise LossPlusError(f"kl_estimator {name!r}: a name has letters, digits and underscores (a + is added by itself).")
    if name in KL_ALIASES or name in BUILT_IN or (name in KL_ESTIMATORS and not replace):
        raise LossPlusError(f"kl_estimator {name!r} is registered already. Take another name.")

    def decorate(func: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, float], Tensor]:
        KL_ESTIMATORS[name] = func
        KL_FORMULAS[name] = formula or (func.__doc__ or "").strip()
        return func

    return decorate


def kl_names() -> list[str]:
    """Every accepted name, aliases and straight-through forms included."""
    plain = [*KL_ESTIMATORS, *KL_ALIASES]
    return [*plain, *(f"{name}+" for name in plain)]


def canonical_kl(name: str) -> str:
    """
    The canonical name of an estimator: aliases resolved, and `k2+` (whose gradient is k2's own) given as `k2`.

    Raises:
        LossPlusError: the name is not known; lists the allowed ones.
    """
    plain, plus = (name[:-1], "+") if isinstance(name, str) and name.endswith("+") else (name, "")
    plain = KL_ALIASES.get(plain, plain) if isinstance(name, str) else ""
    if plain not in KL_ESTIMATORS:
        raise unknown_name("kl_estimator", name, kl_names(), unlikely=("kl", "kl+"))  # "k4" is near "kl"
    return "k2" if plain == "k2" else plain + plus


def estimate_kl(name: str, logps: Tensor, ref_logps: Tensor, *, log_ratio_clamp: float = 20.0) -> Tensor:
    """
    Per-token KL estimate, connected to `logps`.

    Args:
        name: k1, k2, k3, abs, any of them with `+` for the straight-through gradient, or an alias (kl, kl_div, mse,
            biased_kl, low_var_kl).
        logps, ref_logps: (B, T) log-probs in nats of the sampled tokens; computed in float32. `ref_logps` is a constant.
        log_ratio_clamp: the log ratio is bounded by this before exp (k3 only), so that the value stays finite.

    Returns:
        (B, T) float32, in nats.

    Raises:
        LossPlusError: unknown name.

    Source: see the head of this file; the `+` forms as in verl's `kl_penalty`. verl and OpenRLHF also clamp the values at 10,
    where the gradient of k3 vanishes; this does not.
    """
    canonical = canonical_kl(name)
    d = logps.float() - ref_logps.detach().float()
    if not canonical.endswith("+"):
        return KL_ESTIMATORS[canonical](d, log_ratio_clamp)
    value = KL_ESTIMATORS[canonical[:-1]](d.detach(), log_ratio_clamp)
    gradient = k2(d, log_ratio_clamp)
    return value + (gradient - gradient.detach())
