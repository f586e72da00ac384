"""What the machine and its control groups leave to a rank."""

import pytest

from dtr_integrations.measure import device_total_bytes, device_totals
from dtr_integrations.measure.device_totals import available_bytes, cgroup_limit_bytes


def cgroup(tmp_path, membership, limits):
    (tmp_path / "membership").write_text(membership)
    mount = tmp_path / "mount"
    mount.mkdir()
    for path, limit in limits.items():
        file = mount / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return cgroup_limit_bytes(tmp_path / "membership", mount)


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": 8_000_000_000}, 8_000_000_000),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": 5000, "a/b/memory.max": 7000}, 5000),
        ("0::/not/mounted/here\n", {"memory.max": 5000}, 5000),
        ("4:cpu:/x\n2:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": 6000}, 6000),
        ("2:memory:/a\n", {"memory/memory.limit_in_bytes": 9223372036854771712}, None),
        ("nonsense\n", {"memory.max": 5000}, None),
    ],
)
def test_control_groups(tmp_path, membership, limits, expected):
    assert cgroup(tmp_path, membership, limits) == expected


def test_no_control_groups_at_all(tmp_path):
    assert cgroup_limit_bytes(tmp_path / "none", tmp_path) is None


def test_available_memory(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  100 kB\nMemAvailable:  42 kB\n")
    assert available_bytes(file) == 42 * 1024
    assert available_bytes(tmp_path / "none") > 2**20


def test_the_smaller_of_the_two_shared_by_the_ranks(monkeypatch):
    monkeypatch.setattr(device_totals, "available_bytes", lambda: 10_000)
    monkeypatch.setattr(device_totals, "cgroup_limit_bytes", lambda: 9_001)
    assert device_total_bytes("cpu") == 9_001
    assert device_total_bytes("cpu", ranks_on_host=2) == 4_500
    monkeypatch.setattr(device_totals, "cgroup_limit_bytes", lambda: None)
    assert device_total_bytes("cpu") == 10_000


def test_this_machine():
    assert device_total_bytes("cpu") > 2**20


def test_errors_say_what_to_give():
    with pytest.raises(ValueError, match="ranks_on_host is 0; give the number of ranks on this machine"):
        device_total_bytes("cpu", 0)
    with pytest.raises(ValueError, match="device meta cannot be told; supported are 'cpu' and 'cuda'"):
        device_total_bytes("meta")
