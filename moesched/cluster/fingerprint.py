"""Computes a model's fingerprint, by which the launcher detects nodes with another model; reads no weights."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from moesched.models.checkpoint import Checkpoint


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hash of a model's configuration, its tensors' names, shapes, dtypes and places, and its files' sizes.

    Copies of a checkpoint have equal fingerprints in any folder, even if files are absent. Values of weights are not
    covered: reading them would take as long as loading the model on every node.
    """
    tensors = sorted(
        (name, list(stored.shape), stored.format.name, stored.file.name, stored.offset, stored.nbytes)
        for name, stored in checkpoint.tensors.items()
    )
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    sizes = [(file.name, checkpoint.absent.get(file) or file.stat().st_size) for file in files]
    config = msgspec.structs.replace(checkpoint.config, name="")  # the folder's name
    content = (msgspec.to_builtins(config), tensors, sizes)
    return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
