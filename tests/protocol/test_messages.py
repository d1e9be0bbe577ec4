"""Protocol 1 at the level of bytes: what is taken, what is refused and with which sentence."""

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.protocol import messages as wire
from hicache.protocol.messages import (
    ERRORS,
    MAX_HEAD_BYTES,
    NEEDS_SESSION,
    OPS,
    RESERVED_OPS,
    Field,
    WireError,
    _decode_plain,
    _decode_strictly,
    decode_reply,
    decode_request,
    error_reply,
    pack,
    unpack,
)

SESSION = bytes(range(16))


def code_of(decode: Callable[[bytes], object], data: bytes) -> str:
    """The error's code, or "" if the message is taken. Anything but WireError comes out."""
    try:
        decode(data)
    except WireError as error:
        return error.code
    return ""


def is_harmless(data: bytes) -> bool:
    return {code_of(decode_request, data), code_of(decode_reply, data)} <= {"", *ERRORS}


def values_of(field: Field) -> st.SearchStrategy[Any]:
    if field.kind is bool:
        return st.booleans()
    if field.kind is int:
        return st.integers(int(field.low), min(int(field.high), 2**63 - 1))
    if field.kind is float:
        return st.floats(field.low, min(field.high, 1e18))
    if field.kind is str:
        return st.text(max_size=20)
    if field.kind is dict:
        return st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3)
    least = int(field.low)
    words = st.binary(min_size=least, max_size=least + 4).map(lambda part: part * field.multiple)
    return words.filter(lambda data: len(data) <= field.high)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    op = draw(st.sampled_from(sorted(OPS)))
    body = {name: draw(values_of(field)) for name, field in OPS[op].items()}
    common = {"deadline_s": draw(st.floats(0, 3600)), "sent_s": draw(st.floats(0, 1e12))}
    number = draw(st.integers(0, 2**63 - 1))
    return {"op": op, "id": number, "s": SESSION, **common, **body}


@given(requests())
def test_a_request_survives_the_wire(message: dict[str, Any]) -> None:
    request = decode_request(pack(message))
    assert (request.op, request.id, request.session) == (message["op"], message["id"], SESSION)
    assert (request.deadline_s, request.sent_s) == (message["deadline_s"], message["sent_s"])
    body = request.body
    if request.op == "match":
        body = {name: getattr(body, name) for name in OPS["match"]}
    assert body == {name: message[name] for name in OPS[request.op]}


@given(requests(), st.data())
def test_the_plain_way_takes_nothing_that_the_strict_way_refuses(
    message: dict[str, Any], data: st.DataObject
) -> None:
    """A field is dropped or set to something else: whatever the fast decoder still takes, the one
    that names every mistake takes as well, and reads the same in it."""
    for name in data.draw(st.lists(st.sampled_from(sorted(message)), max_size=2, unique=True)):
        if data.draw(st.booleans()):
            del message[name]
        else:
            message[name] = data.draw(nested)
    packed = msgpack.packb(message, use_bin_type=True)
    plain = _decode_plain(packed)
    if plain is not None:
        assert plain == _decode_strictly(packed)


@given(requests())
def test_a_right_request_goes_the_plain_way(message: dict[str, Any]) -> None:
    assert message["op"] == "hello" or _decode_plain(pack(message)) is not None


@given(st.binary(max_size=200))
def test_garbage_is_only_ever_a_wire_error(data: bytes) -> None:
    assert is_harmless(data)


nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6), inner, max_size=3)
        | st.binary(max_size=40)
    ),
    max_leaves=8,
)
names = st.sampled_from(["op", "id", "s", "tokens", "lease", "sum_n", "deadline_s", "spec", "more"])


@given(st.dictionaries(names | st.text(max_size=6), nested | st.sampled_from(sorted(OPS))))
def test_any_map_is_only_ever_a_wire_error(message: dict[str, Any]) -> None:
    assert is_harmless(msgpack.packb(message, use_bin_type=True))


@given(requests(), st.data())
def test_one_flipped_byte_is_only_ever_a_wire_error(
    message: dict[str, Any], data: st.DataObject
) -> None:
    packed = bytearray(pack(message))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    assert is_harmless(bytes(packed))


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"op": None}, "malformed", "op: missing"),
        ({"op": 7}, "malformed", "op: missing, or not a string"),
        ({"op": "mtach"}, "malformed", "'mtach' is no operation"),
        ({"id": -1}, "malformed", "id: must be an unsigned integer"),
        ({"id": "7"}, "malformed", "id: must be an unsigned integer"),
        ({"id": True}, "malformed", "id: must be an unsigned integer"),
        ({"s": b""}, "unknown_session", "say hello first"),
        ({"s": b"short"}, "malformed", "s: must be the 16 bytes"),
        ({"s": "x" * 16}, "malformed", "s: must be the 16 bytes"),
        ({"surprise": 1}, "malformed", "surprise: unknown field of match"),
        ({"tokens": None}, "malformed", "tokens: missing"),
        ({"tokens": [1, 2]}, "malformed", "tokens: must be bytes, not list"),
        ({"tokens": b"abc"}, "malformed", "tokens: length 3"),
        ({"skip_blocks": -1}, "malformed", "skip_blocks: -1 is outside"),
        ({"skip_blocks": 1.5}, "malformed", "skip_blocks: must be int, not float"),
        ({"skip_blocks": True}, "malformed", "skip_blocks: must be int, not bool"),
        ({"hop_bytes_per_s": float("nan")}, "malformed", "hop_bytes_per_s: nan is outside"),
        ({"hop_bytes_per_s": float("inf")}, "malformed", "hop_bytes_per_s: inf is outside"),
        ({"deadline_s": 1e9}, "malformed", "deadline_s"),
        ({"request": "x" * 201}, "too_large", "request: 201 long"),
    ],
)
def test_what_is_refused(change: dict[str, Any], code: str, words: str) -> None:
    message = {"op": "match", "id": 5, "s": SESSION, "tokens": b"", **change}
    with pytest.raises(WireError) as caught:
        decode_request(pack({name: value for name, value in message.items() if value is not None}))
    assert caught.value.code == code
    assert words in caught.value.message
    assert caught.value.request_id == (0 if "id" in change else 5)


def test_an_integer_may_stand_for_a_float() -> None:
    request = decode_request(pack({"op": "ping", "id": 1, "deadline_s": 2}))
    assert request.deadline_s == 2.0
    assert type(request.deadline_s) is float


def test_defaults_are_filled_in() -> None:
    request = decode_request(pack({"op": "match", "id": 1, "s": SESSION, "tokens": b"\0" * 8}))
    assert request.body.skip_blocks == 0
    assert request.body.request == ""


def test_reserved_operations_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none now."""
    monkeypatch.setattr(wire, "RESERVED_OPS", frozenset({"later"}))
    with pytest.raises(WireError, match="reserved") as caught:
        decode_request(pack({"op": "later", "id": 3, "anything": 1}))
    assert (caught.value.code, caught.value.request_id) == ("unsupported", 3)


def test_tables_agree() -> None:
    assert set(OPS) >= NEEDS_SESSION
    assert not RESERVED_OPS & set(OPS)


def test_a_large_map_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(WireError) as caught:
        unpack(bytes(MAX_HEAD_BYTES + 1))
    assert caught.value.code == "too_large"


def test_a_small_message_cannot_claim_much_memory() -> None:
    """An array's length is believed before its items are there, at every level of nesting."""
    with pytest.raises(WireError, match="max_array_len"):
        decode_request(b"\x81\xa1x" + b"\xdc\xff\xff" * 1000)


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1x"])
@pytest.mark.parametrize("depth", [100, 1000, 100_000])
def test_deep_nesting_is_refused(opener: bytes, depth: int) -> None:
    with pytest.raises(WireError) as caught:
        decode_request(b"\x81\xa1x" + opener * depth + b"\xc0")
    assert str(caught.value)


def test_replies() -> None:
    assert decode_reply(pack({"id": 3, "ok": True}))["id"] == 3
    reply = decode_reply(pack(error_reply(4, "expired")))
    assert (reply["error"], reply["message"]) == ("expired", ERRORS["expired"])
    for wrong in (
        {},
        {"id": 1},
        {"id": "1", "ok": True},
        {"id": 1, "ok": 1},
        {"id": 1, "ok": False},
    ):
        with pytest.raises(WireError):
            decode_reply(pack(wrong))
