"""The command line: what it prints and exits with; that `check` finds what is broken; all without a GPU."""

import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import cuflash
from cuflash import config, cpu, jit
from cuflash.cli import builds, environment, main, options, trial
from cuflash.cli.case import LAYOUTS, Case
from cuflash.cli.cases import CASES
from cuflash.problem import DTYPES

REPO = Path(__file__).resolve().parent.parent


def run(*args):
    """The exit status and all that a command prints, on both streams."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def environ():
    """Without a GPU. One thread for BLAS: those of several processes would wait busily for each other."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
    }


def python(*args):
    return subprocess.run([sys.executable, *args], env=environ(), capture_output=True, text=True, timeout=300)


def read_json(text):
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(environment, "find_gpus", lambda: environment.Found(0, "no NVIDIA driver was found"))


@pytest.fixture
def no_nvrtc(monkeypatch):
    def missing():
        raise jit.NvrtcMissing("NVRTC was not found. Install it with: pip install x")

    for name in ("nvrtc_version", "supported_archs"):
        monkeypatch.setattr(jit, name, missing)


@pytest.fixture
def no_cupy(monkeypatch, no_nvrtc):
    def missing():
        raise jit.CupyMissing("CuPy is not installed. Install it with: pip install 'cuflash[cuda12]'")

    monkeypatch.setattr(jit, "import_cupy", missing)


@pytest.fixture
def built(monkeypatch):
    """Nothing is compiled: the variants that would be, in a list."""
    variants = []

    def build_all(wanted, cache_dir=None, jobs=None):
        variants.extend(dict.fromkeys(wanted))
        return {variant: jit.Built("", b"cubin", Path(), 64, 0, 0, "", 0.1, False) for variant in variants}

    monkeypatch.setattr(builds, "build_all", build_all)
    return variants


# ------------------------------------------------------------------------------------------------- the group


def test_help_is_quick_and_imports_little():
    code = "import sys, cuflash.cli; print([m for m in ('cupy', 'scipy', 'torch') if m in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_module_and_group():
    shown = python("-m", "cuflash", "--help").stdout
    assert all(command in shown for command in ("check", "info", "explain", "warmup"))
    assert run("--version")[1].strip() == f"cuflash, version {cuflash.__version__}"
    for command in main.commands:
        assert run(command, "--help")[0] == 0


BAD = [
    (["check", "--tier", "sm70"], 2, "'sm70' is not one of 'sm90', 'sm80', 'simt'"),
    (["check", "--dtype", "int8"], 2, "'int8' is not one of"),
    (["check", "--device", "gpu"], 2, "'gpu' is neither the index of a GPU nor 'cpu'"),
    (["check", "--device", "3"], 1, "there is no GPU 3: no NVIDIA driver was found"),
    (["check", "--tier", "simt"], 2, "--tier simt needs a GPU; there is none: no NVIDIA driver was found"),
    (["check", "--case", "nonesuch"], 1, "no case is left"),
    (["check", "--json", "/nonexistent/x.json"], 2, "No such file or directory"),
    (["info", "--arch", "sm_42"], 2, "'sm_42' is not one of sm_60"),
    (["info", "--device", "0"], 1, "there is no GPU 0"),
    (["info", "--device", "0", "--arch", "sm_90"], 2, "give one of them"),
    (["explain"], 2, "name a GPU with --arch, as in --arch sm_90; none is here: no NVIDIA driver was found"),
    (["explain", "--arch", "ampere"], 2, "'ampere' is not one of sm_60"),
    (["explain", "--arch", "sm_90", "--deterministic"], 2, "give --backward too"),
    (["warmup", "--arch", "sm_90", "--deterministic"], 2, "give --backward too"),
    (["explain", "--arch", "sm_90", "--decode", "--varlen"], 2, "leave out --backward and --varlen"),
    (["explain", "--arch", "sm_90", "--page-size", "16"], 2, "are about a cache: give --decode too"),
    (["explain", "--arch", "sm_90", "--decode", "--num-splits", "9999"], 1, "num_splits must be 0 (chosen) to 4096; got 9999"),
    (["explain", "--arch", "sm_90", "--device", "0"], 2, "give one of them"),
    (["explain", "--arch", "sm_90", "--head-dim", "300"], 1, "head_dim of q and k must be 1 to 256; got 300"),
    (["explain", "--arch", "sm_90", "--head-dim", "64.5"], 2, "not a valid integer"),
    (["explain", "--arch", "sm_90", "--batch", "-1"], 2, "-1 is not in the range x>=0"),
    (["explain", "--arch", "sm_90", "--heads", "6", "--heads-k", "4"], 1, "must be a multiple of the heads"),
    (["explain", "--arch", "sm_90", "--window", "1"], 2, "'1' is not LEFT,RIGHT"),
    (["explain", "--arch", "sm_90", "--window", "1,2.5"], 2, "'1,2.5' is not LEFT,RIGHT"),
    (["explain", "--arch", "sm_90", "--window", "-3,1"], 1, "window left must be 0 or more"),
    (["explain", "--arch", "sm_90", "--softcap", "-1"], 1, "softcap must be finite and 0 (off) or more"),
    (["explain", "--arch", "sm_90", "--scale", "nan"], 1, "softmax_scale must be finite"),
    (
        ["explain", "--arch", "sm_90", "--dtype", "float32", "--tier", "sm80"],
        1,
        "tier sm80: tensor cores take float16",
    ),
    (["explain", "--arch", "sm_100", "--tier", "sm90"], 1, "tier sm90: needs compute capability 9.0 (wgmma, TMA)"),
    (["explain", "--arch", "sm_90", "--seqlen-q", "1000000000", "--batch", "9999"], 1, "split the batch"),
    (["warmup"], 2, "name GPUs with --arch, as in --arch sm_90; none is here"),
    (["warmup", "--arch", "sm_42"], 2, "'sm_42' is not one of sm_60"),
    (["warmup", "--arch", "sm_90", "--head-dim", "1/2/3"], 2, "'1/2/3' is neither a head_dim"),
    (["warmup", "--arch", "sm_90", "--head-dim", "257"], 1, "head_dim of q and k must be 1 to 256; got 257"),
    (["warmup", "--arch", "sm_90", "--jobs", "0"], 2, "0 is not in the range"),
]


@pytest.mark.parametrize("args, status, message", BAD, ids=[" ".join(args) for args, _, _ in BAD])
def test_bad_options_get_one_line(no_gpu, args, status, message):
    code, output = run(*args)
    error = output.strip().splitlines()[-1]
    assert (code, error.startswith("Error: ")) == (status, True) and message in error, output


# ----------------------------------------------------------------------------------------------------- check


@pytest.fixture(scope="module")
def whole_check(tmp_path_factory):
    """One run of everything on the NumPy path: (lines as printed, record)."""
    file = tmp_path_factory.mktemp("check") / "record.json"
    done = python("-m", "cuflash", "check", "--device", "cpu", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), read_json(file.read_text())


def test_every_case_holds_on_the_cpu(whole_check):
    lines, record = whole_check
    assert lines[0].startswith("no GPU: --device cpu") and lines[0].endswith("checking the NumPy path")
    assert len(record["rows"]) == len(CASES) * len(DTYPES)
    assert sum(line.endswith("  ok") for line in lines) == len(record["rows"])
    assert lines[-1].startswith(f"all {len(record['rows'])} checks hold ({len(CASES)} cases, 4 dtypes, cpu")


def test_the_record_says_where_and_what(whole_check):
    _, record = whole_check
    found = record["environment"]
    assert found["gpu"] is None and found["cuflash"] == cuflash.__version__
    assert re.fullmatch("[0-9a-f]{16}", found["kernels"])
    assert found["numpy"] == np.__version__ and found["date"] and "cupy" in found and "nvrtc" in found
    assert record["summary"]["ok"] and record["summary"]["failed"] == 0 and record["summary"]["seconds"] > 0
    for row in record["rows"]:
        assert row["ok"] and row["tier"] == "cpu" and row["why"] == ""
        assert row["max_err"] <= row["max_budget"] and row["rms_err"] <= row["rms_budget"]
        assert row["ref_max_err"] >= 0 and row["ref_rms_err"] >= 0
        if row["case"].startswith(("backward, ", "packed backward, ")):
            assert row["of"] in ("dq", "dk", "dv") and row["lse_err"] is None
        else:
            assert row["of"] == "out" and row["lse_err"] <= row["lse_budget"]


def test_no_gpu_is_said_first(no_gpu):
    code, output = run("check", "--case", "seqlen 63 x 65")
    assert (
        code == 0 and output.splitlines()[0] == "no GPU: no NVIDIA driver was found; checking the NumPy path"
    )


def test_without_cupy_the_first_line_says_what_to_install(no_cupy):
    code, output = run("check", "--case", "seqlen 63 x 65")
    first = output.splitlines()[0]
    assert code == 0 and first.startswith("no GPU: CuPy is not installed") and "cuflash[cuda12]" in first


def test_a_driver_too_old_is_no_pass(monkeypatch):
    found = environment.Found(0, "the NVIDIA driver is too old", unusable=True)
    monkeypatch.setattr(environment, "find_gpus", lambda: found)
    code, output = run("check", "--quick")
    assert code == 1 and output == (
        "Error: the NVIDIA driver is too old; or check the NumPy path with --device cpu\n"
    )
    assert run("check", "--device", "cpu", "--case", "seqlen 63 x 65")[0] == 0


def test_quick_is_a_part_and_options_narrow_it(no_gpu, tmp_path):
    quick = [case for case in CASES if case.quick]
    assert 10 < len(quick) < len(CASES) / 2
    file = tmp_path / "record.json"
    code, _ = run(
        "check", "--quick", "--case", "causal 1", "--case", "softcap", "--dtype", "float16", "--json", file
    )
    rows = read_json(file.read_text())["rows"]
    assert code == 0 and {(row["case"], row["dtype"]) for row in rows} == {
        (case.name, "float16") for case in quick if "causal 1" in case.name or "softcap" in case.name
    }


def test_json_to_stdout_is_json_alone():
    done = python("-m", "cuflash", "check", "--case", "seqlen 63 x 65", "--json", "-")
    assert done.returncode == 0 and read_json(done.stdout)["summary"]["checks"] == 4
    assert done.stderr.startswith("no GPU: ") and "all 4 checks hold" in done.stderr
    assert "checking " not in done.stderr.split("\n", 1)[1], "a progress bar where no one looks"


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_the_progress_bar_is_on_a_terminal():
    import pty

    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [sys.executable, "-m", "cuflash", "check", "--device", "cpu", "--case", "seqlen 63 x 65"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environ(),
            timeout=120,
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # at the end of a terminal
            while part := terminal.read(65536):
                shown += part
    assert done.returncode == 0 and b"checking " in shown and b"100%" in shown
    assert done.stdout.count(b"  ok\n") == 4 and b"100%" not in done.stdout


# Ways to be wrong, each a replacement of cpu.attention that calls the right one.

right = cpu.attention


def slightly_wrong(problem, q, k, v, out):
    lse = right(problem, q, k, v, out)
    out[0, 3, 1, 5] *= 1.01
    return lse


def one_key_too_many(problem, q, k, v, out):
    return right(dataclasses.replace(problem, window_right=problem.window_right + 1), q, k, v, out)


def last_row_unwritten(problem, q, k, v, out):
    whole = np.empty_like(out)
    lse = right(problem, q, k, v, whole)
    out[:, :-1] = whole[:, :-1]
    return lse


def differs_from_run_to_run(problem, q, k, v, out, turn=[0]):  # noqa: B006
    lse = right(problem, q, k, v, out)
    turn[0] += 1
    if turn[0] % 2:
        out[0, 1, 0, 0] = np.nextafter(out[0, 1, 0, 0], out.dtype.type(9))
    return lse


def lse_differs_from_run_to_run(problem, q, k, v, out, turn=[0]):  # noqa: B006
    lse = right(problem, q, k, v, out)
    turn[0] += 1
    return np.nextafter(lse, lse.dtype.type(turn[0] % 2 * 99)) if lse is not None else None


def writes_past_the_end(problem, q, k, v, out):
    lse = right(problem, q, k, v, out)
    np.lib.stride_tricks.as_strided(out, (*out.shape[:3], out.shape[3] + 1))[-1, -1, -1, -1] = 0
    return lse


def writes_before_the_start(problem, q, k, v, out):
    lse = right(problem, q, k, v, out)
    memory = out.base if out.base.dtype == np.uint8 else out.base.base
    memory[trial.GUARD - 1] ^= 1
    return lse


def writes_an_input(problem, q, k, v, out):
    lse = right(problem, q, k, v, out)
    k[...] = 0
    return lse


def reads_past_the_end(problem, q, k, v, out):
    k = np.lib.stride_tricks.as_strided(k, (k.shape[0], k.shape[1] + 1, *k.shape[2:]))
    return right(problem, q, k[:, 1:], v, out)


def depends_on_the_layout(problem, q, k, v, out):
    lse = right(problem, q, k, v, out)
    if not q.flags.c_contiguous:
        out[0, 1, 0, 0] = np.nextafter(out[0, 1, 0, 0], out.dtype.type(9))
    return lse


def lse_in_base_two(problem, q, k, v, out):
    lse = right(problem, q, k, v, out)
    return None if lse is None else lse * np.float32(1.4426950408889634)


def masked_nan_spreads(problem, q, k, v, out):
    lse = right(problem, q, k, v, out)
    if np.isnan(v).any():
        out[:, -problem.seqlen_q // 2 :] = np.nan
    return lse


def raises(problem, q, k, v, out):
    raise RuntimeError("an illegal memory access was encountered\nand more")


# The same of cpu.backward and of the functions for packed sequences.

right_backward = cpu.backward


def dk_slightly_wrong(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv)
    dk[0, 3, 1, 5] *= 1.01


def last_key_unwritten(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    whole = np.empty_like(dv)
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, whole)
    dv[:, :-1] = whole[:, :-1]


def dlse_ignored(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    right_backward(problem, dout, q, k, v, out, lse, None, dq, dk, dv)


def group_not_summed(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    group = problem.heads_q // problem.heads_k
    first = [x[:, :, ::group] for x in (dout, q)] + [k, v, out[:, :, ::group], lse[:, ::group]]
    one_each = dataclasses.replace(problem, heads_q=problem.heads_k)
    right_backward(one_each, *first, None, np.empty_like(first[1]), dk, dv)
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, np.empty_like(dk), np.empty_like(dv))


def dq_differs_from_run_to_run(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, turn=[0]):  # noqa: B006
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv)
    turn[0] += 1
    if turn[0] % 2:
        dq[0, 1, 0, 0] = np.nextafter(dq[0, 1, 0, 0], dq.dtype.type(9))


def dv_differs(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, turn=[0]):  # noqa: B006
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv)
    turn[0] += 1
    if turn[0] % 2:
        dv[0, 1, 0, 0] = np.nextafter(dv[0, 1, 0, 0], dv.dtype.type(9))


def dk_past_the_end(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv)
    np.lib.stride_tricks.as_strided(dk, (*dk.shape[:3], dk.shape[3] + 1))[-1, -1, -1, -1] = 0


def dout_written(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv)
    dout[...] = 0


def unseen_keys_unwritten(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv):
    whole = np.empty_like(dk)
    right_backward(problem, dout, q, k, v, out, lse, dlse, dq, whole, dv)
    seen = (whole != 0).any(axis=(0, 2, 3))
    dk[:, seen] = whole[:, seen]


right_varlen, right_varlen_backward = cpu.attention_varlen, cpu.backward_varlen


def sequences_leak(problem, q, k, v, cu_q, cu_k, used_q, used_k, out):
    one = np.array([0, cu_q[-1]], cu_q.dtype), np.array([0, cu_k[-1]], cu_k.dtype)
    return right_varlen(dataclasses.replace(problem, batch=1), q, k, v, *one, None, None, out)


def used_ignored(problem, q, k, v, cu_q, cu_k, used_q, used_k, out):
    return right_varlen(problem, q, k, v, cu_q, cu_k, None, None, out)


def rest_unwritten(problem, q, k, v, cu_q, cu_k, used_q, used_k, out):
    whole = np.empty_like(out)
    lse = right_varlen(problem, q, k, v, cu_q, cu_k, used_q, used_k, whole)
    out[: cu_q[-1]] = whole[: cu_q[-1]]
    return lse


def lengths_written(problem, q, k, v, cu_q, cu_k, used_q, used_k, out):
    lse = right_varlen(problem, q, k, v, cu_q, cu_k, used_q, used_k, out)
    cu_k[-1] += 1
    return lse


def rest_of_dk_unwritten(problem, dout, q, k, v, out, lse, cu_q, cu_k, used_q, used_k, dlse, dq, dk, dv):
    whole = np.empty_like(dk)
    right_varlen_backward(problem, dout, q, k, v, out, lse, cu_q, cu_k, used_q, used_k, dlse, dq, whole, dv)
    dk[: cu_k[-1]] = whole[: cu_k[-1]]


right_decode = cpu.attention_with_kvcache


def appended_too_late(problem, q, k_cache, v_cache, k, v, lengths, index, table, out):
    """The new keys go into the cache, and are not attended to."""
    lse = right_decode(problem, q, k_cache, v_cache, None, None, lengths, index, table, out)
    right_decode(problem, q, k_cache, v_cache, k, v, lengths, index, table, np.empty_like(out))
    return lse


def not_appended(problem, q, k_cache, v_cache, k, v, lengths, index, table, out):
    return right_decode(problem, q, k_cache.copy(), v_cache.copy(), k, v, lengths, index, table, out)


def another_page_written(problem, q, k_cache, v_cache, k, v, lengths, index, table, out):
    lse = right_decode(problem, q, k_cache, v_cache, k, v, lengths, index, table, out)
    v_cache[-1, 0, 0, 0] = 1
    return lse


def past_the_cache(problem, q, k_cache, v_cache, k, v, lengths, index, table, out):
    lse = right_decode(problem, q, k_cache, v_cache, k, v, lengths, index, table, out)
    np.lib.stride_tricks.as_strided(k_cache, (k_cache.size + 1,), (k_cache.itemsize,))[-1] = 0
    return lse


def a_key_too_many(problem, q, k_cache, v_cache, k, v, lengths, index, table, out):
    return right_decode(problem, q, k_cache, v_cache, k, v, lengths + 1, index, table, out)


def table_written(problem, q, k_cache, v_cache, k, v, lengths, index, table, out):
    lse = right_decode(problem, q, k_cache, v_cache, k, v, lengths, index, table, out)
    table[0, -1] ^= 1
    return lse


def cache_written(problem, q, k_cache, v_cache, k, v, lengths, index, table, out):
    lse = right_decode(problem, q, k_cache, v_cache, k, v, lengths, index, table, out)
    k_cache[0, -1] = 0
    return lse


BROKEN = [
    (slightly_wrong, "seqlen 63 x 65", "max error "),
    (one_key_too_many, "causal 129 x 257", "max error "),
    (one_key_too_many, "window 31,7", "max error "),
    (last_row_unwritten, "seqlen 63 x 65", "out has nan wrong in 128 places, first at (0, 62, 0, 0)"),
    (
        last_row_unwritten,
        "NaN in the last key, causal",
        "out of a second run differs in 128 of",
    ),  # NaN is right there
    (differs_from_run_to_run, "seqlen 63 x 65", "out of a second run differs in 1 of 8064 elements"),
    (lse_differs_from_run_to_run, "seqlen 63 x 65", "lse of a second run differs in 126 of 126 elements"),
    (writes_past_the_end, "seqlen 63 x 65", "memory around out was written"),
    (writes_past_the_end, "rows of 8-byte alignment", "memory around out was written"),
    (writes_before_the_start, "seqlen 63 x 65", "memory around out was written"),
    (writes_an_input, "seqlen 63 x 65", "k was written"),
    (reads_past_the_end, "seqlen 63 x 65", "out has nan wrong in"),
    (depends_on_the_layout, "transposed", "out of packed arrays differs in 1 of 16640 elements"),
    (lse_in_base_two, "seqlen 63 x 65", "lse error "),
    (masked_nan_spreads, "NaN in keys that no query sees", "out has nan wrong in"),
    (raises, "seqlen 63 x 65", "RuntimeError: an illegal memory access was encountered"),
    (dk_slightly_wrong, "backward, 63 x 65", "dk: max error "),
    (last_key_unwritten, "backward, 63 x 65", "dv: not finite in 128 places, first at (0, 64, 0, 0)"),
    (dlse_ignored, "backward, gradient of lse", "dq: max error "),
    (group_not_summed, "backward, 7 heads", "dk: max error "),
    (dq_differs_from_run_to_run, "backward, causal, 500", None),  # it may
    (dq_differs_from_run_to_run, "backward, 8 heads", "dq of a second run differs in 1 of"),
    (dv_differs, "backward, causal, 500", "dv of a second run differs in 1 of"),
    (dk_past_the_end, "backward, heads outside", "memory around dk was written"),
    (dout_written, "backward, 63 x 65", "dout was written"),
    (unseen_keys_unwritten, "backward, NaN in unseen", "dk: not finite in"),
    (sequences_leak, "packed, several", "max error "),
    (used_ignored, "packed, some unused", "out has nan wrong in"),
    (rest_unwritten, "packed, some unused", "out has nan wrong in"),
    (lengths_written, "packed, several", "cu_seqlens_k was written"),
    (rest_of_dk_unwritten, "packed backward, some unused", "dk: not finite in"),
    (appended_too_late, "decode, 3 appended across pages", "max error "),
    (not_appended, "decode, 3 appended to rows", "k_cache afterwards is wrong in 1152 of"),
    (another_page_written, "decode, 3 appended across pages", "v_cache afterwards is wrong in 1 of"),
    (past_the_cache, "decode, 3 appended across pages", "memory around k_cache was written"),
    (a_key_too_many, "decode, pages of 16", "out has nan wrong in"),
    (table_written, "decode, pages of 16", "block_table was written"),
    (cache_written, "decode, one query", "k_cache was written"),
]
PATCHED = {  # by the number of arguments
    5: "attention",
    9: "attention_varlen",
    10: "attention_with_kvcache",
    11: "backward",
    15: "backward_varlen",
}


@pytest.mark.parametrize(
    "broken, case, why", BROKEN, ids=[f"{broken.__name__}-{case}" for broken, case, _ in BROKEN]
)
def test_check_finds(monkeypatch, tmp_path, broken, case, why):
    takes = len([x for x in inspect.signature(broken).parameters if x != "turn"])
    monkeypatch.setattr(cpu, PATCHED[takes], broken)
    file = tmp_path / "record.json"
    code, output = run("check", "--device", "cpu", "--case", case, "--dtype", "float32", "--json", file)
    rows = read_json(file.read_text())["rows"]
    assert len(rows) == 1 and code == (why is not None), output
    if why is None:
        return
    line = next(line for line in output.splitlines() if line.startswith(case) and "float32" in line)
    assert "FAIL: " in line and why in line, output
    assert (
        "1 of 1 checks FAILED" in output and f"  {rows[0]['case']}, float32, cpu: {rows[0]['why']}" in output
    )
    assert read_json(file.read_text())["summary"] | {"seconds": 0} == {
        "ok": False,
        "checks": 1,
        "failed": 1,
        "seconds": 0,
        "quick": False,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_of_a_hundredth_is_found_in_every_dtype(monkeypatch, dtype):
    def broken(problem, q, k, v, out):
        lse = right(problem, q, k, v, out)
        out *= out.dtype.type(1.0 if dtype == "bfloat16" else 1.01)
        out += out.dtype.type(0.01 if dtype == "bfloat16" else 0.0)
        return lse

    monkeypatch.setattr(cpu, "attention", broken)
    assert run("check", "--device", "cpu", "--case", "seqlen 128 x 128", "--dtype", dtype)[0] == 1


def test_one_failing_row_leaves_the_others(monkeypatch):
    def broken(problem, *tensors):
        if problem.dtype == "float16":
            raise RuntimeError("boom")
        return right(problem, *tensors)

    monkeypatch.setattr(cpu, "attention", broken)
    code, output = run("check", "--device", "cpu", "--case", "seqlen 63 x 65")
    assert code == 1 and output.count("  ok\n") == 3 and "1 of 4 checks FAILED" in output


# ----------------------------------------------------------------------------------------------------- cases


def test_case_names_are_distinct_and_layouts_used():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {layout for case in CASES for layout in case.layouts.values()} == set(LAYOUTS)


def test_cases_cover_what_they_should():
    dims = {(case.head_dim, case.head_dim_v) for case in CASES}
    assert {(d, d) for d in (1, 20, 64, 80, 96, 128, 256)} | {(192, 128)} <= dims
    assert any(case.batch == 0 for case in CASES) and any(case.seqlen_q == 0 for case in CASES)
    assert any(case.seqlen_k == 0 and case.seqlen_q for case in CASES)
    assert any(case.heads_q > case.heads_k > 1 for case in CASES) and any(
        case.heads_q > case.heads_k == 1 for case in CASES
    )
    assert any(case.options.get("causal") and case.seqlen_q > case.seqlen_k for case in CASES)
    gradients = [case for case in CASES if case.backward]
    assert {case.lengths is not None for case in gradients} == {True, False}
    assert (
        {case.deterministic for case in gradients} == {case.with_dlse for case in gradients} == {True, False}
    )
    caches = [(case, case.cache) for case in CASES if case.cache]
    assert {bool(cache.page_size) for _, cache in caches} == {bool(cache.new) for _, cache in caches} == {True, False}
    assert {0, 1} < {cache.num_splits for _, cache in caches} and any(cache.page_size == 1 for _, cache in caches)
    assert any(0 in cache.lengths for _, cache in caches) and any(case.options.get("window") for case, _ in caches)
    assert any(case.heads_q > case.heads_k > 1 for case, _ in caches)
    assert {(case.head_dim, case.head_dim_v) for case, cache in caches if cache.values_are_keys} == {(576, 512)}
    packed = [case.lengths for case in CASES if case.lengths]
    assert any(0 in lengths.q and 0 in lengths.k for lengths in packed)
    assert any(lengths.spare for lengths in packed) and any(lengths.used_k for lengths in packed)
    scales = {case.options.get("softmax_scale") for case in CASES}
    assert 0.0 in scales and any(scale is not None and scale < 0 for scale in scales)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_case_states_the_problems_of_its_arrays(monkeypatch, case):
    """What is compiled ahead of the run is what the run then needs."""
    stated, depth = [], [0]

    def recorder(compute):
        def record(problem, *tensors):
            if not depth[0]:  # a packed batch is computed as dense ones
                stated.append(problem)
            depth[0] += 1
            try:
                return compute(problem, *tensors)
            finally:
                depth[0] -= 1

        return record

    for name in ("attention", "attention_varlen", "attention_with_kvcache", "backward", "backward_varlen"):
        monkeypatch.setattr(cpu, name, recorder(getattr(cpu, name)))
    for dtype in ("float16", "float64"):
        del stated[:]
        # The host's allocator aligns to 16 bytes, as much as counts; a GPU's to more.
        trial._compute(case, case.draw(dtype), dtype, None, trial.NAN_BYTE)
        assert stated == case.problems(dtype)


def test_draws_are_repeatable_and_constant_along_stride_0():
    for case in CASES:
        if case.kv_layout == "expanded":
            first, second = case.draw("float32"), case.draw("float32")
            assert all(np.array_equal(first[name], second[name]) for name in first)
            q, k, v = (first[name] for name in "qkv")
            assert (k == k[:1, :, :1]).all() and (v == v[:1, :, :1]).all() and not (q == q[:1]).all()
            assert not case.backward or (first["dout"] == first["dout"][:1, :, :1]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_placed_holds_its_values_between_guards(layout):
    values = np.random.default_rng(1).standard_normal((2, 5, 3, 4)).astype(np.float32)
    if layout == "expanded":
        values[...] = values[:1, :, :1]
    placed = trial.Placed(values.shape, "float32", layout, None, trial.NAN_BYTE, values)
    assert np.array_equal(placed.array, values) and placed.is_unchanged()
    read, intact = placed.read()
    assert np.array_equal(read, values) and intact
    raw = placed._memory
    assert (
        np.isnan(raw[: trial.GUARD].view(np.float32)).all()
        and np.isnan(raw[-trial.GUARD :].view(np.float32)).all()
    )
    raw[-1] = 0
    assert placed.read()[1] is False and not placed.is_unchanged()


# ------------------------------------------------------------------------------------- check, as if on a GPU


class FakeMemory:
    """What Placed needs of CuPy, on the host."""

    def __init__(self, shape, dtype):
        self.host, self.data = np.empty(shape, dtype), self

    def __add__(self, offset):
        return self.host, offset

    def set(self, host):
        self.host[...] = host

    def get(self):
        return self.host.copy()


@pytest.fixture
def fake_gpu(monkeypatch, built):
    """A GPU that is the CPU; arch sm_90 unless its preset is replaced."""
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 13000)
    cuda = types.SimpleNamespace(Device=contextlib.nullcontext, runtime=runtime)
    cupy = types.SimpleNamespace(
        __version__="14.2.0",
        cuda=cuda,
        empty=FakeMemory,
        ndarray=lambda shape, dtype, memory, strides: np.ndarray(shape, dtype, *memory, strides),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(jit, "import_cupy", lambda: cupy)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(jit, "arch_for", lambda capability: f"sm_{capability[0]}{capability[1]}")
    monkeypatch.setattr(environment, "find_gpus", lambda: environment.Found(2, ""))
    monkeypatch.setattr(environment, "device_of", lambda index: config.DEVICES["sm_90"])
    monkeypatch.setattr(
        environment,
        "hardware",
        lambda index: {
            "gpu": "NVIDIA H200",
            "gpu_index": index,
            "compute_capability": "9.0",
            "driver": "580.159",
            "cuda": "13.0",
        },
    )
    return built


def forced_tiers(monkeypatch, name: str) -> list[str]:
    """The tier that is forced at each call of the function of cuflash, as they come."""
    forced, function = [], getattr(cuflash, name)

    def recording(*args, **kwargs):
        forced.append(config.forced_tier())
        return function(*args, **kwargs)

    monkeypatch.setattr(cuflash, name, recording)
    return forced


def test_on_a_gpu_each_tier_has_a_row(fake_gpu, monkeypatch, tmp_path):
    forced = forced_tiers(monkeypatch, "attention")
    file = tmp_path / "record.json"
    code, output = run(
        "check", "--case", "seqlen 63 x 65", "--case", "transposed", "--case", "batch 0", "--json", file
    )
    assert code == 0, output
    assert output.splitlines()[0] == (
        "NVIDIA H200, compute capability 9.0, driver 580.159 (CUDA 13.0), NVRTC 13.0, CuPy 14.2.0"
    )
    rows = [(row["case"], row["dtype"], row["tier"]) for row in read_json(file.read_text())["rows"]]
    tiers = [
        ("float16", "sm90"),
        ("float16", "sm80"),
        ("float16", "simt"),
        ("bfloat16", "sm90"),
        ("bfloat16", "sm80"),
        ("bfloat16", "simt"),
        ("float32", "simt"),
        ("float64", "simt"),
    ]
    assert rows == [
        (case.name, *tier)
        for case in CASES
        if case.name in ("seqlen 63 x 65", "transposed", "batch 0")
        for tier in tiers
    ]
    assert set(forced) == set(config.TIERS) and config.forced_tier() is None
    # Both cases are of one variant in each dtype and tier, and an empty one needs none.
    assert len(fake_gpu) == len(tiers)
    archs = {(variant.kernel, variant.arch) for variant in fake_gpu}
    assert archs == {("fwd_sm90", "sm_90a"), ("fwd_sm80", "sm_90"), ("fwd_simt", "sm_90")}


def test_a_tier_that_refuses_a_layout_has_no_row(fake_gpu, tmp_path):
    """sm90 takes any out, and what TMA can address."""
    file = tmp_path / "record.json"
    cases = ("fused QKV slice", "keys and values of stride 0", "three layouts at once", "transposed")
    refused = ("rows of 8-byte alignment", "base addresses off by an element", "backwards")
    words = itertools.chain(*(("--case", name) for name in cases + refused))
    assert run("check", "--dtype", "float16", *words, "--json", file)[0] == 0
    rows = {(row["case"], row["tier"]) for row in read_json(file.read_text())["rows"]}
    expected = {(name, tier) for name, tier in itertools.product(cases + refused, config.TIERS)}
    expected -= {(name, "sm90") for name in refused}
    assert {row for row in rows if not row[0].startswith("backward, ")} == expected
    assert {tier for name, tier in rows if name.startswith("backward, ")} == set(config.TIERS)


@pytest.mark.parametrize(
    "args, tiers",
    [((), ["sm90", "sm80", "simt"]), (("--tier", "sm80"), ["sm80"]), (("--tier", "sm90"), ["sm90"])],
)
def test_all_kernels_of_gradients_are_compiled_ahead(fake_gpu, monkeypatch, args, tiers):
    """On a tier that has gradients, and so is the forward before them: a tier is checked by itself."""
    forced = forced_tiers(monkeypatch, "attention_varlen")
    code, output = run("check", "--case", "packed backward, several", "--dtype", "float16", *args)
    assert code == 0 and output.count("packed backward, several") == len(tiers)
    assert list(dict.fromkeys(forced)) == tiers
    kernels = {kernel: 2 if kernel == "varlen_tiles" else 1 for kernel in ("bwd_cast", "bwd_delta", "varlen_tiles")}
    of_tiers = {f"{call}_{tier}": 1 for call, tier in itertools.product(("fwd", "bwd"), tiers)}
    compiled = [variant.kernel for variant in fake_gpu]
    if len(tiers) == 1:
        assert {kernel: compiled.count(kernel) for kernel in compiled} == kernels | of_tiers
    assert {kernel for kernel in compiled if kernel.startswith(("fwd", "bwd_s"))} == set(of_tiers)


def test_all_kernels_of_decoding_are_compiled_ahead(fake_gpu, monkeypatch):
    """Of each tier that takes the case; sm90 takes values that are the first columns of keys."""
    forced = forced_tiers(monkeypatch, "attention_with_kvcache")
    for case, tiers in (("pages of 16", ["sm80", "simt"]), ("latent keys", ["sm90", "simt"])):
        del forced[:], fake_gpu[:]
        code, output = run("check", "--case", f"decode, {case}", "--dtype", "float16")
        assert code == 0 and output.count(f"decode, {case}") == len(tiers), output
        assert list(dict.fromkeys(forced)) == tiers
        kernels = [variant.kernel for variant in fake_gpu]
        wide = ["decode_combine_wide"] * ("sm90" in tiers)
        assert sorted(set(kernels)) == sorted(["decode_combine", *wide, *(f"decode_{tier}" for tier in tiers)])
    del fake_gpu[:]
    assert run("check", "--case", "decode, 1 split", "--dtype", "float32")[0] == 0
    assert [variant.kernel for variant in fake_gpu] == ["decode_simt"]


def test_a_tier_without_the_gradients_says_so(fake_gpu):
    code, output = run("check", "--tier", "sm90", "--case", "backward, 63 x 65", "--dtype", "float32", "--dtype", "float64")
    assert code == 1 and "float32 would be rounded; tier sm90: tensor cores" in output, "every reason, and once"
    assert output.count("would be rounded") == 2 and fake_gpu == []


def test_one_tier_and_dtype_of_a_gpu(fake_gpu, tmp_path):
    file = tmp_path / "record.json"
    assert run("check", "--tier", "sm80", "--device", 1, "--case", "causal 1", "--json", file)[0] == 0
    record = read_json(file.read_text())
    assert {row["tier"] for row in record["rows"]} == {"sm80"} and record["environment"]["gpu_index"] == 1
    assert {row["dtype"] for row in record["rows"]} == {"float16", "bfloat16"}
    code, output = run("check", "--tier", "sm80", "--dtype", "float32")
    assert code == 1 and output.splitlines()[-1] == (
        "Error: no case is left: tier sm80: tensor cores take float16 and bfloat16; float32 would be rounded"
    )
    file = tmp_path / "hopper.json"
    assert run("check", "--tier", "sm90", "--case", "causal 1", "--json", file)[0] == 0
    rows = read_json(file.read_text())["rows"]
    assert {(row["tier"], row["dtype"]) for row in rows} == {("sm90", "float16"), ("sm90", "bfloat16")}
    code, output = run("check", "--device", 2)
    assert code == 1 and "Error: there is no GPU 2: the GPUs here are 0 to 1" in output


def test_check_names_a_missing_nvrtc(fake_gpu, monkeypatch):
    def missing(capability):
        raise jit.NvrtcMissing("NVRTC was not found. Install it with: pip install x")

    monkeypatch.setattr(jit, "arch_for", missing)
    assert run("check") == (1, "Error: NVRTC was not found. Install it with: pip install x\n")


def test_a_variant_that_does_not_compile_fails_in_its_row(monkeypatch):
    def build(kernel, constants, arch, cache_dir=None):
        raise RuntimeError("cannot compile fwd_simt\nlog")

    monkeypatch.setattr(jit, "build", build)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (13, 0))
    variants = [builds.Variant("fwd_simt", (("A", number),), "sm_90") for number in range(3)]
    assert {str(error) for error in builds.build_all(variants * 2).values()} == {
        "cannot compile fwd_simt\nlog"
    }

    def missing(kernel, constants, arch, cache_dir=None):
        raise jit.NvrtcMissing("NVRTC is broken")

    monkeypatch.setattr(jit, "build", missing)
    with pytest.raises(jit.NvrtcMissing):
        builds.build_all(variants)


# ------------------------------------------------------------------------------------------------------ info


def test_info_without_a_gpu(no_gpu):
    code, output = run("info")
    assert code == 0 and "GPU      none: no NVIDIA driver was found" in output
    for text in (
        jit.digest(),
        str(jit.kernels_dir()),
        str(jit.cache_dir()),
        "headers  none needed",
        "NumPy arrays: float16",
    ):
        assert text in output


def test_info_without_cupy(no_cupy):
    code, output = run("info")
    assert code == 0 and "NVRTC    none: CuPy is not installed" in output and "CuPy    " not in output
    assert run("info", "--arch", "sm_86")[0] == 0


@pytest.mark.parametrize("arch", config.DEVICES)
def test_info_shows_what_the_dispatcher_chooses(no_gpu, arch):
    code, output = run("info", "--arch", arch, "--json")
    support = read_json(output)["support"]
    assert code == 0 and {row["dtype"] for row in support} == set(DTYPES)
    for call, dtype in itertools.product(("forward", "backward", "decode"), DTYPES):
        rows = [row["head_dim"] for row in support if (row["call"], row["dtype"]) == (call, dtype)]
        assert (
            rows[0][0] == 1
            and rows[-1][1] == (576 if call == "decode" else 256)
            and all(a[1] + 1 == b[0] for a, b in itertools.pairwise(rows))
        )
    device = config.DEVICES[arch]
    for row in support:
        for head_dim in row["head_dim"]:
            sizes = {"seqlen_q": 4096, "seqlen_k": 4096, "head_dim": head_dim, "head_dim_v": head_dim}
            if row["call"] == "decode":
                sizes |= {"seqlen_q": 1, "head_dim_v": min(512, head_dim)}
                for feature, asked in (("plain", {}), ("pages", {"page_size": 16}), ("latent", {"latent": True})):
                    problem = builds.cached_problem(row["dtype"], **sizes, **asked)
                    aligned = dataclasses.replace(problem, alignment=16, out_alignment=16)
                    assert row["tiers"][feature] == config.choose(aligned, device).tier
                continue
            for feature, asked in (
                ("plain", {}),
                ("causal", {"causal": True}),
                ("softcap", {"softcap": 30.0}),
                ("varlen", {"varlen": True}),
            ):
                problem = builds.packed_problem(
                    row["dtype"], **sizes, **asked, backward=row["call"] == "backward"
                )
                aligned = dataclasses.replace(problem, alignment=16, out_alignment=16, tma=True)
                assert row["tiers"][feature] == config.choose(aligned, device).tier
                if problem.alignment < 16 and feature == "plain":
                    assert row["tiers"]["any stride"] == config.choose(problem, device).tier


def test_info_table(no_gpu):
    _, output = run("info", "--arch", "sm_90a")
    lines = output.splitlines()
    assert any(line.startswith("tiers on H100/H200, compute capability 9.0") for line in lines)
    # A column for each feature: any stride is what TMA cannot address.
    features = sys.modules["cuflash.cli.info"].FEATURES
    forward, backward = ([line.split() for line in lines if line.startswith(dtype)] for dtype in ("float16", "bfloat16"))
    # Wide heads are of tensor cores only where their values lie in the keys.
    ways = len(features["decode"])
    for dtype, lines_of in (("float16", forward), ("bfloat16", backward)):
        wide = [dtype, "257-576", *["simt"] * (ways - 1), "sm90"]
        assert lines_of[-2:] == [[dtype, "1-256", *["sm80"] * (ways - 2), "sm90", "sm80"], wide]
        del lines_of[-2:]
    tiers = ["sm80" if feature == "any stride" else "sm90" for feature in features["forward"]]
    assert forward[0] == ["float16", "1-256", *tiers] and backward[0] == ["bfloat16", "1-256", *tiers]
    tiers = ["sm80" if feature == "any stride" else "sm90" for feature in features["backward"]]
    for dtype, lines_of in (("float16", forward), ("bfloat16", backward)):
        assert lines_of[1:] == [[dtype, "1-256", *tiers]]
    assert any(line.split()[:3] == ["float64", "1-256", "simt"] for line in lines)
    assert any(line.split()[:2] == ["forward", "head_dim"] and "varlen" in line for line in lines)
    assert any(line.split()[:2] == ["backward", "head_dim"] and "deterministic" in line for line in lines)
    assert any(line.split()[:2] == ["decode", "head_dim"] and "pages" in line for line in lines)
    _, output = run("info", "--arch", "sm_75")
    assert any(line.split()[:3] == ["bfloat16", "1-256", "simt"] for line in output.splitlines())
    float16 = [line.split()[2] for line in output.splitlines() if line.startswith("float16")]
    assert float16 == ["sm80", "simt", "sm80", "simt"], "forward, backward, decoding of narrow and wide heads"


def test_info_with_a_gpu(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(
        environment,
        "hardware",
        lambda index: {
            "gpu": "NVIDIA H200",
            "gpu_index": index,
            "compute_capability": "9.0",
            "num_sms": 132,
            "smem_optin": 232448,
            "l2_bytes": 50 * 2**20,
            "memory_bytes": 140 * 2**30,
            "driver": None,
            "cuda": "13.0",
        },
    )
    monkeypatch.setattr(jit, "nvrtc_location", lambda: "/opt/libnvrtc.so")
    monkeypatch.setattr(jit, "supported_archs", lambda: (75, 90))
    code, output = run("info", "--json", tmp_path / "info.json")
    assert (
        code == 0
        and "GPU 1    NVIDIA H200, compute capability 9.0, 132 multiprocessors, 140 GiB, 227 KiB" in output
    )
    assert "driver   of unknown version (CUDA 13.0)" in output and "NVRTC    13.0, /opt/libnvrtc.so" in output
    record = read_json((tmp_path / "info.json").read_text())
    assert (
        len(record["gpus"]) == 2 and record["support_of"].startswith("H100/H200") and record["no_gpu"] is None
    )


# --------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize(
    "arch, dtype, kernel",
    [
        ("sm_75", "float16", "fwd_sm80"),
        ("sm_80", "bfloat16", "fwd_sm80"),
        ("sm_90a", "bfloat16", "fwd_sm90"),
        ("sm_90", "float16", "fwd_sm90"),
        ("sm_90", "float32", "fwd_simt"),
        ("sm_100", "bfloat16", "fwd_sm80"),
        ("sm_120", "float64", "fwd_simt"),
    ],
)
def test_explain_without_a_gpu(no_gpu, arch, dtype, kernel):
    code, output = run(
        "explain",
        "--arch",
        arch,
        "--dtype",
        dtype,
        "--head-dim",
        64,
        "--seqlen-q",
        1000,
        "--batch",
        20,
        "--heads",
        8,
        "--causal",
        "--json",
    )
    record = read_json(output)
    assert code == 0 and record["kernel"] == kernel and record["tier"] == kernel.removeprefix("fwd_")
    assert record["arch"] == ("sm_90a" if kernel == "fwd_sm90" else arch) and record["not_built"] is None
    assert 0 < record["registers"] <= 255 and record["spill_bytes"] >= 0 and record["reasons"]
    assert 0 < record["smem_bytes"] <= record["device"]["smem_optin"]
    constants = record["constants"]
    if kernel == "fwd_sm90":  # as many as there are multiprocessors
        assert record["grid"] == min(132, 160 * -(-1000 // (64 * constants["CONSUMERS"])))
        assert record["scratch_bytes"] == {"tiles": 16}
    else:
        assert record["grid"] == 160 * -(-1000 // constants["BLOCK_M"]) and record["scratch_bytes"] == {}
    assert record["problem"]["window_right"] == 0 and record["problem"]["seqlen_k"] == 1000


def test_explain_says_why(no_gpu):
    code, output = run(
        "explain", "--arch", "sm_90a", "--head-dim", 64, "--window", "none,16", "--softcap", 30
    )
    assert code == 0
    for text in (
        "bfloat16, batch 1, seqlen 4096 x 4096",
        "window None,16, softcap 30",
        "kernel     fwd_sm90, tier sm90",
        "because    block_m = ",
        "compiled for sm_90a\n",
        "shared     ",
        "grid       132 blocks of ",
        "scratch    tiles 16 bytes",
        "constants  BLOCK_N=",
        "others     sm80: takes it too; sm90 comes first",
        "           simt: takes it too; sm90 comes first",
    ):
        assert text in output, output


@pytest.mark.parametrize(
    "args, kernels, scratch",
    [
        ((), ["fwd_sm90"], []),
        (("--causal",), ["fwd_sm90"], ["tiles"]),
        (("--causal", "--tier", "sm80"), ["fwd_sm80"], []),
        (("--varlen",), ["varlen_tiles", "fwd_sm90"], ["tiles"]),
        (("--backward",), ["bwd_delta", "bwd_sm90", "bwd_cast"], ["rows", "dq_sum", "turns"]),
        (("--backward", "--head-dim", 256), ["bwd_delta", "bwd_dkv_sm90", "bwd_dq_sm90"], ["rows", "turns"]),
        (("--backward", "--tier", "sm80"), ["bwd_delta", "bwd_sm80", "bwd_cast"], ["rows", "dq_sum"]),
        (
            ("--backward", "--deterministic", "--tier", "simt"),
            ["bwd_delta", "bwd_simt", "bwd_cast"],
            ["rows", "dq_sum", "turns"],
        ),
        (("--decode", "--seqlen-q", 1), ["decode_sm80", "decode_combine"], ["partial_out", "partial_lse"]),
        (("--decode", "--num-splits", 1, "--page-size", 16, "--append", 2), ["decode_rows_sm90"], []),
        (
            ("--decode", "--latent", "--head-dim", 576, "--head-dim-v", 512, "--num-splits", 3),
            ["decode_sm90", "decode_combine_wide"],
            ["partial_out", "partial_lse"],
        ),
        (
            ("--backward", "--varlen", "--batch", 3),
            ["varlen_tiles", "bwd_delta", "bwd_sm90", "bwd_cast"],
            ["tiles", "rows", "dq_sum", "turns"],
        ),
    ],
)
def test_explain_says_what_is_launched(no_gpu, no_nvrtc, args, kernels, scratch):
    args = ("explain", "--arch", "sm_90", "--head-dim", 64, *args)
    record = read_json(run(*args, "--json")[1])
    assert [step["kernel"] for step in record["launches"]] == kernels
    assert list(record["scratch_bytes"]) == scratch and all(record["scratch_bytes"].values())
    call = "backward" if "bwd_delta" in kernels else "decode" if "--decode" in args else "forward"
    assert record["kernel"] in kernels and record["call"] == call
    assert record["grid"] == {step["kernel"]: step["grid"] for step in record["launches"]}[record["kernel"]]
    _, output = run(*args)
    assert (", ".join(f"{step['kernel']} (" for step in record["launches"][:1]) in output) == (
        len(kernels) > 1
    )
    assert all(f"{name} " in output for name in scratch)
    assert ("3 sequences of 12288 x 12288 rows in all" in output) == ("--batch" in args)
    assert (", deterministic" in output) == ("--deterministic" in args)
    assert ("keys in pages of 16, heads" in output) == (", 2 appended" in output) == ("--page-size" in args)
    assert (", 3 splits, values in the keys" in output) == ("--latent" in args)


def test_explain_of_decoding_is_causal_unless_told_otherwise(no_gpu, no_nvrtc):
    for args, expected in ((("--decode",), True), (("--decode", "--no-causal"), False), ((), False), (("--causal",), True)):
        _, output = run("explain", "--arch", "sm_90", *args)
        assert (", causal" in output) == expected


def test_explain_says_why_not(no_gpu):
    _, output = run("explain", "--arch", "sm_90", "--dtype", "float32", "--head-dim", 64)
    reason = "tensor cores take float16 and bfloat16; float32 would be rounded"
    assert f"others     sm90: {reason}\n           sm80: {reason}\n" in output
    _, output = run("explain", "--arch", "sm_75", "--dtype", "bfloat16", "--head-dim", 64)
    assert (
        "others     sm90: needs compute capability 9.0 (wgmma, TMA)\n"
        "           sm80: bfloat16 tensor cores need compute capability 8.0 or newer\n"
    ) in output
    _, output = run("explain", "--arch", "sm_90", "--tier", "simt", "--head-dim", 64)
    assert (
        "others     sm90: takes it too; simt was forced\n           sm80: takes it too; simt was forced\n" in output
        and "kernel     fwd_simt, tier simt" in output
    )
    _, output = run("explain", "--arch", "sm_90", "--backward", "--head-dim", 192)
    assert "kernel     bwd_dkv_sm90, tier sm90" in output and "bwd_dq_sm90" in output


def test_explain_needs_no_compiler_for_the_choice(no_gpu, no_nvrtc):
    code, output = run("explain", "--arch", "sm_90")
    assert (
        code == 0 and "registers  unknown: NVRTC was not found." in output and "kernel     fwd_sm90" in output
    )
    assert read_json(run("explain", "--arch", "sm_90", "--json")[1])["arch"] is None


def test_explain_says_for_what_it_could_not_be_compiled(no_gpu, monkeypatch):
    def missing(*variant):
        raise jit.NvrtcMissing("NVRTC is broken")

    monkeypatch.setattr(jit, "build", missing)
    record = read_json(run("explain", "--arch", "sm_90", "--json")[1])
    assert (record["arch"], record["registers"], record["not_built"]) == ("sm_90a", None, "NVRTC is broken")
    assert read_json(run("explain", "--arch", "sm_90", "--backward", "--json")[1])["arch"] == "sm_90a"
    other = ("--backward", "--tier", "sm80")
    assert read_json(run("explain", "--arch", "sm_90", *other, "--json")[1])["arch"] == "sm_90"


def test_explain_for_a_gpu_that_nvrtc_does_not_know(no_gpu, monkeypatch):
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(jit, "supported_archs", lambda: (75, 80, 90))
    code, output = run("explain", "--arch", "sm_60", "--dtype", "float32")
    assert code == 0 and "registers  unknown: compute capability 6.0 is too old for NVRTC 13.0" in output
    monkeypatch.setattr(jit, "build", lambda *variant: jit.Built("", b"", None, 0, 0, 0, "", 0.1, False))
    code, output = run("explain", "--arch", "sm_120")
    assert code == 0 and "registers  unknown: NVRTC 13.0 does not know this GPU" in output


def test_explain_a_kernel_that_does_not_compile(no_gpu, monkeypatch):
    def build(kernel, constants, arch):
        raise RuntimeError(f"cannot compile {kernel} for {arch}\na long log")

    monkeypatch.setattr(jit, "build", build)
    assert run("explain", "--arch", "sm_90") == (1, "Error: cannot compile fwd_sm90 for sm_90a\n")


def test_explain_takes_the_gpu_here(fake_gpu, monkeypatch):
    monkeypatch.setattr(jit, "build", lambda *variant: jit.Built("", b"", None, 168, 12, 64, "", 0.1, False))
    code, output = run("explain")
    assert code == 0 and "registers  168 a thread, 12 bytes of spills, compiled for sm_90a\n" in output
    assert "bytes a block and 64 static" in output
    assert run("explain", "--device", 5)[0] == 1


def test_explain_an_empty_problem(no_gpu, no_nvrtc):
    code, output = run("explain", "--arch", "sm_90", "--seqlen-q", 0, "--json")
    assert code == 0 and read_json(output)["grid"] == 0


# ---------------------------------------------------------------------------------------------------- warmup


def test_warmup_fills_a_folder_that_later_needs_no_compile(no_gpu, tmp_path):
    args = (
        "warmup",
        "--arch",
        "sm_90a",
        "--dtype",
        "bfloat16",
        "--head-dim",
        "64",
        "--output",
        tmp_path / "new" / "kernels",
    )
    code, output = run(*args)
    assert code == 0 and output.startswith("2 kernels in ") and ": 2 compiled, 0 already there; " in output, (
        output
    )
    assert len(list((tmp_path / "new" / "kernels").glob("*.cubin"))) == 2
    before = jit.compile_count()
    code, output = run(*args)
    assert code == 0 and ": 0 compiled, 2 already there; " in output and jit.compile_count() == before
    problem = builds.packed_problem(
        "bfloat16", seqlen_q=100, seqlen_k=77, head_dim=64, head_dim_v=64, heads_q=3, heads_k=3
    )
    variant = builds.variant_of(config.choose(problem, config.DEVICES["sm_90"]), "sm_90")
    assert jit.build(*variant, cache_dir=tmp_path / "new" / "kernels").from_cache


def chosen(built, name):
    return sorted({dict(variant.constants)[name] for variant in built})


def test_warmup_defaults(no_gpu, built, tmp_path):
    code, output = run("warmup", "--arch", "sm_90", "--output", tmp_path)
    assert code == 0 and len(built) == 3 * 4 * 2 and output.startswith("24 kernels in ")
    assert chosen(built, "DTYPE") == [0, 1, 2] and chosen(built, "HEAD_DIM") == [64, 96, 128, 256]
    assert chosen(built, "MASK_RIGHT") == [0, 1] and chosen(built, "MASK_LEFT") == [0]


def test_warmup_options_extend(no_gpu, built, tmp_path):
    code, _ = run(
        "warmup",
        "--arch",
        "sm_80",
        "--arch",
        "sm_90",
        "--arch",
        "sm_90a",
        "--dtype",
        "float16",
        "--dtype",
        "float64",
        "--head-dim",
        "64",
        "--head-dim",
        "192/128",
        "--mask",
        "window",
        "--softcap",
        "--output",
        tmp_path,
    )
    assert code == 0 and len(built) == 2 * 2 * 2 * 2
    assert (
        chosen(built, "DTYPE") == [0, 3]
        and chosen(built, "HEAD_DIM_V") == [64, 128]
        and chosen(built, "MASK_LEFT") == [1]
    )
    assert chosen(built, "SCORE") == [0, 1, 2]
    archs = {("fwd_sm80", "sm_80"), ("fwd_simt", "sm_80"), ("fwd_sm90", "sm_90a"), ("fwd_simt", "sm_90")}
    assert {(variant.kernel, variant.arch) for variant in built} == archs


@pytest.mark.parametrize("is_hopper", [False, True])
def test_warmup_of_gradients_and_packed_sequences(no_gpu, built, tmp_path, is_hopper):
    fwd, bwd = ("fwd_sm90", "bwd_sm90") if is_hopper else ("fwd_sm80", "bwd_sm80")
    one = (
        "warmup",
        "--arch",
        "sm_90" if is_hopper else "sm_80",
        "--dtype",
        "bfloat16",
        "--head-dim",
        "64",
        "--mask",
        "causal",
        "--output",
        tmp_path,
    )
    kernels = {}
    for args in ((), ("--varlen",), ("--backward",), ("--backward", "--varlen", "--deterministic")):
        built.clear()
        assert run(*one, *args)[0] == 0
        kernels[args] = [variant.kernel for variant in built]
    forward, varlen, backward, everything = kernels.values()
    # Dense; packed, on sm80 also of short sequences, whose tiles are others.
    more = not is_hopper
    assert forward == [fwd] and sorted(varlen) == [fwd] * (2 + more) + ["varlen_tiles"] * (1 + more)
    assert sorted(backward) == sorted(["bwd_cast", "bwd_delta", bwd, fwd])
    # Dense and packed, deterministic or not; the tiles of queries and those of keys.
    counts = {"bwd_cast": 2, "bwd_delta": 4, bwd: 4, fwd: 2 + more, "varlen_tiles": 2 + more}
    assert {kernel: everything.count(kernel) for kernel in everything} == counts


def test_warmup_of_decoding(no_gpu, built, tmp_path):
    one = ("warmup", "--arch", "sm_90", "--dtype", "bfloat16", "--head-dim", "128", "--head-dim", "576/512", "--mask", "causal")
    assert run(*one, "--output", tmp_path)[0] == 1, "no other call takes heads as wide"
    built.clear()
    assert run(*one, "--decode", "--output", tmp_path)[0] == 0
    # In rows and in pages, with new keys and without.
    kernels = [variant.kernel for variant in built]
    counts = {"fwd_sm90": 1, "decode_sm80": 4, "decode_sm90": 4, "decode_combine": 4, "decode_combine_wide": 4, "merge": 2}
    assert {kernel: kernels.count(kernel) for kernel in kernels} == counts
    for kernel in ("decode_sm80", "decode_sm90"):
        ways = {(dict(v.constants)["PAGED"], dict(v.constants)["APPENDS"]) for v in built if v.kernel == kernel}
        assert ways == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_warmup_takes_the_gpus_here(fake_gpu, tmp_path):
    code, _ = run("warmup", "--dtype", "float32", "--head-dim", "64", "--mask", "full", "--output", tmp_path)
    assert code == 0 and [variant.arch for variant in fake_gpu] == ["sm_90"]


def test_warmup_errors(no_gpu, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    one = "warmup", "--arch", "sm_90", "--dtype", "float16", "--head-dim", "64", "--mask", "full"
    code, output = run(*one, "--output", file / "below")
    assert code == 1 and output == f"Error: {file / 'below'} cannot be written: Not a directory\n"
    monkeypatch.setattr(
        builds,
        "build_all",
        lambda variants, **_: {variant: RuntimeError("cannot compile fwd_sm80\nlog") for variant in variants},
    )
    assert run(*one, "--output", tmp_path) == (1, "Error: cannot compile fwd_sm80\n")
    monkeypatch.setattr(jit, "supported_archs", lambda: (75, 80, 90))
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (13, 0))
    code, output = run("warmup", "--arch", "sm_60", "--output", tmp_path)
    assert code == 1 and "compute capability 6.0 is too old for NVRTC 13.0" in output


def test_warmup_without_nvrtc(no_gpu, no_nvrtc, tmp_path):
    assert run("warmup", "--arch", "sm_90", "--output", tmp_path / "x") == (
        1,
        "Error: NVRTC was not found. Install it with: pip install x\n",
    )
    assert not (tmp_path / "x").exists()


# ----------------------------------------------------------------------------------------------- environment


def fake_driver(monkeypatch, version, count):
    class CUDARuntimeError(RuntimeError):
        pass

    def device_count():
        if isinstance(count, str):
            raise CUDARuntimeError(count)
        return count

    runtime = types.SimpleNamespace(
        driverGetVersion=lambda: version,
        runtimeGetVersion=lambda: 13000,
        getDeviceCount=device_count,
        CUDARuntimeError=CUDARuntimeError,
    )
    cupy = types.SimpleNamespace(__version__="14.2.0", cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(jit, "import_cupy", lambda: cupy)


def test_find_gpus(monkeypatch):
    fake_driver(monkeypatch, 13000, 2)
    assert environment.find_gpus() == (2, "", False)
    fake_driver(monkeypatch, 0, "cudaErrorInsufficientDriver")
    assert environment.find_gpus() == (0, "no NVIDIA driver was found", False)
    fake_driver(monkeypatch, 12040, 1)
    found = environment.find_gpus()
    assert found.count == 0 and found.unusable and found.reason.startswith("the NVIDIA driver is too old")
    fake_driver(monkeypatch, 13000, "cudaErrorNoDevice: no CUDA-capable device is detected")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.find_gpus() == (
        0,
        "the driver shows none (CUDA_VISIBLE_DEVICES is ''): "
        "cudaErrorNoDevice: no CUDA-capable device is detected",
        False,
    )


def test_headline_without_a_driver_version():
    found = {
        "gpu": "NVIDIA T4",
        "compute_capability": "7.5",
        "driver": None,
        "cuda": "12.4",
        "nvrtc": "12.9",
        "cupy": "14.2.0",
    }
    assert environment.headline(found) == (
        "NVIDIA T4, compute capability 7.5, driver of unknown version (CUDA 12.4), NVRTC 12.9, CuPy 14.2.0"
    )


def test_driver_version_is_a_version_or_nothing():
    version = environment.driver_version()
    assert version is None or version.split(".")[0].isdigit()


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1024, "1 KiB"),
        (232448, "227 KiB"),
        (1000 * 1024, "1000 KiB"),
        (int(1.5 * 2**20), "1.5 MiB"),
        (140 * 2**30, "140 GiB"),
    ],
)
def test_sizes(value, text):
    assert options.size(value) == text


@pytest.mark.parametrize(
    "text, sides",
    [("128,0", (128, 0)), ("none,16", (None, 16)), ("-1,None", (-1, None)), (" 3 , 4 ", (3, 4))],
)
def test_windows(text, sides):
    assert options.Window().convert(text, None, None) == sides


def test_json_has_no_nan():
    record = {"a": float("nan"), "b": [float("inf"), 1.5, None], "c": {"d": (True, "x")}}
    assert options._plain(record) == {"a": None, "b": [None, 1.5, None], "c": {"d": [True, "x"]}}


def test_a_case_is_a_value():
    case = Case("x", 8, 8, kv_layout="fused")
    assert case.has_packed_twin and not case.packed_twin().has_packed_twin
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.name = "y"


def test_errors_are_one_line():
    assert options.one_line(RuntimeError("first\nsecond")) == "first"
    log = "cannot compile fwd_simt " + 100 * "x" + "\nheader\n  a.cu(3): error: no\na.cu(4): error: more"
    assert (
        options.one_line(RuntimeError(log))
        == "cannot compile fwd_simt " + 56 * "x" + "...: a.cu(3): error: no"
    )
    assert options.one_line(NotImplementedError()) == "NotImplementedError"
    assert issubclass(click.UsageError, click.ClickException)
