"""What other frameworks call a loss or an estimator, and the settings that give it here."""

from __future__ import annotations

from typing import Any, NamedTuple


class Elsewhere(NamedTuple):
    """A framework's name for something, and ours: configuration fields and their values, or None with the reason."""

    framework: str
    name: str
    settings: dict[str, Any] | None
    note: str = ""


ROLLOUT = "log-probs of the sampler: vLLM, or a rollout_func that returns them"
STATES = "compares turns that start in the same state of an environment, which no TRL dataset holds"
TEACHER = "distillation from a teacher: TRL has trainers for it"


def _rows(framework: str, *rows: tuple[Any, ...]) -> list[Elsewhere]:
    return [Elsewhere(framework, *row) for row in rows]


def policy(name: str, **fields: Any) -> dict[str, Any]:
    """Settings with an objective."""
    return {"policy_loss": name, **fields}


def advantages(name: str, **fields: Any) -> dict[str, Any]:
    """Settings with an estimator."""
    return {"advantage_estimator": name, **fields}


ELSEWHERE: list[Elsewhere] = [
    *_rows(
        "TRL",
        ("loss_type grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo", {"loss_type": "dapo"}, "the same field"),
        ("experimental: gmpo, gspo_token", policy("gmpo"), "and gspo_token"),
        ("multi_objective_aggregation normalize_then_sum", advantages("gdpo"), "or the same field"),
        ("experimental: a2po", None, "a regression on values estimated beforehand: a trainer of its own in TRL"),
    ),
    *_rows(
        "verl",
        ("vanilla", policy("ppo_clip", clip_ratio_c=3.0)),
        ("dppo_tv, dppo_kl", policy("dppo_tv", dppo_ratio_max=3.0), "documented as 20, read as 3"),
        (
            "gspo",
            policy("gspo_token", loss_aggregation="token_mean"),
            "its gradient is by token; the aggregation is the caller's",
        ),
        ("sapo, gpg, clip_cov, kl_cov", policy("sapo"), "the same names"),
        ("geo_mean", policy("gmpo")),
        ("dro", policy("dro", dro_beta=0.1), "has no default for its beta"),
        (
            "cispo",
            policy("cispo", cispo_ratio_min=0.8, epsilon_high=1.2),
            "its range is a distance from 1, here it is the ratio's",
        ),
        ("bypass_mode ppo_clip", policy("rollout_ppo", clip_ratio_c=3.0), ROLLOUT),
        ("bypass_mode reinforce", policy("rollout_is", importance_sampling_level="sequence"), ROLLOUT),
        ("rollout_is, rollout_rs", {"rollout_is_correction": True}, "see sampler.md"),
        ("grpo, grpo_vectorized", advantages("grpo")),
        ("grpo with norm_adv_by_std_in_grpo false", advantages("grpo", scale_rewards="none")),
        ("gae, gdpo, grpo_passk, opo, remax", advantages("gae"), "the same names"),
        ("rloo, rloo_vectorized", advantages("rloo")),
        ("reinforce_plus_plus, reinforce_plus_plus_baseline", advantages("reinforce_plus_plus"), "the same names"),
        ("gpg", advantages("gpg", alpha_from="nonzero")),
        (
            "optimal_token_baseline, tir_optimal_token_baseline",
            advantages("optimal_token_baseline", handle_zero_tail=True),
            "the same names",
        ),
    ),
    *_rows(
        "OpenRLHF",
        ("policy_loss_type ppo", policy("ppo_clip")),
        ("policy_loss_type gspo", policy("gspo")),
        ("reinforce", advantages("reinforce_plus_plus")),
        ("reinforce_baseline", advantages("reinforce_plus_plus_baseline")),
        ("group_norm", advantages("grpo")),
        ("dr_grpo", advantages("grpo", scale_rewards="none")),
        ("gae, rloo", advantages("rloo"), "the same names; rloo is not whitened there either"),
    ),
    *_rows(
        "NeMo-RL",
        ("ClippedPGLoss", policy("ppo_clip")),
        ("disable_ppo_ratio", policy("reinforce")),
        ("sequence_level_importance_ratios", policy("gspo")),
        ("use_cispo", policy("cispo", cispo_ratio_min=0.8, epsilon_high=1.2)),
        ("ratio_clip_c", policy("ppo_clip", clip_ratio_c=3.0)),
        ("force_on_policy_ratio", {"num_iterations": 1}, "one update a rollout: old log-probs are not computed"),
        ("truncated_importance_sampling_type tis, icepop, seq-mask-tis", {"rollout_is_correction": True}, "see sampler.md"),
        ("grpo", advantages("rloo"), "with its leave-one-out baseline, before the std divides it"),
        ("gdpo", advantages("gdpo")),
        ("reinforce_plus_plus with minus_baseline", advantages("reinforce_plus_plus_baseline")),
        ("raw reward", advantages("reinforce_plus_plus", advantage_normalization="none")),
        ("gae with gae_lambda_value", advantages("gae", gae_lambda_critic=1.0)),
        ("gae with length_adaptive_alpha (VAPO)", None, "a lambda for each row by its length; here one gae_lambda for all"),
        ("positive_example_nll_weight (VAPO)", None, "a supervised term beside the loss, with a normalizer of its own"),
        ("opd", None, TEACHER),
    ),
    *_rows(
        "SkyRL",
        ("regular", policy("ppo_clip")),
        ("dual_clip", policy("ppo_clip", clip_ratio_c=3.0)),
        ("gspo, sapo, clip_cov, kl_cov", policy("gspo"), "the same names"),
        ("cispo", policy("cispo", epsilon_high=5.0)),
        ("dppo", policy("dppo_tv"), "and dppo_kl; measured from the sampler there"),
        ("rollout_is", policy("rollout_is", is_mode="mask", is_ratio_min=0.8, is_ratio_max=1.2), ROLLOUT),
        ("cispo with cispo_anchor rollout", policy("rollout_is", is_ratio_max=5.0), ROLLOUT),
        ("importance_sampling", policy("tis", is_ratio_max=None), "the gradient of r A"),
        ("reinforce++", advantages("reinforce_plus_plus")),
        ("loop", advantages("rloo")),
        ("gae, grpo, rloo, maxrl", advantages("maxrl"), "the same names"),
        ("cross_entropy", None, "supervised: TRL's SFTTrainer"),
    ),
    *_rows(
        "ms-swift",
        ("loss_type grpo, bnpo, dr_grpo, dapo, cispo, sapo", {"loss_type": "dapo"}, "the same field"),
        ("fipo, real", policy("fipo"), "the same names"),
        ("importance_sampling_level sequence, sequence_token", policy("gspo"), "and gspo_token"),
        ("reinforce_plus_plus", advantages("reinforce_plus_plus_baseline"), "it takes off the group's mean first"),
        ("scale_rewards gdpo", advantages("gdpo")),
        ("CHORD", None, "mixes a supervised loss on expert data in"),
    ),
    *_rows(
        "prime-rl",
        ("default (DPPO and KL)", policy("ipo", ipo_by_sign=True, ipo_threshold=0.2), "measured from the sampler there"),
        ("ipo", policy("ipo", ipo_threshold=0.1), "measured from the sampler there"),
        ("grpo", advantages("grpo", scale_rewards="none")),
        ("max_rl", advantages("maxrl")),
        ("rae, hierarchical_grpo", None, "credit between several agents of one environment"),
        ("opd, opsd, sft, echo", None, TEACHER),
    ),
    *_rows(
        "AReaL",
        ("ppo, decoupled", policy("ppo_clip", rollout_is_correction=True), ROLLOUT),
        ("prox_logp_method loglinear", None, "guesses the old log-probs between two versions; here a forward pass computes them"),
        ("use_sapo_loss", policy("sapo")),
        ("importance_sampling_level sequence", policy("gspo")),
        ("m2_threshold", policy("m2po"), "on the sampler's ratio and over all tokens there"),
        ("adv_norm: mean_level group, std_level null, batch", advantages("grpo", scale_rewards="batch"), "or none"),
        ("adv_norm: mean_leave1out", advantages("rloo")),
    ),
    *_rows(
        "slime",
        ("grpo", policy("ppo_clip"), "with advantage_estimator grpo"),
        ("gspo", policy("gspo")),
        ("cispo", policy("cispo", epsilon_high=5.0)),
        ("eps-clip-c", policy("ppo_clip", clip_ratio_c=3.0)),
        ("use-opsm", {"off_policy_mask_threshold": 1e-4}),
        ("reinforce_plus_plus, reinforce_plus_plus_baseline", advantages("reinforce_plus_plus"), "the same names"),
        ("ppo", advantages("gae")),
    ),
    *_rows(
        "ROLL",
        ("pg_variant vanilla", policy("reinforce")),
        ("pg_variant ppo, dual_clip_loss", policy("ppo_clip", clip_ratio_c=1.4), "1 + 2 pg_clip"),
        ("pg_variant tis", policy("tis", is_ratio_max=1.0)),
        ("pg_variant topr", policy("topr"), "by the sign of the reward there"),
        ("pg_variant cispo", policy("cispo", cispo_ratio_min=0.9, epsilon_high=1.1)),
        ("pg_variant kimi15", policy("dro", dro_beta=0.1)),
        ("reinforce", advantages("reinforce_plus_plus", advantage_normalization="none")),
        ("gae, grpo", advantages("grpo"), "the same names"),
        ("gigpo, step_reinforce, agentic_reinforce", None, STATES),
    ),
    *_rows(
        "Trinity-RFT",
        ("ppo, gspo, topr, cispo, sapo", policy("topr"), "the same names (ppo: ppo_clip)"),
        ("sppo", policy("sppo", epsilon=0.3)),
        ("rec, clip_mode one-side, two-side, ring", policy("rec", rec_clip="ring"), "one_side, two_side, ring or none"),
        ("rec, clip_mode none", policy("reinforce")),
        ("rec, weight importance_sampling", policy("rec", rec_weight="importance"), "one_side has PPO's gradient"),
        ("rec, weight truncated_importance_sampling", policy("tis", is_ratio_min=0.4, is_ratio_max=3.0), "with clip_mode none"),
        (
            "rec, clip_mode gspo-one-side, weight gspo_importance_sampling",
            policy("rec", rec_weight="importance", importance_sampling_level="sequence", loss_aggregation="seq_mean_token_mean"),
        ),
        ("rec, weight advantage, temp 1 (RED-Weight)", policy("rec", rec_clip="none", rec_weight="advantage")),
        ("rec, regularizer k2, coefficient c", policy("dro", dro_beta=0.2), "dro_beta = 2 c, with clip_mode none"),
        ("rec, regularizer forward-kl, coefficient .1", policy("reinforce", advantage_estimator="asymre"), "asymre_shift = -c"),
        ("opmd", policy("reinforce", scale_rewards="none"), "its 1 / (1 + tau) is a factor on the learning rate"),
        ("importance_sampling", policy("tis", is_ratio_max=None)),
        ("m2po", policy("m2po")),
        ("opmd with opmd_baseline logavgexp", advantages("opmd")),
        ("asymre", advantages("asymre")),
        ("rec with std_normalize false", advantages("grpo", scale_rewards="none")),
        (
            "rec with drop balance (RED-Drop)",
            None,
            "draws completions to leave out by their place; weigh them with token_weight_func",
        ),
        ("grpo, rloo, remax, reinforceplusplus", advantages("rloo"), "the same names"),
        ("reinforce", advantages("reinforce_plus_plus", advantage_normalization="none")),
        (
            "clipb, clipv (2602.03392)",
            None,
            "leave out tokens by p (H + log p) against its spread over batch or vocabulary; near: clip_cov, kl_cov",
        ),
        ("gigpo, step_wise_grpo, cod", None, STATES),
        ("mix, mix_chord, sft, dpo, on_policy_distill, jsd", None, TEACHER),
    ),
]


def written(settings: dict[str, Any]) -> str:
    """Settings as they stand in YAML, in one line."""
    words = {True: "true", False: "false", None: "null"}
    return ", ".join(
        f"{name}: {words.get(value, value) if isinstance(value, bool | None) else value}" for name, value in settings.items()
    )
