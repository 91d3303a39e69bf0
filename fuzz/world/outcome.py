# SPDX-License-Identifier: Apache-2.0
"""What comes of one run of the world."""

from collections import Counter
from dataclasses import dataclass, field


class WrongWorld(AssertionError):
    """The oracle's verdict: what vLLM or kvsafe did is not what the requests demand."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise.

    Attributes:
        kind: `wrong-store`, `wrong-load`, `wrong-compute`, `wrong-row`, `wrong-output`,
            `announced`, `died`, `starved`, `needless` or `unbalanced`.
        where: what tells one fault from another: the innermost function, or what was checked.
        detail: one line for a person.
        at: index of the event at which it was seen; the number of events if it was at the end.
    """

    kind: str
    where: str
    detail: str
    at: int

    @property
    def signature(self) -> str:
        """Equal for two findings that are probably one fault."""
        return f"{self.kind}@{self.where}"


@dataclass(slots=True)
class Outcome:
    """One run: what was found, what happened, and a digest that is equal for equal runs.

    Attributes:
        finding: the first broken promise, None if the run is clean.
        digest: hex, over the log of everything that happened; the same plan gives the same
            digest in every process with the same PYTHONHASHSEED.
        counts: how often each thing happened (steps, loads, hits, promotions, resets, ...).
        events: how many events the run had.
    """

    finding: Finding | None
    digest: str
    counts: Counter[str] = field(default_factory=Counter)
    events: int = 0

    def demand_clean(self) -> None:
        """Raises `WrongWorld` if something was found."""
        if self.finding is not None:
            raise WrongWorld(self.finding.kind, self.finding.detail)

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return self.finding is None
