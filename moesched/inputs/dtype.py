"""Chooses the dtype that a model is computed in, from the model, the user's option, the machine and the device."""

from __future__ import annotations

from moesched import plugins
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.seams import ChoosesDtype, Device

HALF = "float16"


def dtype_for(own: str, given: str | None, machine: Machine, device: str | type[Device] | None = None) -> str:
    """Return the dtype that a run or a prediction computes in.

    Args:
        own: dtype of the model's weights.
        given: dtype that the user chose; None for none.
        machine: the machine. In predictions without a chosen dtype, bfloat16 models are computed in float16 if the
            accelerator has FLOP/s stated for float16 and none for bfloat16.
        device: the device that runs the model; None in predictions.

    Raises:
        BadInput: the user chose float16, but the device does not compute in float16.
    """
    if device is None:
        return given or _on_machine(own, machine)
    kind = plugins.find("devices", device)
    if issubclass(kind, ChoosesDtype):
        return given or kind.chosen_dtype(own)
    if given == HALF:
        raise BadInput(
            f"device {plugins.name_of('devices', device)} does not compute in {HALF}: give --dtype bfloat16 or float32"
        )
    return given or own


def dtype_of_nodes(own: str, given: str | None, machine: Machine, device: str) -> str:
    """Return the dtype of a run over several nodes, which has to be equal on all of them.

    Args:
        own: dtype of the model's weights.
        given: dtype that the user chose; None for none.
        machine: the machine that is this node.
        device: name of this node's device.

    Raises:
        BadInput: the user chose none, and this node's device does not compute in the dtype of the weights.
    """
    if given is None and dtype_for(own, None, machine, device) != own:
        raise BadInput(
            f"device {device} has no {own} here: give --dtype {HALF}, which all nodes then compute in"
        )
    return dtype_for(own, given or own, machine, device)


def _on_machine(own: str, machine: Machine) -> str:
    rates = machine.accelerator.flops
    return HALF if own == "bfloat16" and own not in rates and HALF in rates else own
