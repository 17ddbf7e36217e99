"""
Runs a recipe as `accelerate launch` would, with what a CPU machine needs: python recipe.py LAUNCH SCRIPT ARGUMENTS...

FSDP2 is chosen on CPU too (cpu_fsdp.py); DeepSpeed does not compile its shared-memory communication.
"""

import runpy
import sys

launch, script, *arguments = sys.argv[1:]
if launch == "FSDP2":
    import cpu_fsdp  # noqa: F401
if launch.startswith("ZeRO"):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
