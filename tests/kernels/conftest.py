"""Fixtures of the kernels' tests: kernels run on the CPU, in an emulator of a GPU's multiprocessor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulator.emulator import EmulatorLauncher, cpp_compiler


@pytest.fixture(scope="session")
def kernel_builds(request: pytest.FixtureRequest) -> Path:
    """Where kernels compiled for the emulator are kept, from one test session to the next."""
    if cpp_compiler() is None:
        pytest.skip("no C++ compiler (g++, clang++ or $CXX)")
    builds = request.config.rootpath / "build" / "emulator"
    EmulatorLauncher(builds).remove_stale()
    return builds


@pytest.fixture
def emulator(kernel_builds: Path) -> Iterator[EmulatorLauncher]:
    """The emulator, set as the launcher of all kernels during the test. A test may change its `seed`."""
    from kveval.kernels.launcher import use_launcher

    launcher = EmulatorLauncher(kernel_builds)
    with use_launcher(launcher):
        yield launcher
