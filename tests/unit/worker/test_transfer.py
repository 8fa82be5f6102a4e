import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_worker.interface import DeviceLostError
from pagefleet_worker.paging.transfer import (
    Download,
    all_to_device,
    pack,
    telling_loss,
    to_device,
    unpack,
)

CPU = torch.device("cpu")
DTYPES = [torch.int64, torch.float32, torch.int32, torch.uint8, torch.float64, torch.bfloat16]
TENSORS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
    min_size=1,
    max_size=6,
)


@given(TENSORS)
def test_whatever_travels_together_arrives_as_it_was(shapes):
    tensors = [torch.randint(0, 100, shape).to(dtype) for dtype, shape in shapes]
    arrived = unpack(pack(tensors), tensors)
    for before, after in zip(tensors, arrived, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


def test_views_travel_without_what_lies_between():
    matrix = torch.arange(24).view(4, 6)
    (arrived,) = unpack(pack([matrix[:, 2:4]]), [matrix[:, 2:4]])
    assert torch.equal(arrived, matrix[:, 2:4])


def test_nothing_moves_on_a_cpu():
    tensor = torch.ones(3)
    download = Download([tensor])
    assert download.ready()
    assert download.tensors()[0] is tensor
    arrays = [np.arange(3), np.ones(2, np.float32)]
    assert [each.dtype for each in all_to_device(arrays, CPU)] == [torch.int64, torch.float32]
    assert to_device([1, 2], CPU, np.int32).dtype == torch.int32


def fail(*_):
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("device", "synchronize", "told"),
    [
        ("cuda", fail, DeviceLostError),
        ("cuda", lambda _: None, RuntimeError),
        ("cpu", fail, RuntimeError),
    ],
)
def test_a_device_is_lost_if_it_answers_with_the_error_again(
    device, synchronize, told, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(told, match="illegal memory access"), telling_loss(torch.device(device)):
        fail()
