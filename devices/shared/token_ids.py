"""A check of the token ids of prompts, before a device runs the prompts."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.errors import BadInput


def check_token_ids(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Check that the prompts' token ids are within the vocabulary.

    Raises:
        BadInput: an id is outside the vocabulary.
    """
    for number, prompt in enumerate(prompts):
        for token in prompt:
            if not 0 <= token < vocabulary:
                raise BadInput(
                    f"prompt {number}: token id {token} is outside the vocabulary of {vocabulary}: "
                    f"use ids from 0 to {vocabulary - 1}"
                )
