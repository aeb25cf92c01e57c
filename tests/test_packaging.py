"""The built wheel works away from the checkout; importing needs NumPy alone; README and CI run the same."""

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

from cuflash import jit

REPO = Path(__file__).resolve().parent.parent

# What a user is told to type. README.md holds these very lines, and .ci/run takes the second from there.
RUN = "python3 -m venv .venv && .venv/bin/pip install -q '.[cuda12]' && .venv/bin/cuflash check"
TEST = (
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[cuda12,test]' "
    "&& .venv/bin/python -m pytest -n auto --dist worksteal tests"
)


def run(*command, cwd, timeout=300, **environment) -> str:
    # Without PYTHONPATH and the like, which could bring the checkout back in.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, REPO, cwd=folder)
    (path,) = folder.glob("cuflash-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; what the wheel depends on is seen in the one that runs the tests."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # Only the folders named here are added: an editable cuflash in them is found through a .pth of its own,
    # which does not count here.
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site, "outer.pth").write_text("\n".join(sorted(outer)) + "\n")
    return folder


def test_the_wheel_holds_the_kernels_and_nothing_else_of_the_checkout(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"cuflash"}
    kernels = {path.relative_to(REPO).as_posix() for path in (REPO / "kernels").rglob("*.cu*")}
    assert kernels and {f"cuflash/{name}" for name in kernels} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_installed_kernels_are_those_of_the_checkout(installed):
    code = "from cuflash import jit; print(jit.kernels_dir()); print(jit.digest())"
    folder, digest = run(installed / "venv/bin/python", "-c", code, cwd=installed).split()
    assert Path(folder).is_relative_to(installed.resolve()) and digest == jit.digest()


def test_the_installed_command_checks_on_the_cpu(installed, tmp_path):
    cuflash = installed / "venv/bin/cuflash"
    cache = str(tmp_path / "cache")
    assert "check" in run(cuflash, "--help", cwd=tmp_path, CUFLASH_CACHE_DIR=cache)
    output = run(cuflash, "check", "--quick", cwd=tmp_path, CUDA_VISIBLE_DEVICES="", CUFLASH_CACHE_DIR=cache)
    assert re.search(r"\bno\b.*GPU", output.splitlines()[0])


OTHERS = ("cupy", "cupy_backends", "cuda", "scipy", "click", "ml_dtypes", "torch", "jax")

# An interpreter in which some modules cannot be found.
WITHOUT = """
    import importlib.abc, os, sys

    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {absent}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Absent())
    sys.path.insert(0, {repo!r})
"""


def without(absent, code, home) -> str:
    setup = textwrap.dedent(WITHOUT).format(absent=set(absent), repo=str(REPO))
    environment = {"HOME": str(home), "CUFLASH_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    output = run(sys.executable, "-B", "-c", setup + textwrap.dedent(code), cwd=home, **environment)
    assert list(home.iterdir()) == [], "written to the user's home"
    return output


def test_importing_needs_numpy_alone_and_touches_no_disk(tmp_path):
    code = f"""
        import cuflash
        print([name for name in {OTHERS} if name in sys.modules])
    """
    assert without(OTHERS, code, tmp_path).strip() == "[]"


def test_importing_imports_nothing_else_although_it_is_there(tmp_path):
    code = f"""
        import cuflash
        print([name for name in {OTHERS} if name in sys.modules])
    """
    assert without((), code, tmp_path).strip() == "[]"


def test_numpy_arrays_need_no_cupy(tmp_path):
    code = """
        import numpy as np
        import cuflash
        q = np.ones((1, 3, 2, 4), np.float32)
        print(cuflash.attention(q, q, q, causal=True).sum())
        ends = np.array([0, 1, 3], np.int32)
        out, lse = cuflash.attention_varlen(q[0], q[0], q[0], ends, ends, return_lse=True)
        print(cuflash.attention_varlen_backward(out, q[0], q[0], q[0], out, lse, ends, ends)[2].sum())
        print(cuflash.attention_vjp(q, q, q)[1](q)[2].sum())
    """
    assert [float(x) for x in without(("cupy", "cupy_backends"), code, tmp_path).split()] == [24, 24, 24]


# ------------------------------------------------------------------------------------------------------------
# README and CI


def test_readme_has_the_two_commands():
    lines = [line.strip() for line in (REPO / "README.md").read_text().splitlines()]
    assert RUN in lines and TEST in lines


def ci(tmp_path: Path, readme: str) -> subprocess.CompletedProcess:
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((REPO / ".ci" / "run").read_text())
    (tmp_path / "README.md").write_text(readme)
    return subprocess.run(["bash", str(script)], cwd="/", capture_output=True, text=True, timeout=60)


def test_ci_runs_the_test_command_of_the_readme(tmp_path):
    done = ci(tmp_path, f"{RUN}\npython3 -m venv --help > out && echo '.venv/bin/python -m pytest tests'\n")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == ".venv/bin/python -m pytest tests"
    assert (tmp_path / "out").is_file()  # from the root of the repository, wherever it is called


def test_ci_fails_when_the_command_fails(tmp_path):
    done = ci(tmp_path, "python3 -m venv --help > out && false -m pytest tests && echo done\n")
    assert done.returncode != 0


@pytest.mark.parametrize("readme", ["", f"{RUN}\n", f"{TEST}\n{TEST}\n"])
def test_ci_fails_without_exactly_one_command(tmp_path, readme):
    done = ci(tmp_path, readme)
    assert done.returncode == 1 and "README.md must have exactly one line" in done.stderr


def test_ci_can_be_started():
    assert os.access(REPO / ".ci" / "run", os.X_OK)
