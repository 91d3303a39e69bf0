# SPDX-License-Identifier: Apache-2.0
"""A station without an engine: real keys, epoch file and sealing, an invented identity."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsafe.engine.config import parse_config
from kvsafe.engine.station import Launch, Station
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.identity import IDENTITY_FIELDS, Identity
from kvsafe.seal.keyfile import load_or_create
from kvsafe.seal.suites import Suite

_VALUES: dict[str, Any] = {
    "text": "x",
    "count": 1,
    "flag": False,
    "number": 1.0,
    "digest": bytes(32),
    "list": [],
    "map": {},
}


def invented_identity(**changes: object) -> Identity:
    """An identity with a plain value in every field, and `changes`."""
    values = {field.name: _VALUES[field.kind] for field in IDENTITY_FIELDS}
    return Identity.of({**values, **changes})


def invented_station(
    options: Mapping[str, object], workers: int = 1, **identity: object
) -> Station:
    """A station that is not laid out yet. Raises `ConfigError`.

    `options` are those of the connector; keys are made where they say, and the epoch lies in
    the state folder. `identity` has the fields that matter; the others are invented.
    """
    config = parse_config(options, environ=os.environ)
    suite = Suite.named(config.suite)
    keyring = load_or_create(Path(str(config.key_file)), suite=suite.label)
    secret = keyring.state_secret
    place = Path(config.state_dir) / "epoch.json"
    epoch_file = EpochFile(place, lambda data: suite.tag(secret, data))
    launch = Launch(uuid.uuid4().hex, workers, None)
    return Station(config, invented_identity(**identity), keyring, epoch_file, launch)
