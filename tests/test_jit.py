"""cuflash.jit without a GPU: text closure and key, NVRTC, the disk cache and its accidents, archs, loading.

Kernels are small ones of the test's own; the module that loads a cubin is a stand-in for CuPy's.
"""

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import warnings
from pathlib import Path

import pytest

from cuflash import jit

REPO = Path(jit.__file__).resolve().parent.parent

SMALL = """
#include "attn/mask.cuh"
extern "C" __global__ void small(float* x) { x[threadIdx.x] = mask(x[threadIdx.x]) + VALUE; }
"""
MASK = """#pragma once
#include "tile/copy.cuh"
__device__ inline float mask(float x) { return twice(x); }
"""
COPY = """#pragma once
__device__ inline float twice(float x) { return 2 * x; }
"""


def write_kernels(folder: Path, **more: str) -> Path:
    files = {"small.cu": SMALL, "attn/mask.cuh": MASK, "tile/copy.cuh": COPY}
    for name, text in {**files, **{f"{kernel}.cu": text for kernel, text in more.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Kernels and a cache of the test's own; nothing in memory from another test."""
    folder = write_kernels(tmp_path / "kernels")
    monkeypatch.setattr(jit, "kernels_dir", lambda: folder)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_warned", False)
    monkeypatch.setattr(jit, "_unsaved", {})
    monkeypatch.setattr(jit, "_loaded", {})
    return types.SimpleNamespace(kernels=folder, cache=tmp_path / "cache")


def have_nvrtc() -> bool:
    try:
        jit.nvrtc_version()
    except jit.NvrtcMissing:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not have_nvrtc(), reason="no NVRTC")


@contextlib.contextmanager
def compiles(expected: int):
    before = jit.compile_count()
    yield
    assert jit.compile_count() - before == expected


def in_process(code: str, kernels: Path, **environment: str) -> subprocess.Popen:
    """A new interpreter in which `jit` is imported and sees the test's kernels."""
    setup = f"""
import json, os, sys, warnings
from pathlib import Path
sys.path.insert(0, {str(REPO)!r})
from cuflash import jit
jit.kernels_dir = lambda: Path({str(kernels)!r})
"""
    return subprocess.Popen(
        [sys.executable, "-c", setup + textwrap.dedent(code)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


BUILD = """
    import hashlib
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        built = [jit.build("small", {"VALUE": value}, "sm_80") for value in (1, 2, 1)]
    print(json.dumps({
        "sha": [hashlib.sha256(b.cubin).hexdigest() for b in built],
        "saved": [b.path is not None for b in built],
        "compiles": jit.compile_count(),
        "warnings": [str(w.message) for w in seen],
    }))
"""


# ------------------------------------------------------------------------------------------------------------
# Text


def test_closure_holds_every_include_once():
    text = jit.closure("small")
    for name in ("small.cu", "attn/mask.cuh", "tile/copy.cuh"):
        assert text.count(f"//// {name} ") == 1
    assert text.index("small.cu") < text.index("//// attn/mask.cuh") < text.index("//// tile/copy.cuh")


def test_an_include_cycle_ends(fresh):
    (fresh.kernels / "tile/copy.cuh").write_text('#pragma once\n#include "attn/mask.cuh"\n' + COPY)
    assert jit.closure("small").count("//// attn/mask.cuh ") == 1


@pytest.mark.parametrize(
    "include, message",
    [
        ("attn/none.cuh", r'#include "attn/none.cuh" in attn/mask.cuh: .* cannot be read: No such file'),
        ("seqlen.cuh", r'#include "seqlen.cuh" in attn/mask.cuh: .*write "attn/seqlen.cuh"'),
        ("../attn/seqlen.cuh", r"in attn/mask.cuh: name it relative to"),
        ("./attn/seqlen.cuh", r"in attn/mask.cuh: name it relative to"),
        ("/etc/hostname", r"in attn/mask.cuh: name it relative to"),
    ],
)
def test_a_wrong_include_is_named(fresh, include, message):
    (fresh.kernels / "attn/seqlen.cuh").write_text("")
    (fresh.kernels / "attn/mask.cuh").write_text(f'  #  include "{include}"\n' + MASK)
    with pytest.raises(RuntimeError, match=message):
        jit.closure("small")


def test_a_commented_include_is_none(fresh):
    (fresh.kernels / "attn/mask.cuh").write_text('// #include "attn/none.cuh"\n' + MASK)
    assert "attn/none.cuh 0" not in jit.closure("small")


def test_no_such_kernel():
    with pytest.raises(RuntimeError, match=r"kernel 'fwd_sm999': .*fwd_sm999.cu cannot be read"):
        jit.closure("fwd_sm999")


def test_digest_follows_names_and_bytes_of_the_kernels(fresh):
    seen = [jit.digest()]
    (fresh.kernels / "README.md").write_text("not a kernel")
    assert jit.digest() == seen[0] and len(seen[0]) == 16
    (fresh.kernels / "tile/copy.cuh").write_text(COPY + " ")
    seen.append(jit.digest())
    (fresh.kernels / "tile/copy.cuh").rename(fresh.kernels / "tile/move.cuh")
    seen.append(jit.digest())
    assert len(set(seen)) == 3


def test_the_digest_of_a_kernel_follows_what_it_includes_and_nothing_else(fresh):
    before = jit.kernel_digests()
    (fresh.kernels / "other.cu").write_text('extern "C" __global__ void other() {}')
    assert {name: value for name, value in jit.kernel_digests().items() if name != "other"} == before
    (fresh.kernels / "tile/copy.cuh").write_text(COPY + " ")
    changed = {name for name, value in before.items() if jit.kernel_digests()[name] != value}
    assert changed == {name for name in before if "//// tile/copy.cuh " in jit.closure(name)} != set()


def test_the_kernels_of_the_project_are_found(monkeypatch):
    monkeypatch.undo()
    assert jit.kernels_dir() == REPO / "kernels"


# ------------------------------------------------------------------------------------------------------------
# Key and compile


@needs_nvrtc
def test_key_changes_with_every_part_of_the_text_and_nothing_else(fresh):
    def key(constants, arch="sm_80"):
        return jit.build("small", constants, arch).key

    keys = [key({"VALUE": 1}), key({"VALUE": 2}), key({"VALUE": 1, "MORE": 1}), key({"VALUE": 1}, "sm_90")]
    assert key((("MORE", 1), ("VALUE", 1))) == key({"VALUE": "1", "MORE": True}) == keys[2]
    for name in ("small.cu", "attn/mask.cuh", "tile/copy.cuh"):
        path = fresh.kernels / name
        path.write_text(path.read_text() + "// a change\n")
        keys.append(key({"VALUE": 1}))
    assert len(set(keys)) == len(keys)
    (fresh.kernels / "attn/other.cuh").write_text("// included by nobody")
    assert key({"VALUE": 1}) == keys[-1]


@needs_nvrtc
def test_a_header_change_reaches_the_code(fresh):
    before = jit.build("small", {"VALUE": 1}, "compute_80").cubin
    (fresh.kernels / "tile/copy.cuh").write_text(COPY.replace("2 * x", "3 * x"))
    assert jit.build("small", {"VALUE": 1}, "compute_80").cubin != before


@needs_nvrtc
def test_key_holds_the_nvrtc_version(monkeypatch):
    key = jit.build("small", {"VALUE": 1}, "sm_80").key
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 1))  # so without --no-cache: any NVRTC takes it
    assert jit.build("small", {"VALUE": 1}, "sm_80").key != key


def test_no_cache_is_asked_of_those_that_know_it():
    assert "--no-cache" not in jit._options((), "sm_80", (12, 8))
    assert "--no-cache" in jit._options((), "sm_80", (12, 9))
    assert "--no-cache" in jit._options((), "sm_80", (13, 0))


def test_a_constant_given_twice():
    with pytest.raises(ValueError, match="VALUE is given twice: 1 and 2"):
        jit.build("small", (("VALUE", 2), ("VALUE", 1)), "sm_80")


@needs_nvrtc
def test_the_cubin_is_whole():
    built = jit.build("small", {"VALUE": 1}, "sm_80")
    assert built.cubin[:4] == b"\x7fELF" and built.path.read_bytes() == built.cubin

    def field(offset, size):
        return int.from_bytes(built.cubin[offset : offset + size], "little")

    # ELF-64: one table or the other ends the file (offset + entry size * entries).
    assert max(field(32, 8) + field(54, 2) * field(56, 2), field(40, 8) + field(58, 2) * field(60, 2)) == len(
        built.cubin
    )
    assert built.registers > 0 and built.spill_bytes == 0 and built.static_smem == 0 and built.seconds > 0


@needs_nvrtc
def test_figures_of_a_repeated_compile(fresh):
    # An NVRTC that answers from its own cache says nothing of registers.
    first = jit.build("small", {"VALUE": 1}, "sm_80")
    for path in fresh.cache.iterdir():
        path.unlink()
    with compiles(1):
        again = jit.build("small", {"VALUE": 1}, "sm_80")
    assert again.registers == first.registers > 0 and "Used" in again.log


@needs_nvrtc
def test_stack_and_shared_memory_are_read_from_the_log(fresh):
    write_kernels(
        fresh.kernels,
        heavy="""
        extern "C" __global__ void __launch_bounds__(1024, 2) heavy(float* x) {
            __shared__ float s[100];
            float many[80];  // of 32 registers that a thread may have
            for (int i = 0; i < 80; ++i) many[i] = x[i * 1024 + threadIdx.x];
            s[threadIdx.x % 100] = x[0];
            __syncthreads();
            for (int i = 0; i < 80; ++i) x[i] = many[79 - i] * s[i];
        }""",
    )
    built = jit.build("heavy", {}, "sm_80")
    assert built.spill_bytes > 0 and built.static_smem == 400 and 0 < built.registers <= 32


@needs_nvrtc
def test_a_failed_compile_says_which_and_why(fresh):
    (fresh.kernels / "attn/mask.cuh").write_text(MASK.replace("twice(x)", "thrice(x)"))
    with pytest.raises(RuntimeError) as caught:
        jit.build("small", {"VALUE": 7, "HEAD_DIM": 64}, "sm_80")
    message = str(caught.value)
    assert "cannot compile small for sm_80 with HEAD_DIM=64 VALUE=7" in message
    assert 'attn/mask.cuh(3): error: identifier "thrice" is undefined' in message
    assert not fresh.cache.exists()


@needs_nvrtc
def test_an_option_nvrtc_refuses_is_named():
    with pytest.raises(RuntimeError, match=r"(?s)small for sm_999 .*-arch=sm_999.*invalid value for"):
        jit.build("small", {"VALUE": 1}, "sm_999")


@needs_nvrtc
def test_ptx_for_a_gpu_newer_than_nvrtc(fresh):
    arch = jit.arch_for((99, 0))
    assert arch == f"compute_{max(jit.supported_archs())}"
    built = jit.build("small", {"VALUE": 1}, arch)
    assert built.path.suffix == ".ptx" and built.path.read_bytes() == built.cubin
    assert b".entry small(" in built.cubin and built.registers == built.spill_bytes == 0
    with compiles(0):
        assert jit.build("small", {"VALUE": 1}, arch) == built._replace(from_cache=True)


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fwd_flat' for 'sm_90a'
ptxas info    : Function properties for fwd_flat
ptxas         .     999 bytes stack frame, 999 bytes spill stores, 999 bytes spill loads
ptxas info    : Used 99 registers, used 9 barriers, 9999 bytes smem
ptxas info    : Compiling entry function 'fwd' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Function properties for fwd
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 360 bytes cmem[0]
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_figures_of_a_log_with_two_entries():
    assert jit._figures(LOG, "fwd") == (168, 40, 1024)
    assert jit._figures(LOG, "fwd_flat") == (99, 2997, 9999)
    assert jit._figures("", "fwd") == (0, 0, 0)


# ------------------------------------------------------------------------------------------------------------
# Disk cache


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert jit.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/kernels")
    assert jit.cache_dir() == Path("/home/someone/kernels")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "")
    assert jit.cache_dir() == Path("/xdg/cuflash")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert jit.cache_dir() == Path("/home/someone/.cache/cuflash")


@needs_nvrtc
def test_a_second_build_reads_the_disk(fresh):
    with compiles(1):
        first = jit.build("small", {"VALUE": 1}, "sm_80")
        second = jit.build("small", {"VALUE": 1}, "sm_80")
    assert not first.from_cache and second == first._replace(from_cache=True)
    size = sum(path.stat().st_size for path in fresh.cache.iterdir())
    assert jit.cache_info() == (fresh.cache, 2, size)


@needs_nvrtc
def test_a_folder_of_its_own(tmp_path, fresh):
    built = jit.build("small", {"VALUE": 1}, "sm_80", cache_dir=tmp_path / "image")
    assert built.path.parent == tmp_path / "image" and not fresh.cache.exists()
    # Readable by whoever the image is for, as the umask says.
    mask = os.umask(0)
    os.umask(mask)
    assert all(path.stat().st_mode & 0o777 == 0o666 & ~mask for path in built.path.parent.iterdir())


@needs_nvrtc
def test_a_second_process_compiles_nothing(fresh):
    first = answer(in_process(BUILD, fresh.kernels))
    second = answer(in_process(BUILD, fresh.kernels))
    assert first["compiles"] == 2 and second["compiles"] == 0
    assert first["sha"] == second["sha"] and first["warnings"] == second["warnings"] == []


@needs_nvrtc
def test_many_processes_race_on_an_empty_folder(fresh):
    processes = [in_process(BUILD, fresh.kernels) for _ in range(8)]
    answers = [answer(process) for process in processes]
    assert len({tuple(a["sha"]) for a in answers}) == 1
    assert all(all(a["saved"]) and a["compiles"] <= 2 and not a["warnings"] for a in answers)
    assert sorted(p.suffix for p in fresh.cache.iterdir()) == [".cubin", ".cubin", ".json", ".json"]
    assert answer(in_process(BUILD, fresh.kernels))["compiles"] == 0


@needs_nvrtc
def test_threads_compile_each_variant_once(fresh):
    start, results = threading.Barrier(12), []

    def work(value):
        start.wait()
        results.append((value, jit.build("small", {"VALUE": value}, "sm_80")))

    threads = [threading.Thread(target=work, args=(i % 3,)) for i in range(12)]
    with compiles(3):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 12 and len({(value, built.cubin) for value, built in results}) == 3


@needs_nvrtc
def test_the_first_program_of_a_process_is_compiled_alone(fresh, monkeypatch):
    """NVRTC 13.0 cannot open its builtins in two threads at once."""
    start, events, compile_program = threading.Barrier(4), [], jit._compile_program

    def watched(*args):
        events.append("begins")
        compiled = compile_program(*args)
        events.append("ends")
        return compiled

    def work(value):
        start.wait()
        jit.build("small", {"VALUE": value}, "sm_80")

    monkeypatch.setattr(jit, "_had_program", False)
    monkeypatch.setattr(jit, "_compile_program", watched)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[:2] == ["begins", "ends"] and len(events) == 8 and jit._had_program


def _truncate(cubin, record):
    cubin.write_bytes(cubin.read_bytes()[:-1])


def _flip(cubin, record):
    cubin.write_bytes(cubin.read_bytes()[:-9] + b"\1" + cubin.read_bytes()[-8:])


def _other_variant(cubin, record):
    other = jit.build("small", {"VALUE": 2}, "sm_80")
    cubin.write_bytes(other.cubin)
    record.write_bytes(other.path.with_suffix(".json").read_bytes())


def _without(name):
    def damage(cubin, record):
        record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != name}))

    return damage


DAMAGE = {
    "truncated cubin": _truncate,
    "changed byte": _flip,
    "empty cubin": lambda cubin, record: cubin.write_bytes(b""),
    "no cubin": lambda cubin, record: cubin.unlink(),
    "no record": lambda cubin, record: record.unlink(),
    "empty record": lambda cubin, record: record.write_bytes(b""),
    "half a record": lambda cubin, record: record.write_bytes(record.read_bytes()[:40]),
    "record is not UTF-8": lambda cubin, record: record.write_bytes(b"\xff\xfe\xfd"),
    "record is a list": lambda cubin, record: record.write_text("[1, 2]"),
    "record without sha256": _without("sha256"),
    "record without registers": _without("registers"),
    "another variant": _other_variant,
}


@needs_nvrtc
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_again_and_mended(damage):
    good = jit.build("small", {"VALUE": 1}, "sm_80")
    DAMAGE[damage](good.path, good.path.with_suffix(".json"))
    with compiles(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        again = jit.build("small", {"VALUE": 1}, "sm_80")
    assert again.cubin == good.cubin and not again.from_cache
    with compiles(0):
        assert jit.build("small", {"VALUE": 1}, "sm_80").from_cache


def works_unsaved(error: str):
    """Compiles once, from then on in memory, and warns once, naming what is wrong."""
    with compiles(2), pytest.warns(RuntimeWarning) as seen:
        first = jit.build("small", {"VALUE": 1}, "sm_80")
        second = jit.build("small", {"VALUE": 1}, "sm_80")
        jit.build("small", {"VALUE": 2}, "sm_80")
    assert first.path is None and second == first._replace(from_cache=True)
    assert len(seen) == 1 and error in str(seen[0].message) and "CUFLASH_CACHE_DIR" in str(seen[0].message)
    assert seen[0].filename == __file__


@needs_nvrtc
def test_the_cache_folder_is_a_file(fresh):
    fresh.cache.write_text("")
    works_unsaved("File exists")


@needs_nvrtc
def test_the_cache_folder_is_below_a_file(fresh, monkeypatch):
    fresh.cache.write_text("")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(fresh.cache / "below"))
    works_unsaved("Not a directory")


@needs_nvrtc
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("where", ["open", "replace"])
def test_the_disk_refuses(fresh, monkeypatch, number, where):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*{"open": (jit, "open"), "replace": (os, "replace")}[where], refuse, raising=False)
    works_unsaved(os.strerror(number))
    assert list(fresh.cache.iterdir()) == []  # no temporary file stays


@needs_nvrtc
def test_files_that_can_neither_be_read_nor_replaced(fresh):
    # A folder at each expected name does to root what another user's file in a sticky folder does to others.
    good = jit.build("small", {"VALUE": 1}, "sm_80")
    for path in (good.path, good.path.with_suffix(".json")):
        path.unlink()
        (path / "full").mkdir(parents=True)
    with compiles(1), pytest.warns(RuntimeWarning):
        again = jit.build("small", {"VALUE": 1}, "sm_80")
    assert again.cubin == good.cubin and again.path is None
    assert sorted(p.name for p in fresh.cache.iterdir()) == sorted(
        [good.path.name, good.path.with_suffix(".json").name]
    )


@needs_nvrtc
def test_a_folder_that_becomes_writable_is_used(fresh):
    fresh.cache.write_text("")
    with pytest.warns(RuntimeWarning):
        jit.build("small", {"VALUE": 1}, "sm_80")
    fresh.cache.unlink()
    with compiles(0):
        assert jit.build("small", {"VALUE": 1}, "sm_80").path.is_file()


@needs_nvrtc
@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can become another user")
def test_read_only_and_foreign_files_for_another_user():
    # The interpreter may lie where another user cannot go: it changes user once all is imported and loaded.
    # And pytest's folders are closed to others.
    become = """
        jit.build("small", {"VALUE": 0}, "sm_80", cache_dir=Path(f"{jit.cache_dir()}-{os.getpid()}"))
        jit._compiles = 0
        os.setegid(65534)
        os.seteuid(65534)
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        os.chmod(open_to_all, 0o755)
        kernels, cache = write_kernels(Path(open_to_all, "kernels")), Path(open_to_all, "cache")

        def as_other_user():
            code = textwrap.dedent(become) + textwrap.dedent(BUILD)
            return answer(in_process(code, kernels, CUFLASH_CACHE_DIR=str(cache)))

        first = answer(in_process(BUILD, kernels, CUFLASH_CACHE_DIR=str(cache)))
        cache.chmod(0o555)
        readable = as_other_user()
        assert readable["compiles"] == 0 and readable["sha"] == first["sha"] and not readable["warnings"]
        for path in cache.iterdir():
            path.chmod(0o600)
        hidden = as_other_user()
        assert hidden["compiles"] == 2 and hidden["sha"] == first["sha"] and len(hidden["warnings"]) == 1
        assert "Permission denied" in hidden["warnings"][0]


@needs_nvrtc
def test_no_home(fresh, tmp_path):
    # Below a file, so that not even root can make it. CuPy needs a folder too.
    home = tmp_path / "file" / "home"
    home.parent.write_text("")
    result = answer(in_process(BUILD, fresh.kernels, HOME=str(home), CUFLASH_CACHE_DIR="", XDG_CACHE_HOME=""))
    assert result["saved"] == [False] * 3 and result["compiles"] == 2
    assert len(result["warnings"]) == 1 and f"{home}/.cache/cuflash" in result["warnings"][0]


def test_import_touches_neither_disk_nor_cupy(tmp_path):
    code = """
        print(json.dumps([name for name in ("cupy", "numpy", "ml_dtypes") if name in sys.modules]))
    """
    names = answer(in_process(code, tmp_path, HOME=str(tmp_path), CUFLASH_CACHE_DIR=str(tmp_path / "cache")))
    assert "cupy" not in names and not (tmp_path / "cache").exists()


# ------------------------------------------------------------------------------------------------------------
# NVRTC missing or broken


def test_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    jit.nvrtc_version.cache_clear()
    with pytest.raises(jit.CupyMissing, match=r"pip install 'cuflash\[cuda12\]'") as caught:
        jit.nvrtc_version()
    assert "\n" not in str(caught.value) and isinstance(caught.value, jit.NvrtcMissing)
    assert jit.nvrtc_location() is None
    jit.nvrtc_version.cache_clear()


def fake_cupy(**cuda):
    """As much of CuPy as is asked for; `cuda` are members of cupy.cuda."""
    return types.SimpleNamespace(__version__="14.2.0", cuda=types.SimpleNamespace(**cuda))


@pytest.mark.parametrize("major, package", [(12, "nvidia-cuda-nvrtc-cu12"), (13, "nvidia-cuda-nvrtc==13.*")])
def test_no_nvrtc(monkeypatch, major, package):
    def get_version():
        raise RuntimeError('Failure finding "libnvrtc.so":\n  No such file')

    cupy = fake_cupy(
        nvrtc=types.SimpleNamespace(getVersion=get_version),
        runtime=types.SimpleNamespace(runtimeGetVersion=lambda: 1000 * major + 20),
    )
    monkeypatch.setattr(jit, "import_cupy", lambda: cupy)
    monkeypatch.setattr(jit, "_preload", lambda major: False)
    jit.nvrtc_version.cache_clear()
    with pytest.raises(jit.NvrtcMissing) as caught:
        jit.nvrtc_version()
    message = str(caught.value)
    assert "\n" not in message and 'CUDA_PATH (Failure finding "libnvrtc.so": No such file)' in message
    assert f"pip install 'cuflash[cuda{major}]'" in message and f"pip install '{package}'" in message
    jit.nvrtc_version.cache_clear()


def test_a_wheel_is_loaded_for_a_cupy_that_does_not_look_there(monkeypatch, tmp_path):
    library = tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    library.parent.mkdir(parents=True)
    library.write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    loaded = []
    monkeypatch.setattr(jit.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    assert jit._preload(12) and loaded == [str(library)]
    assert not jit._preload(13)


def test_builtins_of_another_version(monkeypatch, tmp_path):
    (tmp_path / "libnvrtc-builtins.so.12.8").write_text("")
    monkeypatch.setattr(jit, "nvrtc_location", lambda: str(tmp_path / "libnvrtc.so.12"))
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))

    class NVRTCError(RuntimeError):
        pass

    def compile_program(program, options):
        raise NVRTCError("NVRTC_ERROR_BUILTIN_OPERATION_FAILURE (7)")

    log = "nvrtc: error: failed to open libnvrtc-builtins.so.12.9.\n  Make sure that it is installed.\0"
    nvrtc = types.SimpleNamespace(
        NVRTCError=NVRTCError,
        createProgram=lambda *arguments: 1,
        compileProgram=compile_program,
        getProgramLog=lambda program: log,
        destroyProgram=lambda program: None,
    )
    monkeypatch.setattr(jit, "import_cupy", lambda: fake_cupy(nvrtc=nvrtc))
    with pytest.raises(jit.NvrtcMissing) as caught:
        jit.build("small", {"VALUE": 1}, "sm_80")
    message = str(caught.value)
    assert "\n" not in message and f"NVRTC 12.9 at {tmp_path}/libnvrtc.so.12" in message
    assert "libnvrtc-builtins.so.12.9 (beside it: libnvrtc-builtins.so.12.8)" in message
    assert "pip install --force-reinstall 'nvidia-cuda-nvrtc-cu12==12.9.*'" in message


@needs_nvrtc
def test_location_is_a_file():
    location = jit.nvrtc_location()
    assert location is None or (Path(location).is_file() and "nvrtc" in location)


# ------------------------------------------------------------------------------------------------------------
# Archs

CUDA_12_8 = ((50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120), (12, 8))
CUDA_12_9 = ((50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121), (12, 9))
CUDA_13_0 = ((75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121), (13, 0))


@pytest.mark.parametrize(
    "cc, accelerated, nvrtc, arch",
    [
        ((6, 1), False, CUDA_12_9, "sm_61"),
        ((7, 5), False, CUDA_13_0, "sm_75"),
        ((8, 7), False, CUDA_13_0, "sm_87"),
        ((9, 0), False, CUDA_13_0, "sm_90"),
        ((9, 0), True, CUDA_12_8, "sm_90a"),
        ((12, 0), True, CUDA_13_0, "sm_120a"),
        # A minor version not known yet runs the code of an older one ...
        ((12, 1), False, CUDA_12_8, "sm_120"),
        ((12, 5), False, CUDA_13_0, "sm_121"),
        # ... but not that of an integrated GPU (10.1), and an integrated GPU (8.8) that of no other.
        ((10, 3), False, CUDA_12_8, "sm_100"),
        ((8, 8), False, CUDA_12_9, "compute_86"),
        ((10, 1), False, CUDA_13_0, "compute_100"),
        ((11, 0), False, CUDA_12_9, "compute_103"),
        # Newer than all: PTX.
        ((13, 7), False, CUDA_13_0, "compute_121"),
        ((13, 7), False, CUDA_12_8, "compute_120"),
    ],
)
def test_arch_for(monkeypatch, cc, accelerated, nvrtc, arch):
    monkeypatch.setattr(jit, "supported_archs", lambda: nvrtc[0])
    monkeypatch.setattr(jit, "nvrtc_version", lambda: nvrtc[1])
    assert jit.arch_for(cc, accelerated) == arch


@pytest.mark.parametrize(
    "cc, accelerated, nvrtc, message",
    [
        ((6, 1), False, CUDA_13_0, r"6\.1 is too old for NVRTC 13\.0, .*7\.5; CUDA 12 still .*cuda12"),
        ((7, 2), False, CUDA_13_0, "CUDA 12 still supports it"),
        ((3, 5), False, CUDA_12_9, "CUDA 11 was the last"),
        ((8, 0), True, CUDA_13_0, r"NVRTC 13\.0 has no sm_80a"),
        ((13, 7), True, CUDA_13_0, r"NVRTC 13\.0 has no sm_137a"),
    ],
)
def test_arch_for_refuses(monkeypatch, cc, accelerated, nvrtc, message):
    monkeypatch.setattr(jit, "supported_archs", lambda: nvrtc[0])
    monkeypatch.setattr(jit, "nvrtc_version", lambda: nvrtc[1])
    with pytest.raises(RuntimeError, match=message):
        jit.arch_for(cc, accelerated)


# ------------------------------------------------------------------------------------------------------------
# Loading, with a stand-in for CuPy: what a GPU adds is in tests/gpu


class FakeError(RuntimeError):
    def __init__(self, status, text=""):
        super().__init__(text)
        self.status = status


class FakeGpu:
    """The parts of CuPy that load a module; keeps what was asked of it."""

    def __init__(self, smem_limit=232448, driver=13000):
        self.modules, self.current, self.capturing, self.load_error = [], [], 0, None
        self.smem_limit, self.driver = smem_limit, driver
        gpu = self

        class Device:
            def __init__(self, device_id):
                self.id = device_id

            def __enter__(self):
                gpu.current.append(self.id)

            def __exit__(self, *_):
                gpu.current.pop()

        def is_capturing(stream):
            if gpu.capturing == 906:
                raise FakeError(906)
            return stream == gpu.capturing

        runtime = types.SimpleNamespace(
            CUDARuntimeError=FakeError,
            driverGetVersion=lambda: gpu.driver,
            runtimeGetVersion=lambda: 12090,
            streamIsCapturing=is_capturing,
            getDeviceProperties=lambda device: {
                "name": b"Fake GPU",
                "major": 9,
                "minor": 0,
                "sharedMemPerBlockOptin": smem_limit,
            },
        )
        self.cupy = fake_cupy(
            Device=Device, runtime=runtime, get_current_stream=lambda: types.SimpleNamespace(ptr=-1)
        )
        self.cupy.RawModule = self.raw_module

    def raw_module(self, path):
        assert self.current, "a module is loaded into the device that is current"
        content = Path(path).read_bytes()
        if self.load_error:
            raise self.load_error
        self.modules.append((self.current[-1], path, content))
        gpu = self

        class Kernel:
            num_regs, local_size_bytes = 40, 8
            kernel = types.SimpleNamespace(ptr=1000 + len(gpu.modules))

            def __setattr__(self, name, value):
                assert name == "max_dynamic_shared_size_bytes"
                if value > gpu.smem_limit:
                    raise FakeError(1, "CUDA_ERROR_INVALID_VALUE: invalid argument")
                super().__setattr__(name, value)

        return types.SimpleNamespace(get_function=lambda name: Kernel())


@pytest.fixture
def gpu(monkeypatch, fresh):
    gpu = FakeGpu()
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(jit, "import_cupy", lambda: gpu.cupy)
    monkeypatch.setattr(jit, "_compile", lambda kernel, files, options, what: (b"cubin", LOG))
    return gpu


def test_load(gpu):
    loaded = jit.load("small", {"VALUE": 1}, "sm_90", 1, 100_000)
    assert loaded.function == 1001 and loaded.registers == 40 and loaded.local_bytes == 8
    assert loaded.kernel.max_dynamic_shared_size_bytes == 100_000
    assert gpu.modules == [(1, str(loaded.built.path), b"cubin")] and gpu.current == []


def test_load_is_kept_per_variant_and_device(gpu):
    first = jit.load("small", {"VALUE": 1}, "sm_90", 0, 1000)
    assert jit.load("small", (("VALUE", "1"),), "sm_90", 0, 1000) is first
    assert jit.load("small", {"VALUE": 1}, "sm_90", 0, 0) is first
    assert jit.load("small", {"VALUE": 1}, "sm_90", 1, 1000) is not first
    assert jit.load("small", {"VALUE": 2}, "sm_90", 0, 1000) is not first
    more = jit.load("small", {"VALUE": 1}, "sm_90", 0, 2000)
    assert more.smem_bytes == 2000 and more.kernel.max_dynamic_shared_size_bytes == 2000


def test_threads_load_once(gpu):
    start, results = threading.Barrier(8), []

    def work():
        start.wait()
        results.append(jit.load("small", {"VALUE": 1}, "sm_90", 0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(gpu.modules) == 1 and all(result is results[0] for result in results)


def test_load_without_a_cache_leaves_no_file(gpu, fresh, monkeypatch, tmp_path):
    fresh.cache.write_text("")
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning):
        loaded = jit.load("small", {"VALUE": 1}, "sm_90", 0)
    (_, path, content), *_ = gpu.modules
    assert loaded.built.key in path and content == b"cubin" and not os.path.exists(path)
    assert not list(tmp_path.glob("*.cubin"))


def test_a_file_that_vanishes_after_the_build(gpu, monkeypatch):
    build = jit.build

    def and_remove(*arguments, **options):
        built = build(*arguments, **options)
        built.path.unlink()
        return built

    monkeypatch.setattr(jit, "build", and_remove)
    jit.load("small", {"VALUE": 1}, "sm_90", 0)
    assert gpu.modules[0][2] == b"cubin"


@pytest.mark.parametrize("capturing, stream", [(7, 7), (-1, None), (906, None)])
def test_no_load_under_capture(gpu, capturing, stream):
    gpu.capturing = capturing
    with pytest.raises(RuntimeError, match="make one such call before the capture.*cuflash warmup"):
        jit.load("small", {"VALUE": 1}, "sm_90", 0, stream=stream)
    assert gpu.modules == []
    gpu.capturing = 0
    loaded = jit.load("small", {"VALUE": 1}, "sm_90", 0, stream=stream)
    gpu.capturing = capturing
    assert jit.load("small", {"VALUE": 1}, "sm_90", 0, stream=stream) is loaded


def test_too_much_shared_memory(gpu):
    with pytest.raises(RuntimeError) as caught:
        jit.load("small", {"VALUE": 1}, "sm_90", 0, 300_000)
    message = str(caught.value)
    assert "cannot load small for sm_90 with VALUE=1" in message and "300000 bytes of dynamic" in message
    assert "Fake GPU, compute capability 9.0, at most 232448 bytes" in message and "INVALID_VALUE" in message
    jit.load("small", {"VALUE": 1}, "sm_90", 0, 1000)


def test_ptx_newer_than_the_driver(gpu):
    gpu.driver = 12040
    gpu.load_error = FakeError(222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled ...")
    with pytest.raises(RuntimeError, match=r"driver supports CUDA 12\.4, NVRTC is 12\.9: update"):
        jit.load("small", {"VALUE": 1}, "compute_90", 0)


@pytest.mark.parametrize(
    "driver, runtime, message",
    [
        (0, 12090, "no NVIDIA driver was found"),
        (
            11080,
            12090,
            r"CUDA 11\.8, CuPy 14 needs CUDA 12\.0 \(driver 525\.60 or newer\); update the driver$",
        ),
        (12040, 13020, r"CUDA 12\.4, CuPy 14 needs CUDA 13\.0 .*580.*pip install 'cuflash\[cuda12\]'"),
        (12000, 12090, None),
        (13000, 12090, None),
        (13000, 13020, None),
    ],
)
def test_driver_too_old(driver, runtime, message):
    problem = jit._driver_problem(driver, runtime, "CuPy 14")
    assert problem is None if message is None else re.search(message, problem)


def test_load_checks_the_driver_first(gpu):
    gpu.driver = 11080
    with pytest.raises(RuntimeError, match="the NVIDIA driver is too old"):
        jit.load("small", {"VALUE": 1}, "sm_90", 0)
    assert gpu.modules == []
