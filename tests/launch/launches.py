"""The shipped accelerate files as two processes on a CPU: what is changed in them, and how they are started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIGS = ROOT / "accelerate_configs"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]

# Launch: the shipped file, and the class that must wrap the model (FSDP2 makes a class for each model).
LAUNCHES = {
    "single": ("cpu.yaml", None),
    "DDP": ("multi_gpu.yaml", "DistributedDataParallel"),
    "ZeRO-1": ("deepspeed_zero1.yaml", "DeepSpeedEngine"),
    "ZeRO-2": ("deepspeed_zero2.yaml", "DeepSpeedEngine"),
    "ZeRO-3": ("deepspeed_zero3.yaml", "DeepSpeedEngine"),
    "FSDP2": ("fsdp2.yaml", "FSDP"),
}
# Variables of an outer launch that would be taken for this one's.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_", "FSDP_", "PYTEST_", "KMP_")


def read(name):
    """A shipped file's settings."""
    return yaml.safe_load((CONFIGS / name).read_text())


def cpu_form(name, folder, processes=2):
    """
    The shipped file as it can run here, written to `folder`.

    Changed: the number of processes (not in cpu.yaml), and no list of GPUs. Backend and device are chosen by the training argument
    use_cpu=True, not here: with `use_cpu: true` in the file accelerate would start one process.
    """
    settings = read(name)
    if not settings["use_cpu"]:
        settings["num_processes"] = processes
    settings.pop("gpu_ids", None)
    path = Path(folder) / f"cpu-{name}"
    path.write_text(yaml.safe_dump(settings))
    return path


def environment(**more):
    """This process's environment without a launcher's variables, one thread a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    paths = os.pathsep.join([str(ROOT), str(HERE), str(ROOT / "tests" / "trainers")])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def command(launch, folder, script, *arguments, processes=2, port=0):
    """`accelerate launch` with the CPU form of a launch's file."""
    file = cpu_form(LAUNCHES[launch][0], folder, processes)
    joined = [] if launch == "single" else ["--main_process_port", str(port or free_port())]
    return [*ACCELERATE, "--config_file", str(file), *joined, str(script), *map(str, arguments)]


def free_port():
    """A port that nothing listens on now."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Run:
    """One started launch."""

    process: subprocess.Popen
    output: Path
    started: float = field(default_factory=time.time)

    def text(self):
        return self.output.read_text(errors="replace")

    def wait(self, timeout):
        """The exit status, or None where it took too long and was ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self):
        """SIGKILL to every process of the launch."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(words, output, **more):
    """Starts a command in a process group of its own; what it prints goes to the file `output`."""
    with open(output, "w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment(**more), start_new_session=True)
    return Run(process, Path(output))


def run_cells(launch, cells, folder, toy, *, timeout=600, silence=150, say=lambda line: None):
    """
    Runs cells one after another in one launch (a new one after a cell that failed or hung).

    Args:
        cells: mappings as `worker.py` takes them, each with a `name`.
        timeout: seconds in all. silence: seconds without a new result that count as a hang.

    Returns:
        Results by cell name: what the worker wrote, or `error`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    left, results, began = list(cells), {}, time.time()
    while left:
        names = [cell["name"] for cell in left]
        job = {"launch": launch, "folder": str(folder), "toy": str(toy), "cells": left}
        (folder / "job.json").write_text(json.dumps(job))
        run = start(command(launch, folder, HERE / "worker.py", folder / "job.json"), folder / "output.txt")
        seen, last = 0, time.time()
        while run.process.poll() is None:
            time.sleep(0.2)
            done = sum((folder / f"{name}.json").exists() for name in names)
            if done > seen:
                seen, last = done, time.time()
                say(f"{launch}: {names[done - 1]} ({time.time() - began:.0f} s)")
            if (
                done == len(names) and time.time() - last > 20 or time.time() - last > silence or time.time() - began > timeout
            ):  # written; the processes do not end by themselves
                run.kill()
        for cell in list(left):
            path = folder / f"{cell['name']}.json"
            if path.exists():
                results[cell["name"]] = json.loads(path.read_text())
                left.remove(cell)
            else:
                results[cell["name"]] = {"error": last_lines(run.text())}
                say(f"{launch}: {cell['name']} FAILED: {results[cell['name']]['error']}")
                (folder / f"{cell['name']}.output.txt").write_text(run.text())
                left.remove(cell)
                break
        if time.time() - began > timeout:
            results |= {cell["name"]: {"error": "not started: out of time"} for cell in left}
            break
    return results


def last_lines(text):
    """The error that ended a run, from what it printed: the last line of the first traceback, else the end."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if line.startswith(("[rank", "Traceback")) or "Traceback (most recent call last)" in line:
            rest = [part.split("]: ", 1)[-1] for part in lines[at + 1 :]]
            ends = [part for part in rest if part and not part.startswith((" ", "Traceback", "During", "The above"))]
            if ends:
                return ends[0][:400]
    return " | ".join(lines[-3:])[:400]
