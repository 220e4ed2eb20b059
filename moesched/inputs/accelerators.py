"""Division of a model, a machine and its budgets among several equal accelerators."""

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
    """Return each accelerator's share of model, machine and budgets; a limit of page-locked memory changes the machine.

    A pipelined policy gets the whole model and machine, and assigns layers to accelerators itself.

    Args:
        budgets: limits of memories, as bytes or texts such as "16GB"; None for none.
        ranks: number of accelerators that share the model; by default all of the machine.
        here: whether the machine is this one.

    Raises:
        BadInput: the model cannot be cut into that many shares, the machine has fewer accelerators, `ranks` is given
            for a pipelined policy, a budget is more than the machine has, or it limits page-locked memory without need.
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
