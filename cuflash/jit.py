"""From kernel text to a function on the GPU: text closure -> key -> cubin -> CUfunction.

NVRTC is called here and not through `cupy.RawModule(code=...)`, whose disk key ignores the text of included
headers and which sets `-arch` itself. What NVRTC makes is kept in a folder (`cache_dir`), two files a
variant: `<key>.cubin` (`.ptx` for a GPU newer than NVRTC) and `<key>.json`. The key is the sha256 of all that
decides the code: text of the kernel and of every include, constants, options, arch, NVRTC version. Both files
are verified on reading; whatever is wrong with the folder costs a compile, never a result. The folder is
trusted as the code of this package is: name only one whose writers you trust.

Nothing here imports CuPy, touches CUDA or reads the disk before the first call.
"""

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# ------------------------------------------------------------------------------------------------------------
# Kernel text

# Only quoted includes: kernels use no system header. One inside a comment counts too if it starts its line,
# which costs at most a needless recompile.
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def kernels_dir() -> Path:
    """The folder of the CUDA files: `kernels` inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if folder.is_dir():
            return folder
    raise RuntimeError(f"the CUDA files of cuflash are missing: no {package / 'kernels'}; reinstall cuflash")


def digest() -> str:
    """16 hex digits that name the state of the kernels: sha256 of names and bytes of every .cu and .cuh."""
    root, total = kernels_dir(), hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".cu", ".cuh")):
        data = path.read_bytes()
        total.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()[:16]


def kernel_digests() -> dict[str, str]:
    """16 hex digits by kernel: sha256 of its closure. They stay the same when other kernels change, or new ones come."""
    names = sorted(path.stem for path in kernels_dir().glob("*.cu"))
    return {name: hashlib.sha256(closure(name).encode()).hexdigest()[:16] for name in names}


def closure(kernel: str) -> str:
    """Text of `<kernel>.cu` and of every quoted include, recursively, each once, under its name and length.

    Includes are written relative to the kernels folder, from any file: `#include "attn/mask.cuh"`.
    Raises RuntimeError for one that is written otherwise or cannot be read.
    """
    return _joined(_sources(kernel))


def _joined(files: dict[str, str]) -> str:
    return "".join(f"//// {name} {len(text)}\n{text}\n" for name, text in files.items())


def _sources(kernel: str) -> dict[str, str]:
    """Name (relative to the kernels folder) -> text of a kernel and of all it includes, the kernel first."""
    root = kernels_dir()
    files: dict[str, str] = {}
    waiting: list[tuple[str, str | None]] = [(f"{kernel}.cu", None)]
    while waiting:
        name, includer = waiting.pop(0)
        if name in files:
            continue
        asked = f'#include "{name}" in {includer}' if includer else f"kernel {kernel!r}"
        # NVRTC matches the very text between the quotes: a file must have one name, the same from everywhere.
        if PurePosixPath(name).as_posix() != name or name.startswith("/") or ".." in name.split("/"):
            raise RuntimeError(f'{asked}: name it relative to {root}, without ".", ".." or "//"')
        try:
            # Decoded from bytes: universal newlines would hide a change of line endings from the key.
            text = (root / name).read_bytes().decode("utf-8")
        except OSError as error:
            near = PurePosixPath(includer or "").parent / name
            if includer and (root / near).is_file():
                raise RuntimeError(f'{asked}: includes are relative to {root}; write "{near}"') from None
            raise RuntimeError(f"{asked}: {root / name} cannot be read: {error.strerror}") from None
        files[name] = text
        waiting += [(found, name) for found in _INCLUDE.findall(text)]
    return files


# ------------------------------------------------------------------------------------------------------------
# NVRTC


class NvrtcMissing(RuntimeError):
    """NVRTC, the CUDA run-time compiler, cannot be used here; one line says what to install."""


class CupyMissing(NvrtcMissing):
    """CuPy cannot be imported, so neither NVRTC nor a GPU can be reached."""


def _one_line(error: object, limit: int = 300) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[:limit] + "..."


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _let_cupy_import() -> None:
    # CuPy 14.2 makes the folder of its own kernels while it is imported, and fails with it. Where it cannot
    # be made (a container's user without a home) it is a temporary one, for this process.
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cuflash-cupy-")
        atexit.register(shutil.rmtree, os.environ["CUPY_CACHE_DIR"], ignore_errors=True)


def import_cupy():
    """The module cupy, imported at the first call. Raises CupyMissing, in one line, when that fails."""
    try:
        _let_cupy_import()
        import cupy
    except (ImportError, OSError) as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        found = "CuPy is not installed" if absent else f"CuPy cannot be imported ({_one_line(error)})"
        raise CupyMissing(
            f"{found}: GPU arrays and kernels need it. Install it with: pip install 'cuflash[cuda12]' "
            "(or 'cuflash[cuda13]' for a driver of CUDA 13)"
        ) from None
    return cupy


def _nvrtc_package(major: int) -> str:
    return "nvidia-cuda-nvrtc-cu12" if major == 12 else "nvidia-cuda-nvrtc"


def _preload(major: int) -> bool:
    """Loads libnvrtc from a wheel: CuPy 13 asks the system's loader alone, which then finds it by name."""
    for folder in sys.path:
        for package in ("cuda_nvrtc", f"cu{major}"):
            library = Path(folder, "nvidia", package, "lib", f"libnvrtc.so.{major}")
            if library.is_file():
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
                return True
    return False


_opening = threading.Lock()     # or a thread would compile while another still opens NVRTC


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that CuPy finds. Raises NvrtcMissing, in one line, when there is none."""
    with _opening:
        return _open_nvrtc()


def _open_nvrtc() -> tuple[int, int]:
    cupy = import_cupy()
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    # Whatever goes wrong while the library is looked for means the same here, and its type differs between
    # versions of CuPy (RuntimeError, AssertionError, OSError).
    try:
        return cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        problem = error
    try:
        if _preload(major):
            return cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        problem = error
    package = _nvrtc_package(major) + ("" if major == 12 else f"=={major}.*")
    raise NvrtcMissing(
        f"NVRTC, the CUDA run-time compiler, was not found: CuPy {cupy.__version__} for CUDA {major} "
        f"searched Python's packages, the system's libraries and CUDA_PATH ({_one_line(problem)}). "
        f"Install it with: pip install 'cuflash[cuda{major}]' (or: pip install '{package}')"
    )


def nvrtc_location() -> str | None:
    """Path of the NVRTC library in use; None when there is none or the system does not tell."""
    try:
        nvrtc_version()
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.split(maxsplit=5)[5:]
                if path and re.match(r"libnvrtc\.(alt\.)?so", os.path.basename(path[0])):
                    return path[0].strip()
    except (NvrtcMissing, OSError):
        pass
    return None


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Archs the NVRTC at hand compiles for, ascending: 75, 80, ... 121. Raises NvrtcMissing."""
    nvrtc_version()
    return tuple(sorted(import_cupy().cuda.nvrtc.getSupportedArchs()))


# Integrated GPUs: their machine code runs on no other GPU of the same major version, nor the reverse
# (CUDA C++ Programming Guide, "Binary Compatibility").
_INTEGRATED = frozenset((53, 62, 72, 87, 88, 101, 110))


def arch_for(compute_capability: tuple[int, int], accelerated: bool = False) -> str:
    """The `-arch` for a GPU: "sm_90"; with `accelerated` "sm_90a" (instructions of that one arch, as wgmma).

    A GPU that NVRTC does not know gets the machine code of an older minor version of its major version, which
    it runs, and else "compute_<highest known>": PTX, which its driver translates. Raises RuntimeError for a
    GPU too old for this NVRTC (names the CUDA that still supports it), and for `accelerated` where NVRTC does
    not know that exact arch.
    """
    return _choose_arch(compute_capability, accelerated, supported_archs(), nvrtc_version())


def _choose_arch(compute_capability, accelerated, supported, version) -> str:
    major, minor = compute_capability
    arch, nvrtc, gpu = 10 * major + minor, f"NVRTC {_dotted(version)}", f"compute capability {major}.{minor}"
    if accelerated:
        if arch < 90 or arch not in supported:
            raise RuntimeError(f"{nvrtc} has no sm_{arch}a: a GPU of {gpu} runs portable code only")
        return f"sm_{arch}a"
    if arch in supported:
        return f"sm_{arch}"
    if arch < min(supported):
        last = "CUDA 11 was the last to support it, and cuflash needs CUDA 12"
        if arch >= 50:
            last = "CUDA 12 still supports it: pip install 'cuflash[cuda12]'"
        raise RuntimeError(f"{gpu} is too old for {nvrtc}, which starts at {min(supported) / 10:.1f}; {last}")
    older = [known for known in supported if known < arch and known not in _INTEGRATED]
    if not older:
        raise RuntimeError(f"{nvrtc} makes nothing that {gpu} can run; it knows {supported}")
    runs_cubin = max(older) // 10 == major and arch not in _INTEGRATED
    return f"{'sm' if runs_cubin else 'compute'}_{max(older)}"


# ------------------------------------------------------------------------------------------------------------
# Disk cache


class Built(NamedTuple):
    """A compiled variant. With an arch of "compute_XX" `cubin` is PTX text and the three figures are 0."""

    key: str
    cubin: bytes
    path: Path | None  # None: the cache could not be written
    registers: int  # a thread
    spill_bytes: int  # a thread: stack frame, spill stores and spill loads together
    static_smem: int  # bytes a block
    log: str  # of NVRTC and ptxas, warnings included
    seconds: float  # that the compile took, also when this came from the cache
    from_cache: bool


_FORMAT = 1  # of the files in the cache; part of the key
_unsaved: dict[str, Built] = {}  # key -> what no folder could take: compiled once a process all the same
_locks: dict[object, threading.Lock] = {}  # one a variant, never removed: all threads meet at the same
_warned = False


def cache_dir() -> Path:
    """Where compiled kernels are kept: CUFLASH_CACHE_DIR, XDG_CACHE_HOME/cuflash or ~/.cache/cuflash."""
    if named := os.environ.get("CUFLASH_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(named)))
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg, "cuflash")
    home = os.path.expanduser("~")
    # An account without a home leaves "~": rather a folder that cannot be made, so that kernels stay in
    # memory, than one of that name wherever the process happens to run.
    return Path(home if os.path.isabs(home) else os.devnull, ".cache", "cuflash")


def cache_info() -> tuple[Path, int, int]:
    """(folder, files, bytes) of the disk cache; (folder, 0, 0) when it is missing or unreadable."""
    folder, files, size = cache_dir(), 0, 0
    try:
        for entry in os.scandir(folder):
            if entry.name.endswith((".cubin", ".ptx", ".json")):
                files, size = files + 1, size + entry.stat().st_size
    except OSError:
        pass
    return folder, files, size


def _folder(given: Path | None) -> Path:
    return cache_dir() if given is None else Path(os.path.abspath(given))


def _suffix(arch: str) -> str:
    return ".ptx" if arch.startswith("compute_") else ".cubin"


def _read(folder: Path, key: str, arch: str) -> Built | None:
    path = folder / (key + _suffix(arch))
    try:
        record = json.loads((folder / f"{key}.json").read_bytes())
        cubin = path.read_bytes()
        if record["key"] != key or record["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        figures = (int(record[name]) for name in ("registers", "spill_bytes", "static_smem"))
        return Built(key, cubin, path, *figures, str(record["log"]), float(record["seconds"]), True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, built: Built, record: dict, arch: str) -> Path | None:
    """Stores a variant; None, with one warning a process, when the folder cannot take it."""
    global _warned
    path = folder / (built.key + _suffix(arch))
    # The record goes last: it says that the other is there, and carries its sha256.
    contents = ((path, built.cubin), (folder / f"{built.key}.json", json.dumps(record, indent=1).encode()))
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, data in contents:
            # In the same folder, so that the rename is atomic. Not mkstemp: its mode 0600 would hide a cache
            # that is built into an image from the user it is for.
            temporary = folder / f".{built.key[:16]}-{os.getpid()}-{secrets.token_hex(8)}.tmp"
            with open(temporary, "xb") as file:
                file.write(data)
            os.replace(temporary, target)
        return path
    except OSError as error:
        # Windows refuses a rename while another process reads the target, which then holds the same.
        if _read(folder, built.key, arch):
            return path
        if not _warned:
            _warned = True
            warnings.warn(
                f"cuflash: compiled kernels cannot be kept in {folder} ({_one_line(error)}), so every "
                "process compiles them again; set CUFLASH_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=3,
            )
        return None
    finally:
        if temporary is not None:
            try:
                temporary.unlink()
            except OSError:
                pass  # renamed, as it should be


# ------------------------------------------------------------------------------------------------------------
# Compiling

_compiles = 0
_compiles_lock = threading.Lock()
# With its first program NVRTC opens its builtins: where two threads do it at once, one of them fails (seen with 13.0).
_first_program, _had_program = threading.Lock(), False


def compile_count() -> int:
    """NVRTC compiles in this process so far."""
    return _compiles


def _normalise(constants) -> tuple[tuple[str, str], ...]:
    pairs = constants.items() if isinstance(constants, Mapping) else constants
    # str(True) would be a name that C++ does not know.
    text = sorted((str(name), str(int(value) if isinstance(value, bool) else value)) for name, value in pairs)
    for (name, value), (next_name, other) in itertools.pairwise(text):
        if name == next_name:
            raise ValueError(f"constant {name} is given twice: {value} and {other}")
    return tuple(text)


def _options(constants, arch: str, version: tuple[int, int]) -> list[str]:
    options = [f"-arch={arch}", "-std=c++17", "--ptxas-options=-v"]
    # From 12.9 on NVRTC answers a repeated compile from a cache of its own, with an empty log; older ones
    # refuse the option (tried: 12.0, 12.8).
    if version >= (12, 9):
        options.append("--no-cache")
    return options + [f"-D{name}={value}" for name, value in constants]


def _variant(kernel: str, constants, arch: str) -> str:
    defines = " ".join(f"{name}={value}" for name, value in constants)
    return f"{kernel} for {arch} with {defines or 'no constants'}"


def _figures(log: str, kernel: str) -> tuple[int, int, int]:
    """(registers, spill bytes, static shared memory) of an entry from what `ptxas -v` says of it."""
    start = log.find(f"Compiling entry function '{kernel}'")
    if start < 0:
        return 0, 0, 0
    # Up to the next entry: the kernel, then the functions that it calls, whose spills count as well.
    part = log[start:].split("Compiling entry function")[1]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
    registers = re.search(r"Used (\d+) registers", part)
    smem = re.search(r"(\d+) bytes smem", part)
    return (
        int(registers[1]) if registers else 0,
        sum(int(number) for line in spills for number in line),
        int(smem[1]) if smem else 0,
    )


def _builtins_missing(log: str) -> NvrtcMissing:
    version, location = nvrtc_version(), nvrtc_location()
    package = _nvrtc_package(version[0])
    needed = re.search(r"[\w.-]*nvrtc-builtins[\w.-]*\w", log)
    beside = sorted(p.name for p in Path(location).parent.glob("*nvrtc-builtins*")) if location else []
    return NvrtcMissing(
        f"NVRTC {_dotted(version)} at {location or 'an unknown path'} cannot open its part "
        f"{needed[0] if needed else 'nvrtc-builtins'} (beside it: {', '.join(beside) or 'none'}). Install "
        f"both of one version: pip install --force-reinstall '{package}=={_dotted(version)}.*'"
    )


def _compile(kernel: str, files: dict[str, str], options: list[str], what: str) -> tuple[bytes, str]:
    """(cubin or PTX, log). Raises RuntimeError with variant and log, NvrtcMissing for a broken NVRTC."""
    global _had_program
    if _had_program:
        return _compile_program(kernel, files, options, what)
    with _first_program:
        compiled = _compile_program(kernel, files, options, what)
        _had_program = True
        return compiled


def _compile_program(kernel: str, files: dict[str, str], options: list[str], what: str) -> tuple[bytes, str]:
    global _compiles
    nvrtc = import_cupy().cuda.nvrtc
    with _compiles_lock:
        _compiles += 1
    main = f"{kernel}.cu"
    # CuPy hands NVRTC pointers into these bytes: they must outlive the program.
    names = [name.encode() for name in files if name != main]
    texts = [text.encode() for name, text in files.items() if name != main]
    program = nvrtc.createProgram(files[main], main, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip("\0\n")
            if "nvrtc-builtins" in log:
                raise _builtins_missing(log) from None
            raise RuntimeError(
                f"cannot compile {what}: {error}, NVRTC {_dotted(nvrtc_version())}, options "
                f"{' '.join(options)}\n{log}"
            ) from None
        log = nvrtc.getProgramLog(program).strip("\0\n")
        if options[0].startswith("-arch=compute_"):
            return nvrtc.getPTX(program), log
        # CuPy takes the last byte for a terminator and drops it; it is the last, zero, byte of the file.
        return nvrtc.getCUBIN(program) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


def build(kernel: str, constants, arch: str, *, cache_dir: Path | None = None) -> Built:
    """The compiled variant of a kernel: from the disk cache, else from NVRTC. Needs no GPU.

    `constants` is a mapping or pairs of name and int or str, each a `-DNAME=VALUE`; their order does not
    matter. `arch` is "sm_90", "sm_90a" or "compute_90". Safe to call from several threads (one compile a
    variant) and processes. Raises NvrtcMissing; RuntimeError for a kernel or include that is not there and
    for a failed compile (with NVRTC's log); ValueError for a constant given twice.
    """
    constants = _normalise(constants)
    files, version = _sources(kernel), nvrtc_version()
    options = _options(constants, arch, version)
    key = hashlib.sha256(json.dumps([_FORMAT, options, version, _joined(files)]).encode()).hexdigest()
    folder = _folder(cache_dir)
    with _locks.setdefault(key, threading.Lock()):
        if built := _read(folder, key, arch):
            return built
        built = _unsaved.get(key)
        if built is None:
            start = time.perf_counter()
            cubin, log = _compile(kernel, files, options, _variant(kernel, constants, arch))
            seconds = round(time.perf_counter() - start, 3)
            built = Built(key, cubin, None, *_figures(log, kernel), log, seconds, False)
        record = {
            "key": key,
            "sha256": hashlib.sha256(built.cubin).hexdigest(),
            "kernel": kernel,
            "arch": arch,
            "constants": dict(constants),
            "options": options,
            "nvrtc": _dotted(version),
            "registers": built.registers,
            "spill_bytes": built.spill_bytes,
            "static_smem": built.static_smem,
            "seconds": built.seconds,
            "log": built.log,
        }
        built = built._replace(path=_write(folder, built, record, arch))
        if built.path is None:
            _unsaved[key] = built._replace(from_cache=True)
        else:
            _unsaved.pop(key, None)
        return built


# ------------------------------------------------------------------------------------------------------------
# Loading


class Loaded(NamedTuple):
    """A variant on one GPU. Keep it for as long as `function` may be launched: it holds the module."""

    function: int  # CUfunction handle
    registers: int  # a thread, as the driver sees it
    local_bytes: int  # of local memory a thread: stack and spills
    smem_bytes: int  # of dynamic shared memory that a block may have
    built: Built
    kernel: object  # cupy.RawKernel


_loaded: dict[tuple, Loaded] = {}  # (kernel, constants, arch, device) -> for the life of the process

# Linux driver that came with the first CUDA of a major version: every later minor version runs on it.
_FIRST_DRIVER = {12: "525.60", 13: "580.65"}


def _driver_problem(driver: int, runtime: int, stack: str) -> str | None:
    """Why a driver cannot run what `stack`, of a CUDA runtime, needs; both as 1000 * major + 10 * minor."""
    major = runtime // 1000
    if driver // 1000 >= major:
        return None
    if driver == 0:
        return "no NVIDIA driver was found: install one, or pass NumPy arrays to compute on the CPU"
    first = f" (driver {_FIRST_DRIVER[major]} or newer)" if major in _FIRST_DRIVER else ""
    other = f", or pip install 'cuflash[cuda{driver // 1000}]'" if driver >= 12000 else ""
    return (
        f"the NVIDIA driver is too old: it supports CUDA {_dotted((driver // 1000, driver % 1000 // 10))}, "
        f"{stack} needs CUDA {major}.0{first}; update the driver{other}"
    )


def check_driver() -> None:
    """Raises RuntimeError, with the versions found and needed, for an NVIDIA driver missing or too old."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    stack = f"CuPy {cupy.__version__}"
    if problem := _driver_problem(runtime.driverGetVersion(), runtime.runtimeGetVersion(), stack):
        raise RuntimeError(problem)


def _capturing(cupy, stream: int | None) -> bool:
    if stream is None:
        stream = cupy.cuda.get_current_stream().ptr
    try:
        return bool(cupy.cuda.runtime.streamIsCapturing(stream))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        # cudaErrorStreamCaptureImplicit: the legacy stream cannot say while one that it waits for captures.
        if error.status == 906:
            return True
        raise


def _describe_device(cupy, device_id: int) -> str:
    try:
        properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    except RuntimeError:
        return f"device {device_id}"
    capability = _dotted((properties["major"], properties["minor"]))
    return (
        f"device {device_id} ({properties['name'].decode()}, compute capability {capability}, at most "
        f"{properties['sharedMemPerBlockOptin']} bytes of shared memory a block)"
    )


def _load_problem(error, what: str, built: Built, smem_bytes: int, device: str, driver: int) -> str:
    """One message for all that the driver has against a module: what it is and needs, what the GPU has."""
    version, hint = nvrtc_version(), ""
    if "UNSUPPORTED_PTX_VERSION" in str(error) or driver // 1000 < version[0]:
        hint = (
            f"; the driver supports CUDA {_dotted((driver // 1000, driver % 1000 // 10))}, NVRTC is "
            f"{_dotted(version)}: update the driver or install an NVRTC that is not newer"
        )
    return (
        f"cannot load {what}, {built.registers} registers a thread, {smem_bytes} bytes of dynamic and "
        f"{built.static_smem} of static shared memory a block, on {device}: {error}{hint}"
    )


def _raw_kernel(cupy, kernel: str, built: Built, arch: str):
    # CuPy keeps a module by its path for the life of the process, so no path may ever name two variants: all
    # contain the key.
    if built.path is not None and built.path.is_file():
        return cupy.RawModule(path=str(built.path)).get_function(kernel)
    handle, path = tempfile.mkstemp(prefix=f"cuflash-{built.key}-", suffix=_suffix(arch))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(built.cubin)
        return cupy.RawModule(path=path).get_function(kernel)  # which loads: the file may go
    finally:
        os.unlink(path)


def load(
    kernel: str, constants, arch: str, device_id: int, smem_bytes: int = 0, *, stream: int | None = None
) -> Loaded:
    """A variant loaded on a GPU, with leave to use `smem_bytes` of dynamic shared memory a block.

    Kept for the process: a second call with the same arguments is a look-up. `stream` (a cudaStream_t as int;
    CuPy's current one by default) is where the caller will launch: nothing is loaded while it is captured.
    Raises RuntimeError: capture under way; driver missing or too old; the module does not load (with variant,
    shared memory and the device's limit); and what `build` raises.
    """
    constants = _normalise(constants)
    memo = (kernel, constants, arch, device_id)
    found = _loaded.get(memo)
    if found is None or found.smem_bytes < smem_bytes:
        with _locks.setdefault(memo, threading.Lock()):
            found = _loaded.get(memo)
            if found is None or found.smem_bytes < smem_bytes:
                found = _loaded[memo] = _load(kernel, constants, arch, device_id, smem_bytes, stream)
    return found


def _load(kernel: str, constants, arch: str, device_id: int, smem_bytes: int, stream: int | None) -> Loaded:
    cupy = import_cupy()
    check_driver()
    what = _variant(kernel, constants, arch)
    with cupy.cuda.Device(device_id):
        if _capturing(cupy, stream):
            raise RuntimeError(
                f"{what} is not loaded on device {device_id}, and nothing can be while a stream is captured: "
                "make one such call before the capture (after `cuflash warmup` it takes milliseconds)"
            )
        built = build(kernel, constants, arch)
        try:
            raw = _raw_kernel(cupy, kernel, built, arch)
            if smem_bytes > 0:
                raw.max_dynamic_shared_size_bytes = smem_bytes
            return Loaded(raw.kernel.ptr, raw.num_regs, raw.local_size_bytes, smem_bytes, built, raw)
        except (RuntimeError, OSError) as error:  # from the driver, through CuPy; from the temporary file
            device, driver = _describe_device(cupy, device_id), cupy.cuda.runtime.driverGetVersion()
            raise RuntimeError(_load_problem(error, what, built, smem_bytes, device, driver)) from None
