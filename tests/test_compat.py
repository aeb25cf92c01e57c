"""cuflash.compat: the peers' names, arguments and rules, on the CPU."""

import importlib
import inspect

import pytest
from support import inputs

import cuflash

torch = pytest.importorskip("torch", reason="no PyTorch")
fa2 = pytest.importorskip("cuflash.compat.flash_attn", reason="PyTorch is too old")
fa3 = importlib.import_module("cuflash.compat.flash_attn_interface")
padding = importlib.import_module("cuflash.compat.bert_padding")

# ------------------------------------------------------------------------------------------------------------
# Signatures, as printed from the peers' sources

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
FA3_TAIL = (
    f"qv=None, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False"
)
SIGNATURES = {
    ("flash_attn", "flash_attn_func"): f"q, k, v, {TAIL}",
    ("flash_attn", "flash_attn_qkvpacked_func"): f"qkv, {TAIL}",
    ("flash_attn", "flash_attn_kvpacked_func"): f"q, kv, {TAIL}",
    ("flash_attn", "flash_attn_varlen_func"): f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    ("flash_attn", "flash_attn_varlen_qkvpacked_func"): f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    ("flash_attn", "flash_attn_varlen_kvpacked_func"): f"q, kv, {LENGTHS}, {TAIL}",
    ("flash_attn", "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
    ("flash_attn_interface", "flash_attn_func"): f"q, k, v, softmax_scale=None, causal=False, {FA3_TAIL}",
    ("flash_attn_interface", "flash_attn_qkvpacked_func"): (
        f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    ("flash_attn_interface", "flash_attn_varlen_func"): (
        f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, {FA3_TAIL}"
    ),
    ("flash_attn_interface", "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    ("flash_attn_interface", "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None",
    ("flash_attn_interface", "get_scheduler_metadata"): (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
    ),
    ("bert_padding", "unpad_input"): "hidden_states, attention_mask, unused_mask=None",
    ("bert_padding", "pad_input"): "hidden_states, indices, batch, seqlen",
}


def arguments(signature: inspect.Signature):
    return [(x.name, x.kind, x.default) for x in signature.parameters.values()]


@pytest.mark.parametrize("module, function", SIGNATURES)
def test_signatures(module, function):
    ours = inspect.signature(getattr(importlib.import_module(f"cuflash.compat.{module}"), function))
    stored = {}
    exec(f"def function({SIGNATURES[module, function]}): pass", {"torch": torch}, stored)
    assert arguments(ours) == arguments(inspect.signature(stored["function"]))


@pytest.mark.parametrize("module, function", SIGNATURES)
def test_signatures_of_what_is_installed(module, function):
    peer = pytest.importorskip("flash_attn.bert_padding" if module == "bert_padding" else module)
    ours = inspect.signature(getattr(importlib.import_module(f"cuflash.compat.{module}"), function))
    assert arguments(ours) == arguments(inspect.signature(getattr(peer, function)))


# ------------------------------------------------------------------------------------------------------------
# Dense and packed


def tensors(**sizes):
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 6} | sizes
    return [torch.from_numpy(x).requires_grad_() for x in inputs("float32", **sizes)]


ENDS = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)


def same(got, expected):
    assert len(got) == len(expected)
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)


def plain(*tensors, **options):
    return cuflash.attention(*(x.detach() for x in tensors), return_lse=True, **options)


def test_dense():
    q, k, v = tensors()
    options = {"softmax_scale": 0.5, "causal": True, "softcap": 3.0}
    expected = plain(q, k, v, window=(2, None), **options)
    out, lse, mask = fa2.flash_attn_func(q, k, v, 0.0, 0.5, True, (2, -1), 3.0, None, True, True)
    assert mask is None
    same((out, lse), expected)
    got = fa3.flash_attn_func(q, k, v, 0.5, True, window_size=(2, -1), softcap=3.0, return_attn_probs=True)
    same(got, expected)
    for module in (fa2, fa3):
        same([module.flash_attn_func(q, k, v, window_size=torch.tensor([2, -1]), **options)], expected[:1])
        same([module.flash_attn_func(q, k, v, window_size=[2, -7], **options)], expected[:1])
        same([module.flash_attn_func(q, k, v)], plain(q, k, v)[:1])
    # Hints are taken; they say how, not what.
    same([fa3.flash_attn_func(q, k, v, num_splits=3, pack_gqa=True, sm_margin=8)], plain(q, k, v)[:1])


def test_queries_that_see_no_key():
    """lse is +inf of FlashAttention 2, -inf of 3; its gradient is 0."""
    q, k, v = tensors(seqlen_q=7, seqlen_k=5)
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[:, :, :2] == torch.inf).all() and lse[:, :, 2:].isfinite().all() and (out[:, :2] == 0).all()
    (out.sum() + lse.nan_to_num(posinf=0.0).sum()).backward()
    assert (q.grad[:, :2] == 0).all() and q.grad.isfinite().all()
    lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1]
    assert (lse[:, :, :2] == -torch.inf).all()
    ends = torch.tensor([0, 7], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    given = (q[0], k[0], v[0], *ends, 7, 5)
    lse = fa2.flash_attn_varlen_func(*given, causal=True, return_attn_probs=True)[1]
    assert (lse[:, :2] == torch.inf).all() and lse.shape == (4, 7)
    lse = fa3.flash_attn_varlen_func(*given, causal=True, return_attn_probs=True)[1]
    assert (lse[:, :2] == -torch.inf).all()


def test_odd_head_dims_and_strides():
    q, k, v = tensors(head_dim=59)
    same([fa2.flash_attn_func(q, k, v)], plain(q, k, v)[:1])
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    same([fa2.flash_attn_func(*strided)], plain(q, k, v)[:1])


def test_packed_tensors():
    q, k, v = tensors(seqlen_q=7, heads_k=4)
    expected = torch.autograd.grad(fa2.flash_attn_func(q, k, v, causal=True).square().sum(), (q, k, v))
    for function in (fa2.flash_attn_qkvpacked_func, fa3.flash_attn_qkvpacked_func):
        qkv = torch.stack([q, k, v], 2).detach().requires_grad_()
        out = function(qkv, causal=True)
        same([out], plain(q, k, v, causal=True)[:1])
        same(torch.autograd.grad(out.square().sum(), qkv)[0].unbind(2), expected)
    kv = torch.stack([k, v], 2).detach().requires_grad_()
    out = fa2.flash_attn_kvpacked_func(q, kv, 0.0, None, True)
    same([out], plain(q, k, v, causal=True)[:1])
    same(torch.autograd.grad(out.square().sum(), kv)[0].unbind(2), expected[1:])
    q, k, v = tensors(seqlen_q=7, heads_q=4, heads_k=2)
    got = fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=4)
    same([got], plain(q, k, v, causal=True)[:1])
    with pytest.raises(ValueError, match="num_heads_q must leave two equal parts of the 8 heads of qkv; got 3"):
        fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), num_heads_q=3)
    with pytest.raises(ValueError, match=r"qkv must have 3 elements \(q, k, v\) along axis 2; got shape \(2, 7, 2, 2, 6\)"):
        fa2.flash_attn_qkvpacked_func(torch.stack([k, v], 2))


def test_varlen():
    q, k, v = (x.detach()[0].requires_grad_() for x in tensors(heads_k=4))
    expected = cuflash.attention_varlen(q.detach(), k.detach(), v.detach(), *ENDS, causal=True, window=(1, None), return_lse=True)
    options = {"causal": True, "window_size": (1, -1), "return_attn_probs": True}
    results = [
        fa2.flash_attn_varlen_func(q, k, v, *ENDS, 3, 4, **options)[:2],
        fa2.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *ENDS, 3, 4, **options)[:2],
        fa3.flash_attn_varlen_func(q, k, v, *ENDS, 3, 4, **options),
    ]
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out, _ in results]
    for result, gradient in zip(results, gradients, strict=True):
        same(result, expected)
        same(gradient, gradients[0])
    qkv = torch.stack([k, k, v], 1)
    got = fa2.flash_attn_varlen_qkvpacked_func(qkv, ENDS[1], 4, causal=True)
    same([got], [fa2.flash_attn_varlen_func(k, k, v, ENDS[1], ENDS[1], 4, 4, causal=True)])
    used = torch.tensor([3, 2], dtype=torch.int32)
    got = fa3.flash_attn_varlen_func(q, k, v, *ENDS, 3, 4, seqused_k=used)
    same([got], [cuflash.attention_varlen(q.detach(), k.detach(), v.detach(), *ENDS, seqused_k=used)])


def test_combine():
    """Halves of the keys, one of which some queries do not see."""
    q, k, v = (x.detach() for x in tensors(seqlen_k=8))
    whole, whole_lse = plain(q, k, v)
    parts = [plain(q, k[:, half], v[:, half]) for half in (slice(0, 3), slice(3, 8))]
    out = torch.stack([x for x, _ in parts])
    lse = torch.stack([x.transpose(1, 2) for _, x in parts])
    joined, joined_lse = fa3.flash_attn_combine(out, lse)
    torch.testing.assert_close(joined, whole)
    torch.testing.assert_close(joined_lse, whole_lse.transpose(1, 2))
    lse[0, :, 0], out[0, :, 0] = -torch.inf, torch.nan
    lse[:, :, 1], out[:, :, 1] = -torch.inf, 0
    given = torch.empty_like(whole, dtype=torch.bfloat16)
    joined, joined_lse = fa3.flash_attn_combine(out, lse, given)
    assert joined is given
    same([joined[:, 0]], [out[1, :, 0].bfloat16()])
    assert (joined[:, 1] == 0).all() and (joined_lse[:, 1] == -torch.inf).all()
    assert fa3.flash_attn_combine(out, lse, out_dtype=torch.float16)[0].dtype == torch.float16


# ------------------------------------------------------------------------------------------------------------
# What is refused

SOME = torch.zeros(2)
REFUSED = [
    (fa2.flash_attn_func, "qkv", {"dropout_p": 0.1}),
    (fa2.flash_attn_func, "qkv", {"alibi_slopes": SOME}),
    (fa2.flash_attn_qkvpacked_func, "q", {"dropout_p": 0.1}),
    (fa2.flash_attn_kvpacked_func, "qk", {"alibi_slopes": SOME}),
    (fa2.flash_attn_varlen_func, "qkv1234", {"dropout_p": 0.5}),
    (fa2.flash_attn_varlen_func, "qkv1234", {"block_table": SOME}),
    (fa2.flash_attn_varlen_qkvpacked_func, "q12", {"alibi_slopes": SOME}),
    (fa2.flash_attn_varlen_kvpacked_func, "qk1234", {"dropout_p": 0.5}),
    *(
        (fa2.flash_attn_with_kvcache, "qkv", {name: SOME})
        for name in ("rotary_cos", "rotary_sin", "cache_leftpad", "alibi_slopes")
    ),
    *((fa3.flash_attn_func, "qkv", {name: SOME}) for name in ("qv", "q_descale", "k_descale", "v_descale")),
    (fa3.flash_attn_func, "qkv", {"attention_chunk": 4}),
    (fa3.flash_attn_qkvpacked_func, "q", {"k_descale": SOME}),
    (fa3.flash_attn_varlen_func, "qkv1234", {"attention_chunk": 4}),
    (fa3.flash_attn_varlen_func, "qkv1234", {"qv": SOME}),
    *(
        (fa3.flash_attn_with_kvcache, "qkv", {name: SOME})
        for name in (
            *("qv", "rotary_cos", "rotary_sin", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new"),
            *("q_descale", "k_descale", "v_descale", "scheduler_metadata"),
        )
    ),
    (fa3.flash_attn_with_kvcache, "qkv", {"attention_chunk": 4}),
]


@pytest.mark.parametrize("function, given, option", REFUSED, ids=lambda x: getattr(x, "__name__", None) or str(list(x)[0]))
def test_refused_by_name(function, given, option):
    q = tensors()[0]
    ((name, value),) = option.items()
    came = r"a tensor of shape \(2,\)" if value is SOME else value
    message = f"{name} is not supported by cuflash's {function.__name__}; got {came}: only .* is allowed"
    with pytest.raises(NotImplementedError, match=message):
        function(*(q for _ in given), **option)


def test_neutral_values_are_not_refused():
    q, k, v = tensors()
    same([fa2.flash_attn_func(q, k, v, dropout_p=0, alibi_slopes=None)], plain(q, k, v)[:1])
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "rotary_seqlens": lengths, "rotary_interleaved": False}
    same([fa3.flash_attn_with_kvcache(q, k, v, **options)], [fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)])


# ------------------------------------------------------------------------------------------------------------
# Caches


def test_what_a_cache_is_called_with(monkeypatch):
    called = []

    def spy(q, k_cache, v_cache, **options):
        called.append((q, k_cache, v_cache, options, torch.is_grad_enabled()))
        return (q, torch.tensor([-torch.inf, 1.0])) if options["return_lse"] else q

    monkeypatch.setattr(importlib.import_module("cuflash.torch"), "_attention_with_kvcache", spy)
    q, k, v = tensors()
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    out, lse = fa2.flash_attn_with_kvcache(
        *(q, k, v, k[:, :1], v[:, :1], None, None, lengths), block_table=SOME, num_splits=2, return_softmax_lse=True
    )
    assert out is q and lse.tolist() == [torch.inf, 1.0]
    assert fa2.flash_attn_with_kvcache(q, k, v) is q
    out, lse = fa3.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=5,
        page_table=SOME,
        causal=True,
        window_size=(3, 0),
        return_softmax_lse=True,
    )
    assert lse.tolist() == [-torch.inf, 1.0]
    neutral = {
        **dict.fromkeys(("k", "v", "cache_seqlens", "cache_batch_idx", "block_table", "softmax_scale")),
        **{"causal": False, "window": (-1, -1), "softcap": 0.0, "num_splits": 0, "return_lse": True},
    }
    expected = [
        {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": lengths, "block_table": SOME, "num_splits": 2},
        {"return_lse": False},
        {"cache_seqlens": 5, "block_table": SOME, "causal": True, "window": (3, 0)},
    ]
    for (got_q, k_cache, v_cache, options, grad), changes in zip(called, expected, strict=True):
        assert got_q is q and k_cache is k and v_cache is v and not grad
        wanted = neutral | changes
        assert options.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(options[name], value), name
            else:
                assert options[name] == value, name


def test_cache_batch_idx_says_which_row_of_a_page_table_is_meant():
    """In FlashAttention 3; in FlashAttention 2 the two exclude each other."""
    q, k, v = (x.detach() for x in tensors(seqlen_q=2, seqlen_k=12))
    pages = [x.unflatten(1, (3, 4)).flatten(0, 1) for x in (k, v)]
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    options = {"cache_seqlens": torch.tensor([9, 11], dtype=torch.int32), "causal": True}
    order = torch.tensor([1, 0], dtype=torch.int32)
    got = fa3.flash_attn_with_kvcache(q, *pages, page_table=table, cache_batch_idx=order, **options)
    same([got], [fa3.flash_attn_with_kvcache(q, k.flip(0), v.flip(0), **options)])
    with pytest.raises(ValueError, match="cache_batch_idx is for a cache that is not paged"):
        fa2.flash_attn_with_kvcache(q, *pages, block_table=table, cache_batch_idx=order, **options)


def test_caches():
    q, k, v = (x.detach() for x in tensors(seqlen_q=2, seqlen_k=12))
    new_k, new_v = (x.detach() for x in tensors(seqlen_k=2, seed=1)[1:])
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    for module, empty in ((fa2, torch.inf), (fa3, -torch.inf)):
        k_cache, v_cache = k.clone(), v.clone()
        out, lse = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, new_k, new_v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
        )
        for i, length in enumerate(lengths.tolist()):
            same([k_cache[i, length : length + 2], v_cache[i, length : length + 2]], [new_k[i], new_v[i]])
            expected = plain(q[i], k_cache[i, : length + 2], v_cache[i, : length + 2], causal=True)
            torch.testing.assert_close((out[i], lse[i]), expected)
        lse = module.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=1, causal=True, return_softmax_lse=True)[1]
        assert (lse[:, :, 0] == empty).all() and lse[:, :, 1].isfinite().all()


# ------------------------------------------------------------------------------------------------------------
# Padding


def test_unpad_and_pad():
    x = torch.randn(3, 4, 2, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    unused = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]])
    rows, indices, cu_seqlens, longest, used = padding.unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 2, 8, 9] and cu_seqlens.tolist() == [0, 3, 3, 5] and longest == 3
    assert used.tolist() == [3, 0, 2] and cu_seqlens.dtype == used.dtype == torch.int32
    same([rows], [torch.cat([x[0, :3], x[2, :2]])])
    back = padding.pad_input(rows, indices, 3, 4)
    same([back], [x * mask[..., None, None]])
    assert torch.autograd.gradcheck(lambda y: padding.pad_input(padding.unpad_input(y, mask)[0] * 2, indices, 3, 4), x)
    rows, indices, cu_seqlens, longest, used = padding.unpad_input(x, mask.bool(), unused.bool())
    assert indices.tolist() == [0, 1, 2, 3, 8, 9, 10] and cu_seqlens.tolist() == [0, 4, 4, 7] and longest == 4
    assert used.tolist() == [3, 0, 2] and rows.shape == (7, 2, 5)


def test_unpad_concatenated_sequences():
    x = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    same([rows], [torch.cat([x[0, :5], x[1, :5], x[2]])])
    same([padding.pad_input(rows, indices, 3, 6)[:2, 5]], [torch.zeros(2, 2)])


def test_rows_by_index():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([3, 0])
    same([padding.index_first_axis(x, indices)], [x[indices]])
    picked, rest = padding.index_first_axis_residual(x, indices)
    same([picked, rest], [x[indices], x])
    assert not rest.requires_grad
    put = padding.index_put_first_axis(picked, indices, 4)
    assert put.shape == (4, 2) and (put[[1, 2]] == 0).all()
    same([put[indices]], [picked])
    assert torch.autograd.gradcheck(lambda y: padding.index_put_first_axis(y, indices, 4), picked)
