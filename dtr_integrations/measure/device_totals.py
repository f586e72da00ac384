"""How many bytes of device memory one rank can count on at most."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["device_total_bytes"]


def device_total_bytes(device: torch.device | str, ranks_on_host: int = 1) -> int:
    """The total of one rank's device memory, in bytes: what `budget="100%"` means.

    Args:
        device: CPU: the smaller of the cgroup limit and the available memory, divided by `ranks_on_host`.
            CUDA: the memory of that GPU, which is the rank's own.
        ranks_on_host: training processes on this machine, at least 1.

    Raises:
        ValueError: another kind of device, or fewer than one rank.
    """
    device = torch.device(device)
    if ranks_on_host < 1:
        raise ValueError(
            f"ranks_on_host is {ranks_on_host}; give the number of ranks on this machine, 1 or more"
        )
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        raise ValueError(f"the memory of device {device} cannot be told; supported are 'cpu' and 'cuda'")
    limits = [available_bytes(), cgroup_limit_bytes()]
    return min(limit for limit in limits if limit is not None) // ranks_on_host


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that new work can get without swapping, in bytes; where the system does not say, all it has."""
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_limit_bytes(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The tightest memory limit of this process's control groups (v1 and v2), in bytes; None if there is
    none.

    A limit anywhere up the tree binds. Inside of a container the path in `membership` may be the host's,
    which is not mounted there; the walk up still ends at the mount's root, where the container's own limit
    stands.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, separator, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not separator:
            continue
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(root):
                break
            limits.append(_limit_in(folder / name))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_in(file: Path) -> int | None:
    try:
        limit = int(file.read_text())  # "max" is v2's word for none
    except (OSError, ValueError):
        return None
    # v1 has no word for it: none is the largest multiple of the page size in 63 bits.
    return limit if limit < 2**60 else None
