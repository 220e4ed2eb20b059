"""The policy `Previewing` for jobs, and how many of its previews were right."""

from __future__ import annotations

from typing import ClassVar

from moesched.testing.previewing import Previewing


class Kept(Previewing):
    """Previews every later layer, for jobs, which make their policies themselves, also for trial runs."""

    made: ClassVar[list[Kept]] = []

    def __init__(self, scores: bool = False) -> None:
        super().__init__(scores=scores)
        Kept.made.append(self)

    @classmethod
    def last(cls, count: int) -> list[Kept]:
        """The last policies that ran."""
        found = [each for each in cls.made if each.seen][-count:]
        cls.made.clear()
        return found

    def counts(self) -> list[tuple[int, int, int, int]]:
        """For each distance: the number of previews, of chosen experts, and of those that were forecast."""
        found = []
        for ahead in sorted({ahead for *_, ahead in self.seen} - {0}):
            pairs = [(value, self.chosen[where]) for where, value in self.foretold(ahead).items()]
            chosen = sum(len(routed) for _, routed in pairs)
            right = sum(len(set(routed) & set(forecast)) for forecast, routed in pairs)
            found.append((ahead, len(pairs), chosen, right))
        return found
