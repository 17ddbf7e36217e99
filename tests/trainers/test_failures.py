"""What ends a run reaches every process, and one tells it; what is said of a gradient that is not finite."""

import math
from types import SimpleNamespace

import pytest
import torch
from processes import Processes
from toyrun import letter_reward, trainer

from trl_lossplus import LossPlusError
from trl_lossplus.diagnostics.guards import NonFiniteError
from trl_lossplus.trainers.failures import StoppedElsewhere, rewards_of_all, told_elsewhere, told_here, told_once
from trl_lossplus.trainers.step_guard import gradient_fault


@pytest.mark.parametrize("kind", [LossPlusError, NonFiniteError])
def test_process_0_tells_what_all_found(kind):
    """The others raise the same type, with a pointer; another type of error passes as it is, everywhere."""
    for process in (0, 1, 2):
        with pytest.raises(kind) as raised, told_once(process):
            raise kind("step 3: logps is nan")
        assert told_elsewhere(raised.value) == (process > 0)
        assert str(raised.value) == ("the run ends on every process; process 0 says why." if process else "step 3: logps is nan")
        with pytest.raises(KeyError, match="column"), told_once(process):
            raise KeyError("column")


def outcomes(failing):
    """What each of three processes gets whose rewards fail on the `failing` ones."""
    processes = Processes(3)

    def work(process, gather):
        def own():
            if process in failing:
                raise KeyError(process)
            return gather(torch.full((2, 2), float(process)))

        try:
            return rewards_of_all(own, SimpleNamespace(gather=gather, process_index=process, device="cpu"), (2, 2))
        except Exception as error:
            return error

    results = processes.run(work)
    assert processes.calls == 1
    return results


def test_rewards_that_fail_on_some_processes_end_all():
    """One gathering in every case; the first process on which it failed raises its own error, the others one that points there."""
    for result in outcomes([]):
        assert result[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    for failing, first in (([1], 1), ([2], 2), ([1, 2], 1), ([0, 1, 2], 0)):
        for process, error in enumerate(outcomes(failing)):
            if process == first:
                assert isinstance(error, KeyError)
                assert error.args == (first,)
                assert told_here(error)
                assert not told_elsewhere(error)
            else:
                assert isinstance(error, StoppedElsewhere)
                assert str(error) == f"process {first} ends the run while rewards are computed, and says why."


def test_one_reward_that_could_not_be_given_is_no_failure():
    """NaN, and a row of one column only that holds the stand-in, are rewards."""
    low = torch.finfo(torch.float32).min
    rewards = torch.tensor([[math.nan, 1.0], [low, 1.0]])
    assert rewards_of_all(lambda: rewards, SimpleNamespace(process_index=0), (2, 2)) is rewards


def engine(applied):
    return SimpleNamespace(was_step_applied=lambda: applied)


@pytest.mark.parametrize(
    ("norm", "deepspeed", "expected"),
    [
        (1.5, None, None),
        (None, None, None),
        (math.inf, None, (math.inf, False)),
        (math.nan, None, (math.nan, False)),
        (1.5, engine(True), None),
        (None, engine(True), None),
        (math.inf, engine(False), (math.inf, False)),  # ZeRO-1 and 2
        (1.5, engine(False), (math.nan, False)),  # ZeRO-3: the norm is the step's before
        (None, engine(False), (math.nan, False)),
        (-1.0, engine(True), (math.nan, True)),  # bfloat16 without a check
        (math.nan, engine(True), (math.nan, True)),
    ],
)
def test_whether_the_step_was_taken(norm, deepspeed, expected):
    found = gradient_fault(norm, deepspeed, fp16=False)
    assert found == (expected if expected is None else pytest.approx(expected, nan_ok=True))
    assert gradient_fault(norm, deepspeed, fp16=True) is None  # its loss scaler drops such steps by itself


def test_token_weights_that_fail_end_the_run_as_rewards_do(toy, tmp_path):
    """Asked for before the rewards are gathered, so that their error goes the same way."""
    order = []

    def weights(prompts, completions, completion_ids, **columns):
        order.append("weights")
        raise KeyError("no such column")

    def reward(completions, **kwargs):
        order.append("rewards")
        return letter_reward(completions)

    run = trainer(toy, tmp_path, reward=reward, extra={"token_weight_func": weights}, max_steps=1)
    with pytest.raises(KeyError) as raised:
        run.train()
    assert told_here(raised.value)
    assert order == ["weights"]
