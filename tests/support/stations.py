# SPDX-License-Identifier: Apache-2.0
"""A station without an engine: real keys, epoch file, region and sealing, an invented identity."""

import os
import uuid
from pathlib import Path

from conformance.stations import invented_identity
from kvsafe.engine.config import parse_config
from kvsafe.engine.station import Launch, Station
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.keyfile import load_or_create
from kvsafe.seal.suites import Suite

__all__ = ["bare_station", "invented_identity"]


def bare_station(
    folder: Path, *, slice_bytes: int, rows: int = 8, slots: int = 1, **options: object
) -> Station:
    """A station of one worker, laid out and with its region open and its worker registered."""
    extra = {"cpu_bytes_to_use": 1 << 20, "state_dir": str(folder / "state"), **options}
    config = parse_config(extra, environ=os.environ)
    suite = Suite.named(config.suite)
    keyring = load_or_create(Path(str(config.key_file)), suite=suite.label)
    secret = keyring.state_secret
    place = Path(config.epoch_file or folder / "state" / "epoch.json")
    epoch_file = EpochFile(place, lambda data: suite.tag(secret, data))
    launch = Launch(uuid.uuid4().hex, 1, None)
    station = Station(config, invented_identity(), keyring, epoch_file, launch)
    station.lay_out(key_bytes=36, slots=slots, slice_bytes=(slice_bytes,))
    station.open_region(rows).forget_name()
    station.register(0, {"invented": True})
    return station
