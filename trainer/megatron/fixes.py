"""Repairs three defects of megatron-core 0.16.1 that make a resumed run differ from a run that was not stopped.

Each repair names its cause, and when it can be removed, and has its own test. `checkpoint` calls `install` on every device.
"""

import functools
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_installed = False


def install() -> None:
    """Repairs how the distributed optimizer is saved and loaded."""
    global _installed
    if not _installed:
        _keep_padding_between_buckets()
        _leave_step_out_of_loading()
        _give_each_parameter_its_step()
        _installed = True


def _keep_padding_between_buckets() -> None:
    """The state that is gathered for a save lacks the padding between buckets, but the offsets that cut it include the padding.
    So in every bucket but the first the parameters are saved shifted, and the last one partly as zeros. There is more than one
    bucket if embeddings are tied and pp > 1, and if gradient reduction overlaps. Can be removed when the offsets agree.
    """
    gather = DistributedOptimizer.get_parameter_state_dp_zero

    @functools.wraps(gather)
    def gather_with_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        for buffer in self.buffers:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
        return gather(self, *args, **kwargs)

    DistributedOptimizer.get_parameter_state_dp_zero = gather_with_padding


def _leave_step_out_of_loading() -> None:
    """Loading copies every entry of torch's AdamW from the checkpoint, but the checkpoint keeps "step" elsewhere, and loading
    fails with KeyError: 'step'. Can be removed when a release loads without Transformer Engine.
    """
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(set_states)
    def set_states_but_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        set_states(self, model_param, tensors)
        if step is not None:
            state["step"] = step

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step


def _give_each_parameter_its_step() -> None:
    """Loading puts the same step tensor into the state of every parameter, and AdamW increments it once per parameter. The bias
    correction is then wrong, and the run drifts without an error. Can be removed when each parameter gets its own tensor.
    """
    load = DistributedOptimizer.load_state_dict

    @functools.wraps(load)
    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_with_own_steps
