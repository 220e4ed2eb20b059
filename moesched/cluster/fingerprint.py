"""A model's fingerprint: nodes with different ones hold different models. It reads headers, not weights."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from moesched.models.checkpoint import Checkpoint


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of the configuration, and of each tensor's name, shape, dtype and place in a file of so many bytes.

    Equal for copies of one checkpoint wherever they lie. Weights of the same shapes in files of the same sizes are not
    told apart: reading them all would take as long as loading the model everywhere.
    """
    tensors = sorted(
        (name, list(stored.shape), stored.dtype, stored.file.name, stored.offset, stored.nbytes)
        for name, stored in checkpoint.tensors.items()
    )
    files = sorted({stored.file for stored in checkpoint.tensors.values()})
    sizes = [(file.name, file.stat().st_size) for file in files]
    config = msgspec.structs.replace(checkpoint.config, name="")  # which is the folder's
    content = (msgspec.to_builtins(config), tensors, sizes)
    return sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
