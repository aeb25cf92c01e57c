"""Few queries on a cache of keys and values: the cases, their data, the truth of some rows, and what is asked of them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import numpy as np

from cuflash.problem import ITEMSIZE

from .cases import (
    LENGTHS_SEED,
    Arrays,
    Asked,
    Case,
    Truth,
    as_words,
    asked,
    int32,
    library_of,
    like,
    make_arrays,
    normal,
    relative_error,
    to_host,
    truth_of,
)

# What an H200 can do: bytes a second of a copy in its memory, FLOP a second of products in 16 bits.
COPY_RATE, PRODUCT_RATE = 4.25e12, 700e12


@dataclass(frozen=True)
class DecodeCase(Case):
    """One ``cuflash.attention_with_kvcache``: ``seqlen_q`` queries a request on a cache that holds up to ``seqlen_k`` keys of
    each.

    ``key_lengths``: how many of them the queries of each request see, () for all. The last ``appended`` of them are given
    as k and v and not in the cache yet. ``page_size`` 0: the cache is not paged; else its pages lie in random order.
    ``v_is_k``: the values are the first columns of the keys. ``clocked``: calls are measured by the host's clock too.
    """

    key_lengths: tuple[int, ...] = ()
    appended: int = 0
    page_size: int = 0
    v_is_k: bool = False
    clocked: bool = False
    graph: bool = True

    by_row = True

    @property
    def name(self) -> str:
        """As of every case, with what the cache is like: "d128 s1/8192 b64 h32/8 causal page64 append1"."""
        words = super().name.split()
        if self.key_lengths:
            words.insert(3, f"t{sum(self.key_lengths)}")
        words += [f"page{self.page_size}"] * (self.page_size > 0) + [f"append{self.appended}"] * (self.appended > 0)
        return " ".join(words)

    @property
    def lengths_k(self) -> tuple[int, ...]:
        """Keys of each request, those appended too."""
        return self.key_lengths or (self.seqlen_k,) * self.batch

    @property
    def pairs(self) -> float:
        """Of one query head in all requests, exactly."""
        rows = np.arange(self.seqlen_q)
        return sum(int(last_key(self, rows, length).clip(-1).sum()) + self.seqlen_q for length in self.lengths_k)

    @property
    def kv_bytes(self) -> int:
        """Of keys and values, once."""
        columns = self.head_dim + (0 if self.v_is_k else self.head_dim_v)
        return sum(self.lengths_k) * self.heads_k * columns * ITEMSIZE[self.dtype]

    @property
    def bytes(self) -> int:
        """Keys and values, q and out once, and what is appended once more: it is written too."""
        rows = self.batch * self.seqlen_q * self.heads_q * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]
        return self.kv_bytes + rows + self.kv_bytes // sum(self.lengths_k) * self.batch * self.appended

    @property
    def work(self) -> float:
        return self.kv_bytes

    @property
    def tolerance(self) -> float:
        """Of the size of a row: sums of that many values lose more than the last bits only if keys are missing."""
        return super().tolerance / 4

    @property
    def seed(self) -> int:
        """The same for every cache of the same keys."""
        return super().seed if self == self.answer else self.answer.seed

    @property
    def answer(self) -> Case:
        """The case with the same result whose keys are all in a cache without pages."""
        return replace(self, page_size=0, appended=0)

    @property
    def is_plain(self) -> bool:
        """The cache is as good as dense keys and values."""
        return not (self.page_size or self.appended) and set(self.lengths_k) == {self.seqlen_k}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q and the caches."""
        rows = (self.batch, self.seqlen_k)
        if self.page_size:
            rows = (self.batch * self.max_pages, self.page_size)
        return (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (*rows, self.heads_k, self.head_dim),
            (*rows, self.heads_k, self.head_dim_v),
        )

    @property
    def given_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the other arrays of a call, by their names."""
        found = {"cache_seqlens": ((self.batch,), "int32")}
        if self.page_size:
            found["block_table"] = (self.batch, self.max_pages), "int32"
        if self.appended:
            rows = self.batch, self.appended, self.heads_k
            found |= {"k": ((*rows, self.head_dim), self.dtype), "v": ((*rows, self.head_dim_v), self.dtype)}
        return found

    @property
    def max_pages(self) -> int:
        return -(-self.seqlen_k // self.page_size)

    @property
    def bound(self) -> tuple[float, str]:
        """(seconds that no call on an H200 beats, what binds it)."""
        return max((self.bytes / COPY_RATE, "bytes"), (self.flops / PRODUCT_RATE, "flops"))

    @property
    def facts(self) -> dict:
        seconds, by = self.bound
        return {
            "kv_bytes": self.kv_bytes,
            "page_size": self.page_size,
            "appended": self.appended,
            "v_is_k": self.v_is_k,
            "bound": {"seconds": float(f"{seconds:.4g}"), "by": by},
            **({"key_lengths": self.key_lengths} if self.key_lengths else {}),
        }

    def rates(self, seconds: float) -> dict:
        return {
            "tb_per_s": float(f"{self.kv_bytes / seconds * 1e-12:.4g}"),
            "share_of_bound": round(self.bound[0] / seconds, 4),
        }

    def caches(self, l2_bytes: int) -> int:
        """How many caches with the same keys calls take in turns, so that none finds its keys in L2."""
        return min(_MOST_CACHES, max(1, math.ceil(4 * l2_bytes / self.kv_bytes)))

    def calls_a_graph(self, caches: int) -> int:
        """Enough for a millisecond, so that what launching the graph takes does not count; all caches as often."""
        calls = min(_MOST_CALLS, math.ceil(1e-3 * COPY_RATE / self.kv_bytes))
        return caches * math.ceil(calls / caches)


_MOST_CACHES, _MOST_CALLS = 32, 64


def last_key(case: DecodeCase, rows: np.ndarray, length: int) -> np.ndarray:
    """The last key that each of these queries sees in a request of ``length`` keys; below 0 if none."""
    return rows + length - case.seqlen_q if case.causal else np.full_like(rows, length - 1)


# ------------------------------------------------------------------------------------------------------------
# Suites

# (requests, keys of each)
_SIZES = ((64, 8192), (128, 2048), (1, 524288), (16, 4096), (1, 65536), (1, 8192))


def _decode(dtype, causal):
    heads = {128: ((32, 8), (64, 8), (32, 32)), 64: ((32, 4),)}
    return [
        _case("decode", dtype, size, number, head_dim, causal, clocked=True)
        for head_dim in heads
        for number in heads[head_dim]
        for size in _SIZES
    ]


def _paged(dtype, causal):
    return [
        _case("decode-paged", dtype, size, (32, 8), 128, causal, page_size=page_size)
        for size in ((64, 8192), (16, 4096))
        for page_size in (64, 16, 1)
    ]


def _queries(dtype, causal):
    return [
        _case("decode-queries", dtype, (64, 8192), (32, 8), 128, causal, seqlen_q=seqlen_q) for seqlen_q in (1, 2, 4, 8, 16)
    ]


def _mla(dtype, causal):
    """Multi-head latent attention, as DeepSeek's models decode: one key head, whose first 512 columns are the values."""
    return [
        _case("decode-mla", dtype, size, (heads_q, 1), 576, causal, head_dim_v=512, v_is_k=True, page_size=page_size)
        for size in ((64, 8192), (16, 4096), (128, 2048))
        for heads_q in (16, 64, 128)
        for page_size in (64, 0)
    ]


def _append(dtype, causal):
    """A token appended to each request; and requests of very different lengths."""
    lengths = np.exp(np.random.RandomState(LENGTHS_SEED).uniform(math.log(64), math.log(32768), 64))
    skewed = tuple(int(length) for length in lengths)
    return [
        _case("decode-append", dtype, (64, 8192), (32, 8), 128, causal, appended=1),
        _case("decode-append", dtype, (64, 32768), (32, 8), 128, causal, key_lengths=skewed),
    ]


def _case(suite, dtype, size, heads, head_dim, causal, *, seqlen_q=1, head_dim_v=None, **options) -> DecodeCase:
    return DecodeCase(
        suite, dtype, size[0], seqlen_q, size[1], *heads, head_dim, head_dim_v or head_dim, causal, **options
    )


_SUITES = {
    "decode": _decode,
    "decode-paged": _paged,
    "decode-queries": _queries,
    "decode-mla": _mla,
    "decode-append": _append,
}


def suite(name: str, dtype: str, causal: bool) -> list[DecodeCase]:
    return _SUITES[name](dtype, causal)


def table(dtype: str, head_dims, seqlens, causal: bool, tokens: int, hidden: int) -> list[DecodeCase]:
    """One query a request on ``tokens`` keys in all, ``hidden // head_dim`` query heads, four on a key head."""
    sizes = [
        (head_dim, seqlen, max(1, tokens // seqlen), max(1, hidden // head_dim)) for head_dim in head_dims for seqlen in seqlens
    ]
    return [
        _case("table", dtype, (batch, seqlen), (heads, heads // 4 if heads % 4 == 0 else heads), head_dim, causal, clocked=True)
        for head_dim, seqlen, batch, heads in sizes
    ]


def _uniform(case: DecodeCase) -> DecodeCase | None:
    return replace(case, key_lengths=(), seqlen_k=8192) if case.key_lengths else None


# What contenders of cuflash compute that are there for a comparison, by their names: another case, or None if it is this.
BESIDE = {
    "cuflash-contiguous": lambda case: replace(case, page_size=0) if case.page_size else None,
    "cuflash-one-query": lambda case: replace(case, seqlen_q=1) if case.seqlen_q > 1 else None,
    "cuflash-no-append": lambda case: replace(case, appended=0) if case.appended else None,
    "cuflash-uniform": _uniform,
}

# TB/s of keys and values.
_RATES = {(64, 8192): 4.0, (1, 524288): 4.0, (128, 2048): 3.8, (16, 4096): 3.5, (1, 65536): 3.5}


@asked.register
def _(case: DecodeCase) -> list[Asked]:
    if case.suite == "decode":
        rate = _RATES.get((case.batch, case.seqlen_k))
        rates = [Asked(round(rate * (1.0 if case.head_dim > 64 else 0.85), 4), figure="tb_per_s")] if rate else []
        return [*rates, Asked(1.0, "fa3"), Asked(1.0, "fa3", clock="single"), Asked(1.0, "fa3", clock="queued")]
    if case.suite == "decode-paged":
        return [Asked(0.95 if case.page_size >= 16 else 0.7, "cuflash-contiguous")]
    if case.suite == "decode-queries":
        return [Asked(1 / 1.1, "cuflash-one-query")]
    if case.suite == "decode-mla":
        return [Asked(0.8, figure="share_of_bound")]
    if case.suite == "decode-append" and case.key_lengths:
        return [Asked(0.9, "cuflash-uniform")]
    return []


# ------------------------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class DecodeArrays(Arrays):
    """q, and the caches as k and v. ``given``: the arrays among the keyword arguments of ``attention_with_kvcache``;
    ``places``: the index that each new token of each request will have in the caches.
    """

    given: dict | None = None
    places: tuple = ()

    @property
    def new(self) -> tuple:
        """The tokens to append, k and v of them; or ()."""
        return tuple(self.given[name] for name in "kv" if name in self.given)

    def unappend(self) -> None:
        """NaN where the new tokens will be: a call has to write them."""
        for x in (self.k, self.v):
            for place in self.places:
                _fill(x[place])


@make_arrays.register
def _(case: DecodeCase, framework: str) -> DecodeArrays:
    """Requests hold NaN behind their keys; tables hold pages that do not exist behind those of a request."""
    dense = replace(case, page_size=0).shapes
    q, k, *v = normal(case, framework, dense[:2] if case.v_is_k else dense)
    v = k[..., : case.head_dim_v] if case.v_is_k else v[0]
    lengths = [length - case.appended for length in case.lengths_k]
    given = {"cache_seqlens": int32(lengths, framework)}
    if case.appended:
        given["k"] = _rows(k, lengths, case.appended)
        given["v"] = given["k"][..., : case.head_dim_v] if case.v_is_k else _rows(v, lengths, case.appended)
    for number, length in enumerate(lengths):
        if length < case.seqlen_k:
            _fill(k[number, length:])
            _fill(v[number, length:])
    places = [(number, length + step) for number, length in enumerate(lengths) for step in range(case.appended)]
    if case.page_size:
        order = np.random.RandomState(case.seed).permutation(case.batch * case.max_pages)
        pages = np.argsort(order).astype(np.int32).reshape(case.batch, case.max_pages)
        table = pages.copy()
        for number, length in enumerate(case.lengths_k):
            table[number, -(-length // case.page_size) :] = -1
        given["block_table"] = int32(table, framework)
        k = _in_pages(k, case, order)
        v = k[..., : case.head_dim_v] if case.v_is_k else _in_pages(v, case, order)
        places = [(int(pages[number, key // case.page_size]), key % case.page_size) for number, key in places]
    return DecodeArrays(framework, q, k, v, given=given, places=tuple(places))


def in_turns(case: DecodeCase, arrays: DecodeArrays, count: int) -> DecodeArrays:
    """The same with ``count`` caches, for `peers.make` to take in turns; they all hold what the first does."""
    others = []
    for _ in range(count - 1):
        k = _copy(arrays.k)
        v = k[..., : case.head_dim_v] if case.v_is_k else _copy(arrays.v)
        others.append(replace(arrays, k=k, v=v))
    return replace(arrays, turns=(arrays, *others)) if others else arrays


def _rows(x, starts, count):
    """(batch, count, heads, head_dim): of each request the rows behind its start."""
    words = as_words(x)
    rows = _copy(words[:, :count])
    for number, start in enumerate(starts):
        rows[number] = words[number, start : start + count]
    return _of_words(rows, x)


def _fill(x) -> None:
    """NaN in all of an array."""
    words = as_words(x)
    words[...] = math.nan if words is x else 0xFFFF


def _copy(x):
    return x.clone() if hasattr(x, "data_ptr") else _of_words(as_words(x).copy(), x)


def _of_words(words, x):
    """What `as_words` made words of, as an array like ``x``: contiguous."""
    if words.dtype == x.dtype:
        return words
    return sys.modules["cupy"].ndarray(words.shape, x.dtype, memptr=words.data)


def _in_pages(x, case: DecodeCase, order: np.ndarray):
    """The pages of (batch, seqlen_k, heads, head_dim) in this order."""
    words = as_words(x).reshape(case.batch * case.max_pages, case.page_size, *x.shape[2:])
    return _of_words(words[like(x, order)], x)


# ------------------------------------------------------------------------------------------------------------
# Truth


@truth_of.register
def _(case: DecodeCase, arrays: DecodeArrays) -> Truth:
    return DecodeTruth(case, arrays)


class DecodeTruth(Truth):
    """In float64: all queries of the first head of the first request, of the last of the last, and of the first of the
    shortest and the longest; errors relative to the row, since a mean of many values is small. Also that what is
    appended is in the cache.
    """

    def __init__(self, case: DecodeCase, arrays: DecodeArrays):
        self.case, self.arrays = case, arrays
        lengths = case.lengths_k
        parts = {(0, 0), (case.batch - 1, case.heads_q - 1), (lengths.index(max(lengths)), 0), (lengths.index(min(lengths)), 0)}
        self.expected = {part: _true_rows(case, arrays, *part) for part in sorted(parts)}

    def error(self, result) -> float:
        """The largest error of a row over the largest of its values; nan if one is not a number or nothing was appended."""
        worst = []
        for (number, head), expected in self.expected.items():
            error = np.abs(to_host(result[number, :, head]) - expected).max(axis=1)
            worst.append(relative_error(error, np.abs(expected).max(axis=1)).max())
        return math.nan if self._lacks_new() else float(np.max(worst))

    def _lacks_new(self) -> bool:
        case, arrays = self.case, self.arrays
        for cache, new in zip((arrays.k, arrays.v), arrays.new):
            for place, token in ((0, (0, 0)), (-1, (case.batch - 1, case.appended - 1))):
                if not np.array_equal(to_host(cache[arrays.places[place]]), to_host(new[token])):
                    return True
        return False


def _true_rows(case: DecodeCase, arrays: DecodeArrays, number: int, head: int) -> np.ndarray:
    """(seqlen_q, head_dim_v)."""
    xp, wide = library_of(arrays)
    head_k, length = head // (case.heads_q // case.heads_k), case.lengths_k[number]
    cached = length - case.appended
    k, v = (wide(_of_request(x, case, arrays, number)[:cached, head_k]) for x in (arrays.k, arrays.v))
    if arrays.new:
        k, v = (xp.concatenate([x, wide(new[number, :, head_k])]) for x, new in zip((k, v), arrays.new))
    logits = wide(arrays.q[number, :, head]) @ k.T * case.head_dim**-0.5
    for row, last in enumerate(last_key(case, np.arange(case.seqlen_q), length)):
        logits[row, max(0, int(last) + 1) :] = -math.inf
    top = xp.amax(logits, 1)
    top[top == -math.inf] = 0
    weights = xp.exp(logits - top[:, None])
    total = weights.sum(1)
    total[total == 0] = 1
    return to_host(weights @ v / total[:, None])


def _of_request(x, case: DecodeCase, arrays: DecodeArrays, number: int):
    """(seqlen_k, heads, head_dim): a request's part of a cache."""
    if not case.page_size:
        return x[number]
    pages = arrays.given["block_table"][number, : -(-case.lengths_k[number] // case.page_size)]
    words = as_words(x)
    return _of_words(words[pages.long() if hasattr(pages, "data_ptr") else pages], x).reshape(-1, *x.shape[2:])
