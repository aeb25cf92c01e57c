"""What a record of a measurement holds beside the numbers: when, on what, with which versions of what."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import sys
from pathlib import Path

import numpy as np

import cuflash
from cuflash import config, jit

from . import peers
from .timing import Nvml


def environment(device_id: int | None) -> dict:
    """Date, GPU, driver, CUDA, NVRTC, versions and digest of the kernels. ``device_id`` None: the CPU.

    What cannot be found out is None.
    """
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cuflash": cuflash.__version__,
        "kernels_digest": _or_none(jit.digest),
        "kernel_digests": _or_none(jit.kernel_digests),
        "forced_tier": config.forced_tier(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if device_id is None:
        return record | {"device": "cpu", "cpu": _cpu_name(), "cpu_cores": os.cpu_count()}
    cupy = jit.import_cupy()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(device_id)
    return record | {
        "device": "cuda",
        "gpu": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "max_clock_mhz": properties.get("clockRate", 0) / 1000,
        "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "l2_mib": properties["l2CacheSize"] / 2**20,
        "driver": monitor(device_id).driver(),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": _or_none(lambda: ".".join(map(str, jit.nvrtc_version()))),
        "cupy": cupy.__version__,
        "peers": peers.versions(),
        "cudnn": _or_none(_cudnn_version),
    }


@functools.cache
def monitor(device_id: int) -> Nvml:
    """The NVML readings of a GPU."""
    return Nvml(jit.import_cupy().cuda.Device(device_id).pci_bus_id)


def _or_none(find):
    try:
        return find()
    except Exception:
        return None


def _cudnn_version():
    return sys.modules["torch"].backends.cudnn.version() if "torch" in sys.modules else None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# FLOP a clock and multiprocessor: 16-bit tensor cores with float32 sums; FMA units in float32 and in float64.
# From NVIDIA's architecture papers; None where a rate differs between products of one compute capability.
_RATES = {
    (6, 0): (None, 128, 64),
    (6, 1): (None, 256, 8),
    (7, 0): (1024, 128, 64),
    (7, 5): (1024, 128, 4),
    (8, 0): (2048, 128, 64),
    (8, 6): (None, 256, 4),
    (8, 9): (None, 256, 4),
    (9, 0): (4096, 256, 128),
    (10, 0): (8192, 256, 128),
    (12, 0): (None, 256, 4),
}


def limit_tflops(
    dtype: str, compute_capability: tuple[int, int], multiprocessors: int, clock_mhz: float
) -> float | None:
    """What the arithmetic units could do at the highest clock: tensor cores for 16 bits, else FMA; None if
    unknown.

    Under full tensor load no GPU keeps that clock: the last tenths of this limit are out of reach for anyone.
    """
    half, single, double = _RATES.get(compute_capability, (None, None, None))
    rate = {"float32": single, "float64": double}.get(dtype, half)
    return rate and rate * multiprocessors * clock_mhz * 1e-6


def limit_of(environment: dict, dtype: str) -> float | None:
    """``limit_tflops`` of the GPU of a record."""
    if environment["device"] == "cpu":
        return None
    major, minor = map(int, environment["compute_capability"].split("."))
    return limit_tflops(dtype, (major, minor), environment["multiprocessors"], environment["max_clock_mhz"])


def write(path: str | os.PathLike, record: dict) -> None:
    """As JSON, under its name only when whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)


def headline(environment: dict) -> str:
    """One line: what this ran on."""
    if environment["device"] == "cpu":
        return (
            f"no GPU used: {environment['cpu']}, {environment['cpu_cores']} cores, NumPy "
            f"{environment['numpy']}, cuflash {environment['cuflash']}"
        )
    runtime = environment["cuda_runtime"]
    return (
        f"{environment['gpu']}, compute capability {environment['compute_capability']}, driver "
        f"{environment['driver'] or 'unknown'}, CUDA {runtime // 1000}.{runtime % 1000 // 10}, NVRTC "
        f"{environment['nvrtc'] or 'missing'}, cuflash {environment['cuflash']}, kernels "
        f"{environment['kernels_digest']}"
    )
