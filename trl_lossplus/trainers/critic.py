"""
Critics: a scalar head on a second LoRA adapter, on the policy's own trunk, or on a model of its own.

Each critic lives inside the policy's module, so that accelerate prepares one engine: one DDP, ZeRO or FSDP wrapper, one
backward pass. A value belongs to the state before a token: with a prompt of P tokens, token t's value is read at position P - 1 + t.

New heads are drawn with standard deviation 0.1 / sqrt(hidden size), so first values are of order 0.1 and the trunk gets a
gradient from the first step.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from ..functional.errors import LossPlusError
from .adapters import active_adapter, adapters_of, base_of, by_row, keep_adapter_in_recomputation
from .files import broken, broken_tensors, read_tensors
from .minibatch import MicroBatch
from .packing import Packing
from .segment_attention import install, packed_rows
from .sharded import restore
from .value_pass import at_tokens, checkpointed_layers, keeping, whole

ADAPTER = "critic"
# The name holds `lora_`, by which TRL tells what is not part of the model that vLLM serves.
HEAD = "lora_value_head"
MODEL = "critic_model"
HEAD_FILE = "value_head.safetensors"


def new_head(hidden_size: int, like: Tensor) -> nn.Linear:
    """A scalar head without bias, of the dtype and device of `like`; see the head of this file for its scale."""
    head = nn.Linear(hidden_size, 1, bias=False, dtype=like.dtype, device=like.device)
    nn.init.normal_(head.weight, std=0.1 / hidden_size**0.5)
    return head


def hidden_size(model: nn.Module) -> int:
    """Width of the last hidden states."""
    return model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]


def trunk_of(model: nn.Module) -> nn.Module:
    """The policy's layers, without its LM head."""
    return base_of(model).base_model  # type: ignore[return-value]


class Critic:
    """
    What the three critics have in common: a `role="critic"` of the policy module's forward.

    Its forward takes what the policy's layers take, padded or packed rows, and gives float32 values at every position: (B, P + C) or (1, N).

    checkpointing: which layers of the critic's own pass are recomputed where the policy's are. None: all but the last.
    """

    kind = ""

    def __init__(self, policy: nn.Module, checkpointing: bool | None = None):
        self.policy = policy
        self.checkpointing = checkpointing

    def forward(self, **inputs: Any) -> Tensor:
        """Values at every position, inside the policy module's forward."""
        raise NotImplementedError

    def own(self, name: str) -> bool:
        """Whether a parameter of the policy module, by its name, is the critic's."""
        raise NotImplementedError

    def ensure_trainable(self) -> None:
        """Sets requires_grad again wherever it must be set; looked up live, since wrappers replace parameters."""

    def values(self, model: nn.Module, rows: MicroBatch) -> Tensor:
        """
        Values before each token and after the last, through the wrapped model, of rows that are padded or have a `packing`.

        Returns:
            (b, t + 1), see `value_pass.values_at_tokens`.
        """
        packing: Packing | None = rows.get("packing")
        if packing is None:
            ids, mask = whole(rows)
            return at_tokens(model(input_ids=ids, attention_mask=mask, role="critic"), rows)
        with packed_rows():
            return packing.at_tokens(model(**packing.inputs, role="critic"))

    def fit(self, unfit: Callable[[nn.Module], str | None]) -> str | None:
        """Prepares a model of its own for packed rows; gives why it cannot take them, by `unfit`, and is padded."""
        return None

    def save(self, folder: Path, state_dict: dict[str, Tensor] | None) -> None:
        """Writes the critic into `folder`; `state_dict` is the gathered one of the policy module, or None."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote. Raises LossPlusError where it is not there, or broken."""
        raise NotImplementedError

    def start_from(self, folder: Path) -> None:
        """`load` of an earlier run's critic. Raises LossPlusError also for one of another kind."""
        found = kind_in(folder)
        if found not in (None, self.kind):
            raise LossPlusError(
                f"critic_model_name_or_path={str(folder)!r} holds a critic of kind {found!r}, and critic is {self.kind!r}. Set "
                f"critic={found!r}, or take the critic/ folder of a run with critic={self.kind!r}."
            )
        try:
            self.load(folder)
        except LossPlusError as error:
            raise LossPlusError(f"critic_model_name_or_path: {error}") from None

    def _check_adapters(self) -> None:
        """Raises LossPlusError for adapters that act by PEFT's own forward pass, which is not the one that a critic on this model takes."""
        reason = by_row(self.policy)
        if reason is not None:
            raise LossPlusError(
                f"critic={self.kind!r}: {reason}, which values on the policy's model would miss. Take critic='model'."
            )

    def _install(self) -> None:
        """Gives the policy module's forward its role."""
        inner = self.policy.forward

        @functools.wraps(inner)
        def forward(*args: Any, role: str | None = None, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self.ensure_trainable()
            return self.forward(**kwargs) if role == "critic" else inner(*args, **kwargs)

        self.policy.forward = forward

    def _hidden(self, trunk: nn.Module, **inputs: Any) -> Tensor:
        """Last hidden states of a model without its head, at every position."""
        layers = checkpointed_layers(trunk)
        with keeping({None: layers[-1:], True: [], False: layers}[self.checkpointing]):
            return trunk(**inputs, use_cache=False).last_hidden_state

    def _score(self, hidden: Tensor) -> Tensor:
        head = getattr(self.policy, HEAD)
        return head(hidden.to(head.weight.dtype)).squeeze(-1).float()

    def _add_head(self) -> None:
        like = next(p for p in self.policy.parameters() if p.requires_grad)
        self.policy.add_module(HEAD, new_head(hidden_size(self.policy), like))

    def _save_head(self, folder: Path, state_dict: dict[str, Tensor] | None) -> None:
        weight = getattr(self.policy, HEAD).weight if state_dict is None else _by_suffix(state_dict, f"{HEAD}.weight")
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"weight": weight.detach().cpu().contiguous().clone()}, folder / HEAD_FILE)
        (folder / "critic.json").write_text(json.dumps({"critic": self.kind}))

    def _load_head(self, folder: Path) -> None:
        path = folder / HEAD_FILE
        if not path.exists():
            raise LossPlusError(f"{folder}: there is no {HEAD_FILE} in it.")
        restore(getattr(self.policy, HEAD).weight, read_tensors(path), "weight", path)


def kind_in(folder: Path) -> str | None:
    """The kind of critic that a run wrote into a folder, None where there is none."""
    try:
        return str(json.loads((folder / "critic.json").read_text())["critic"])
    except (OSError, ValueError, KeyError, TypeError):
        return ModelCritic.kind if (folder / "config.json").exists() else None


def _by_suffix(state_dict: dict[str, Tensor], suffix: str) -> Tensor:
    return next(tensor for name, tensor in state_dict.items() if name.endswith(suffix))


class AdapterCritic(Critic):
    """A second LoRA adapter and a head on the policy's base model, which exists once."""

    kind = "adapter"

    def __init__(self, policy: nn.Module, start: Path | None = None, checkpointing: bool | None = None):
        super().__init__(policy, checkpointing)
        if not isinstance(policy, PeftModel) or not isinstance(policy.peft_config.get("default"), LoraConfig):
            raise LossPlusError(
                "critic='adapter' needs a policy with a LoRA adapter named 'default' (peft_config=LoraConfig(...)). Without LoRA "
                "take critic='model' or 'shared'."
            )
        self._check_adapters()
        policy.add_adapter(ADAPTER, policy.peft_config["default"])
        like = next(p for name, p in policy.named_parameters() if ".default." in name)
        for name, parameter in policy.named_parameters():
            if f".{ADAPTER}." in name:
                parameter.data = parameter.data.to(like.dtype)  # one dtype over what is trained: ZeRO-3 needs it
        self._add_head()
        self.ensure_trainable()
        keep_adapter_in_recomputation(base_of(policy))
        self._install()
        if start is not None:
            self.start_from(start)

    def forward(self, **inputs: Any) -> Tensor:
        with active_adapter(self.policy, ADAPTER):
            return self._score(self._hidden(trunk_of(self.policy), **inputs))

    def own(self, name: str) -> bool:
        return f".{ADAPTER}." in name or HEAD in name

    def ensure_trainable(self) -> None:
        for name, parameter in self.policy.named_parameters():
            if f".{ADAPTER}." in name or ".default." in name or HEAD in name:
                parameter.requires_grad_(True)

    def save(self, folder: Path, state_dict: dict[str, Tensor] | None) -> None:
        self._save_head(folder, state_dict)  # PEFT wrote the adapter beside it

    def load(self, folder: Path) -> None:
        if (folder / "adapter_config.json").exists():
            try:
                found = self.policy.load_adapter(str(folder), ADAPTER, is_trainable=True)  # type: ignore[operator]
            except SafetensorError as error:
                raise broken_tensors(folder, error) from None
            except RuntimeError as error:
                if "size mismatch" not in str(error):
                    raise
                raise broken(folder, "its adapter has tensors of other shapes than this policy's LoRA") from None
            if found.missing_keys:
                raise broken(folder, f"its adapter holds no {found.missing_keys[0]}")
        self._load_head(folder)
        self.ensure_trainable()


class SharedCritic(Critic):
    """A head on the policy's hidden states: its values come with any forward pass of the policy that is watched."""

    kind = "shared"

    def __init__(self, policy: nn.Module, start: Path | None = None, detach: bool = False):
        super().__init__(policy)
        self._check_adapters()
        self.detach = detach
        self._seen: list[Tensor] | None = None
        self._adapters = adapters_of(policy)
        self._add_head()
        self._install()
        trunk_of(policy).register_forward_hook(self._see, prepend=True)  # before packed rows leave states out
        if start is not None:
            self.start_from(start)

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._seen is not None and adapters_of(self.policy) == self._adapters:  # a LoRA reference is the same trunk
            hidden = output.last_hidden_state
            self._seen.append(self._score(hidden.detach() if self.detach else hidden))

    @property
    def watching(self) -> bool:
        """Whether a forward pass is being watched."""
        return self._seen is not None

    def watch(self, forward: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
        """Runs forward passes; returns their result and the values at every position that came with each, none if they were not the policy's."""
        seen: list[Tensor] = []
        self._seen = seen
        try:
            return forward(), seen
        finally:
            self._seen = None

    def forward(self, **inputs: Any) -> Tensor:
        return self._score(self._hidden(trunk_of(self.policy), **inputs))

    def own(self, name: str) -> bool:
        return HEAD in name

    def ensure_trainable(self) -> None:
        getattr(self.policy, HEAD).requires_grad_(True)
        if isinstance(self.policy, PeftModel):
            for name, parameter in self.policy.named_parameters():
                if ".default." in name:
                    parameter.requires_grad_(True)

    def save(self, folder: Path, state_dict: dict[str, Tensor] | None) -> None:
        self._save_head(folder, state_dict)

    def load(self, folder: Path) -> None:
        self._load_head(folder)


class ModelCritic(Critic):
    """A sequence-classification model of its own: from a causal model with a new head, or from a reward model with its head."""

    kind = "model"

    def __init__(
        self,
        policy: nn.Module,
        start: str,
        init_kwargs: dict[str, Any],
        trust_remote_code: bool = False,
        checkpointing: bool | None = None,
    ):
        super().__init__(policy, checkpointing)
        kwargs = {"trust_remote_code": trust_remote_code, **init_kwargs, "num_labels": 1}
        kwargs.setdefault("dtype", base_of(policy).dtype)
        try:
            config = AutoConfig.from_pretrained(start, trust_remote_code=trust_remote_code)
            critic = AutoModelForSequenceClassification.from_pretrained(start, **kwargs)
        except SafetensorError as error:
            raise LossPlusError(f"critic_model_name_or_path: {broken_tensors(Path(start), error)}") from None
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "ignore_mismatched_sizes" not in str(error):
                raise
            shapes = "its weights have other shapes than its config.json says" if isinstance(error, RuntimeError) else None
            reason = shapes or str(error).strip().splitlines()[0]
            raise LossPlusError(f"critic_model_name_or_path={start!r} cannot be loaded as a critic ({reason})") from None
        if not isinstance(getattr(critic, "score", None), nn.Linear):
            raise LossPlusError(f"critic_model_name_or_path={start!r}: a {type(critic).__name__} has no scalar `score` head.")
        is_reward_model = any("SequenceClassification" in name for name in config.architectures or [])
        if not is_reward_model:
            critic.score = new_head(hidden_size(critic), critic.score.weight)
        policy.add_module(MODEL, critic)
        self.ensure_trainable()
        self._install()

    @property
    def model(self) -> nn.Module:
        """The critic's model."""
        return getattr(self.policy, MODEL)

    def forward(self, **inputs: Any) -> Tensor:
        critic: Any = self.model
        return critic.score(self._hidden(critic.base_model, **inputs)).squeeze(-1).float()

    def fit(self, unfit: Callable[[nn.Module], str | None]) -> str | None:
        reason = unfit(self.model)
        if reason is None:
            install(self.model)
        return reason

    def own(self, name: str) -> bool:
        return f"{MODEL}." in name

    def ensure_trainable(self) -> None:
        self.model.requires_grad_(True)

    def save(self, folder: Path, state_dict: dict[str, Tensor] | None) -> None:
        mine = None
        if state_dict is not None:
            mine = {name.split(f"{MODEL}.", 1)[1]: tensor for name, tensor in state_dict.items() if f"{MODEL}." in name}
        self.model.save_pretrained(folder, state_dict=mine)  # type: ignore[operator]

    def load(self, folder: Path) -> None:
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise LossPlusError(f"{folder} holds no critic (model.safetensors).")
        state = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
        for name, parameter in self.model.named_parameters():
            restore(parameter, state, name, folder if len(files) > 1 else files[0])


def without_critic(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The policy's part of the module's state dict."""
    return {name: tensor for name, tensor in state_dict.items() if HEAD not in name and f"{MODEL}." not in name}
