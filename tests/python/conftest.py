"""Fixtures: daemons on sockets in a temporary directory of their own."""

import sys
import pathlib

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

from daemons import Daemon  # noqa: E402


@pytest.fixture(scope="session")
def wave_buffer_address(tmp_path_factory):
    address = f"unix:{tmp_path_factory.mktemp('wavebufferd')}/s"
    daemon = Daemon("wavebufferd", f"--listen={address}", "--backend=host", "--bytes_max=1GiB")
    yield address
    assert daemon.stop() == 0, daemon.log


@pytest.fixture(scope="session")
def address(tmp_path_factory, wave_buffer_address):
    """A daemon with a wave buffer that all tests of a run may share."""
    address = f"unix:{tmp_path_factory.mktemp('wavekvd')}/s"
    # At 7,000 tokens a step reads a third of the blocks: a cache of the default 5 % would miss all.
    daemon = Daemon(
        "wavekvd", f"--listen={address}", "--pool_bytes=2GiB", f"--wave_buffer={wave_buffer_address}",
        "--wave_buffer_bytes=384MiB", "--wave_buffer_cache_ratio=0.6",
    )  # fmt: skip
    yield address
    assert daemon.stop() == 0, daemon.log


@pytest.fixture
def private_daemon(tmp_path):
    """A daemon of one test, which may stop or kill it. Yields (address, daemon)."""
    address = f"unix:{tmp_path}/s"
    daemon = Daemon("wavekvd", f"--listen={address}", "--pool_bytes=256MiB")
    yield address, daemon
    daemon.stop()


@pytest.fixture
def fresh_seed():
    """Seeds torch; returns the seed."""
    import torch_models  # Where there is torch.

    return torch_models.seed_everything()


@pytest.fixture
def model(fresh_seed):
    """A small model of random weights with the attention "wavekv"."""
    import torch_models

    return torch_models.make_model()
