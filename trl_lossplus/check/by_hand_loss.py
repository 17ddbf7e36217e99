"""From advantages to the loss by hand: one optimizer step, every number beside the trainer's."""

from __future__ import annotations

from typing import Any

from ..functional.errors import LossPlusError
from . import plain, plain_terms
from .by_hand_rollout import RolloutByHand, Settings, picked, whitening_keys
from .plain import Row
from .plain_advantages import whitened
from .plain_batch import BATCH_OBJECTIVES
from .record import Micro
from .table import Rows, Table

CLIPPED = ("ppo_clip", "gspo", "gspo_token", "luspo", "fipo", "rollout_ppo")


class StepCheck:
    """
    Goes through the micro-batches of one optimizer step.

    Args:
        rollouts: by their numbers. untrained: nothing has been trained since the rollout, so the critic's values are the old ones.
    """

    def __init__(
        self, s: Settings, table: Table, number: int, micros: list[Micro], rollouts: list[RolloutByHand], untrained: bool
    ):
        self.untrained, self.number = untrained, number
        self.s, self.table, self.micros, self.rollouts = s, table, micros, rollouts
        self.section = f"optimizer step {number + 1}"
        self.terms: dict[str, float] = {}
        self.scales: dict[str, float] = {}

    def run(self) -> None:
        """Compares the whole step."""
        rows = [self._rows(micro) for micro in self.micros]
        everything = [row for part in rows for row in part]
        if self.s.spec["advantage_normalization"] == "learner":
            keys = whitening_keys(
                self.s.spec["advantage_norm_scope"],
                [row["group"] for row in everything],
                [row["scored"] for row in everything],
                range(len(everything)),
            )
            for row, advantages in zip(everything, whitened([row["advantages"] for row in everything], keys), strict=True):
                row["advantages"] = advantages
        checks = [
            MicroCheck(self, micro, part, self._counts(micro, everything)) for micro, part in zip(self.micros, rows, strict=True)
        ]
        if self.s.objective in BATCH_OBJECTIVES and self.s.plain_loss is None:
            for check in checks:
                check.inputs()
            for row, losses in zip(everything, BATCH_OBJECTIVES[self.s.objective](everything, checks[0].clip_spec), strict=True):
                row["over_step"] = losses
        for check in checks:
            check.run()
        total, scale = sum(self.terms.values()), sum(self.scales.values())
        self.table.one(self.section, "loss of the step", sum(micro.loss for micro in self.micros), total, scale)

    def _rows(self, micro: Micro) -> list[Row]:
        """The micro-batch's rows, as far as the rollout decides them."""
        rollout, rows = self.rollouts[micro.rollout], []
        for k in micro.rows:
            kept = rollout.in_loss(k, self.s.spec)
            row: Row = {"row": k, "group": rollout.groups[k], "flat": rollout.flat[k], "scored": rollout.scored[k]}
            row["id"] = k + self.number * len(rollout.columns)
            row["dropped"] = not any(kept) and bool(kept)
            row["columns"] = [c for c, keep in zip(rollout.columns[k], kept, strict=True) if keep]
            sources = {
                "advantages": rollout.advantages,
                "rollout_weights": rollout.weights,
                "old_logps": rollout.old,
                "ref_logps": rollout.ref,
                "rollout_logps": rollout.sampled,
                "old_values": rollout.old_values,
                "returns": rollout.returns if rollout.old_values is not None else None,
            }
            for name, source in sources.items():
                if source is not None:
                    row[name] = [x for x, keep in zip(source[k], kept, strict=True) if keep]
            rows.append(row)
        return rows

    def _counts(self, micro: Micro, everything: list[Row]) -> dict[str, Any]:
        """What the step divides by, counted by hand."""
        if self.s.exact_windows:
            sized = [{**row, "logps": row["columns"]} for row in everything]
            return plain_terms.window_counts(sized, self.s.empty_rows)
        rollout = self.rollouts[micro.rollout]
        sized = []
        for k, group in enumerate(rollout.groups):
            kept = rollout.in_loss(k, self.s.spec)
            sized.append({"logps": [x for x in kept if x], "group": group, "dropped": not any(kept) and bool(kept)})
        counts = plain_terms.window_counts(sized, self.s.empty_rows)
        share = self.s.accumulation / self.s.micro_batches
        return {**counts, "tokens": counts["tokens"] * share, "rows": counts["rows"] * share}

    def add(self, name: str, value: float, scale: float) -> None:
        """One micro-batch's share of a term of the step."""
        self.terms[name] = self.terms.get(name, 0.0) + value
        self.scales[name] = self.scales.get(name, 0.0) + scale


class MicroCheck:
    """Goes through one micro-batch: what the loss read, then what it made of it."""

    def __init__(self, step: StepCheck, micro: Micro, rows: list[Row], counts: dict[str, Any]):
        self.step, self.s, self.table, self.micro, self.rows, self.counts = step, step.s, step.table, micro, rows, counts
        self.section, self._read = step.section, False
        self.rollout = step.rollouts[micro.rollout]
        self.columns = [row["columns"] for row in rows]
        self.spec = {**self.s.spec, "beta": self.s.spec["beta"] * self.rollout.kl_factor}
        if self.s.adaptive_entropy:
            self.spec["entropy_coef"] = micro.spec["entropy_coef"]
            self.table.given.append("the entropy coefficient (adaptive control)")

    def _tokens(self, quantity: str, theirs: Any, mine: Rows) -> Rows:
        return self.table.tokens(self.section, quantity, picked(theirs, self.columns), mine, self.micro.rows, self.columns)

    def run(self) -> None:
        """Compares everything."""
        self.inputs()
        self._window()
        self._ratios()
        self._selection()
        terms = {"policy": self._policy()}
        if self.s.kl_in("loss"):
            terms["kl"] = self._kl()
        if self.s.spec["entropy_coef"] != 0.0 or self.s.adaptive_entropy:
            terms["entropy"] = self._entropy()
        if self.s.spec["vf_coef"] != 0.0:
            terms["value"] = self._value()
        verified = {}
        for name, (value, scale) in terms.items():
            if self.micro.warming_up and name != "value":
                continue
            if name in self.micro.terms:
                verified[name] = self.table.one(self.section, f"{name} term", self.micro.terms[name], value, scale)
            elif value:
                verified[name] = self.table.one(self.section, f"{name} term", 0.0, value, scale)
            self.step.add(name, value, scale)
        scale = sum(terms[name][1] for name in verified)
        self.table.one(self.section, "total", self.micro.loss, sum(verified.values()), scale)

    def inputs(self) -> None:
        """Mask, log-probs, advantages and values as the loss read them, once."""
        if self._read:
            return
        self._read = True
        batch, width = self.micro.batch, len(self.micro.batch["mask"][0])
        mine = [[float(c in own) for c in range(width)] for own in self.columns]
        theirs = [[float(x) for x in row] for row in batch["mask"]]
        self.table.tokens(self.section, "mask", theirs, mine, self.micro.rows, [range(width)] * len(mine))
        logits, ids, temperature = self.micro.logits, self.micro.inputs["completion_ids"], self.s.temperature
        by_hand = {
            "logps": [
                [plain_terms.log_prob(logits[i][c], ids[i][c], temperature) for c in own] for i, own in enumerate(self.columns)
            ],
            "entropies": [[plain_terms.entropy(logits[i][c], temperature) for c in own] for i, own in enumerate(self.columns)],
        }
        self._take("log-probs", "logps", by_hand["logps"])
        if self.rollout.old is None:
            for row in self.rows:
                row["old_logps"] = row["logps"]
        words = {"old_logps": "old log-probs", "ref_logps": "reference log-probs", "advantages": "advantages"}
        words |= {"old_values": "old values", "returns": "returns", "rollout_weights": "rollout weights"}
        for name, quantity in words.items():
            if name in batch and name in self.rows[0]:
                self._take(quantity, name, [row[name] for row in self.rows])
        if "rollout_logps" in batch and self.rollout.sampled is not None:
            clean = [[0.0 if x is None else x for x in row["rollout_logps"]] for row in self.rows]
            theirs = [[0.0 if x != x else x for x in row] for row in batch["rollout_logps"]]
            self._tokens("sampler log-probs", theirs, clean)
        self._take("entropies", "entropies", by_hand["entropies"])
        for name in ("values", "token_weights", "rollout_weights"):
            if name in batch and not (name in self.rows[0] and name == "rollout_weights"):
                for row, values in zip(self.rows, picked(batch[name], self.columns), strict=True):
                    row[name] = values
                if name != "values":
                    self.table.given.append(name)
        if "values" in batch and self.step.untrained:
            self._take("values, before training", "values", [row["old_values"] for row in self.rows])

    def _take(self, quantity: str, name: str, mine: Rows) -> None:
        for row, values in zip(self.rows, self._tokens(quantity, self.micro.batch[name], mine), strict=True):
            row[name] = values

    def _window(self) -> None:
        """The optimizer step's counts."""
        window, exact = self.micro.window, self.s.exact_windows
        self.table.one(self.section, "window: tokens", window["num_tokens"], self.counts["tokens"])
        self.table.one(self.section, "window: rows", window["num_rows"], self.counts["rows"])
        if exact and self.spec["loss_aggregation"] == "prompt_mean":
            self.table.one(self.section, "window: prompts", window["num_prompts"], self.counts["prompts"])
            mine = [float(self.counts["group_tokens"][row["group"]]) for row in self.rows]
            self.table.rows(self.section, "window: prompt's tokens", window["group_tokens"], mine, self.micro.rows)

    def _ratios(self) -> None:
        per_token = self.micro.per_token
        self._tokens("log ratio", per_token["log_ratio"], [plain.differences(row) for row in self.rows])
        ratios = [plain.token_ratios(row, self.spec) for row in self.rows]
        self._tokens("ratio", per_token["ratio"], ratios)
        low, high = plain.epsilons(self.spec)
        flat = [r for row in ratios for r in row]
        self.table.reach("ratio other than 1", [abs(r - 1) > 1e-6 for r in flat])
        if self.s.objective in CLIPPED:
            pairs = list(zip(self.rows, map(lambda row: plain.clip_flags(row, self.clip_spec), self.rows), strict=True))
            self.table.reach(f"clipped below {1 - low:g}", [flag for _, (below, _) in pairs for flag in below])
            self.table.reach(f"clipped above {1 + high:g}", [flag for _, (_, above) in pairs for flag in above])
            self._clip_shares([below for _, (below, _) in pairs], [above for _, (_, above) in pairs])

    @property
    def clip_spec(self) -> dict[str, Any]:
        """The spec under the objective's own name."""
        return {**self.spec, "policy_loss": self.s.objective}

    def _clip_shares(self, below: list[list[bool]], above: list[list[bool]]) -> None:
        """The clip fractions: shares of the tokens, or of the rows where the loss has one value a row."""
        per_row = plain.is_sequence_level(self.clip_spec) and self.micro.shapes["advantages"][1] == 1
        for name, flags in (("low", below), ("high", above)):
            total, weight = self.micro.statistics.get(f"clip_ratio/{name}_mean", (0.0, 0.0))
            if not weight:
                continue
            one_a_row = per_row and self.micro.shapes["mask"][1] != 1
            hits = sum(any(row) for row in flags) if one_a_row else sum(map(sum, flags))
            count = sum(map(bool, flags)) if one_a_row else sum(map(len, flags))
            self.table.one(self.section, f"clip fraction {name}", total / weight, hits / max(count, 1))

    def _selection(self) -> None:
        """The high-entropy tokens; one that lies on the threshold may go either way."""
        if self.spec["top_entropy_quantile"] >= 1.0:
            return
        values = [h for row in self.rows for h in row["entropies"]]
        bound = plain_terms.quantile(values, 1 - self.spec["top_entropy_quantile"])
        theirs = picked(self.micro.batch["entropy_mask"], self.columns)
        mine = []
        for row, flags in zip(self.rows, theirs, strict=True):
            pairs = zip(row["entropies"], flags, strict=True)
            mine.append([float(flag if abs(h - bound) < 1e-6 else h >= bound) for h, flag in pairs])
        chosen = self.table.tokens(
            self.section, "entropy selection", [[float(x) for x in row] for row in theirs], mine, self.micro.rows, self.columns
        )
        for row, flags in zip(self.rows, chosen, strict=True):
            row["entropy_selected"] = [bool(x) for x in flags]

    def _aggregate(self, losses: Rows) -> tuple[float, float]:
        """The term by hand, and the size of what it was summed from."""
        groups = [row["group"] for row in self.rows]
        mode, length = self.spec["loss_aggregation"], self.spec["norm_length"]
        sizes = [[abs(x) for x in row] for row in losses]
        value, scale = (plain_terms.aggregate(mode, x, groups, self.counts, length) for x in (losses, sizes))
        return value, scale

    def _policy(self) -> tuple[float, float]:
        name, spec = self.s.objective, self.clip_spec
        theirs = self.micro.per_token["policy"]
        if self.s.plain_loss is not None:
            raw = [list(self.s.plain_loss(row, spec)) if row["logps"] else [] for row in self.rows]
            for losses, row in zip(raw, self.rows, strict=True):
                if len(losses) != len(row["logps"]):
                    raise LossPlusError(f"--plain returned {len(losses)} losses for a completion of {len(row['logps'])} tokens.")
        elif name in plain.OBJECTIVES:
            raw = [plain.OBJECTIVES[name](row, spec) for row in self.rows]
        elif name in BATCH_OBJECTIVES:
            raw = [row["over_step"] for row in self.rows]
        else:
            self.table.missing[f"policy_loss {name!r}"] = "give one with --plain module:function"
            return self._aggregate(picked(theirs, self.columns))
        mine = [plain_terms.weighted(losses, row, spec) for losses, row in zip(raw, self.rows, strict=True)]
        return self._aggregate(self._tokens("policy loss", theirs, mine))

    def _kl(self) -> tuple[float, float]:
        self.table.one(self.section, "KL coefficient", self.micro.spec["beta"], self.spec["beta"], 0.0)
        mine = [plain_terms.kl_in_loss(row, self.clip_spec) for row in self.rows]
        kl = self._tokens("KL", self.micro.per_token["kl"], mine)
        if self.spec["zero_std_groups"] == "no_kl":
            kl = [[0.0] * len(x) if row["flat"] else x for x, row in zip(kl, self.rows, strict=True)]
        value, scale = self._aggregate(kl)
        return self.spec["beta"] * value, self.spec["beta"] * scale

    def _entropy(self) -> tuple[float, float]:
        coef = self.spec["entropy_coef"]
        value = plain_terms.entropy_term(self.rows, self.counts["tokens"], coef)
        return value, abs(value)

    def _value(self) -> tuple[float, float]:
        mine = [plain_terms.value_losses(row, self.spec) for row in self.rows]
        losses = self._tokens("value loss", self.micro.per_token["value"], mine)
        value, scale = self._aggregate(losses)
        return self.spec["vf_coef"] * value, self.spec["vf_coef"] * scale
