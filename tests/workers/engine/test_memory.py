"""What the machine and the container leave of memory."""

from pathlib import Path

from workers.engine.memory import _container, _machine, available_memory, gib


def test_this_machine_says_something() -> None:
    available = available_memory()
    assert available is not None
    assert available > 1 << 20


def test_what_the_kernel_calls_available_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemFree:          1 kB\nMemAvailable:    40 kB\n")
    assert _machine(meminfo) == 40 * 1024
    assert _machine(tmp_path / "absent") is None


def test_a_containers_limit_leaves_what_it_does_not_use_and_files_that_can_go(tmp_path: Path) -> None:
    assert _container(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert _container(tmp_path) == 300
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _container(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert _container(tmp_path) is None


def test_sizes_are_shown_in_gib() -> None:
    assert gib(3 << 29) == "1.50 GiB"
