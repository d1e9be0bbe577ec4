"""Keys and certificate files: what is read, what is refused and in which words, who is let in."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from click.testing import CliRunner

from hicache.cli import cli
from hicache.config import SocketConfig
from hicache.daemon.curve_auth import CurveAuth, check_keys
from hicache.protocol.curve import CurveKeys, read_pair, read_public


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """(NAME.key_secret, NAME.key), as an operator makes them."""
    result = CliRunner().invoke(cli, ["config", "keys", str(folder), name])
    assert result.exit_code == 0, result.output
    return folder / f"{name}.key_secret", folder / f"{name}.key"


def test_made_keys_are_private_and_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    secret, public = make(folder, "me")
    server_secret, server_public = make(folder, "server")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = CurveKeys.load(secret, server_public)
    assert (keys.public, keys.secret) == read_pair(secret)
    assert keys.public == read_public(public)
    assert keys.server_public == read_pair(server_secret)[0]
    assert keys.secret.decode() not in repr(keys)


def test_making_keys_never_replaces_any(tmp_path: Path) -> None:
    secret, _ = make(tmp_path, "me")
    before = secret.read_bytes()
    again = CliRunner().invoke(cli, ["config", "keys", str(tmp_path), "me"])
    assert again.exit_code == 1
    assert "there already" in again.output
    assert secret.read_bytes() == before
    outside = CliRunner().invoke(cli, ["config", "keys", str(tmp_path), "../me"])
    assert outside.exit_code == 2


def test_what_is_no_key_file_is_a_sentence(tmp_path: Path) -> None:
    secret, public = make(tmp_path, "me")
    with pytest.raises(ValueError, match="cannot be read"):
        read_pair(tmp_path / "absent")
    with pytest.raises(ValueError, match="cannot be read"):
        read_pair(tmp_path)
    with pytest.raises(ValueError, match="holds no secret key"):
        read_pair(public)
    secret.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_pair(secret)
    wrong = tmp_path / "wrong"
    for text, words in [
        (b"\xff\x00", "no CURVE certificate"),
        (b"public-key\n", "no CURVE certificate"),
        (b'public-key = "short"\n', "40 characters"),
        (b'public-key = "' + b"~" * 40 + b'"\n', "40 characters"),
    ]:
        wrong.write_bytes(text)
        with pytest.raises(ValueError, match=words):
            read_public(wrong)


def test_keys_that_do_not_belong_together(tmp_path: Path) -> None:
    (public, secret), (other, _) = zmq.curve_keypair(), zmq.curve_keypair()
    with pytest.raises(ValueError, match="do not belong together"):
        CurveKeys(other, other, secret)
    assert CurveKeys(other, public, secret).public == public


def test_the_check_names_both_keys_of_the_configuration(tmp_path: Path) -> None:
    server, _ = make(tmp_path, "server")
    allowed = tmp_path / "allowed"
    config = SocketConfig(
        endpoint="tcp://0.0.0.0:99",
        curve_secret_key_file=str(tmp_path / "absent"),
        curve_allowed_clients_dir=str(allowed),
    )
    assert [problem.key for problem in check_keys(config)] == [
        "socket.curve_secret_key_file",
        "socket.curve_allowed_clients_dir",
    ]
    good = config.model_copy(update={"curve_secret_key_file": str(server)})
    assert "not a folder" in check_keys(good)[0].sentence
    allowed.mkdir()
    assert "no client could connect" in check_keys(good)[0].sentence
    make(allowed, "me")
    assert check_keys(good) == []
    (allowed / "bad.key").write_text("nothing")
    assert "bad.key" in check_keys(good)[0].sentence
    assert check_keys(SocketConfig(endpoint="tcp://127.0.0.1:99")) == []


@pytest.fixture
def door(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """CURVE authentication, its folder, and the socket of its ZAP requests."""
    server, _ = make(tmp_path, "server")
    allowed = tmp_path / "allowed"
    make(allowed, "first")
    with zmq.Context() as context:
        auth = CurveAuth(context, str(server), str(allowed))
        asker = context.socket(zmq.REQ)
        asker.linger = 0
        asker.connect("inproc://zeromq.zap.01")

        def admits(key_file: Path, mechanism: bytes = b"CURVE") -> bool:
            key = zmq.utils.z85.decode(read_public(key_file))
            asker.send_multipart([b"1.0", b"1", b"hicache", b"10.0.0.1", b"", mechanism, key])
            auth.answer()
            version, request, code, *_ = asker.recv_multipart()
            assert (version, request) == (b"1.0", b"1")
            return code == b"200"

        yield SimpleNamespace(allowed=allowed, admits=admits)
        asker.close()
        auth.socket.close()


def test_the_folder_is_followed(door: SimpleNamespace, tmp_path: Path) -> None:
    """A key that is added, replaced or removed counts at once; a broken file harms only itself."""
    first = door.allowed / "first.key"
    _, second = make(tmp_path, "second")
    assert door.admits(first)
    assert not door.admits(first, b"PLAIN")
    assert not door.admits(second)
    (door.allowed / "second.key").write_bytes(second.read_bytes())
    (door.allowed / "broken.key").write_text("half a fi")
    assert door.admits(second)
    assert door.admits(first)
    moved = first.rename(tmp_path / "gone.key")
    assert not door.admits(moved)
    os.replace(moved, door.allowed / "second.key")
    assert door.admits(door.allowed / "second.key")
    assert not door.admits(second)
