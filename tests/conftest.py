"""Shared by all tests: a kernel cache of their own, and no GPU tests where there is no GPU."""

import functools
import os
import shutil
import tempfile

import pytest

# Before NumPy is imported: the threads of several processes' BLAS would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure(config):
    # Before any worker of pytest-xdist starts, so that all share what one of them compiled.
    if not hasattr(config, "workerinput"):
        config.cuflash_cache = os.environ["CUFLASH_CACHE_DIR"] = tempfile.mkdtemp(prefix="cuflash-tests-")


def pytest_unconfigure(config):
    if folder := getattr(config, "cuflash_cache", None):
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _no_gpu() -> str | None:
    """Why GPU tests cannot run, None if they can."""
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA GPU"
    except Exception as error:  # of many types: no CuPy, no driver, a driver too old
        return f"no CUDA GPU ({type(error).__name__}: {' '.join(str(error).split())[:120]})"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))
