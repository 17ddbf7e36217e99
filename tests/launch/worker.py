"""Run by each process of a launch: trains the cells of a job one after another and writes one result file a cell."""

# ruff: noqa: E402 - what is changed in accelerate and DeepSpeed comes before all other imports

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path

JOB = json.loads(Path(sys.argv[1]).read_text())
if JOB["launch"] == "FSDP2":
    import cpu_fsdp  # noqa: F401
if JOB["launch"].startswith("ZeRO"):
    import deepspeed

    # DeepSpeed would first compile its shared-memory communication, which takes a minute; gloo gives the same numbers.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

import torch
from accelerate.state import AcceleratorState, GradientState
from cells import apart, config, count_collectives, data, draw_by_name, is_split, reward, saved_weights, whole_weights
from peft import LoraConfig
from transformers import set_seed

from trl_lossplus.diagnostics.guards import NonFiniteError


def build(cell, folder):
    """A cell's trainer."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(3)
    trainer_class, args = config(cell, JOB["launch"], folder)
    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if cell["lora"] else {}
    dataset, rollout = data(cell)
    trainer = trainer_class(
        model=JOB["toy"],
        reward_funcs=reward(cell.get("reward", "letters")),
        args=args,
        train_dataset=dataset,
        rollout_func=rollout,
        **more,
    )
    draw_by_name(trainer.model)
    # Momentum, so that the optimizer has a state to save; torch cannot load FSDP2's of an optimizer without any.
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": args.learning_rate, "momentum": 0.5})
    if "kill" in cell:
        kill_in_step(trainer, cell["kill"])
    if "nan" in cell:
        poison(trainer, cell["nan"])
    return trainer


def kill_in_step(trainer, step):
    """SIGKILL to the second process between the two micro-batches of an optimizer step."""
    inner = trainer.micro_loss

    def micro_loss(model, inputs):
        if trainer.state.global_step == step and trainer.accelerator.sync_gradients and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(model, inputs)

    trainer.micro_loss = micro_loss


def keep_gradients(trainer):
    """The gradients of the log-probs as the backward passes give them, one a micro-batch, in a list that fills."""
    inner, seen = trainer.combine, []

    def combine(batch, spec, window):
        batch.logps.retain_grad()
        seen.append(batch.logps)
        return inner(batch, spec, window)

    trainer.combine = combine
    return seen


def poison(trainer, step):
    """NaN advantages on the last process, in every micro-batch of one optimizer step."""
    inner = trainer.micro_loss

    def micro_loss(model, inputs):
        if trainer.state.global_step == step and trainer.accelerator.is_last_process:
            inputs = {**inputs, "advantages": inputs["advantages"] * float("nan")}
        return inner(model, inputs)

    trainer.micro_loss = micro_loss


def facts(trainer):
    """What is compared between launches."""
    keep = ("step", "loss", "grad_norm", "reward", "kl", "kl_coef", "kl_rollout", "entropy", "skipped_steps")
    log = [
        {
            name: value
            for name, value in entry.items()
            if name in keep or name.startswith(("loss/", "value/", "clip_ratio/region", "resample/"))
        }
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    coefs = [trainer.kl_controller.coef if hasattr(trainer, "kl_controller") else trainer.beta]
    if torch.distributed.is_initialized():
        coefs, mine = [None] * torch.distributed.get_world_size(), coefs[0]
        torch.distributed.all_gather_object(coefs, mine)
    return {
        "processes": trainer.accelerator.num_processes,
        "wrapped": type(trainer.model_wrapped).__name__,
        "steps": trainer.state.global_step,
        "coefs": coefs,
        "log": log,
        "is_split": is_split(trainer),
    }


def run(cell):
    """Trains, then (where asked) once more from the checkpoint in the middle."""
    folder = Path(JOB["folder"]) / cell["name"]
    main = int(os.environ.get("RANK", "0")) == 0
    trainer = build(cell, folder)
    start = whole_weights(trainer)
    counts = count_collectives(trainer) if cell.get("count") else None
    log_probs = keep_gradients(trainer) if cell.get("gradients") else None
    stopped = None
    try:
        trainer.train(resume_from_checkpoint=cell.get("from"))
    except NonFiniteError as error:
        if not cell.get("stops"):
            raise
        stopped = str(error)
    if log_probs is not None:
        torch.save([x.grad for x in log_probs], folder / f"gradients-{os.environ.get('RANK', '0')}.pt")
    weights = whole_weights(trainer)
    result = {**facts(trainer), "stopped": stopped}
    if counts is not None:
        result["collectives"] = counts
    if main:
        dtype = next(
            trainer.accelerator.unwrap_model(trainer.model_wrapped).parameters()
        ).dtype  # DeepSpeed's bf16 rounds at its start
        result["moved"] = apart({name: value.to(dtype).float() for name, value in start.items()}, weights)
        torch.save(start, folder / "start.pt")
        torch.save(weights, folder / "weights.pt")
    if cell.get("resume"):
        trainer.save_model(str(folder / "final"))
        if main:
            torch.save(saved_weights(folder / "final"), folder / "saved.pt")
        del trainer
        gc.collect()
        trainer = build(cell, folder)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{cell['resume']}"))
        again = whole_weights(trainer)
        result["resumed"] = facts(trainer)
        if main:
            torch.save(again, folder / "resumed.pt")
    if main:
        part = Path(JOB["folder"]) / f"{cell['name']}.part"
        part.write_text(json.dumps(result))
        part.rename(part.with_suffix(".json"))
    trainer.accelerator.wait_for_everyone()


try:
    for one in JOB["cells"]:
        run(one)
        gc.collect()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads sometimes abort an orderly exit
