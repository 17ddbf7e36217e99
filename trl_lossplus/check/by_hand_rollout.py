"""From rewards to advantages by hand: one rollout, every number beside the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import plain_advantages as adv
from .plain import Spec, kept_tokens
from .plain_terms import adaptive_coefficient, kl_estimates, log_prob, rollout_weights, squared_sum
from .record import Draw, Rollout
from .sampler import Completion
from .table import Rows, Table


@dataclass
class Settings:
    """What a configuration says, in plain words: the loss, and the few fields around it that decide numbers."""

    spec: Spec
    estimator_options: dict[str, Any]
    estimator: str
    objective: str
    num_generations: int
    reward_weights: list[float]
    temperature: float
    accumulation: int
    micro_batches: int
    exact_windows: bool
    empty_rows: bool
    mask_truncated: bool
    ends: list[int]
    pad: int
    missing_eos_penalty: float = 0.0
    bootstrap: bool = False
    adaptive_entropy: bool = False
    plain_loss: Callable[..., Any] | None = None
    plain_estimator: Callable[..., Any] | None = None
    token_level: bool = False
    rejects: bool = False
    weights: tuple[str, float | None, float | None] | None = None  # mode, and the bounds of the rollout weights

    def kl_in(self, place: str) -> bool:
        """Whether a KL acts in the loss or in the reward."""
        coefficient = self.spec["beta"] if place == "loss" else self.spec["kl_reward_coef"]
        return self.spec["kl_placement"] in (place, "both") and coefficient != 0


@dataclass
class RolloutByHand:
    """What the loss needs of a rollout, row by row over each row's own tokens."""

    section: str
    columns: list[list[int]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    flat: list[bool] = field(default_factory=list)
    scored: list[bool] = field(default_factory=list)
    logps: Rows = field(default_factory=list)
    old: Rows | None = None
    ref: Rows | None = None
    sampled: list[list[float | None]] | None = None
    old_values: Rows | None = None
    returns: Rows | None = None
    advantages: Rows = field(default_factory=list)
    kl_factor: float = 1.0
    kept: list[list[bool]] | None = None
    weights: Rows | None = None

    def in_loss(self, k: int, spec: Spec) -> list[bool]:
        """Which own tokens of a row are in the loss: all, but for what is rejected and for groups that are dropped."""
        if spec["zero_std_groups"] == "drop" and self.flat[k]:
            return [False] * len(self.columns[k])
        return [True] * len(self.columns[k]) if self.kept is None else self.kept[k]


def picked(tensor: Any, columns: Sequence[Sequence[int]]) -> Any:
    """The values (B, T), or (B, 1) repeated, at each row's own columns."""
    return [[row[0] if len(row) == 1 else row[c] for c in own] for row, own in zip(tensor, columns, strict=True)]


def ended(row: Completion, s: Settings) -> bool:
    """Whether a completion ends with an end token."""
    return row.ids[-1] in s.ends


def own_columns(row: Completion, s: Settings) -> list[int]:
    """The columns of a completion's own tokens; none of one that was cut off, where those are masked."""
    cut_off = s.mask_truncated and row.ids[-1] not in (*s.ends, s.pad)
    return [] if cut_off else [c for c, own in enumerate(row.own) if own]


def flat_rows(columns: Sequence[Sequence[float | None]], groups: Sequence[int], s: Settings) -> list[bool]:
    """Whether each row's group is flat; `columns` holds the rewards of each row, one a reward function."""
    if s.estimator != "gdpo":
        return adv.flat_groups(adv.summed(columns, s.reward_weights), groups)
    by_column = [adv.flat_groups([row[k] for row in columns], groups) for k in range(len(columns[0]))]
    return [all(flags) for flags in zip(*by_column, strict=True)]


def known(rewards: Any) -> list[list[float | None]]:
    """Rewards with None for NaN."""
    return [[None if x != x else x for x in row] for row in rewards]


def kept(draws: Sequence[Draw], s: Settings) -> Draw:
    """What the rollout is made of: the first draw, its flat groups replaced in turn by the later draws' groups with spread."""
    places: list[Draw] = []
    spare: list[Draw] = []
    is_flat: list[bool] = []
    for number, draw in enumerate(draws):
        rows = range(len(draw.completions))
        flat = flat_rows(known(draw.rewards), [i // s.num_generations for i in rows], s)
        for i in rows[:: s.num_generations]:
            group = Draw(draw.completions[i : i + s.num_generations], draw.rewards[i : i + s.num_generations])
            if number == 0:
                places.append(group)
                is_flat.append(flat[i])
            elif not flat[i]:
                spare.append(group)
    chosen = [spare.pop(0) if flat and spare else group for group, flat in zip(places, is_flat, strict=True)]
    return Draw([row for group in chosen for row in group.completions], [row for group in chosen for row in group.rewards])


class RolloutCheck:
    """Goes through one rollout. `coefficient` is the KL coefficient as the controller left it after the rollout before."""

    def __init__(self, s: Settings, table: Table, event: Rollout, coefficient: float):
        self.s, self.table, self.event = s, table, event
        self.coefficient = coefficient
        self.kept = kept(event.draws, s)
        self.completions = self.kept.completions
        self.rows = list(range(len(self.completions)))
        self.out = RolloutByHand(f"rollout {event.number + 1}")

    def run(self) -> RolloutByHand:
        """The rollout by hand; `coefficient` is then the one for the next rollout."""
        out = self.out
        configured = (self.s.spec["beta"] if self.s.kl_in("loss") else self.s.spec["kl_reward_coef"]) or 1.0
        out.kl_factor = self.coefficient / configured
        self._masks()
        self._log_probs()
        self._correction()
        kl = self._kl()
        totals = self._rewards(kl)
        per_token_kl = kl if self.s.kl_in("reward") and self.s.spec["kl_reward_level"] == "token" else None
        if self.s.token_level:
            self._token_level(totals, per_token_kl)
        else:
            self._sequence_level(totals, per_token_kl)
        tensor = self.event.tensors["advantages"]
        theirs = picked([[x] for x in tensor] if tensor and not isinstance(tensor[0], list) else tensor, out.columns)
        out.advantages = self._tokens("advantages", theirs, out.advantages)
        if self.s.spec["advantage_normalization"] == "rollout":  # seen next where the loss reads them
            keys = whitening_keys(self.s.spec["advantage_norm_scope"], out.groups, out.scored, self.rows)
            out.advantages = self._whitened(keys)
        return out

    def _tokens(self, quantity: str, theirs: Rows, mine: Rows) -> Rows:
        return self.table.tokens(self.out.section, quantity, theirs, mine, self.rows, self.out.columns)

    def _masks(self) -> None:
        s, out, width = self.s, self.out, len(self.event.tensors["completion_ids"][0])
        out.groups = [i // s.num_generations for i in self.rows]
        self.table.rows(out.section, "prompt's number", self.event.tensors["group_ids"], out.groups, self.rows)
        out.columns = [own_columns(row, s) for row in self.completions]
        mine = [[float(c in own) for c in range(width)] for own in out.columns]
        theirs = [[float(x) for x in row] for row in self.event.tensors["loss_mask"]]
        self.table.tokens(out.section, "mask", theirs, mine, self.rows, [range(width)] * len(mine))

    def _log_probs(self) -> None:
        s, out, tensors = self.s, self.out, self.event.tensors

        def by_hand(logits: Any) -> Rows:
            return [
                [log_prob(logits[i][c], self.completions[i].ids[c], s.temperature) for c in own]
                for i, own in enumerate(out.columns)
            ]

        out.logps = by_hand(self.event.logits)
        if "old_per_token_logps" in tensors:
            out.old = self._tokens("old log-probs", picked(tensors["old_per_token_logps"], out.columns), out.logps)
        if "ref_per_token_logps" in tensors:
            theirs = picked(tensors["ref_per_token_logps"], out.columns)
            if self.event.ref_logits is None:
                self.table.given.append("the reference's log-probs (an adapter that moves)")
            mine = theirs if self.event.ref_logits is None else by_hand(self.event.ref_logits)
            out.ref = self._tokens("reference log-probs", theirs, mine)
        if self.completions[0].logprobs is not None:
            out.sampled = [
                [row.logprobs[c] if row.logprobs else None for c in own]
                for row, own in zip(self.completions, out.columns, strict=True)
            ]
        if "old_values" in tensors:
            out.old_values = picked(tensors["old_values"], out.columns)
            self.table.given.append("the critic's values (its forward pass)")

    def _correction(self) -> None:
        """What is rejected, and the weights against the sampler."""
        s, out = self.s, self.out
        if out.sampled is None:
            return
        rows = [
            {"logps": a, "rollout_logps": b} for a, b in zip(out.logps if out.old is None else out.old, out.sampled, strict=True)
        ]
        if s.rejects:
            mine = [[float(x) for x in kept_tokens(row, s.spec)] for row in rows]
            theirs = [[float(x) for x in row] for row in self.event.tensors["sampler_keep"]]
            out.kept = [[bool(x) for x in row] for row in self._tokens("kept tokens", picked(theirs, out.columns), mine)]
        if s.weights is not None:
            mine = rollout_weights(rows, *s.weights, s.spec["log_ratio_clamp"], s.spec["rollout_is_batch_normalize"])
            theirs = picked(self.event.tensors["importance_sampling_ratio"], out.columns)
            out.weights = self._tokens("rollout weights", theirs, mine)

    def _whitened(self, keys: list[Any]) -> Rows:
        """Whitened over the tokens that are not rejected, which become 0."""
        kept = self.out.kept or [[True] * len(row) for row in self.out.advantages]
        inside = [[a for a, k in zip(row, keep, strict=True) if k] for row, keep in zip(self.out.advantages, kept, strict=True)]
        white = [iter(row) for row in adv.whitened(inside, keys)]
        return [[next(row) if k else 0.0 for k in keep] for row, keep in zip(white, kept, strict=True)]

    def _kl(self) -> Rows | None:
        """KL of each token at the rollout, and the adaptive coefficient's next value."""
        s, out = self.s, self.out
        adaptive = s.spec["kl_controller"] == "adaptive"
        if not (s.kl_in("reward") or adaptive):
            return None
        assert out.ref is not None
        logps = out.logps if out.old is None else out.old
        name, bound = s.spec["kl_estimator"], s.spec["log_ratio_clamp"]
        mine = [kl_estimates(name, a, b, bound) for a, b in zip(logps, out.ref, strict=True)]
        kl = self._tokens("KL at the rollout", picked(self.event.steps["kl"], out.columns), mine)
        tokens = sum(len(row) for row in kl)
        if adaptive and tokens:
            mean = sum(sum(row) for row in kl) / tokens
            self.coefficient = adaptive_coefficient(self.coefficient, mean, len(kl), s.spec)
        return kl

    def _rewards(self, kl: Rows | None) -> list[float | None]:
        """One reward a completion, less its penalties."""
        s, out = self.s, self.out
        columns = known(self.event.rewards)
        for k, pair in enumerate(zip(zip(*columns, strict=True), zip(*known(self.kept.rewards), strict=True), strict=True)):
            if len(self.event.draws) > 1:
                theirs, mine = ([x or 0.0 for x in column] for column in pair)
                self.table.rows(out.section, f"reward {k + 1} of the kept groups", theirs, mine, self.rows)
        totals = adv.summed(columns, s.reward_weights)
        out.scored = [x is not None for x in totals]
        out.flat = flat_rows(columns, out.groups, s)
        self.table.rows(out.section, "group without spread", self.event.tensors["flat"], out.flat, self.rows)
        coefficient = s.spec["kl_reward_coef"] * out.kl_factor
        for i, row in enumerate(self.completions):
            total = totals[i]
            if total is not None and kl is not None and s.kl_in("reward") and s.spec["kl_reward_level"] == "sequence":
                total -= coefficient * sum(kl[i])
            cut_off = not ended(row, s) or (s.mask_truncated and not out.columns[i])
            if total is not None and s.missing_eos_penalty and cut_off:
                total -= s.missing_eos_penalty
            totals[i] = total
        ids = [i for i in self.rows if totals[i] is not None]
        theirs, mine = [self.event.steps["total_rewards"][i] for i in ids], [totals[i] for i in ids]
        verified = self.table.rows(out.section, "reward", theirs, [float(x or 0.0) for x in mine], ids)
        for i, value in zip(ids, verified, strict=True):
            totals[i] = value
        return totals

    def _sequence_level(self, totals: list[float | None], kl: Rows | None) -> None:
        s, out = self.s, self.out
        options = {**s.estimator_options, "scale_rewards": s.spec["scale_rewards"], "reward_weights": s.reward_weights}
        options["lengths"] = [len(own) for own in out.columns]
        theirs = self.event.steps["sequence_advantages"]
        estimate = s.plain_estimator or adv.SEQUENCE_ESTIMATORS.get(s.estimator)
        if estimate is None:
            self._no_plain_version()
            mine = theirs
        else:
            columns = [[None if x != x else x for x in row] for row in self.event.rewards]
            mine = estimate(columns if s.estimator == "gdpo" else totals, out.groups, options)
        values = self.table.rows(out.section, "advantage of the row", theirs, mine, self.rows)
        out.advantages = [[a] * len(own) for a, own in zip(values, out.columns, strict=True)]
        if kl is not None:
            coefficient = s.spec["kl_reward_coef"] * out.kl_factor
            out.advantages = [adv.less_kl_to_go(a, k, coefficient) for a, k in zip(out.advantages, kl, strict=True)]

    def _token_level(self, totals: list[float | None], kl: Rows | None) -> None:
        s, out, steps = self.s, self.out, self.event.steps
        coefficient = s.spec["kl_reward_coef"] * out.kl_factor
        mine = [
            adv.token_rewards(totals[i], None if kl is None else kl[i], coefficient, len(own))
            for i, own in enumerate(out.columns)
        ]
        if s.spec["whiten_rewards"]:
            mine = adv.whitened(mine, [0] * len(mine), keep_mean=True)
        rewards = self._tokens("token rewards", picked(steps["token_rewards"], out.columns), mine)
        pairs = self._estimated(rewards)
        values = out.old_values
        for i, scored in enumerate(out.scored):
            if not scored and pairs is not None:
                pairs[i] = ([0.0] * len(out.columns[i]), values[i] if values is not None else pairs[i][1])
        theirs = [picked(steps[name], out.columns) for name in ("token_advantages", "returns")]
        advantages, returns = theirs if pairs is None else ([a for a, _ in pairs], [r for _, r in pairs])
        out.advantages = self._tokens("advantages, raw", theirs[0], advantages)
        out.returns = self._tokens("returns", theirs[1], returns)

    def _estimated(self, rewards: Rows) -> list[tuple[list[float], list[float]]] | None:
        """(advantages, returns) of each row by the estimator; None where it has no plain version."""
        s, out, tensors = self.s, self.out, self.event.tensors
        rows: list[dict[str, Any]] = []
        squares, baselines = self._squares(), self._baselines()
        for i, own in enumerate(out.columns):
            row: dict[str, Any] = {"rewards": rewards[i], "places": own, "scored": out.scored[i]}
            if out.old_values is not None:
                row["values"] = out.old_values[i]
                cut_off = not ended(self.completions[i], s) or (s.mask_truncated and not own)
                row["next_value"] = tensors["next_values"][i] if s.bootstrap and cut_off else 0.0
            row["old_logps"] = (out.logps if out.old is None else out.old)[i]
            if squares is not None:
                row["sum_pi_squared"] = squares[i]
            if baselines is not None:
                row["reward_baseline"] = baselines[i]
            rows.append(row)
        if s.plain_estimator is not None:
            return [s.plain_estimator(row, s.estimator_options) for row in rows]
        if s.estimator in adv.GROUP_TOKEN_ESTIMATORS:
            return adv.GROUP_TOKEN_ESTIMATORS[s.estimator](rows, out.groups, s.estimator_options)
        if s.estimator in adv.TOKEN_ESTIMATORS:
            return [adv.TOKEN_ESTIMATORS[s.estimator](row, s.estimator_options) for row in rows]
        self._no_plain_version()
        return None

    def _squares(self) -> Rows | None:
        """Sum over the vocabulary of the squared probabilities at each token, where the estimator reads it."""
        if "sum_pi_squared" not in self.event.tensors:
            return None
        mine = [[squared_sum(self.event.logits[i][c], self.s.temperature) for c in own] for i, own in enumerate(self.out.columns)]
        return self._tokens("sum of squared probabilities", picked(self.event.tensors["sum_pi_squared"], self.out.columns), mine)

    def _baselines(self) -> list[float | None] | None:
        """The reward of each row's greedy completion, where the estimator reads it."""
        if "reward_baselines" not in self.event.tensors:
            return None
        self.table.given.append("each function's reward of the greedy completions")
        totals = adv.summed(known([self.event.greedy[row.prompt] for row in self.completions]), self.s.reward_weights)
        ids = [i for i in self.rows if totals[i] is not None]
        theirs, mine = [self.event.tensors["reward_baselines"][i] for i in ids], [totals[i] or 0.0 for i in ids]
        verified = self.table.rows(self.out.section, "reward of the greedy completion", theirs, mine, ids)
        return [dict(zip(ids, verified, strict=True)).get(i) for i in self.rows]

    def _no_plain_version(self) -> None:
        name = self.s.estimator
        self.table.missing[f"advantage_estimator {name!r}"] = "give one with --plain_estimator module:function"


def whitening_keys(scope: str, groups: Sequence[int], scored: Sequence[bool], rows: Sequence[int]) -> list[Any]:
    """Which rows are whitened together: equal keys; None for a row that is not scored."""
    keys = [0] * len(groups) if scope == "batch" else list(groups) if scope == "group" else list(rows)
    return [key if ok else None for key, ok in zip(keys, scored, strict=True)]
