"""The port that ranks of one machine meet at is nobody else's by the time they use it."""

import random
import socket

import pytest

from smlp.launch import local


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    """Sets the range that the system says to give to connections."""

    def say(text: str) -> None:
        path = tmp_path / "range"
        path.write_text(text)
        monkeypatch.setattr(local, "_RANGE_FILE", path)

    return say


def test_below_what_the_system_gives_to_connections(ephemeral):
    ephemeral("12000\t60999\n")
    found = [local.free_port() for _ in range(300)]
    assert all(10000 <= port < 12000 for port in found)
    assert len(set(found)) > 200  # launches at the same time draw different ones


def test_without_such_a_file_below_the_usual_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_RANGE_FILE", tmp_path / "none")
    assert all(10000 <= local.free_port() < 32768 for _ in range(100))


def test_a_port_in_use_is_passed_over(ephemeral, monkeypatch):
    ephemeral("12000\t60999\n")
    used, free = local.free_port(), local.free_port()
    monkeypatch.setattr(random.SystemRandom, "sample", lambda self, numbers, count: [used, free])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", used))
        listener.listen()
        assert local.free_port() == free
    assert local.free_port() == used


def test_where_the_system_leaves_none_below_any_will_do(ephemeral):
    ephemeral("1024\t65535\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", local.free_port()))
