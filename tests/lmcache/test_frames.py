# SPDX-License-Identifier: Apache-2.0
"""lm:// frames byte for byte, and every way in which a reply can fail to be the answer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsafe.lmcache import Dtype, Fmt, Found, chunk_shape
from kvsafe.lmcache.frames import (
    FAIL,
    OK,
    REPLY,
    REQUEST,
    Command,
    Reply,
    Request,
    decode_reply,
    decode_request,
    exist_request,
    get_request,
    judge_get,
    judge_look,
    put_request,
)
from kvsafe.seal.refusal import Refusal, RefusalKind

KEY = "tiny-qwen3@1@0@-3a3358165cdee0d0@bfloat16"
SHAPE = chunk_shape(Fmt.KV_2LTD, Dtype.BFLOAT16, (2, 4, 256, 256))
GOOD = Reply(OK, SHAPE.length, SHAPE.fmt, SHAPE.dtype, SHAPE.dims, 0)
PAD = b" " * (150 - len(KEY))
_int32 = st.integers(-(2**31), 2**31 - 1)


def test_requests_are_those_that_a_real_engine_sent() -> None:
    # Recorded between vLLM 0.32 with LMCacheConnectorV1 0.5.6 and LMCache's server.
    key = KEY.encode() + PAD
    assert exist_request(KEY) == bytes.fromhex("030000000000000001000000020000" + "00" * 21) + key
    assert get_request(KEY) == bytes.fromhex("020000000000000001000000020000" + "00" * 21) + key
    head = "0100000000001000010000000300000000000000020000000400000000010000" + "00010000"
    assert put_request(KEY, SHAPE) == bytes.fromhex(head) + key
    assert (REQUEST.size, REPLY.size) == (186, 36)


def test_a_recorded_reply() -> None:
    data = "c80000000000100001000000030000000200000004000000000100000001000000000000"
    assert decode_reply(bytes.fromhex(data)) == GOOD
    assert GOOD.encode().hex() == data


@given(_int32, _int32, _int32, _int32, st.tuples(_int32, _int32, _int32, _int32), _int32)
def test_any_reply_is_judged_and_only_the_right_one_is_taken(
    code: int, length: int, fmt: int, dtype: int, dims: tuple[int, int, int, int], place: int
) -> None:
    reply = decode_reply(Reply(code, length, fmt, dtype, dims, place).encode())
    answer = judge_get(reply, SHAPE)
    assert (answer is Found.HIT) == (reply[:5] == GOOD[:5])
    assert answer is Found.HIT or answer is Found.ABSENT or isinstance(answer, Refusal)
    assert isinstance(judge_look(reply), Refusal) or (length == 0 and code in (OK, FAIL))


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"code": 0}, RefusalKind.PEER_CODE),
        ({"code": -200}, RefusalKind.PEER_CODE),
        ({"length": SHAPE.length - 1}, RefusalKind.PEER_LENGTH),
        ({"length": SHAPE.length + 1}, RefusalKind.PEER_LENGTH),
        ({"length": 2**31 - 1}, RefusalKind.PEER_LENGTH),
        ({"length": 0}, RefusalKind.PEER_LENGTH),
        ({"length": -1}, RefusalKind.PEER_LENGTH),
        ({"code": FAIL}, RefusalKind.PEER_LENGTH),
        ({"fmt": Fmt.KV_T2D}, RefusalKind.PEER_FORMAT),
        ({"fmt": 99}, RefusalKind.PEER_FORMAT),
        ({"dtype": Dtype.FLOAT16}, RefusalKind.PEER_DTYPE),
        ({"dtype": -1}, RefusalKind.PEER_DTYPE),
        ({"dims": (2, 256, 4, 256)}, RefusalKind.PEER_SHAPE),
        ({"dims": (-2, -4, 256, 256)}, RefusalKind.PEER_SHAPE),
        ({"dims": (2, 4, 256, 128)}, RefusalKind.PEER_SHAPE),
    ],
)
def test_each_field_of_a_hit(wrong: dict[str, object], kind: RefusalKind) -> None:
    assert judge_get(GOOD, SHAPE) is Found.HIT
    answer = judge_get(GOOD._replace(**wrong), SHAPE)  # type: ignore[arg-type]
    assert isinstance(answer, Refusal)
    assert answer.kind is kind


def test_half_has_two_numbers() -> None:
    shape = chunk_shape(Fmt.KV_2LTD, Dtype.FLOAT16, (2, 4, 256, 256))
    for number in (Dtype.HALF, Dtype.FLOAT16):
        assert judge_get(GOOD._replace(dtype=number), shape) is Found.HIT
    assert isinstance(judge_get(GOOD, shape), Refusal)


def test_absent_and_present() -> None:
    nothing = Reply(FAIL, 0, 1, 2, (0, 0, 0, 0), 0)
    assert judge_get(nothing, SHAPE) is Found.ABSENT
    assert judge_look(nothing) is Found.ABSENT
    assert judge_look(nothing._replace(code=OK)) is Found.HIT
    for bad in (nothing._replace(length=1), nothing._replace(code=300)):
        assert isinstance(judge_look(bad), Refusal)


@given(st.builds(Request, st.sampled_from(Command), st.text("ab@%1", max_size=60), _int32))
def test_requests_are_read_as_they_are_written(request: Request) -> None:
    assert decode_request(request.encode()) == request


def test_what_no_request_can_carry_is_misuse() -> None:
    with pytest.raises(ValueError, match="room for 150"):
        exist_request("k" * 151)
    for dims in ((2, 0, 256, 256), (2, 4096, 4096, 4096)):
        with pytest.raises(ValueError, match="dimensions"):
            chunk_shape(Fmt.KV_2LTD, Dtype.BFLOAT16, dims)
    with pytest.raises(ValueError, match="0 bytes"):
        put_request(KEY, replace(SHAPE, length=0))
    assert isinstance(decode_request(bytes(36) + b"\xff" * 150), Refusal)
