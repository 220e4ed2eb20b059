"""Divides a model, a machine and its memory budgets among equal accelerators that share the model."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.errors import BadInput
from moesched.inputs.budgets import read_budgets
from moesched.machines import Machine
from moesched.machines.rank import rank_share
from moesched.machines.staging import within_lock_limit
from moesched.models.config import ModelConfig
from moesched.models.tensor_parallel import cut_config
from moesched.seams import Policy, is_pipelined


def cut_over_ranks(
    config: ModelConfig,
    machine: Machine,
    budgets: Mapping[str, int | str] | None,
    ranks: int | None,
    policy: type[Policy] | None = None,
    *,
    here: bool = False,
) -> tuple[ModelConfig, Machine, dict[str, int]]:
    """Return one accelerator's share of the model, of the machine, and of the budget of each memory in bytes.

    For a pipelined policy, which itself assigns layers to accelerators, model and budgets are returned undivided. If
    `machine` has no page-locked memory of a stated size, a budget for it becomes its size in the returned machine.

    Args:
        budgets: limits by memory, as bytes or texts such as "16GB"; None for none. The limit of the accelerators' own
            memory is for each of them, and is not divided; all others are for all accelerators together.
        ranks: number of accelerators that share the model; None for all of the machine.
        policy: class of the policy; None for one that is not pipelined.
        here: whether `machine` describes this computer, whose memory may then be more than `machine` states.

    Raises:
        BadInput: the model cannot be cut into that many shares, the machine has fewer accelerators, `ranks` is given
            for a pipelined policy, a budget is more than the machine has, or page-locked memory cannot be limited on
            this machine.
    """
    given = read_budgets(budgets, machine, here=here)
    machine = within_lock_limit(machine, given)
    if policy is not None and is_pipelined(policy):
        if ranks is not None:
            raise BadInput(
                f"--tensor-parallel is {ranks}, and the policy gives each accelerator layers of its own: omit it"
            )
        return config, machine, given
    count = machine.accelerator_group.count if ranks is None else ranks
    own = machine.accelerator.memory
    share = rank_share(machine, count)
    return (
        cut_config(config, count),
        share,
        {memory: nbytes if memory == own else nbytes // count for memory, nbytes in given.items()},
    )
