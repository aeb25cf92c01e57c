"""The named cases of ``cuflash check``."""

from __future__ import annotations

import math

import numpy as np

from .case import Cache, Case, Lengths


def _seqlens(seqlen_q: int, seqlen_k: int, quick=False) -> Case:
    return Case(f"seqlen {seqlen_q} x {seqlen_k}", seqlen_q, seqlen_k, quick=quick)


def _head_dims(head_dim: int, head_dim_v: int, quick=False) -> Case:
    name = f"head_dim {head_dim}" + (f", of v {head_dim_v}" if head_dim_v != head_dim else "")
    return Case(name, 129, 150, head_dim, head_dim_v, quick=quick)


def _masked(name: str, seqlen_q: int, seqlen_k: int, quick=False, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, options=options, quick=quick)


def _scored(name: str, contents=lambda arrays: None, quick=False, **options) -> Case:
    return Case(name, 129, 193, options=options, contents=contents, quick=quick)


def _poisoned(name: str, seqlen_q: int, seqlen_k: int, contents, quick=False, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, options=options, contents=contents, quick=quick)


def _laid_out(name: str, q="packed", kv="packed", out="packed", quick=False) -> Case:
    return Case(name, 65, 129, batch=2, q_layout=q, kv_layout=kv, out_layout=out, quick=quick)


def _gradients(name: str, seqlen_q: int, seqlen_k: int, options=None, **how) -> Case:
    return Case(f"backward, {name}", seqlen_q, seqlen_k, options=options or {}, backward=True, **how)


def _packed(name: str, lengths: Lengths, causal=False, backward=False, **how) -> Case:
    seqlen_q, seqlen_k = (sum(rows) + lengths.spare for rows in (lengths.q, lengths.k))
    name = f"packed{' backward' * backward}, {name}"
    return Case(name, seqlen_q, seqlen_k, options={"causal": causal}, lengths=lengths, backward=backward, **how)


def _decoded(
    name: str, lengths: tuple[int, ...], *, seqlen_q=1, spare=20, new=0, page_size=0, num_splits=0, latent=False, **how
) -> Case:
    """``spare``: keys that there is room for behind those of the longest request. ``latent``: values are columns of keys."""
    cache = Cache(lengths, new, page_size, num_splits, latent)
    if latent:
        how = {"heads_q": 16, "heads_k": 1, "head_dim": 576, "head_dim_v": 512} | how
    how["options"] = {"causal": True} | how.get("options", {})
    return Case(f"decode, {name}", seqlen_q, max(lengths) + new + spare, batch=len(lengths), cache=cache, **how)


def _set(**rows):
    """Contents: {(first, stop): value} for rows of an array, in all batches and heads."""

    def contents(arrays):
        for name, values in rows.items():
            for (first, stop), value in values.items():
                arrays[name][:, first:stop] = value

    return contents


def _one_value_is_nan(arrays):
    arrays["v"][:, 70, :, 3] = math.nan


def _large_dots(arrays):
    """Products of about 70, of four features: few roundings, since the oracle itself is float64."""
    q, k = arrays["q"], arrays["k"]
    q[...], k[...] = 4 + np.abs(q) / 4, 4 + np.abs(k) / 4
    q[..., 4:] = 0


def _rising_dots(arrays):
    """Later keys have far larger logits: what earlier tiles gave must be scaled down again and again."""
    _large_dots(arrays)
    arrays["k"] *= np.linspace(0, 1, arrays["k"].shape[1])[:, None, None]


SEVERAL = Lengths((1, 65, 3, 128, 17), (1, 65, 3, 128, 17))
SOME_EMPTY = Lengths((0, 65, 0, 33, 9, 0), (0, 130, 1, 0, 9, 0))
SOME_UNUSED = Lengths((33, 65, 0, 4), (129, 130, 9, 64), used_k=(128, 65, 9, 0), spare=70)

CASES = (
    # Tile edges. Out of a tile's rows and keys, what is past the end must neither be read nor written.
    _seqlens(1, 1),
    _seqlens(2, 15),
    _seqlens(16, 17),
    _seqlens(63, 65, quick=True),
    _seqlens(64, 64),
    _seqlens(65, 63),
    _seqlens(127, 129),
    _seqlens(128, 128, quick=True),
    _seqlens(129, 127),
    _seqlens(193, 191),
    _seqlens(1, 300),
    _seqlens(300, 1),
    _masked("seqlen 1000 x 1030, causal", 1000, 1030, causal=True),
    _masked("seqlen 300 x 1030, window 200,100", 300, 1030, window=(200, 100)),
    Case("batch 3, 5 heads", 40, 70, heads_q=5, heads_k=5, batch=3),
    Case("no out=, no lse", 65, 129, plain=True, quick=True),
    # Nothing to do, or nothing to see.
    Case("batch 0", 8, 8, batch=0),
    Case("no heads", 8, 8, heads_q=0, heads_k=0),
    Case("seqlen 0 x 64", 0, 64, quick=True),
    Case("seqlen 64 x 0", 64, 0, quick=True),
    _head_dims(1, 1, quick=True),
    _head_dims(20, 20),
    _head_dims(80, 80),
    _head_dims(96, 96),
    _head_dims(128, 128, quick=True),
    _head_dims(192, 128),
    _head_dims(256, 256, quick=True),
    Case("8 heads, 2 of keys", 65, 129, heads_q=8, heads_k=2, batch=2, quick=True),
    Case("7 heads, 1 of keys, causal", 65, 129, heads_q=7, heads_k=1, options={"causal": True}),
    # Masks, counted from the bottom-right diagonal.
    _masked("causal 128 x 128", 128, 128, causal=True),
    _masked("causal 129 x 257", 129, 257, quick=True, causal=True),
    _masked("causal 257 x 129, empty rows", 257, 129, quick=True, causal=True),
    _masked("window 0,0", 193, 193, window=(0, 0)),
    _masked("window 31,7", 129, 257, quick=True, window=(31, 7)),
    _masked("window 100,open", 200, 257, window=(100, None)),
    _masked("window open,20", 129, 129, window=(None, 20)),
    _masked("window 50,20, causal", 257, 193, window=(50, 20), causal=True),
    _masked("window 16,3, empty rows", 300, 129, window=(16, 3)),
    # Scores. Options are shared where they can be: each set of them is a kernel more to compile.
    _scored("softcap 2, causal", quick=True, softcap=2.0, causal=True),
    _scored("softcap 30, causal, scale 3", softcap=30.0, causal=True, softmax_scale=3.0),
    _scored("scale 0", softmax_scale=0.0),
    _scored("scale -0.2", softmax_scale=-0.2),
    _scored("logits around 70", _large_dots, softmax_scale=1.0),
    _scored("logits around -700", _large_dots, quick=True, softmax_scale=-10.0),
    _scored("logits that rise to 70", _rising_dots, softmax_scale=1.0),
    # NaN and infinities reach exactly the rows that see them.
    _poisoned(
        "NaN in key 70, causal", 129, 193, _set(k={(70, 71): math.nan}, v={(70, 71): math.nan}), causal=True
    ),
    _poisoned(
        "NaN in the last key, causal",
        129,
        129,
        _set(k={(128, 129): math.nan}, v={(128, 129): math.nan}),
        quick=True,
        causal=True,
    ),
    _poisoned(
        "NaN in keys that no query sees",
        64,
        300,
        _set(k={(0, 200): math.nan}, v={(0, 200): math.nan}),
        quick=True,
        window=(30, 30),
    ),
    _poisoned(
        "inf in values, window 20,20",
        193,
        193,
        _set(v={(70, 71): math.inf, (160, 161): -math.inf}),
        window=(20, 20),
    ),
    _poisoned(
        "inf in keys that no query sees",
        64,
        300,
        _set(k={(0, 200): math.inf}, v={(0, 200): -math.inf}),
        window=(30, 30),
    ),
    _poisoned("NaN in one visible value", 65, 129, _one_value_is_nan),
    _poisoned("NaN in one query", 129, 65, _set(q={(64, 65): math.nan})),
    # Layouts: the result is that of packed arrays, bit for bit.
    _laid_out("transposed", "transposed", "transposed", "transposed", quick=True),
    _laid_out("fused QKV slice", "fused", "fused"),
    _laid_out("keys and values of stride 0", kv="expanded", quick=True),
    _laid_out("rows of 8-byte alignment", "pitched", "pitched", "pitched"),
    _laid_out("base addresses off by an element", "shifted", "shifted", "shifted", quick=True),
    _laid_out("backwards", "reversed", "reversed", "reversed"),
    _laid_out("three layouts at once", "fused", "transposed", "reversed"),
    # Gradients. Keys that nothing sees and rows that see nothing have some of exactly 0, whatever they hold.
    _gradients("63 x 65", 63, 65, quick=True),
    _gradients("129 x 257", 129, 257),
    _gradients("1 x 300, causal", 1, 300, {"causal": True}),
    _gradients("causal", 130, 130, {"causal": True}, quick=True, deterministic=True),
    _gradients("causal, 500 x 530", 500, 530, {"causal": True}),
    _gradients("causal, empty rows", 200, 70, {"causal": True}, with_dlse=True),
    _gradients("window 20,9", 193, 257, {"window": (20, 9)}),
    _gradients("softcap 2", 129, 193, {"softcap": 2.0, "causal": True}),
    _gradients("negative scale", 129, 193, {"softmax_scale": -0.2}),
    _gradients("logits around 70", 129, 193, {"softmax_scale": 1.0}, contents=_large_dots),
    _gradients("gradient of lse", 65, 129, with_dlse=True, quick=True),
    _gradients("8 heads, 2 of keys", 65, 129, {"causal": True}, heads_q=8, batch=2, deterministic=True, quick=True),
    _gradients("7 heads, 1 of keys", 65, 129, {"causal": True}, heads_q=7, heads_k=1),
    _gradients("head_dim 128", 129, 150, {"causal": True}, head_dim=128, head_dim_v=128, quick=True),
    _gradients("head_dim 33, of v 20", 129, 150, head_dim=33, head_dim_v=20),
    _gradients("head_dim 256", 129, 150, head_dim=256, head_dim_v=256),
    _gradients(
        "NaN in unseen keys",
        64,
        300,
        {"window": (20, 9)},
        contents=_set(k={(0, 200): math.nan}, v={(0, 200): math.nan}),
        quick=True,
    ),
    _gradients(
        "NaN in empty rows",
        200,
        70,
        {"causal": True},
        contents=_set(q={(0, 130): math.nan}, dout={(0, 130): math.nan}),
    ),
    _gradients("NaN in one dout", 129, 130, {"causal": True}, contents=_set(dout={(70, 71): math.nan})),
    _gradients(
        "heads outside",
        65,
        129,
        {"causal": True},
        q_layout="transposed",
        kv_layout="transposed",
        out_layout="transposed",
        deterministic=True,
    ),
    _gradients("dout, keys and values of stride 0", 65, 129, kv_layout="expanded", out_layout="expanded", batch=2),
    _gradients("addresses off by an element", 65, 129, q_layout="shifted", kv_layout="shifted", out_layout="shifted"),
    _gradients("no queries", 0, 64),
    _gradients("no keys", 64, 0),
    # Packed sequences.
    _packed("several", SEVERAL, causal=True, quick=True),
    _packed("some empty", SOME_EMPTY),
    _packed("some unused", SOME_UNUSED, causal=True, quick=True),
    _packed("more sequences than rows", Lengths((0,) * 9 + (1,), (0,) * 9 + (1,))),
    _packed("one long among many", Lengths((400, *range(1, 20)), (400, *range(1, 20))), causal=True),
    _packed("several", SEVERAL, causal=True, backward=True, deterministic=True, quick=True),
    _packed("some empty", SOME_EMPTY, backward=True, with_dlse=True),
    _packed("some unused", SOME_UNUSED, causal=True, backward=True, heads_q=6, quick=True),
    _packed("one long among many", Lengths((400, *range(1, 20)), (400, *range(1, 20))), causal=True, backward=True),
    # Decoding: few queries on a cache. What of it is unused is NaN.
    _decoded("one query", (300, 1, 65), quick=True),
    _decoded("lengths of 0", (0, 129, 0), seqlen_q=2),
    _decoded("one long among many", (2000, *range(30)), heads_q=8),
    _decoded("no out=, no lse", (300, 65), plain=True),
    _decoded("16 queries, 8 heads, 2 of keys", (130, 64, 9), seqlen_q=16, heads_q=8, quick=True),
    _decoded("7 heads, 1 of keys", (130, 64), seqlen_q=2, heads_q=7, heads_k=1),
    _decoded("pages of 16", (300, 1, 65), page_size=16, quick=True),
    _decoded("pages of 1", (100, 0, 65), page_size=1),
    _decoded("3 appended to rows", (300, 0, 65), seqlen_q=3, new=3, quick=True),
    _decoded("3 appended across pages", (15, 0, 47), seqlen_q=3, new=3, page_size=16, quick=True),
    _decoded("appended up to the end", (60, 60), seqlen_q=4, new=4, spare=0),
    _decoded("1 split", (300, 1, 65), num_splits=1),
    _decoded("7 splits", (300, 1, 65, 0), num_splits=7, quick=True),
    _decoded("7 splits of pages", (1000, 2), num_splits=7, page_size=16, seqlen_q=2),
    _decoded("window 40,0", (300, 20), seqlen_q=5, options={"window": (40, 0)}),
    _decoded("softcap 2", (300, 20), seqlen_q=5, options={"softcap": 2.0}),
    _decoded("not causal", (300, 20), seqlen_q=5, options={"causal": False}),
    _decoded(
        "NaN in unseen keys",
        (300, 290),
        seqlen_q=5,
        options={"window": (40, 0)},
        contents=_set(k_cache={(0, 200): math.nan}, v_cache={(0, 200): math.nan}),
        quick=True,
    ),
    _decoded("head_dim 128", (300, 65), head_dim=128, head_dim_v=128, quick=True),
    _decoded("head_dim 65, of v 40", (300, 65), head_dim=65, head_dim_v=40),
    _decoded(
        "heads outside, rows of 4 elements more",
        (300, 65),
        kv_layout="transposed",
        q_layout="pitched",
        out_layout="pitched",
    ),
    _decoded("latent keys of 576, values of 512", (300, 65), latent=True, quick=True),
    _decoded("latent, 2 appended to pages", (130, 0, 65), latent=True, seqlen_q=2, new=2, page_size=64),
    _decoded("latent, 3 splits", (300, 2), latent=True, num_splits=3),
)
