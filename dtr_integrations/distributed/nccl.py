"""What NCCL keeps on the device for its communicators, by arithmetic.

A communicator connects each of its channels to the neighbours of this rank in NCCL's rings and trees: two
within a node, up to four across nodes, and no more however many there are (NVIDIA/nccl issues 864 and 986).
One such connection has a receive buffer for each of the protocols LL, LL128 and Simple, and the sender's
flags, each rounded up to 2 MiB (NCCL 2.30, src/init.cc: `computeBuffSizes`, src/transport/p2p.cc:
`p2pRecvSetup`, `p2pSendSetup`): 10 MiB and 2 MiB, the sizes that NVIDIA/nccl issue 1685 saw allocated. From
three ranks of a node on, all-reduce may go over NVLink SHARP, with buffers of its own
(src/transport/nvls.cc: `ncclNvlsBufferSetup`).

The number of channels depends on the machine: 24 on HGX A100 (NVIDIA/nccl-tests issue 100), 16 on H800
(NVIDIA/nccl issue 892); 24 are assumed, and two neighbours for two ranks as well. So the result is meant as
an upper bound: 604 MB for two ranks, 738 MB for four, where 544 MiB (570 MB) and 688 MiB (721 MB) were
reported on four A100 (NVIDIA/nccl issue 964). What is not in it: send/recv and all-to-all, which connect
every pair of ranks. Communicators that share buffers after a split take less.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from .._compat import process_groups

__all__ = ["communicator_bytes", "communicators"]

_MIB = 1 << 20
_STEPS = 8
_BUFFERS = {
    "NCCL_LL_BUFFSIZE": 8 * 512 * _STEPS * 16,
    "NCCL_LL128_BUFFSIZE": 120 * 640 * _STEPS * 8,
    "NCCL_BUFFSIZE": 4 * _MIB,
}
_FLAGS_BYTES = 64 << 10  # head and tail counters and their page
_CHANNELS = 24
_SHARP_CHANNELS = 16
_SHARP_BYTES = 2 * _STEPS * (128 << 10)  # of a channel, for each rank of the node
_RANKS_OF_A_NODE = 8


def communicators(backend: str = "nccl") -> Iterator[int]:
    """The number of ranks of each process group of this process that has a communicator; none of a single
    rank.

    Torch makes a group's communicator when the group is first used, so that all are counted.
    """
    for config, ranks in process_groups():
        if backend in config and len(ranks) > 1:
            yield len(ranks)


def communicator_bytes(
    ranks: int, *, ranks_of_a_node: int | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """What one communicator of that many ranks takes on this rank's device, in bytes; 0 for one rank.

    Args:
        ranks: of the communicator.
        ranks_of_a_node: how many of them there are in a node at most. None: `LOCAL_WORLD_SIZE`, else 8.
        environment: `NCCL_BUFFSIZE`, `NCCL_LL_BUFFSIZE`, `NCCL_LL128_BUFFSIZE` (bytes), `NCCL_MIN_NCHANNELS`,
            `NCCL_MAX_NCHANNELS` and `NCCL_NVLS_ENABLE=0` count as NCCL takes them.
    """
    if ranks < 2:
        return 0

    def setting(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else default

    of_node = min(ranks, ranks_of_a_node or setting("LOCAL_WORLD_SIZE", _RANKS_OF_A_NODE))
    channels = max(_CHANNELS, setting("NCCL_MIN_NCHANNELS", 0))
    channels = min(channels, setting("NCCL_MAX_NCHANNELS", channels))
    received = _FLAGS_BYTES + sum(setting(name, default) for name, default in _BUFFERS.items())
    connection = _rounded(received) + _rounded(_FLAGS_BYTES)
    neighbours = 2 if ranks <= of_node else 4
    sharp = 0
    if of_node > 2 and environment.get("NCCL_NVLS_ENABLE") != "0":
        sharp = min(channels, _SHARP_CHANNELS) * _SHARP_BYTES * min(of_node, _RANKS_OF_A_NODE)
    return channels * neighbours * connection + sharp


def _rounded(size: int) -> int:
    return -(-size // (2 * _MIB)) * 2 * _MIB
