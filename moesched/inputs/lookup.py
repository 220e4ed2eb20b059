"""Finds by name: a model's shape, a machine, a policy's class, a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moesched import plugins
from moesched.errors import BadInput
from moesched.inputs.defaults import NEW_TOKENS
from moesched.inputs.prompts import Prompt, encode_prompts, read_prompts, require_prompts
from moesched.inputs.tokenizer import find_tokenizer
from moesched.machines import Machine, load_machine, machine_names
from moesched.machines.changes import changed
from moesched.machines.local import calibrated_file, local_machine, require_measured_on, this_processor
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.gguf.parts import is_gguf
from moesched.models.reading import in_format, read_config, runs
from moesched.models.shapes import SHAPES
from moesched.models.shards import is_complete
from moesched.requests.workloads import Workload, given_lengths, load_workload
from moesched.seams import ChecksMachine, DescribesMachine, Device, Emulates, IsCalibrated, Policy
from moesched.system.input_file import absolute_path, is_folder
from moesched.system.near_names import with_nearest


def find_shape(model: Path | str, stored_as: str | None = None) -> ModelConfig:
    """Return a model's shape, found by its name or read from its files.

    Args:
        model: a name of `moesched list models`, a folder with a config.json, or a GGUF file.
        stored_as: storage format of the weights; None for the format in which the model is published.

    Raises:
        BadInput: the name is unknown and not a path of model files, or the model cannot have that format.
    """
    name, path = str(model), Path(model)
    if name in SHAPES:
        config = SHAPES[name]
        return config if stored_as is None else in_format(config, stored_as)
    if name and (is_folder(path) or is_gguf(path)):
        config = read_config(path, stored_as)
        if stored_as or is_gguf(path) or not (runs(config) and is_complete(path)):
            return config
        return open_checkpoint(path, partial=True).config  # some tensors may be in float32
    remedy = f"name a folder with a config.json, a GGUF file, or one of {', '.join(SHAPES)}"
    raise BadInput(f"no model {name!r}: {with_nearest(name, SHAPES, remedy)}")


def find_machine(
    machine: Machine | str, device: str | type[Device] | None = None, *, foreign: bool = False
) -> Machine:
    """Return a machine, found by its name or file, and check that a device accepts plans for this machine.

    Args:
        machine: a name, a file, "auto" for this machine as the device describes it, or a machine.
        device: the device that will carry out plans; None in predictions.
        foreign: whether to accept costs that were measured on another processor.

    Raises:
        BadInput: the name is unknown, or the device does not accept plans for that machine.
    """
    kind = plugins.find("devices", device) if device else None
    if machine == "auto":
        found = local_machine()
        if not foreign:
            require_measured_on(found, this_processor)
        if kind is not None and issubclass(kind, DescribesMachine):
            found = kind.machine(found)
    else:
        found = machine if isinstance(machine, Machine) else load_machine(machine)
        if kind is not None and issubclass(kind, ChecksMachine):
            kind.check_machine(found)
    imitates = kind is not None and issubclass(kind, Emulates)
    if kind is not None and not imitates and not foreign:
        require_measured_on(found, kind.processors if issubclass(kind, IsCalibrated) else this_processor)
    return found


def changed_machine(machine: Machine | str, changes: Mapping[str, str] | None) -> Machine:
    """Find a machine by its name or file, and return it with changes.

    Args:
        changes: new values by the names of the figures, such as {"link.host->gpu": "24GB/s"}; None for none.

    Raises:
        BadInput: the name is unknown, or a change is impossible.
    """
    return changed(find_machine(machine), [f"{what}={value}" for what, value in (changes or {}).items()])


def absolute_machine(machine: Machine | str) -> Machine | str:
    """Return a machine as given; a file's path is made absolute, so that it is found after a change of folder."""
    if not isinstance(machine, str) or machine in ("", "auto", *machine_names()):
        return machine
    return str(absolute_path(Path(machine)))


def machine_file(machine: Machine | str) -> Path | None:
    """Return the path of the file that describes a machine; None for a `Machine`.

    Args:
        machine: "auto" for this machine's calibrated file; any other text counts as a path.
    """
    if isinstance(machine, Machine):
        return None
    return calibrated_file() if machine == "auto" else Path(machine)


def find_policy(name: str) -> type[Policy]:
    """Find a policy's class by its name, or by file.py:Class.

    Raises:
        BadInput: there is no policy of that name, or the class is no policy.
    """
    return plugins.find("policies", name)


def find_workload(workload: str | Sequence[Prompt], model: Path | str, config: ModelConfig) -> Workload:
    """Return a workload, found by its name or file, or made with the lengths of the given prompts.

    Args:
        workload: a name, a TOML file, a .jsonl file of prompts, or prompts as texts or token ids.
        model: name or path of the model whose tokenizer encodes prompts of text.
        config: the model's shape, against which prompts are checked.

    Raises:
        BadInput: there is no workload of that name, or it has no prompts.
    """
    if isinstance(workload, str):
        if not workload.endswith(".jsonl"):
            return load_workload(workload)
        workload = read_prompts(Path(workload))
    require_prompts(workload)
    has_files = str(model) not in SHAPES
    if not has_files and any(isinstance(prompt, str) for prompt in workload):
        raise BadInput(
            f"prompts are text, and model {model} has no tokenizer: name a model's folder or file, or give ids"
        )
    tokenizer = find_tokenizer(Path(model)) if has_files else None
    encoded = encode_prompts(workload, tokenizer, config, 0)
    return given_lengths(list(map(len, encoded)), NEW_TOKENS)
