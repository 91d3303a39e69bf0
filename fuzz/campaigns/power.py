# SPDX-License-Identifier: Apache-2.0
"""Power loss: what was not synced is lost, zeroed or torn, then the store is opened anew.

    python -m fuzz.campaigns.power [--states 20000] [--seed 0] [--json]

After each call of a writer the machine may stop. For many of these moments, and many of the
folders that `model_disk.py` allows at each, the store is opened over what is left and
judged: with every setting nothing wrong is served; with `data` what is there is whole; with
`full` every store that was reported is there. The ledger counts as of another boot. The store's
own folders are a day old, or, with `--young`, made by this writer.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from fuzz.campaigns.aftermath import Findings, Known, opened, reopen
from fuzz.campaigns.command import Progress, finish, parser
from fuzz.campaigns.model_disk import ModelOs
from fuzz.campaigns.work import ROOMY, work

SYNCS = ("none", "data", "full")
LOSSES = ("kept", "lost", "zeroed", "torn", "mixed")
OTHER_BOOT = bytes(range(16))


class Loss:
    """One writer, stopped at many moments; each look lays one folder down and judges it."""

    def __init__(
        self, folder: Path, sync: str, rng: random.Random, states: int, steps: int, young: bool
    ) -> None:
        self._folder = folder
        self._sync = sync
        self._rng = rng
        self._chance = states / max(1, steps)
        self.found = Findings()
        self.met: Counter[str] = Counter()
        self.begun: set[int] = set()
        self.kept: set[int] = set()
        self.steps = 0
        self.tick: Callable[[], None] = lambda: None
        self.disk = ModelOs(folder / "store")
        if not young:
            opened(folder / "store", ROOMY, self.disk).close()
            self.disk.settle()
        self.disk.on_call = self.on_call

    def tell(self, text: str) -> None:
        """What the writer says."""
        word, _, number = text.partition(" ")
        if word == "begin":
            self.begun.add(int(number))
        elif word == "kept":
            self.kept.add(int(number))
        else:
            self.kept.discard(int(number))

    def on_call(self, what: str) -> None:
        """After a call: the power may go."""
        self.steps += 1
        whole, part = divmod(self._chance, 1)
        for _ in range(int(whole) + (self._rng.random() < part)):
            self._stop_here(what)

    def _stop_here(self, what: str) -> None:
        ordered, data = self._rng.random() < 0.5, self._rng.choice(LOSSES)
        label = f"sync {self._sync}, step {self.steps} ({what}), pages {data}"
        target = self._folder / "after"
        self.disk.lose(self._rng, ordered, data, target)
        self.met["states"] += 1
        root = target / "root"
        self.met["no root left"] += not root.exists()
        known = Known(
            frozenset(self.begun),
            frozenset(self.kept) if self._sync == "full" else (),
            whole=self._sync != "none",
            capacity=ROOMY,
            label=label + (", in order" if ordered else ""),
        )
        try:
            with patch("kvsafe.tiers.ledger.boot_id", return_value=OTHER_BOOT):
                reopen(root, known, self.found)
        except Exception as exc:  # else the writer, in whose call we are, would take it for its own
            self.found.other.append(f"{known.label}: {type(exc).__name__}: {exc}")
        shutil.rmtree(target, ignore_errors=True)
        self.tick()


def campaign(
    states: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
    base: str | None = None,
    young: bool = False,
) -> tuple[Findings, Counter[str]]:
    """So many folders after power losses, in all sync settings together."""
    found, met = Findings(), Counter[str]()
    for place, sync in enumerate(SYNCS):
        rng = random.Random(f"{seed} {sync}")
        share = states * (place + 1) // 3 - states * place // 3
        steps = _run(sync, rng, (0, 1), base, young).steps
        loss = _run(sync, rng, (share, steps), base, young, tick)
        met.update(loss.met)
        met[f"refused with sync {sync}"] += sum(loss.found.refused.values())
        _add(found, loss.found)
    return found, met


def _run(
    sync: str,
    rng: random.Random,
    share: tuple[int, int],
    base: str | None,
    young: bool,
    tick: Callable[[], None] = lambda: None,
) -> Loss:
    with tempfile.TemporaryDirectory(prefix="kvsafe-power-", dir=base) as name:
        loss = Loss(Path(name), sync, rng, *share, young)
        loss.tick = tick
        work(Path(name) / "store", sync, ROOMY, loss.disk, loss.tell)
        loss.disk.rest()  # where looks are slow, housekeeping may have outlived its store
        return loss


def _add(total: Findings, part: Findings) -> None:
    total.looks += part.looks
    total.chunks += part.chunks
    total.refused.update(part.refused)
    for name in ("wrong", "phantom", "lost", "account", "leftover", "other"):
        getattr(total, name).extend(getattr(part, name))


def main(argv: list[str]) -> int:
    """The command."""
    options = parser(__doc__)
    options.add_argument("--states", type=int, default=20000, help="folders after a power loss")
    options.add_argument("--young", action="store_true", help="on the store's first day")
    args = options.parse_args(argv)
    with Progress("power", args.states, args.json) as progress:
        found, met = campaign(args.states, args.seed, progress.tick, young=args.young)
    return finish([("power", found, met)], args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
