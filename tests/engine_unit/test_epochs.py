# SPDX-License-Identifier: Apache-2.0
"""Private epochs: what is sealed after a reset belongs to the launch that was reset."""

from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import LookupResult

from kvsafe.engine.rows.epochs import PRIVATE_EPOCH, EpochKeeper
from kvsafe.engine.tiers.names import ObjectNames
from kvsafe.seal.epoch import EpochFile
from kvsafe.seal.keyring import Keyring
from kvsafe.seal.suites import Suite
from tests.engine_unit.sealed_world import World, key_of

A = key_of(1)
HIT, MISS = LookupResult.HIT, LookupResult.MISS


def _file(path: Path) -> EpochFile:
    return EpochFile(path / "epoch.json", lambda message: Suite.BLAKE3.digest(message))


def test_a_reset_moves_this_launch_into_an_epoch_of_its_own(tmp_path: Path) -> None:
    told: list[int] = []
    keeper = EpochKeeper(_file(tmp_path), told.append)
    assert told == [0] and keeper.epoch == 0
    assert keeper.raise_epoch("reset")
    assert keeper.persistent == 1 and keeper.epoch & PRIVATE_EPOCH
    first = keeper.epoch
    assert keeper.raise_epoch("reset") and keeper.epoch not in (first, 2)
    assert told[1:] == [first, keeper.epoch]
    # Another launch, and this one after a restart, go by the file.
    assert EpochKeeper(_file(tmp_path), told.append).epoch == 2


def test_an_operator_can_say_that_weights_survive(tmp_path: Path) -> None:
    keeper = EpochKeeper(_file(tmp_path), lambda epoch: None, weights_survive_reset=True)
    assert keeper.raise_epoch("reset") and keeper.epoch == keeper.persistent == 1


def test_a_raise_elsewhere_revokes_a_private_epoch_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsafe.engine.rows.epochs._POLL_S", 0.0)
    keeper = EpochKeeper(_file(tmp_path), lambda epoch: None)
    keeper.poll()
    assert keeper.epoch == 0
    _file(tmp_path).raise_epoch("elsewhere")
    keeper.poll()
    assert keeper.epoch == 1
    keeper.raise_epoch("reset")
    private = keeper.epoch
    keeper.poll()
    assert keeper.epoch == private
    _file(tmp_path).raise_epoch("elsewhere")
    keeper.poll()
    assert keeper.epoch & PRIVATE_EPOCH and keeper.epoch != private


def test_names_of_a_private_epoch_are_nobody_elses() -> None:
    names = ObjectNames(Suite.BLAKE3, Keyring.unkeyed(), bytes(32))
    key = bytes(36)
    plain = names.name(key)
    names.follow(7)
    assert names.name(key) == plain
    names.follow(PRIVATE_EPOCH | 7)
    private = names.name(key)
    assert private != plain and private[-4:] == plain[-4:]
    names.follow(PRIVATE_EPOCH | 8)
    assert names.name(key) not in (plain, private)


@pytest.mark.parametrize("survive", [False, True])
def test_after_a_reset_the_tier_serves_this_launch_and_no_other(
    tmp_path: Path, survive: bool
) -> None:
    world = World(tmp_path, tiers=["fs"], weights_survive_reset=survive)
    world.epochs.raise_epoch("reset")
    world.manager.reset_cache()
    world.store(A)
    world.forget_rows()
    assert world.ask(A) is HIT
    world.close()
    again = World(tmp_path, tiers=["fs"], weights_survive_reset=survive)
    assert again.ask(A) is (HIT if survive else MISS)
    again.close()
