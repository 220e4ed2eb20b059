"""Which of a machine's equal accelerators a run uses, and what each has of model, machine and budgets."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.machines.rank import rank_share
from moesched.models.config import ModelConfig
from moesched.models.tensor_parallel import cut_config
from moesched.units import parse_bytes


def cut_over_ranks(
    config: ModelConfig,
    machine: Machine,
    budgets: Mapping[str, int | str] | None,
    ranks: int | None,
    policy: type | None = None,
) -> tuple[ModelConfig, Machine, dict[str, int]]:
    """Model, machine and budgets as each of `ranks` accelerators has them, by default as each of all there are.

    A policy that pipelines gets all of them with the whole model, and cuts it by layers itself.

    Raises:
        BadInput: the model cannot be cut over so many, the machine has fewer, or the policy pipelines.
    """
    given = {memory: parse_bytes(size) for memory, size in (budgets or {}).items()}
    if getattr(policy, "pipelines", False):
        if ranks is not None:
            raise BadInput(
                f"--tensor-parallel is {ranks}, and the policy gives each accelerator layers of its own: leave it out"
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
