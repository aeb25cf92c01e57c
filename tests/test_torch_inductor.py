"""Code that Inductor generates: it calls past the dispatcher, or the operators where it must not, and computes the same."""

import re
import shutil
import subprocess
import sys
import threading

import pytest
import test_torch as uncompiled

from cuflash import arrays, config, jit

torch = pytest.importorskip("torch", reason="no PyTorch")
flash = pytest.importorskip("cuflash.torch", reason="PyTorch is too old")
if shutil.which("g++") is None and shutil.which("clang++") is None:
    pytest.skip("Inductor has no C++ compiler", allow_module_level=True)

torch_inductor = pytest.importorskip("cuflash.torch_inductor")
inductor_config = pytest.importorskip("torch._inductor.config")
run_and_get_code = pytest.importorskip("torch._inductor.utils").run_and_get_code
tensors, close, gradients, caches, copied = (
    getattr(uncompiled, name) for name in ("tensors", "close", "gradients", "caches", "copied")
)


@pytest.fixture(autouse=True)
def compile_anew():
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        yield


def compiled(function, *args, **options):
    """(the compiled function, what it returns, the generated modules)."""
    function = torch.compile(function, fullgraph=True, **options)
    results, code = run_and_get_code(function, *args)
    return function, results, code


def sites(code) -> list[str]:
    """The operators that are called past the dispatcher, a name for each place."""
    return [line.split("'")[1] for text in code for line in text.splitlines() if "cuflash_inductor.Site(" in line]


def operators(code) -> int:
    """Calls through the dispatcher."""
    return sum(len(re.findall(r"= torch\.ops\.cuflash\.\w+\.default\(", text)) for text in code)


def flat(results) -> list:
    return torch.utils._pytree.tree_leaves(results)


# ------------------------------------------------------------------------------------------------------------
# What is generated, and what it computes


@pytest.mark.parametrize("dynamic", [False, True])
@uncompiled.optioned
def test_attention(options, dynamic):
    """One whose lse is not used writes into what generated code allocates; shapes may change."""

    def step(q, k, v):
        out = flash.attention(q, k, v, **options)
        return flash.attention(out, k, v, return_lse=True, **options)

    function, results, code = compiled(step, *tensors(grad=False, head_dim_v=6), dynamic=dynamic)
    assert sites(code) == ["attention"] * 2 and not operators(code)
    assert code[0].count(", out=buf") == 1 and "assert_size_stride(buf" not in code[0]
    assert ("sizes=(" in code[0]) == dynamic
    for sizes in ({}, {"seqlen_q": 6, "seqlen_k": 9, "batch": 3}, {}):
        given = tensors(grad=False, head_dim_v=6, **sizes)
        assert all(map(torch.equal, function(*given), step(*given)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients(dynamic):
    """A gradient of lse, one of a result in a layout of its own, and none of lse."""
    leaves = tensors(head_dim_v=6)

    def step(q, k, v):
        out, lse = flash.attention(q, k, v, causal=True, return_lse=True)
        return flash.attention(out, k, v), lse

    def pulled(function):
        return gradients(function(*leaves), leaves)

    function = torch.compile(step, fullgraph=True, dynamic=dynamic)
    got, code = run_and_get_code(pulled, function)
    close(got, pulled(step))
    assert sites(code) == ["attention"] * 2 + ["attention_backward"] * 2 and not operators(code)


def test_a_gradient_in_another_layout():
    """dout comes with strides that the operator copies."""
    leaves = tensors(head_dim_v=6)

    def step(q, k, v):
        return flash.attention(q, k, v).transpose(1, 3).contiguous()

    function = torch.compile(step, fullgraph=True)
    got, code = run_and_get_code(lambda: gradients([function(*leaves)], leaves))
    close(got, gradients([step(*leaves)], leaves))
    assert sites(code) == ["attention"] and operators(code) == 1


@pytest.mark.parametrize("wants_grad", [False, True])
def test_packed_sequences(wants_grad):
    leaves, ends, used = uncompiled.packed(grad=wants_grad)

    def step(*x):
        return flash.attention_varlen(*x, *ends, causal=True, **used)

    def run(function):
        results = [function(*leaves)]
        return [*results, *(gradients(results, leaves) if wants_grad else ())]

    function = torch.compile(step, fullgraph=True)
    got, code = run_and_get_code(run, function)
    close(got, run(step))
    assert sites(code) == ["attention_varlen", "attention_varlen_backward"][: 1 + wants_grad] and not operators(code)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_cache(new, return_lse):
    """New keys are written where they belong."""
    given_tensors, given = caches(new)

    def step(q, k_cache, v_cache, given):
        first = flash.attention_with_kvcache(q, k_cache, v_cache, return_lse=return_lse, window=(9, 0), **given)
        return first, flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=given["cache_seqlens"])

    function = torch.compile(step, fullgraph=True)
    (one, one_given), (other, other_given) = copied(given_tensors, given), copied(given_tensors, given)
    results, code = run_and_get_code(function, *one, one_given)
    expected = step(*other, other_given)
    assert all(map(torch.equal, (*flat(results), *one), (*flat(expected), *other)))
    name = "attention_with_kvcache"
    assert sites(code) == [name + "_append" * new, name] and not operators(code)
    for _ in range(2):
        results, expected = function(*one, one_given), step(*other, other_given)
        assert all(map(torch.equal, (*flat(results), *one), (*flat(expected), *other)))


def test_a_cache_of_as_many_keys_as_a_number_says():
    q, k_cache, v_cache = caches(new=False)[0]

    def step(q, k_cache, v_cache, length):
        return flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=length)

    function, results, code = compiled(step, q, k_cache, v_cache, 3, dynamic=True)
    assert sites(code) == ["attention_with_kvcache"] and not operators(code) and "number=s" in code[0]
    for length in (3, 11, 16):
        assert torch.equal(function(q, k_cache, v_cache, length), step(q, k_cache, v_cache, length))


def test_views_branches_and_two_dtypes():
    """Views are passed on without a copy; each branch has a call of its own; other dtypes and shapes are other places."""
    qkv = torch.randn(2, 5, 3, 4, 8)

    def step(qkv, flag):
        q, k, v = qkv.unbind(2)
        cloned = [x.clone() for x in (q, k, v)]
        out = torch.cond(flag, lambda *x: flash.attention(*x), lambda *x: flash.attention(*x, causal=True), cloned)
        shorter = flash.attention(q[:, :3], k, v)
        return out, shorter, flash.attention(*(x.half() for x in (q, k, v)))

    function, results, code = compiled(step, qkv, torch.tensor(True))
    assert sites(code) == ["attention"] * 4 and not operators(code)
    for flag in (True, False):
        close(function(qkv, torch.tensor(flag)), step(qkv, torch.tensor(flag)))


def test_what_is_expanded_is_not_copied():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8)

    def step(q, k):
        return flash.attention(q, *(x.expand(q.shape) for x in (k, k * 2)))

    function, results, code = compiled(step, q, k)
    assert sites(code) == ["attention"] and code[0].count("= empty_strided_cpu((2, 5, 4, 8)") == 1
    close([results], [step(q, k)])


def test_checkpoint_and_autocast():
    from torch.utils.checkpoint import checkpoint

    leaves = tensors("float32", head_dim_v=6)

    def attend(*x):
        return flash.attention(*x, causal=True)

    def step(*x):
        return checkpoint(attend, *x, use_reentrant=False)

    function = torch.compile(step, fullgraph=True)
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            results, expected = function(*leaves), step(*leaves)
        assert torch.equal(results, expected) and results.dtype == (dtype or torch.float32)
        close(gradients([results], leaves), gradients([expected], leaves))


def test_code_that_is_kept():
    """What Inductor finds in its cache needs no lowering."""
    from torch._dynamo.utils import counters
    from torch._inductor import utils

    given = tensors(grad=False)

    def step(q, k, v):
        return flash.attention(q, k, v, causal=True)

    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    with inductor_config.patch(force_disable_caches=False, fx_graph_cache=True), fresh():
        for _ in range(2):
            torch._dynamo.reset()
            assert torch.equal(torch.compile(step, fullgraph=True)(*given), step(*given))
        assert counters["inductor"]["fxgraph_cache_hit"] > 0


# ------------------------------------------------------------------------------------------------------------
# The operators, where they must be called


def test_what_an_operator_copies_is_left_to_it():
    q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors(grad=False))
    function, results, code = compiled(flash.attention, q, k, v)
    assert not sites(code) and operators(code) == 1
    assert torch.equal(results, flash.attention(q, k, v))


def test_a_scale_that_is_not_known_is_left_to_the_operator():
    given = tensors(grad=False)

    def step(q, k, v, scale):
        return flash.attention(q, k, v, softmax_scale=scale)

    function = torch.compile(step, fullgraph=True, dynamic=True)
    for scale in (0.5, 0.25, 2):
        close([function(*given, scale)], [step(*given, scale)])


def test_an_inductor_of_another_version():
    """Compiled code calls the operator, and nothing is said. And what only imports cuflash.torch has not imported Inductor."""
    code = """
import sys, torch
import cuflash.torch as flash
assert "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.utils import run_and_get_code

inner = PythonWrapperCodegen.__init__
def other(self, *args, **options):
    inner(self, *args, **options)
PythonWrapperCodegen.__init__ = other
q, k, v = (torch.randn(2, 5, 3, 8) for _ in range(3))
with config.patch(force_disable_caches=True):
    out, code = run_and_get_code(torch.compile(flash.attention, fullgraph=True), q, k, v)
assert torch.equal(out, flash.attention(q, k, v))
print(code[0].count("torch.ops.cuflash.attention.default("), code[0].count("cuflash_inductor"))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240, cwd=jit.kernels_dir().parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1 0" and "cuflash" not in done.stderr


def test_a_lowering_that_fails(monkeypatch):
    """As one written for another version may."""

    def fail(*args):
        raise AttributeError("no such thing")

    torch.compile(flash.attention)(*tensors(grad=False))  # so that there are lowerings
    torch._dynamo.reset()
    monkeypatch.setattr(torch_inductor, "_options", fail)
    given = tensors(grad=False)
    function, results, code = compiled(flash.attention, *given)
    assert not sites(code) and operators(code) == 1 and torch.equal(results, flash.attention(*given))


# ------------------------------------------------------------------------------------------------------------
# A call, with a launch that is made up


@pytest.fixture
def launched(monkeypatch):
    """What is prepared, with tensors on the CPU taken for ones on a GPU."""
    prepared = []

    class Call:
        device_id, scratch_bytes, make_lse = 0, 0, None

        def __init__(self):
            self.launches = []

        def launch(self, stream, *pointers):
            self.launches.append(pointers)

    def prepare(operation, door, given, options, key, number=None):
        call = torch_inductor._prepared.calls[key] = Call()
        call.makers = [lambda: torch.empty(given[0].shape)]
        prepared.append(call)
        return call

    door = arrays.door_of(torch.empty(1))
    monkeypatch.setattr(arrays.TorchDoor, "launches", lambda self, x: True)
    monkeypatch.setattr(door, "stream", lambda device_id: 7, raising=False)
    monkeypatch.setattr(torch_inductor, "_prepare", prepare)
    monkeypatch.setattr(torch_inductor, "_is_current", lambda door, device_id: True)
    return prepared


def test_what_a_call_is_prepared_for(launched):
    """Once for whatever the compiler cannot know: alignment, values of symbols, a forced tier, the thread."""
    site = torch_inductor.Site("attention", (False, (-1, -1), None, 0.0, False), ())
    memory = torch.empty(4, 2 * 64 + 1)
    q, k, v, out = (x[:64].view(1, 4, 2, 8) for x in memory[:, :64].clone())
    for _ in range(3):
        site(q, k, v, out=out)
    assert len(launched) == 1
    assert launched[0].launches == [(*(x.data_ptr() for x in (q, k, v, out)), 0)] * 3
    other = memory[0, 1:65].view(1, 4, 2, 8)
    for _ in range(2):
        site(other, k, v, out=out)
    assert len(launched) == 2 and launched[1].launches[0][0] == other.data_ptr()
    for sizes in ((4,), (5,), (4,)):
        site(q, k, v, out=out, sizes=sizes)
    assert len(launched) == 4
    with config.force_tier("simt"):
        site(q, k, v, out=out)
    assert len(launched) == 5
    thread = threading.Thread(target=site, args=(q, k, v), kwargs={"out": out})
    thread.start()
    thread.join()
    assert len(launched) == 6
    torch_inductor.Site("attention", (False, (-1, -1), None, 0.0, False), ())(q, k, v, out=out)
    assert len(launched) == 7


def test_pages_that_are_the_keys_are_other_calls(launched):
    """Values that lie in the keys are read with them."""
    site = torch_inductor.Site("attention_with_kvcache", (True, (-1, -1), None, 0.0, False, 0), ())
    seen = []

    def run(door, call, given, pointers, number):
        seen.append((pointers[1] == pointers[2], number))

    site._operation = site._operation._replace(run=run)
    q, k, v = (torch.empty(1, 4, 2, 8) for _ in range(3))
    site(q, k, v, None, None, None, None, None, number=3)
    assert len(launched) == 1
    for number in (2, 4):
        site(q, k, k, None, None, None, None, None, number=number)
    assert len(launched) == 2 and seen == [(False, 3), (True, 2), (True, 4)]
