"""
Test-only: lets FSDP2 run on two CPU processes.

accelerate selects FSDP for GPU process groups only; for gloo it silently runs DDP. Importing this file makes its state say FSDP
where the launcher's file says so. Nothing else of accelerate, torch or this package is changed.
"""

import os

from accelerate import state

_init = state.AcceleratorState.__init__


def _patched(self, *args, fsdp_plugin=None, **kwargs):
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    on_cpu = self.distributed_type == state.DistributedType.MULTI_CPU
    if fsdp_plugin is not None and on_cpu and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        self.distributed_type = state.DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        state.PartialState._shared_state["distributed_type"] = state.DistributedType.FSDP


state.AcceleratorState.__init__ = _patched
