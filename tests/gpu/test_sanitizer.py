"""compute-sanitizer finds nothing in a small run of every kernel."""

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import MARKS

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("sanitize.py")


def compute_sanitizer() -> str | None:
    """On PATH, in a CUDA toolkit, or in a Python package."""
    if found := shutil.which("compute-sanitizer"):
        return found
    roots = [
        os.environ.get("CUDA_PATH", ""),
        os.environ.get("CUDA_HOME", ""),
        *sorted(glob.glob("/usr/local/cuda*"), reverse=True),
    ]
    patterns = [
        f"{root}/{folder}/compute-sanitizer"
        for root in roots
        if root
        for folder in ("bin", "compute-sanitizer")
    ]
    patterns += [
        f"{folder}/nvidia/**/compute-sanitizer" for folder in sys.path if folder.endswith("-packages")
    ]
    for pattern in patterns:
        for path in glob.glob(pattern, recursive=True):
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
    return None


PARTS = ("forward", "backward", "varlen", "decode")


@pytest.mark.parametrize("part", PARTS)
def test_the_runs_are_right_without_it(part):
    command = [sys.executable, str(SCRIPT), "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip().endswith(" runs, 0 wrong"), done.stdout + done.stderr


# racecheck knows neither the barriers of sm90 nor what TMA and wgmma do with shared memory.
TOOLS = ("memcheck", "racecheck", "synccheck")
RUNS = [(tool, tier, part) for tool in TOOLS for tier in ("simt", "sm80") for part in PARTS]
RUNS += [("memcheck", "sm90", part) for part in PARTS]


@pytest.mark.parametrize("tool, tier, part", [pytest.param(*run, marks=MARKS[run[1]]) for run in RUNS])
def test_compute_sanitizer(tool, tier, part):
    program = compute_sanitizer()
    if program is None:
        pytest.skip("no compute-sanitizer on PATH, in /usr/local/cuda* or in a Python package")
    command = [program, "--tool", tool, "--error-exitcode", "1", sys.executable, str(SCRIPT)]
    command += ["--only", tier, "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = (done.stdout + done.stderr)[-6000:]
    assert done.returncode == 0 and " runs, 0 wrong" in done.stdout, report
