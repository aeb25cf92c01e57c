"""The runner of the peers' suites, on suites of our own that are written like theirs, and the names that theirs import."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peer_suites import suites

REPO = Path(__file__).resolve().parents[1]
SHIMS = REPO / "tests" / "peer_suites" / "shims"


# ------------------------------------------------------------------------------------------------------------
# Which cases


def cases(*marks):
    return suites.Cases("test_it", list(marks))


def test_cases_are_named_as_pytest_names_them():
    dtype = object()
    found = list(cases((["dtype"], [(dtype,)]), (["a", "b"], [(1, None), (2, 0.5)]), (["causal"], [(False,), (True,)])))
    assert [name for name, _ in found] == [
        *("dtype0-1-None-False", "dtype0-1-None-True", "dtype0-2-0.5-False", "dtype0-2-0.5-True"),
    ]
    assert found[2][1] == {"dtype": dtype, "a": 2, "b": 0.5, "causal": False}


def test_the_choice_is_the_same_each_time_and_a_smaller_one_is_part_of_it():
    many = cases((["i"], [(i,) for i in range(100)]), (["dropout_p"], [(0.0,), (0.17,)]))
    eligible, reasons = many.choose(suites.fa2)
    assert eligible == many.choose(suites.fa2)[0] and len(eligible) == 100
    assert reasons == {suites.NO_DROPOUT: 100}
    assert [given["i"] for _, given in eligible] != list(range(100))


@pytest.mark.parametrize("count, expected", [(6, (1, 2, 3)), (7, (1, 3, 3)), (100, (1, 3, 50)), (1, (0, 0, 1)), (54, (1, 3, 50))])
def test_each_test_has_its_share(count, expected):
    got = suites.shares({"small": 1, "middle": 3, "large": 50}, count)
    assert (got["small"], got["middle"], got["large"]) == expected


@pytest.mark.parametrize(
    "left_out, test, given, reason",
    [
        (suites.fa2, "test_flash_attn_output", {"dropout_p": 0.0, "alibi": True}, suites.NO_ALIBI),
        (suites.fa2, "test_flash_attn_kvcache", {"rotary_fraction": 0.5}, suites.NO_ROTARY),
        (suites.fa2, "test_flash_attn_kvcache", {"has_leftpad": True, "paged_kv_block_size": 256}, suites.NO_LEFTPAD),
        (suites.fa2, "test_flash_attn_kvcache", {"has_leftpad": False, "paged_kv_block_size": 256}, None),
        (suites.fa2, "test_flash_attn_varlen_causal", {"paged_kv_block_size": 256}, "no pages"),
        (suites.fa2, "test_flash_attn_varlen_causal", {"paged_kv_block_size": None}, None),
        (suites.fa3, "test_flash_attn_output", {"has_qv": True}, suites.NO_QV),
        (suites.fa3, "test_flash_attn_kvcache", {"varlen_q": True}, "packed queries"),
        (suites.fa3, "test_flash_attn_race_condition", {}, "70 GiB"),
        (suites.fa4, "test_flash_attn_output", {"num_splits": 3}, None),
        (suites.torch_flash, "test_x_seq_len_q_4_seq_len_k_8_is_causal_False_dropout_p_0_22_", {}, suites.NO_DROPOUT),
        (suites.torch_flash, "test_x_seq_len_q_4_seq_len_k_8_is_causal_True_dropout_p_0_0_", {}, "unequal lengths"),
        (suites.torch_flash, "test_x_seq_len_q_4_seq_len_k_4_is_causal_True_dropout_p_0_0_", {}, None),
    ],
)
def test_left_out(left_out, test, given, reason):
    got = left_out(test, given)
    assert got is None if reason is None else reason in got


def test_loops_over_what_cuflash_has():
    sizes, ways = ((256, 512, 64), (7, 0)), ((False, True), (1, 3))
    assert [pair for pair in itertools.product(*sizes) if suites.fa3_loop(*pair)] == [(256, 0), (64, 0)]
    assert all(suites.fa3_loop(*pair) for pair in [*itertools.product(*ways), *itertools.product(*reversed(ways))])


# ------------------------------------------------------------------------------------------------------------
# The whole way

SUITE = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n
from flash_attn.layers.rotary import apply_rotary_emb

assert torch.cuda.get_device_capability("cuda") == (9, 0)

@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("seqlen,d", [(5, 8), (7, 16)])
def test_right(seqlen, d, alibi, dtype):
    q = torch.randn(2, seqlen, 3, d, device="cuda", dtype=dtype)
    out = flash_attn_func(q, q, q, causal=True)
    assert torch.equal(out[:, 0], q[:, 0])

@pytest.mark.parametrize("d", [16, 300])
def test_wrong(d):
    assert d > 16, "so it is"

def test_skips():
    pytest.skip("not today")

def test_asks_for_more():
    x = torch.ones(1, 2, 1, 8)
    flash_attn_func(x, x, x, dropout_p=0.5)

def test_not_ours():
    raise NotImplementedError("theirs")
"""


@pytest.fixture
def checkout(tmp_path):
    pytest.importorskip("torch", reason="no PyTorch")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_flash_attn.py").write_text(SUITE)
    (tmp_path / "COMMIT").write_text("abc\n")
    return tmp_path


def invoke(*args):
    command = [sys.executable, "-m", "tests.peer_suites.run", "--device", "cpu", *map(str, args)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True)


def test_a_record_of_a_suite(checkout, tmp_path):
    path = tmp_path / "record.json"
    done = invoke("--flash-attention", checkout, "--suite", "fa2", "--workers", 1, "--json", path)
    assert done.returncode == 1, done.stderr
    assert "fa2: 5 passed, 2 failed, 1 skipped by the suite, 1 left out, of 9 run of 13" in done.stdout
    record = json.loads(path.read_text())
    assert record["kind"] == "peer_suites" and record["environment"]["device"] == "cpu"
    suite = record["suites"]["fa2"]
    assert suite["commit"] == "abc" and suite["skipped"] == {"not today": 1}
    assert suite["left_out"] == {"dropout_p is not supported by cuflash's flash_attn_func": 1}
    assert suite["left_out_by_name"] == {suites.NO_ALIBI: 4}
    failed = {one["case"]: one["error"] for one in suite["failed"]}
    assert set(failed) == {"test_wrong[16]", "test_not_ours"} and "so it is" in failed["test_wrong[16]"]


def test_a_case_without_memory_is_tried_again(checkout, tmp_path):
    path = tmp_path / "record.json"
    more = "tries = []\ndef test_needs_memory():\n    tries.append(0)\n"
    more += "    if len(tries) < 2:\n        raise RuntimeError('Out of memory')\n"
    (checkout / "tests" / "test_flash_attn.py").write_text(more)
    done = invoke("--flash-attention", checkout, "--suite", "fa2", "--workers", 1, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    suite = json.loads(path.read_text())["suites"]["fa2"]
    assert (suite["run"], suite["passed"], suite["without_memory_at_first"]) == (1, 1, 1)


def test_workers_share_the_cases_and_one_that_dies_is_seen(checkout, tmp_path):
    path = tmp_path / "record.json"
    more = "import os\ndef test_dies():\n    os.kill(os.getpid(), 9)\ndef test_hangs():\n    import time\n    time.sleep(60)\n"
    (checkout / "tests" / "test_flash_attn.py").write_text(SUITE + more)
    done = invoke("--flash-attention", checkout, "--suite", "fa2", "--workers", 3, "--seconds", 2, "--json", path)
    suite = json.loads(path.read_text())["suites"]["fa2"]
    assert done.returncode == 1 and suite["passed"] == 5 and suite["run"] == 10
    failed = {one["case"]: one["error"] for one in suite["failed"]}
    assert set(failed) == {"test_wrong[16]", "test_not_ours", "test_dies", "test_hangs"}
    assert failed["test_dies"] == "the process died" and "more than 2 s" in failed["test_hangs"]


METHODS = """
import unittest

class TestAttentionCUDA(unittest.TestCase):
    def test_flash_attention_vs_math_ref_grads_head_dim_8_dropout_p_0_0_float16_cuda(self):
        assert torch.nn.attention.current_flash_attention_impl() == "cuflash"
    def test_flash_attention_vs_math_ref_grads_head_dim_8_dropout_p_0_22_float16_cuda(self):
        raise AssertionError
    def test_flash_attention_vs_math_ref_grads_head_dim_8_dropout_p_0_0_bfloat16_cuda(self):
        raise AssertionError
    def test_other_cuda(self):
        raise AssertionError
"""


def test_methods_with_cuflash_as_the_flash_backend(checkout, tmp_path):
    torch = pytest.importorskip("torch")
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("PyTorch is too old")
    file, path = checkout / "test_transformers.py", tmp_path / "record.json"
    file.write_text("import torch\n" + METHODS)
    done = invoke("--torch", file, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    suite = json.loads(path.read_text())["suites"]["torch"]
    assert (suite["cases"], suite["run"], suite["passed"]) == (3, 1, 1) and suite["left_out_by_name"] == {suites.NO_DROPOUT: 1}


def test_wrong_use(checkout):
    assert "nothing to run" in invoke().stderr
    assert "--torch must be given" in invoke("--suite", "torch").stderr
    (checkout / "tests" / "test_flash_attn.py").write_text("import no_such_module\n")
    done = invoke("--flash-attention", checkout, "--suite", "fa2", "--workers", 1)
    assert done.returncode == 1 and "no case was found" in done.stderr and "no_such_module" in done.stderr


# ------------------------------------------------------------------------------------------------------------
# What the suites import

SHIM = """
import torch
from flash_attn.cute.interface import flash_attn_combine, flash_attn_func, flash_attn_varlen_func
from flash_attn.layers.rotary import apply_rotary_emb
import flash_attn_interface

torch.manual_seed(0)
q, k, v = (torch.randn(3, 6, heads, 8, requires_grad=True) for heads in (4, 2, 2))
out, lse = flash_attn_func(q, k, v, causal=True)
assert lse.requires_grad and out.shape == q.shape
used = torch.tensor([6, 2, 4], dtype=torch.int32)
ends = torch.tensor([0, 6, 12, 18], dtype=torch.int32)
results = []
for packed_q in (False, True):
    for packed_k in (False, True):
        given = [x.flatten(0, 1) if packed else x for x, packed in ((q, packed_q), (k, packed_k), (v, packed_k))]
        out, lse = flash_attn_varlen_func(*given, cu_seqlens_q=ends if packed_q else None,
                                          cu_seqlens_k=ends if packed_k else None, seqused_k=used)
        if packed_q:
            out, lse = out.unflatten(0, (3, 6)), lse.unflatten(1, (3, 6)).transpose(0, 1)
        results.append((out, lse))
for out, lse in results:
    assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
for i, length in enumerate(used.tolist()):
    expected, _ = flash_attn_func(q[i:i + 1], k[i:i + 1, :length], v[i:i + 1, :length])
    torch.testing.assert_close(out[i:i + 1], expected)
try:
    flash_attn_func(q, k, v, learnable_sink=torch.zeros(4))
except NotImplementedError as error:
    assert "learnable_sink is not supported" in str(error)
else:
    raise AssertionError
assert flash_attn_combine(out[None], lse.transpose(1, 2)[None], return_lse=False)[1] is None

angle = torch.rand(12, 2)
x = torch.randn(3, 4, 2, 8)
for interleaved in (False, True):
    turned = apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved=interleaved, seqlen_offsets=torch.tensor([0, 3, 8]))
    first, second = ((x[..., 0:4:2], x[..., 1:4:2]) if interleaved else (x[..., :2], x[..., 2:4]))
    whole = torch.complex(first, second)[1, 2] * torch.polar(torch.ones(2), angle[5])
    got = turned[1, 2, :, :4].unflatten(-1, (2, 2))
    got = got if interleaved else got.mT
    torch.testing.assert_close(torch.view_as_complex(got.contiguous()), whole)
    assert torch.equal(turned[..., 4:], x[..., 4:])
"""


def test_shims():
    pytest.importorskip("torch", reason="no PyTorch")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SHIMS), str(REPO)])}
    done = subprocess.run([sys.executable, "-c", SHIM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
