"""Backends for the tests of attention. A test without the mark `gpu` runs on the CPU path, wherever it is."""

import functools
import os

import pytest

# Set before JAX is imported: several processes share one GPU, and each would take most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytest.register_assert_rewrite("support")

from support import backend_named  # noqa: E402


def pytest_configure(config):
    # pytest-xdist's own, which need not be installed.
    config.addinivalue_line("markers", "xdist_group(name): tests that one process of pytest-xdist should run")


@functools.cache
def _compute_capability() -> tuple[int, int] | None:
    """Of the first GPU; None if there is none, for which tests/conftest.py skips."""
    try:
        import cupy

        return divmod(int(cupy.cuda.Device(0).compute_capability), 10)
    except Exception:
        return None


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("gpu"):
            wanted = mark.kwargs.get("compute_capability")
            if wanted and (found := _compute_capability()) and found != wanted:
                reason = f"needs compute capability {wanted[0]}.{wanted[1]}; this GPU has {found[0]}.{found[1]}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def backend(request):
    """The CPU path or a forced tier, by name."""
    return backend_named(request.param)


@pytest.fixture(scope="module")
def cupy():
    import cupy

    return cupy


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="no PyTorch")


@pytest.fixture(scope="module")
def cuda(torch):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA GPU")
    return torch


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax", reason="no JAX")


@pytest.fixture(scope="module")
def jax_gpu(jax):
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX finds no CUDA GPU")
