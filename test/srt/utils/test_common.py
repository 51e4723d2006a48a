"""Platforms, copies between host and device, and small arithmetic."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.utils import common
from sglang.srt.utils.common import (
    Platform,
    ceil_align,
    ceil_div,
    get_bool_env_var,
    get_platform,
    is_pin_memory_available,
    register_platform,
    to_device_async,
    to_host_async,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "data",
    [
        [3, 1, 2],
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        np.array([3, 1, 2]),
        np.array([3, 1, 2], np.int32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_copy_has_the_values_and_the_type_asked_for(data: object, dtype: torch.dtype) -> None:
    copied = to_device_async(data, dtype, CPU)
    assert copied.dtype == dtype
    assert copied.tolist() == [3, 1, 2]


def test_a_copy_of_nothing_has_its_type() -> None:
    copied = to_device_async([], torch.int64, CPU)
    assert copied.shape == (0,)
    assert copied.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_what_was_copied_may_be_changed_afterwards(dtype: torch.dtype) -> None:
    data = torch.tensor([1, 2, 3], dtype=dtype)
    copied = to_device_async(data, torch.int64, CPU)
    data.fill_(9)
    assert copied.tolist() == [1, 2, 3]


def test_nested_lists_keep_their_shape() -> None:
    assert to_device_async([[1.5, 2], [3, 4]], torch.float32, CPU).tolist() == [[1.5, 2], [3, 4]]


def test_a_host_tensor_comes_back_as_it_is() -> None:
    tensor = torch.tensor([1, 2])
    assert to_host_async(tensor) is tensor


@pytest.mark.parametrize("word", ["1", "2", "true", "TRUE", " yes ", "on"])
def test_words_that_mean_yes(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_SWITCH", word)
    assert get_bool_env_var("SGLANG_TEST_SWITCH")


@pytest.mark.parametrize("word", ["0", "false", "No", "off", ""])
def test_words_that_mean_no(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_SWITCH", word)
    assert not get_bool_env_var("SGLANG_TEST_SWITCH", default=True)


@pytest.mark.parametrize("word", ["y", "maybe", "-1", "1.0"])
def test_words_that_mean_nothing(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_SWITCH", word)
    with pytest.raises(ValueError, match=f"SGLANG_TEST_SWITCH must be a switch .*got '{word}'"):
        get_bool_env_var("SGLANG_TEST_SWITCH")


@pytest.mark.parametrize("default", [True, False])
def test_a_switch_that_is_not_set(default: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_TEST_SWITCH", raising=False)
    assert get_bool_env_var("SGLANG_TEST_SWITCH", default) is default


@given(a=st.integers(0, 10**9), b=st.integers(1, 10**4))
def test_rounding_up(a: int, b: int) -> None:
    n = ceil_div(a, b)
    assert (n - 1) * b < a <= n * b
    assert ceil_align(a, b) == n * b


class Toy(Platform):
    """A device that does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(name, CPU)

    def is_pin_memory_available(self) -> bool:
        return True


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Platform], Platform | None]]:
    """Register platforms that are gone after the test."""
    for name in ("_platforms", "_platforms_of_types"):
        monkeypatch.setattr(common, name, dict(getattr(common, name)))
    yield register_platform


def test_a_platform_serves_its_name_until_another_does(register: Callable) -> None:
    first, second = Toy("toy"), Toy("toy")
    assert register(first) is None
    assert get_platform("toy") is first
    assert get_platform("toy:1") is first
    assert register(second) is first
    assert get_platform("toy") is second
    # The device type that its tensors have was served before, and still is by the same one.
    assert get_platform(CPU).name == "cpu"


def test_another_device_may_stand_for_cuda(register: Callable) -> None:
    toy = Toy("cuda")
    before = register(toy)
    assert get_platform("cuda") is toy
    assert is_pin_memory_available()
    assert is_pin_memory_available("cuda")
    assert not is_pin_memory_available(CPU)
    assert register(before) is toy


def test_a_new_kind_of_device_is_served_under_its_type_too(register: Callable) -> None:
    meta = Platform("paper", torch.device("meta"))
    register(meta)
    assert get_platform("paper") is meta
    assert get_platform(torch.device("meta")) is meta


def test_the_newest_platform_serves_a_type_that_none_is_named_after(register: Callable) -> None:
    first, second = (Platform("cuda", torch.device("meta")) for _ in range(2))
    for platform in (first, second, first):
        register(platform)
        assert get_platform(torch.device("meta")) is platform
    named = Platform("meta", torch.device("meta"))
    register(named)
    register(second)
    assert get_platform(torch.device("meta")) is named
    assert get_platform("cuda") is second


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"device must be one of \['cpu', 'cuda'.*got 'tpu'"):
        get_platform("tpu")


def test_the_cpu_needs_no_pinned_memory() -> None:
    assert get_platform("cpu").is_available()
    assert not is_pin_memory_available("cpu")
    get_platform("cpu").synchronize()


def test_one_thread_is_the_calling_threads_affair():
    """Only with OpenMP, which torch for Linux is built with."""
    before = torch.get_num_threads()
    seen = []

    def run() -> None:
        seen.append(torch.get_num_threads())
        common.use_one_thread()
        seen.append(torch.get_num_threads())
        torch.ones(512, 512) @ torch.ones(512, 512)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, 1, 1]
    assert torch.get_num_threads() == before


def test_freed_memory_is_kept() -> None:
    """Only with GNU's malloc. In a process of its own, since it cannot be undone."""
    script = """
import resource
import threading
import torch
from sglang.srt.utils.common import keep_freed_memory

def run():
    for _ in range(20):
        parts = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(6)]
        del parts

def count():
    run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

torch.set_num_threads(1)
keep_freed_memory()
# Forwards run on a thread, and threads have arenas of their own.
thread = threading.Thread(target=count)
thread.start()
thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    # All of it anew would be 20 * 6 * 1024 pages.
    assert int(done.stdout) < 6 * 1024


def test_a_dissolved_team_is_made_anew():
    product = torch.ones(256, 256) @ torch.ones(256, 256)
    common.dissolve_thread_team()
    assert torch.equal(torch.ones(256, 256) @ torch.ones(256, 256), product)
