"""Kernels in plain C++ on the host, where g++ is: what reaches into the hardware, kernels/ptx/, is replaced by emulated/ptx/.

A block's threads are coroutines that meet where the kernel says so, and nowhere else. That shows wrong indices, missing
barriers and reads of what is not there yet; it says nothing of speed.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from cuflash import jit

SOURCES = Path(__file__).parent / "emulated"
COMPILER = shutil.which("g++")


def _compiles() -> bool:
    """Whether the compiler is one of the language and the machine that the sources are for."""
    text = "#include <ucontext.h>\n_Float16 x; auto f = []<int>() {}; int main() { makecontext(nullptr, nullptr, 0); }\n"
    done = subprocess.run([COMPILER, "-std=c++20", "-fsyntax-only", "-xc++", "-"], input=text, text=True, capture_output=True)
    return done.returncode == 0


@functools.cache
def is_here() -> bool:
    return COMPILER is not None and _compiles()


needs_compiler = pytest.mark.skipif(not is_here(), reason="no g++ with _Float16 and <ucontext.h>")


@functools.cache
def folder() -> Path:
    """The kernels with the replaced files, for the life of the process."""
    made = tempfile.TemporaryDirectory(prefix="cuflash-emulated-")
    folder.keep = made
    root = Path(made.name)
    shutil.copytree(jit.kernels_dir(), root, dirs_exist_ok=True)
    shutil.copytree(SOURCES, root, dirs_exist_ok=True)
    return root


@functools.cache
def library(source: str, constants: tuple[tuple[str, object], ...]) -> ctypes.CDLL:
    """A file of emulated/, compiled with constants."""
    root = folder()
    target = root / f"{abs(hash((source, constants))):x}.so"
    defines = [f"-D{name}={value}" for name, value in constants]
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
    files = [str(root / source), str(root / "lanes.cpp")]
    done = subprocess.run([*command, f"-I{root}", *defines, *files, "-o", str(target)], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


def run(kernel, constants: dict, params, blocks: int, *, asynchronous=True, step=1) -> None:
    """One launch. ``kernel``: its config; ``params``: its record, with addresses on the host.

    ``asynchronous``: whether the device has asynchronous copies. ``step``: from a thread to the one that goes on when it waits.
    """
    own = {name: value for name, value in constants.items() if not name.startswith(("OFFSET_", "MERGE_OFFSET_"))}
    # Dynamic shared memory is the array `smem`, declared extern; what a kernel itself declares lives on.
    shared = "" if kernel.smem_bytes else "static"
    params_type = "MergeParams" if kernel.kernel == "merge" else "DecodeParams"
    own |= {
        "KERNEL": kernel.kernel,
        "KERNEL_FILE": f'"{kernel.kernel}.cu"',
        "PARAMS": params_type,
        "__shared__": shared,
        "ASYNCHRONOUS": int(asynchronous),
    }
    record = ctypes.create_string_buffer(params.tobytes(), params.nbytes)
    library("kernel.cpp", tuple(sorted(own.items()))).run(record, blocks, kernel.threads, step)
