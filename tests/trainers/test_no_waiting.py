"""
Inside a micro-batch nothing of ours waits for the device, and no collective is called: statistics are fetched at an optimizer step's end.

Left aside: transformers' model, which looks at its attention mask or its position ids once a forward pass.
"""

import pytest
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from toyrun import letter_reward, trainer
from trl import GRPOConfig, GRPOTrainer

from trl_lossplus import GRPOPlusConfig, GRPOPlusTrainer, PPOPlusConfig, PPOPlusTrainer
from trl_lossplus.trainers.adapters import base_of

WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")
CASES = {
    "padded": {},
    "packed": {"microbatch_layout": "packed"},
    "shared_prefix, KL, all probes": {"microbatch_layout": "shared_prefix", "beta": 0.04, "probes": "full"},
    "skip": {"microbatch_layout": "packed", "skip_still_rows": True, "probes": "off"},
    "gspo, two passes": {"policy_loss": "gspo", "num_iterations": 2},
    "PPO": {"critic": "shared"},
}


class Waits(TorchDispatchMode):
    """Names of the operations that would wait for a GPU, outside of a model."""

    def __init__(self):
        super().__init__()
        self.names, self.inside = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).rsplit(".", 1)[0]
        if name in WAITS and not self.inside:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def leave_aside(waits, inside):
    """A hook that turns counting off or on."""

    def hook(*args):
        waits.inside = inside

    return hook


def counted(toy, folder, classes, **settings):
    """Of three optimizer steps of 4 micro-batches: (waits, collectives) of each micro-batch's loss, its forward pass included."""
    waits = Waits()
    trainer_class, config_class = classes
    run = trainer(
        toy, folder, reward=letter_reward, trainer_class=trainer_class, config_class=config_class, max_steps=3,
        extra={"peft_config": LoraConfig(r=4, target_modules="all-linear")}, per_device_train_batch_size=2, gradient_accumulation_steps=4, **settings,
    )  # fmt: skip
    found, calls, inner = [], [], run._compute_loss
    trunk = base_of(run.model).base_model
    trunk.register_forward_pre_hook(leave_aside(waits, True))
    trunk.register_forward_hook(leave_aside(waits, False))
    for name in ("gather", "reduce", "gather_for_metrics"):
        method = getattr(run.accelerator, name)
        setattr(run.accelerator, name, lambda *a, method=method, name=name, **k: (calls.append(name), method(*a, **k))[1])

    def watched(*args, **kwargs):
        calls.clear()
        waits.names = []
        with waits:
            loss = inner(*args, **kwargs)
        found.append((waits.names, list(calls)))
        return loss

    run._compute_loss = watched
    run.train()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_waits_for_nothing(toy, tmp_path, name):
    classes = (PPOPlusTrainer, PPOPlusConfig) if name == "PPO" else (GRPOPlusTrainer, GRPOPlusConfig)
    found = counted(toy, tmp_path, classes, **CASES[name])
    assert len(found) == 12
    for number, (waits, calls) in enumerate(found, start=1):
        assert calls == []
        assert waits == ([] if number % 4 else ["aten._local_scalar_dense"])  # a step's last: whether all of it was finite


def test_trl_s_own_waits(toy, tmp_path):
    """What the test would see: TRL's loss fetches numbers and gathers in each micro-batch."""
    found = counted(toy, tmp_path, (GRPOTrainer, GRPOConfig))
    waits, calls = found[1]
    assert waits.count("aten._local_scalar_dense") >= 5
    assert len(calls) >= 4
