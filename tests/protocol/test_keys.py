"""Names that commit to content: fixed vectors, and a digest that no field escapes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.protocol.keys import (
    ROOT_KEY,
    UNCOUNTED,
    LayerGroup,
    NamespaceSpec,
    block_key,
    chain_keys,
    digest_weights,
    sample_bytes,
)
from hicache.protocol.messages import encode_tokens

SPEC = NamespaceSpec(
    model_digest="m",
    weights_digest="w",
    dtype="float16",
    groups=(LayerGroup(2, 1, 4, "layer,kv,token,head,dim"),),
    block_tokens=4,
    block_bytes=128,
    name="example",
)
OTHER = {
    "model_digest": "m2",
    "weights_digest": "w2",
    "dtype": "bfloat16",
    "groups": (LayerGroup(3, 1, 4, "layer,kv,token,head,dim"),),
    "block_tokens": 8,
    "block_bytes": 256,
    "weights_version": 1,
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 1,
    "pp_size": 2,
    "rope": "theta=1",
    "lora_digest": "l",
    "quantisation": "q",
    "cache_salt": "s",
}


def test_vectors() -> None:
    """Fixed for ever: blocks on disk are found by them."""
    namespace = SPEC.digest()
    assert namespace.hex() == "1dd6240a0d0f22499fc341d2cc3fdbb6bead818660e0ae046f17d456ceb28af8"
    keys = chain_keys(namespace, ROOT_KEY, encode_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9]), 16)
    assert [key.hex() for key in keys] == [
        "d04b373ca2f42099dd8707b6b7c2b161b939bf79d2eebd9a71e2ab344ae93f75",
        "411c94d015c469c9fd906432b9fb864e6a96c773392832de512414449e532293",
    ]


@pytest.mark.parametrize("name", sorted(OTHER))
def test_every_field_changes_the_digest(name: str) -> None:
    changed: dict[str, Any] = {name: OTHER[name]}
    assert replace(SPEC, **changed).digest() != SPEC.digest()


def test_no_field_was_forgotten() -> None:
    assert set(OTHER) == set(SPEC.to_wire()) - set(UNCOUNTED)


@pytest.mark.parametrize(
    "group",
    [
        LayerGroup(1, 1, 4, "layer,kv,token,head,dim"),
        LayerGroup(2, 2, 4, "layer,kv,token,head,dim"),
        LayerGroup(2, 1, 8, "layer,kv,token,head,dim"),
        LayerGroup(2, 1, 4, "kv,layer,token,head,dim"),
        LayerGroup(2, 1, 4, "layer,kv,token,head,dim", window=128),
    ],
)
def test_every_field_of_a_group_changes_the_digest(group: LayerGroup) -> None:
    assert replace(SPEC, groups=(group,)).digest() != SPEC.digest()


def test_the_name_is_for_people_and_the_arithmetic_for_the_planner() -> None:
    told = replace(SPEC, name="another", flop_per_token=1, flop_per_pair=2)
    assert told.digest() == SPEC.digest()
    assert told == SPEC
    assert NamespaceSpec.from_wire(told.to_wire()).flop_per_pair == 2


def test_a_spec_survives_the_wire() -> None:
    assert NamespaceSpec.from_wire(SPEC.to_wire()) == SPEC


def test_the_order_of_fields_does_not_matter() -> None:
    backwards = dict(reversed(SPEC.to_wire().items()))
    assert NamespaceSpec.from_wire(backwards).digest() == SPEC.digest()


def test_optional_fields_have_their_defaults() -> None:
    needed = ("model_digest", "weights_digest", "dtype", "groups", "block_tokens", "block_bytes")
    fields = {name: value for name, value in SPEC.to_wire().items() if name in needed}
    assert NamespaceSpec.from_wire(fields).digest() == SPEC.digest()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_digest": None}, "model_digest: missing"),
        ({"dtype": 16}, "dtype: must be str, not int"),
        ({"block_tokens": "4"}, "block_tokens: must be int"),
        ({"block_tokens": True}, "block_tokens: must be int, not bool"),
        ({"block_tokens": 0}, "at least 1"),
        ({"tp_size": -1}, "tp_size"),
        ({"groups": []}, "groups: at least one"),
        ({"groups": [7]}, "LayerGroup must be a map"),
        ({"groups": {}}, "groups: must be list"),
        ({"colour": "red"}, "colour: unknown field"),
    ],
)
def test_a_wrong_spec_is_named(change: dict[str, Any], words: str) -> None:
    fields = {**SPEC.to_wire(), **change}
    with pytest.raises(ValueError, match=words):
        NamespaceSpec.from_wire({name: fields[name] for name in fields if fields[name] is not None})


def test_a_wrong_group_is_named() -> None:
    group = SPEC.to_wire()["groups"][0]
    for change, words in (
        ({"layers": -1}, "layers"),
        ({"layers": "2"}, "layers: must be int"),
        ({"x": 1}, "x: unknown field of LayerGroup"),
    ):
        with pytest.raises(ValueError, match=words):
            NamespaceSpec.from_wire({**SPEC.to_wire(), "groups": [{**group, **change}]})


def test_a_spec_that_is_no_map() -> None:
    with pytest.raises(ValueError, match="must be a map"):
        NamespaceSpec.from_wire([])  # type: ignore[arg-type]


# --- tokens and keys ----------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_every_form_of_tokens_is_the_same(ids: list[int]) -> None:
    expected = b"".join(token.to_bytes(4, "little") for token in ids)
    assert encode_tokens(ids) == expected
    assert encode_tokens(tuple(ids)) == expected
    assert encode_tokens(np.array(ids, np.uint32)) == expected
    assert encode_tokens(np.array(ids, np.int64)) == expected
    assert encode_tokens(expected) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        [-1],
        [2**32],
        [1.5],
        ["a"],
        [[1, 2]],
        (-1,),
        np.array([-1]),
        np.array([[1]]),
        np.array([1.5]),
        b"abc",
    ],
)
def test_what_is_no_token_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"token|list"):
        encode_tokens(wrong)


def test_keys_commit_to_the_whole_prefix() -> None:
    namespace = SPEC.digest()
    one = chain_keys(namespace, ROOT_KEY, encode_tokens([1, 2, 3, 4]), 8)
    two = chain_keys(namespace, ROOT_KEY, encode_tokens([9, 2, 3, 4]), 8)
    assert len(set(one) | set(two)) == 4
    assert one[1] == block_key(namespace, one[0], encode_tokens([3, 4]))
    assert chain_keys(bytes(32), ROOT_KEY, encode_tokens([1, 2]), 8) != one[:1]


def test_weights_of_the_same_shape_differ() -> None:
    def digest(last: int) -> str:
        weights = np.zeros(1 << 20, np.uint8)
        weights[-1] = last
        return digest_weights([("a", "u8", weights.shape, sample_bytes(weights))])

    assert digest(0) == digest(0)
    assert digest(0) != digest(1)
    assert digest_weights([("a", "u8", (2, 3), b"")]) != digest_weights([("a", "u8", (3, 2), b"")])


def test_the_order_of_tensors_does_not_matter() -> None:
    tensors = [("a", "f", (1,), b"1"), ("b", "f", (1,), b"2")]
    assert digest_weights(tensors) == digest_weights(reversed(tensors))
