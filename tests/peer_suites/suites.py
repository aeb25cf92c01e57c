"""Which cases of a peer's suite are run, and which are left out and why."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """``modules``: shims that are imported before the suite, under names which its checkout has too. ``left_out``: why a case
    is not run, by (name of the test, its parameters). ``loop``: whether a pair of values that a case loops over is tried.
    """

    name: str
    checkout: str  # the option that points at it
    path: str
    count: int  # cases to run
    left_out: Callable[[str, dict], str | None]
    modules: tuple = ()
    environment: dict = field(default_factory=dict)
    loop: Callable[[object, object], bool] | None = None
    methods: Callable[[str], bool] | None = None  # of those of its classes, the ones that are meant
    sdpa: bool = False  # computed by cuflash as SDPA's flash backend
    whole: bool = False  # run as a whole, not sampled
    workers: int = 2
    forks: bool = True  # collected once; otherwise by each of its workers, as it touches the GPU

    def file(self, checkout: Path) -> Path:
        return checkout if checkout.is_file() else checkout / self.path


# ----------------------------------------------------------------------------------------------------------------------
# What is left out


def first_reason(reasons: dict) -> str | None:
    return next((reason for reason, applies in reasons.items() if applies), None)


NO_DROPOUT = "cuflash has no dropout"
NO_ALIBI = "cuflash has no ALiBi"
NO_ROTARY = "cuflash has no rotary embedding of caches"
NO_LEFTPAD = "cuflash has no left padding of caches"
NO_QV = "cuflash has no qv"

_FA2_TESTS = {
    "test_flash_attn_generator_arg_must_be_none": "about the arguments of FlashAttention 2's C++ functions",
    "test_flash_attn_varlen_paged_kv_num_splits": "about a private function of FlashAttention 2",
    "test_flash_attn_kvcache_paged_block_table_bounds": "about an error that FlashAttention 2 finds by waiting for the GPU in "
    "each call; cuflash's kernels read no further than the table",
}


def fa2(test: str, given: dict) -> str | None:
    if test in _FA2_TESTS:
        return _FA2_TESTS[test]
    return first_reason(
        {
            NO_DROPOUT: given.get("dropout_p", 0.0) > 0,
            NO_ALIBI: given.get("alibi", False),
            NO_ROTARY: given.get("rotary_fraction", 0.0) > 0,
            NO_LEFTPAD: given.get("has_leftpad", False),
            "cuflash has no pages in flash_attn_varlen_func": test == "test_flash_attn_varlen_causal"
            and given["paged_kv_block_size"] is not None,
        }
    )


_FA3_TESTS = {
    "test_flash3_bw_compatibility": "about the operators of FlashAttention 3's extension",
    "test_flash_attn_race_condition": "takes 70 GiB of ballast and calls 1000 times; FlashAttention 2's test of that name is run",
}


def fa3(test: str, given: dict) -> str | None:
    if test in _FA3_TESTS:
        return _FA3_TESTS[test]
    return first_reason(
        {
            NO_QV: given.get("has_qv", False),
            NO_ROTARY: given.get("rotary_fraction", 0.0) > 0,
            NO_LEFTPAD: given.get("has_leftpad", False),
            "cuflash has no packed queries or new keys of caches": test == "test_flash_attn_kvcache" and given["varlen_q"],
        }
    )


def fa3_loop(first, second) -> bool:
    """Of (head_dim of v, attention_chunk): what cuflash has. Other loops are over ways to compute, one of them a flag."""
    is_sizes = type(first) is int and type(second) is int
    return not is_sizes or first <= 256 and second == 0


def fa4(test: str, given: dict) -> str | None:
    reuses_cache = test == "test_flash_attn_varlen_tensor_max_seqlen_reuses_fwd_cache"
    return "about the compile cache of FlashAttention 4" if reuses_cache else None


def torch_flash(test: str, given: dict) -> str | None:
    """PyTorch's cases have their parameters in their names."""
    sizes = re.search(r"_seq_len_q_(\d+)_seq_len_k_(\d+)_", test)
    return first_reason(
        {
            NO_DROPOUT: "_dropout_p_0_0" not in test,
            "about other backends of SDPA": "_cudagraph_" in test and "_fused_kernel0" not in test,
            "SDPA gives causal cases of unequal lengths to no flash backend": "_is_causal_True" in test
            and sizes is not None
            and sizes[1] != sizes[2],
        }
    )


def is_torch_flash(test: str) -> bool:
    names = "test_flash_attention_vs_math_ref_grads_", "test_fused_attention_vs_math_ref_grads_cudagraph_"
    return test.startswith(names) and "_cuda" in test


# ----------------------------------------------------------------------------------------------------------------------
# Where they are sampled from

# A kernel is compiled for each dtype and head_dim, with and without each mask: in a sample there is hardly a case that needs no
# new one. So each head_dim is drawn in one dtype. The suite of FlashAttention 4, which is run as a whole, has its own two.
_FLOAT16 = {8, 16, 32, 59, 64, 128, 256}


def is_drawn(test: str, head_dim: int | None, dtype: str) -> bool:
    if head_dim is None or "float16" not in dtype or test in ("test_flash_attn_combine", "test_flash_attn_cluster"):
        return True
    if test == "test_flash_attn_kvcache" and "bfloat16" in dtype:  # of FlashAttention 3, which has no other
        return True
    return (head_dim in _FLOAT16) == ("bfloat16" not in dtype)


def is_torch_drawn(test: str) -> bool:
    head_dim = re.search(r"_head_dim_(\d+)_", test)
    return head_dim is None or is_drawn(test, int(head_dim[1]), test)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("fa2", "flash_attention", "tests/test_flash_attn.py", 2000, fa2, ("flash_attn",), workers=11),
        Suite(
            "fa3",
            "flash_attention",
            "hopper/test_flash_attn.py",
            300,
            fa3,
            ("flash_attn", "flash_attn_interface"),
            {"FLASH_ATTENTION_DISABLE_FP8": "TRUE"},
            fa3_loop,
            workers=3,
        ),
        Suite(
            "fa4", "flash_attention", "tests/cute/test_flash_attn_fast.py", 241, fa4, ("flash_attn.cute.interface",), whole=True
        ),
        Suite(
            "torch",
            "torch",
            "test/test_transformers.py",
            200,
            torch_flash,
            methods=is_torch_flash,
            sdpa=True,
            forks=False,
        ),
    )
}


# ----------------------------------------------------------------------------------------------------------------------
# Which cases are run


def rank(case: str) -> int:
    """Where a case stands among all, the same in every run; the first ones are run."""
    return int.from_bytes(hashlib.blake2b(case.encode(), digest_size=8).digest(), "big")


def shares(sizes: dict, count: int) -> dict:
    """How many cases of each test are run: as many of each as there are, of the larger ones equally many."""
    result, left = {}, count
    for place, name in enumerate(sorted(sizes, key=lambda name: (sizes[name], name))):
        result[name] = min(sizes[name], left // (len(sizes) - place))
        left -= result[name]
    return result


def value_id(name: str, index: int, value) -> str:
    """As pytest writes it into the name of a case."""
    return str(value) if value is None or isinstance(value, str | int | float | bool) else f"{name}{index}"


@dataclass
class Cases:
    """All cases of one test: the products of what its marks list."""

    test: str
    marks: list  # of (names, list of values, one a name)

    def __iter__(self):
        """(the part of its name in brackets, its parameters)."""
        names = [names for names, _ in self.marks]
        listed = [
            [("-".join(value_id(name, i, v) for name, v in zip(names, values)), values) for i, values in enumerate(rows)]
            for names, rows in self.marks
        ]
        for combination in itertools.product(*listed):
            given = {}
            for some, (_, values) in zip(names, combination):
                given.update(zip(some, values))
            yield "-".join(part for part, _ in combination), given

    def choose(self, left_out, whole: bool = False) -> tuple[list, Counter]:
        """(those that can be run: (name, parameters), in the order in which they are taken; how many are left out, by reason)."""
        reasons, eligible = Counter(), []
        for name, given in self:
            if reason := left_out(self.test, given):
                reasons[reason] += 1
            elif whole or is_drawn(self.test, given.get("d"), str(given.get("dtype"))):
                eligible.append((rank(f"{self.test}[{name}]"), name, given))
        eligible.sort(key=lambda case: case[:2])
        return [case[1:] for case in eligible], reasons
