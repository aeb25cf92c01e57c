"""What this machine has: GPUs, driver, CUDA, NVRTC, CuPy; and why not, in one line, where one is missing."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import sys
from typing import NamedTuple

import click
import numpy as np

from .. import __version__, config, jit
from .options import one_line


class Found(NamedTuple):
    """The GPUs that can be used; ``reason`` why there is none, ``unusable`` that their driver is too old."""

    count: int
    reason: str
    unusable: bool = False


def find_gpus() -> Found:
    try:
        cupy = jit.import_cupy()
        driver = cupy.cuda.runtime.driverGetVersion()
    except RuntimeError as error:  # CuPy is missing; its CUDA libraries are
        return Found(0, one_line(error))
    if driver == 0:
        return Found(0, "no NVIDIA driver was found")
    try:
        jit.check_driver()
    except RuntimeError as error:
        return Found(0, one_line(error), unusable=True)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        note = f" (CUDA_VISIBLE_DEVICES is {hidden!r})" if hidden is not None else ""
        return Found(0, f"the driver shows none{note}: {one_line(error)}")
    return Found(count, "" if count else "the driver shows none")


def pick_gpu(found: Found, index: int | None) -> int | None:
    """The GPU of an index, the first for None; None without any. Raises ClickException if it is not there."""
    if index is not None and index >= found.count:
        there = f"the GPUs here are 0 to {found.count - 1}" if found.count else found.reason
        raise click.ClickException(f"there is no GPU {index}: {there}")
    return (index or 0) if found.count else None


def device_of(index: int) -> config.Device:
    from ..launch import device_of

    return device_of(index)


def arch_for(device: config.Device) -> str:
    """What the device's kernels are compiled for. Raises ClickException if NVRTC is missing or too new."""
    try:
        return jit.arch_for(device.compute_capability)
    except RuntimeError as error:
        raise click.ClickException(one_line(error)) from None


def dotted(version) -> str:
    """ "9.0" of (9, 0), "13.0" of CUDA's 13000."""
    major, minor = (version // 1000, version % 1000 // 10) if isinstance(version, int) else version
    return f"{major}.{minor}"


def driver_version() -> str | None:
    """The version of the NVIDIA driver ("580.159.03"), which only NVML tells; None where it does not."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        version = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(version, len(version)):
            return None
        nvml.nvmlShutdown()
        return version.value.decode()
    except (OSError, AttributeError):
        return None


def record(gpu: int | None) -> dict:
    """Everything that a result depends on besides the code under test, for JSON."""
    return {**({"gpu": None} if gpu is None else hardware(gpu)), **software()}


def hardware(gpu: int) -> dict:
    device, runtime = device_of(gpu), jit.import_cupy().cuda.runtime
    return {
        "gpu": device.name,
        "gpu_index": gpu,
        "compute_capability": dotted(device.compute_capability),
        "num_sms": device.num_sms,
        "smem_optin": device.smem_optin,
        "l2_bytes": device.l2_bytes,
        "memory_bytes": runtime.getDeviceProperties(gpu)["totalGlobalMem"],
        "driver": driver_version(),
        "cuda": dotted(runtime.driverGetVersion()),
    }


def software() -> dict:
    """Versions; None for what is not installed, and then ``nvrtc_missing`` says how to get it."""
    packages = {
        "cuflash": __version__,
        "kernels": jit.digest(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cupy": None,
        "cuda_runtime": None,
        "nvrtc": None,
        "nvrtc_missing": None,
    }
    try:
        cupy = jit.import_cupy()
        packages["cupy"] = cupy.__version__
        packages["cuda_runtime"] = dotted(cupy.cuda.runtime.runtimeGetVersion())
        packages["nvrtc"] = dotted(jit.nvrtc_version())
    except RuntimeError as error:
        packages["nvrtc_missing"] = one_line(error)
    return packages


def headline(environment: dict) -> str:
    """ "NVIDIA H200, compute capability 9.0, driver 580.159 (CUDA 13.0), NVRTC 13.0, CuPy 14.2.0"."""
    return (
        "{gpu}, compute capability {compute_capability}, driver {driver} (CUDA {cuda}), NVRTC {nvrtc}, "
        "CuPy {cupy}"
    ).format(**{**environment, "driver": environment["driver"] or "of unknown version"})
