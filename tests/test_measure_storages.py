"""Bytes of storages, each once, whatever wraps or shares them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dtr_integrations.measure import live_bytes, optimizer_state_tensors, static_bytes, tensors_in


def test_views_count_once_and_whole():
    base = torch.zeros(100)
    assert live_bytes([base[:10], base[20:30].view(2, 5), base.detach()]) == 400


def test_distinct_storages_of_equal_size_count_each():
    assert live_bytes(torch.zeros(100) for _ in range(5)) == 2000


def test_tied_weights_count_once():
    embedding, head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
    head.weight = embedding.weight
    assert static_bytes([embedding, head]) == (50 * 8 + 50) * 4
    assert static_bytes(torch.nn.Sequential(embedding, head)) == (50 * 8 + 50) * 4


def test_parameters_buffers_and_state_but_no_gradients():
    model = torch.nn.BatchNorm1d(16)
    optimizer = torch.optim.AdamW(model.parameters())
    own = 2 * 64 + 2 * 64 + 8  # weight, bias, running mean and variance, number of batches
    assert static_bytes(model, optimizer) == own
    model(torch.randn(4, 16)).sum().backward()
    assert static_bytes(model, optimizer) == own
    optimizer.step()
    assert static_bytes(model, [optimizer]) == own + 2 * (2 * 64 + 4)  # moments, step counter
    assert len(list(optimizer_state_tensors(optimizer))) == 6


def test_a_learning_rate_that_is_a_tensor_is_state():
    optimizer = torch.optim.AdamW([torch.zeros(3)], lr=torch.tensor(0.1), capturable=False, foreach=False)
    assert live_bytes(optimizer_state_tensors(optimizer)) == 4


def test_meta_and_fake_tensors_count_as_if_they_were_real():
    assert live_bytes([torch.empty(10**9, device="meta"), torch.empty(10**9, device="meta")]) == 8 * 10**9
    with FakeTensorMode():
        assert live_bytes([torch.empty(1000), torch.empty(10)]) == 4040


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_are_what_they_are_made_of():
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (5,))
    assert live_bytes([coo]) == 2 * 8 + 2 * 4


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_compressed_sparse_tensors_too():
    rows, columns, values = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)
    assert live_bytes([torch.sparse_csr_tensor(rows, columns, values, (2, 2))]) == 3 * 8 + 2 * 8 + 2 * 4
    assert live_bytes([torch.sparse_csc_tensor(rows, columns, values, (2, 2))]) == 3 * 8 + 2 * 8 + 2 * 4


def test_only_one_kind_of_device():
    tensors = [torch.zeros(10), torch.empty(100, device="meta")]
    assert live_bytes(tensors, device_type="cpu") == 40
    assert live_bytes(tensors, device_type="meta") == 400


def test_tensors_in_nested_values():
    a, b, c = (torch.zeros(1) for _ in range(3))
    tree = {"x": [a, (b, 3)], "y": {"z": c}, "label": "text", "none": None}
    assert [t is s for t, s in zip(tensors_in(tree), [a, b, c], strict=True)] == [True] * 3


@pytest.fixture
def four_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_of_a_dtensor_the_local_shard_counts(four_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    sharded = distribute_tensor(torch.zeros(100, 3), mesh, [Shard(0)])
    replicated = distribute_tensor(torch.zeros(100, 3), mesh, [Replicate()])
    assert live_bytes([torch.nn.Parameter(replicated)]) == 1200
    local = sharded.to_local()
    assert live_bytes([sharded, local]) == local.untyped_storage().nbytes() == 300
