"""Protocol 1 at the level of bytes: what is taken, what is refused and with which sentence."""

from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.protocol.messages import (
    ERRORS,
    MAX_HEAD_BYTES,
    MULTIPLE,
    Operation,
    Reply,
    WireError,
    declare,
    decode_reply,
    error_reply,
    pack,
    unpack,
)
from hicache.protocol.operations import OPERATIONS, PingRequest, decode_request, operation_of

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


def values_of(field: msgspec.structs.FieldInfo) -> st.SearchStrategy[Any]:
    kind: Any = msgspec.inspect.type_info(field.type)
    multiple = 1
    if isinstance(kind, msgspec.inspect.Metadata):
        multiple, kind = (kind.extra or {}).get(MULTIPLE, 1), kind.type
    match kind:
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case msgspec.inspect.FloatType():
            return st.floats(kind.ge, kind.le)
        case msgspec.inspect.StrType():
            return st.text(max_size=min(20, kind.max_length or 20))
        case msgspec.inspect.RawType():
            return st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3)
    assert isinstance(kind, msgspec.inspect.BytesType), kind
    least, most = kind.min_length or 0, kind.max_length or 40
    return st.binary(min_size=least, max_size=most).map(
        lambda data: data[: len(data) // multiple * multiple]
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    op = draw(st.sampled_from(sorted(OPERATIONS)))
    fields = msgspec.structs.fields(OPERATIONS[op].request)
    message = {field.name: draw(values_of(field)) for field in fields}
    return {**message, "op": op, "s": SESSION}


@given(requests())
def test_a_request_survives_the_wire(message: dict[str, Any]) -> None:
    request = decode_request(pack(message))
    found = {**msgspec.structs.asdict(request), "op": operation_of(request).name}
    if "spec" in found:
        found["spec"] = unpack(bytes(found["spec"]))
    assert found == message


@given(requests(), st.data())
def test_a_nil_field_counts_as_absent(message: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(message) - {"op", "id", "s", "spec"})))
    without = {key: value for key, value in message.items() if key != name}
    answers = []
    for asked in ({**message, name: None}, without):
        try:
            answers.append(pack(decode_request(pack(asked))))
        except WireError as error:
            answers.append(error.message.encode())
    assert answers[0] == answers[1]


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


@given(st.dictionaries(names | st.text(max_size=6), nested | st.sampled_from(sorted(OPERATIONS))))
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
        ({"surprise": 1}, "malformed", "unknown field `surprise`"),
        ({"tokens": None}, "malformed", "missing required field `tokens`"),
        ({"tokens": [1, 2]}, "malformed", "tokens: Expected `bytes`, got `array`"),
        ({"tokens": b"abc"}, "malformed", "tokens: length 3"),
        ({"skip_blocks": -1}, "malformed", "skip_blocks: Expected `int` >= 0"),
        ({"skip_blocks": 1.5}, "malformed", "skip_blocks: Expected `int`, got `float`"),
        ({"skip_blocks": True}, "malformed", "skip_blocks: Expected `int`, got `bool`"),
        ({"hop_bytes_per_s": float("nan")}, "malformed", "hop_bytes_per_s: Expected `float` >= 0"),
        (
            {"hop_bytes_per_s": float("inf")},
            "malformed",
            "hop_bytes_per_s: Expected `float` <= 1000000000000000.0",
        ),
        ({"deadline_s": 1e9}, "malformed", "deadline_s"),
        ({"request": "x" * 201}, "too_large", "request: Expected `str` of length <= 200"),
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
    request: Any = decode_request(pack({"op": "match", "id": 1, "s": SESSION, "tokens": b"\0" * 8}))
    assert request.skip_blocks == 0
    assert request.request == ""


def test_an_operation_is_declared_once() -> None:
    with pytest.raises(AssertionError, match="ping"):
        declare(Operation(PingRequest, Reply))


def test_a_large_map_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(WireError) as caught:
        unpack(bytes(MAX_HEAD_BYTES + 1))
    assert caught.value.code == "too_large"


def test_a_small_message_cannot_claim_much_memory() -> None:
    """An array's length is believed before its items are there, at every level of nesting."""
    with pytest.raises(WireError, match="max_array_len"):
        decode_request(b"\x81\xa1x" + b"\xdc\xff\xff" * 1000)
    hello: Any = decode_request(pack({"op": "hello", "id": 1, "protocol": 1, "spec": [0] * 65}))
    with pytest.raises(WireError, match="max_array_len"):
        unpack(bytes(hello.spec))


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
