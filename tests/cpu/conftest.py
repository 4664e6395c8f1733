"""A small CPU device per test; GEMM measurements are shared by all tests of a run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def gemm_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("gemm")


@pytest.fixture
def device(gemm_cache):
    from coissue.kernels.cpu.device import CpuDevice

    yield CpuDevice(threads=1, memory_bytes=1 << 28, cache_dir=gemm_cache)
    torch.set_num_threads(1)
