"""A model's fingerprint, by which the launcher finds nodes with another model. It reads headers, not weights."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from moesched.models.checkpoint import Checkpoint


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of the configuration, of each tensor's name, shape, dtype and place in its file, and of the files' sizes.

    Copies of one checkpoint have the same fingerprint in any folder, also where files are absent. It does not cover the
    values of the weights: reading them would take as long as loading the model on every node.
    """
    tensors = sorted(
        (name, list(stored.shape), stored.dtype, stored.file.name, stored.offset, stored.nbytes)
        for name, stored in checkpoint.tensors.items()
    )
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    sizes = [(file.name, checkpoint.absent.get(file) or file.stat().st_size) for file in files]
    config = msgspec.structs.replace(checkpoint.config, name="")  # the folder's name
    content = (msgspec.to_builtins(config), tensors, sizes)
    return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
