"""What gradients must not see: masked, unseen and padding positions, whatever they hold; and where real NaN goes."""

import numpy as np
import pytest
from support import (
    FEW,
    Gradients,
    Layout,
    assert_same,
    backward,
    check_backward,
    compute,
    dlse_of,
    dout_of,
    inputs,
    on_pairs,
)

from cuflash import oracle

SPECIAL = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
MASKS = {
    "causal": dict(causal=True),
    "window": dict(window=(40, 3)),
    "left": dict(window=(70, None)),
    "right": dict(window=(None, 5)),
    "softcap": dict(causal=True, softcap=2.0),  # Inf in q leaves lse finite
    "none": {},
}


def assert_untouched(backend, got, clean, touched, what):
    """Elements outside of `touched` are those of the clean run: dk and dv to the bit on a GPU."""
    kept = [np.where(mask, 0, x).astype(x.dtype) for x, mask in zip(got, touched, strict=True)]
    expected = [np.where(mask, 0, x).astype(x.dtype) for x, mask in zip(clean, touched, strict=True)]
    assert_same(backend, Gradients(*kept), Gradients(*expected), what, exact=("dk", "dv"))


# ------------------------------------------------------------------------------------------------------------
# No influence


@on_pairs(*FEW)
@pytest.mark.parametrize("value", SPECIAL)
def test_keys_that_no_row_sees(backend, dtype, value):
    """To the left of every window; some lie in tiles that are visited all the same. Their dk and dv are 0."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=100, seqlen_k=300, heads_q=4, heads_k=2)
    dout = dout_of(q, v)
    unseen = slice(0, 300 - 100 - 20)
    k[:, unseen], v[:, unseen] = 0, 0
    how = dict(window=(20, 0), deterministic=True)
    clean = check_backward(backend, dout, q, k, v, into=Layout(pad=(0, 0, 0, 8)), **how)
    k[:, unseen], v[:, unseen] = SPECIAL[value], SPECIAL[value]
    poisoned = check_backward(backend, dout, q, k, v, into=Layout(pad=(0, 0, 0, 8)), **how)
    assert_same(backend, poisoned, clean, "poisoned")
    assert (poisoned.dk[:, unseen] == 0).all() and (poisoned.dv[:, unseen] == 0).all()


@on_pairs(*FEW)
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, options, empty",
    [
        (5, 2, dict(causal=True), slice(0, 3)),
        (129, 1, dict(causal=True), slice(0, 128)),
        (256, 3, dict(causal=True), slice(0, 253)),
        (190, 65, dict(causal=True), slice(0, 125)),
        (300, 100, dict(window=(5, 20)), slice(0, 180)),
    ],
    ids=str,
)
def test_rows_that_see_no_key(backend, dtype, value, seqlen_q, seqlen_k, options, empty):
    """Their dq is 0, and what stands in their q, dout, out and dlse reaches nothing."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    dout, dlse = dout_of(q, v), dlse_of(q)
    how = dict(options, deterministic=True)
    clean = check_backward(backend, dout, q, k, v, dlse=dlse, into=Layout(pad=(0, 0, 0, 8)), **how)
    out, lse = compute(backend, q, k, v, **options)
    assert (lse[..., empty] == -np.inf).all()
    for x in (q, dout, out):
        x[:, empty] = SPECIAL[value]
    dlse[..., empty] = SPECIAL[value]
    poisoned = check_backward(backend, dout, q, k, v, dlse=dlse, state=(out, lse), into=Layout(pad=(0, 0, 0, 8)), **how)
    assert_same(backend, poisoned, clean, "poisoned")
    assert (poisoned.dq[:, empty] == 0).all()


@on_pairs(*FEW)
def test_a_band_across_padding(backend, dtype):
    """A row of one sequence sees nothing, with NaN in its dout: nothing else of the batch may know."""
    q, k, v = inputs(dtype, batch=2, seqlen_q=4, seqlen_k=2, head_dim=8)
    dout = dout_of(q, v)
    out, lse = compute(backend, q, k, v, window=(1, 0))
    dout[1, :2], q[1, :2] = np.nan, np.nan
    gradients = check_backward(backend, dout, q, k, v, state=(out, lse), window=(1, 0))
    assert all(np.isfinite(x.astype(np.float64)).all() for x in gradients)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm80-bfloat16")
def test_memory_after_the_last_row_and_channel(backend, dtype):
    """What pads tiles in memory is NaN or zeros: the same gradients, and no byte of it written."""
    for head_dim in (64, 72, 33):
        q, k, v = inputs(dtype, seqlen_q=70, seqlen_k=100, head_dim=head_dim)
        dout = dout_of(q, v)
        clean = check_backward(backend, dout, q, k, v, deterministic=True)
        step = 8 if head_dim % 8 == 0 else 1
        layout = Layout(pad=(0, 0, 40 * step, 8 * step))
        poisoned = backward(backend, dout, q, k, v, layouts=layout, into=layout, deterministic=True)
        assert_same(backend, poisoned, clean, f"head_dim {head_dim}")


# ------------------------------------------------------------------------------------------------------------
# NaN and Inf that are seen


PLACES = (0, 1, 63, 64, 100, 149)


@on_pairs(*FEW)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
def test_nan_reaches_what_is_connected_with_it(backend, dtype, mask, name):
    """One row of one array: gradients of rows and keys that no visible pair connects with it are unchanged."""
    options = MASKS[mask]
    q, k, v = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1)
    arrays = dict(dout=dout_of(q, v), q=q, k=k, v=v, dlse=dlse_of(q))
    clean = check_backward(backend, **arrays, **options)
    for place in PLACES:
        poisoned = {other: x.copy() for other, x in arrays.items()}
        if name == "dlse":
            poisoned["dlse"][0, 1, place] = np.nan
        else:
            poisoned[name][0, place, 0, place % 64] = np.nan
        gradients = check_backward(backend, **poisoned, **options)
        touched = [may for _, may in oracle.contaminated(**poisoned, **options)]
        assert any(mask.any() for mask in touched)
        assert_untouched(backend, gradients, clean, touched, f"{name} {place}")


@on_pairs(*FEW)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("special", ["inf", "-inf"])
def test_infinity_among_the_inputs(backend, dtype, mask, special):
    options = MASKS[mask]
    for name in ("q", "k", "v", "dout"):
        q, k, v = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1)
        arrays = dict(dout=dout_of(q, v), q=q, k=k, v=v)
        clean = backward(backend, **arrays, **options)
        arrays[name][0, [20, 100], 0, [3, 60]] = SPECIAL[special]
        gradients = check_backward(backend, **arrays, **options)
        touched = [may for _, may in oracle.contaminated(**arrays, **options)]
        assert_untouched(backend, gradients, clean, touched, name)


@on_pairs(*FEW)
def test_several_special_values_at_once(backend, dtype):
    q, k, v = inputs(dtype, batch=1, seqlen_q=200, heads_q=2, heads_k=1, head_dim=64, head_dim_v=96)
    dout = dout_of(q, v)
    v[0, 20, 0, :8], v[0, 21, 0, 4:12], v[0, 190, 0] = np.inf, -np.inf, np.nan
    k[0, 60, 0, 0], q[0, 130, 1, 63], dout[0, 170, 0, 95] = np.nan, np.inf, np.nan
    for options in (dict(causal=True), dict(window=(20, 9))):
        check_backward(backend, dout, q, k, v, **options)


@on_pairs(*FEW)
def test_another_head_and_sequence_do_not_see_it(backend, dtype):
    q, k, v = inputs(dtype, batch=2, seqlen_q=70, heads_q=4, heads_k=2)
    dout = dout_of(q, v)
    clean = backward(backend, dout, q, k, v, deterministic=True)
    for name, head in (("q", 1), ("dout", 0), ("k", 0), ("v", 0)):
        arrays = {other: x.copy() for other, x in dict(dout=dout, q=q, k=k, v=v).items()}
        arrays[name][0, 5, head] = np.nan
        gradients = backward(backend, **arrays, deterministic=True)
        assert_same(backend, Gradients(*(x[1] for x in gradients)), Gradients(*(x[1] for x in clean)), "sequence 1")
        parts = [Gradients(dq[0, :, 2:], dk[0, :, 1:], dv[0, :, 1:]) for dq, dk, dv in (gradients, clean)]
        assert_same(backend, *parts, "key head 1")
