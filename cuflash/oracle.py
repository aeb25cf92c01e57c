"""The judge: attention in float64, straightforward, O(seqlen_q * seqlen_k), independent of every other path.

``attention`` is the truth, ``unfused`` is what plain attention in the inputs' own dtype makes of it, and
``judge`` holds a result against both: its error may be at most twice that of ``unfused``, plus a floor.
``attention_backward``, ``unfused_backward`` and ``judge_backward`` are the same for the gradients, the
functions named ``varlen`` loop over the sequences of a packed batch, and those named ``with_kvcache`` over
requests whose keys lie in a cache. ``merge_attention`` joins results on parts of the keys.

The conventions are those of the library, written down a second time on purpose:

* Key j is visible to query i iff it is inside the window around j = i + seqlen_k - seqlen_q; ``visible`` is
  that table. Masked keys and values have no influence, whatever they hold.
* A logit is ``softmax_scale * q.k``, then ``softcap * tanh(logit / softcap)``, then masked.
* A row that sees no key, or whose visible logits are all -inf, has out 0 and lse -inf. A row that sees a
  logit of nan or +inf has out and lse nan. A visible value of nan or inf reaches just the rows that see it.
* Gradients pass through visible pairs only, and not through rows whose lse is -inf, whatever those hold.
  ``contaminated`` says where nan and inf in visible places show in the gradients.
* A packed row that no sequence covers has out 0, lse -inf and gradients of 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp, softmax

# Unit roundoff: the largest relative error of one rounding to nearest.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# What rounding may lose below all relative error: half a subnormal, or, in float32, one that was flushed to 0.
_UNDERFLOW = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
_LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120, "float32": 2.0**128 - 2.0**104,
            "float64": float(np.finfo(np.float64).max)}
_SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}

# The floor, in units of the rounding error that no implementation can avoid (see `_exact`): one rounding is
# that of the output, one that of the weights, which peers do as well. `unfused` can be free of both by luck
# (a single key, few elements), hence 2. An RMS over many elements has no such luck, and a rounding is
# mostly well below its bound. A wrong element is far above: even an average key too few among 1000 moves a
# bfloat16 output by 6 such units and more.
MAX_FLOOR = 2.0
RMS_FLOOR = 0.25


def visible(seqlen_q: int, seqlen_k: int, causal: bool = False, window=None) -> np.ndarray:
    """(seqlen_q, seqlen_k) of bool: True where the query sees the key.

    ``window`` is (left, right), inclusive, from the bottom-right diagonal; None or -1 leaves a side open.
    """
    left, right = (None, None) if window is None else window
    key = np.arange(seqlen_k)[None, :]
    diagonal = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    table = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        table &= key <= diagonal
    reach = seqlen_q + seqlen_k             # as good as unbounded, and fits the index dtype
    if left is not None and left != -1:
        table &= key >= diagonal - min(left, reach)
    if right is not None and right != -1:
        table &= key <= diagonal + min(right, reach)
    return table


def attention(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """Exact attention of q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim) and
    v (batch, seqlen_k, heads_k, head_dim_v), NumPy arrays of any float dtype.

    Returns (out, lse) in float64: (batch, seqlen_q, heads_q, head_dim_v) and, in natural logarithms, (batch,
    heads_q, seqlen_q).
    """
    return _exact(q, k, v, causal, window, softmax_scale, softcap)[:2]


def unfused(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """Plain attention in the dtype of the inputs, as a careful user writes it without a fused kernel.

    Logits and softmax in float32 from the inputs as they are, the weights rounded to the inputs' dtype,
    their product with V accumulated in float32 and rounded once (float32 and float64 stay in their dtype
    throughout). Same shapes, options and conventions as `attention`; returns (out in the inputs' dtype, lse
    in float32, or in float64 for float64).
    """
    dtype = q.dtype
    compute = np.float64 if dtype == np.float64 else np.float32
    q, k, v = (np.asarray(x).astype(compute) for x in (q, k, v))
    options = _Options.of(q, k, causal, window, softmax_scale, softcap)
    out = np.empty((*q.shape[:3], v.shape[3]), compute)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), compute)
    for b, h, hk in _heads(q, k):
        logits = options.logits(q[b, :, h], k[b, :, hk])
        with np.errstate(all="ignore"):
            row_max = logits.max(axis=1, keepdims=True, initial=-np.inf)
            weights = np.exp(logits - np.where(row_max == -np.inf, compute(0), row_max))
            row_sum = weights.sum(axis=1, keepdims=True)
            weights /= np.where(row_sum == 0, compute(1), row_sum)
            lse[b, h] = (row_max + np.log(row_sum))[:, 0]
            weights = weights.astype(dtype).astype(compute)
        out[b, :, h] = _weighted_values(weights, v[b, :, hk], options.table)
    with np.errstate(all="ignore"):
        return out.astype(dtype), lse


@dataclass(frozen=True)
class Judgement:
    """A result held against `attention` and `unfused`; ``ok`` says whether it passed and ``why`` not.

    ``max_err`` and ``rms_err`` are absolute errors over all elements, ``ref_*`` those of `unfused`,
    ``*_budget`` what was allowed. ``scaled_err`` is the largest error in units of its element's own
    rounding noise, so that the small outputs of late causal rows are not judged by the large ones of the
    first rows. ``lse_err`` is relative (absolute near 0), and 0 where no lse was given.
    """

    max_err: float
    rms_err: float
    ref_max_err: float
    ref_rms_err: float
    max_budget: float
    rms_budget: float
    scaled_err: float
    ref_scaled_err: float
    scaled_budget: float
    lse_err: float
    lse_budget: float
    ok: bool
    why: str


def judge(out, lse, q, k, v, **options) -> Judgement:
    """Judge ``out`` and ``lse`` as the attention of q, k and v under ``options``, those of `attention`.

    out is (batch, seqlen_q, heads_q, head_dim_v), lse (batch, heads_q, seqlen_q) or None to leave it out, all
    NumPy arrays, bfloat16 that of ml_dtypes. nan, inf and -inf must stand in exactly the places where the
    truth has them; the rest must keep to the budget.
    """
    truth, true_lse, noise, spread = _exact(q, k, v, **options)
    reference, _ = unfused(q, k, v, **options)
    return _judge(out, lse, truth, true_lse, noise, spread, reference, q.dtype)


def _judge(out, lse, truth, true_lse, noise, spread, reference, dtype) -> Judgement:
    finite, faults = np.isfinite(truth), []
    result = _of_shape("out", out, truth, faults)
    if result is not None:
        faults += _misplaced("out", result, truth)
    figures = _figures(result, truth, noise, reference, finite, faults)

    lse_err, lse_budget = 0.0, 1e-13 if dtype == np.float64 else 1e-5
    if lse is not None:
        lse = _of_shape("lse", lse, true_lse, faults)
        if lse is None:
            lse_err = np.inf
        else:
            faults += _misplaced("lse", lse, true_lse)
            known = np.isfinite(true_lse)
            # Logits that cancel (|q| |k| far above their product) have an error that no lse can be free of.
            unit = 1 + np.abs(true_lse[known]) + 4 * spread[known] / lse_budget
            lse_err = float((np.abs(lse[known] - true_lse[known]) / unit).max(initial=0.0))
            if not lse_err <= lse_budget:
                faults.append(f"lse error {lse_err:.3g} is over {lse_budget:.3g}")
    return Judgement(**figures, lse_err=lse_err, lse_budget=lse_budget, ok=not faults, why="; ".join(faults))


def _of_shape(name, result, truth, faults):
    """The result in float64, or None and a fault if it has not the shape of the truth."""
    if np.shape(result) != truth.shape:
        faults.append(f"{name} has shape {np.shape(result)}, not {truth.shape}")
        return None
    return np.asarray(result).astype(np.float64)


def _figures(result, truth, noise, reference, compared, faults, rows=None) -> dict[str, float]:
    """The errors of result (None: of a wrong shape) and reference where ``compared``, and their budgets.

    Adds to the faults what is over budget. ``rows`` is the number of errors that are independent, if not that
    of elements.
    """
    max_err = rms_err = scaled_err = np.inf
    if result is not None:
        max_err, rms_err, scaled_err = _errors(result, truth, noise, compared)
    reference = reference.astype(np.float64)
    known = compared & np.isfinite(reference)   # where float32 logits overflow, only the floor is left
    ref_max_err, ref_rms_err, ref_scaled_err = _errors(reference, truth, noise, known)

    floors = noise[compared]
    # An RMS of few elements is as lucky as a maximum.
    rms_floor = min(MAX_FLOOR, RMS_FLOOR + 2 / max(1, floors.size if rows is None else rows)**0.5)
    max_budget = 2 * ref_max_err + MAX_FLOOR * float(floors.max(initial=0.0))
    rms_budget = 2 * ref_rms_err + rms_floor * _rms(floors)
    scaled_budget = 2 * ref_scaled_err + MAX_FLOOR
    for name, error, budget in (("max error", max_err, max_budget), ("RMS error", rms_err, rms_budget),
                                ("error over rounding noise", scaled_err, scaled_budget)):
        if result is not None and not error <= budget:
            faults.append(f"{name} {error:.3g} is over {budget:.3g}")
    return {"max_err": max_err, "rms_err": rms_err, "ref_max_err": ref_max_err, "ref_rms_err": ref_rms_err,
            "max_budget": max_budget, "rms_budget": rms_budget, "scaled_err": scaled_err,
            "ref_scaled_err": ref_scaled_err, "scaled_budget": scaled_budget}


def attention_backward(dout, q, k, v, *, dlse=None, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """The gradients of ``sum(dout * out) + sum(dlse * lse)`` for the (out, lse) of `attention`.

    dout is (batch, seqlen_q, heads_q, head_dim_v), dlse (batch, heads_q, seqlen_q) or None; q, k, v and the
    options are those of `attention`. Returns (dq, dk, dv) in float64, of the shapes of q, k and v.

    With the logits s, the weights P = softmax(s) and dP = dout v^T::

        ds = P * (dP - sum(P * dP) + dlse)       # d out / d s, and d lse_i / d s_ij = P_ij
        dq = scale * (ds * slope) k              # slope: 1 - tanh^2 of the softcap, 1 without
        dk = scale * (ds * slope)^T q            # over all rows and query heads that read the key head
        dv = P^T dout
    """
    return _exact_backward(dout, q, k, v, dlse, causal, window, softmax_scale, softcap)[0]


def unfused_backward(dout, q, k, v, out=None, *, dlse=None, causal=False, window=None, softmax_scale=None,
                     softcap=0.0):
    """The gradients as plain attention in the dtype of the inputs has them.

    Logits, softmax and the gradients of both in float32; the weights and ds rounded to the inputs' dtype
    before their products, which are summed in float32, over a group of heads as well, and rounded once
    (float32 and float64 stay in their dtype throughout). sum(P * dP) is taken as sum(dout * out), with out
    in the inputs' dtype, that of `unfused` unless given. Returns (dq, dk, dv) in the inputs' dtype.
    """
    dtype = q.dtype
    compute = np.float64 if dtype == np.float64 else np.float32
    if out is None:
        out = unfused(q, k, v, causal=causal, window=window, softmax_scale=softmax_scale, softcap=softcap)[0]
    dout, q, k, v, out = (np.asarray(x).astype(compute) for x in (dout, q, k, v, out))
    dlse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), compute) if dlse is None else np.asarray(dlse, compute)
    options = _Options.of(q, k, causal, window, softmax_scale, softcap)
    scale = compute(options.scale)
    dq, dk, dv = np.zeros(q.shape, compute), np.zeros(k.shape, compute), np.zeros(v.shape, compute)
    for b, h, hk in _heads(q, k):
        head_q, head_k, head_v, head_dout = q[b, :, h], k[b, :, hk], v[b, :, hk], dout[b, :, h]
        logits = options.logits(head_q, head_k)
        with np.errstate(all="ignore"):
            row_max = logits.max(axis=1, keepdims=True, initial=-np.inf)
            table = options.table & (row_max != -np.inf)
            weights = np.where(table, np.exp(logits - row_max), compute(0))
            weights = np.where(table, weights / weights.sum(axis=1, keepdims=True), compute(0))
            delta = (head_dout * out[b, :, h]).sum(axis=1) - dlse[b, h]
            ds = weights * (head_dout @ head_v.T - delta[:, None])
            if options.softcap:
                ds *= 1 - (logits / options.cap(compute))**2
            ds = np.where(table, ds, compute(0)).astype(dtype).astype(compute)
            weights = weights.astype(dtype).astype(compute)
            dq[b, :, h] = scale * _through(ds, head_k, table)
            dk[b, :, hk] += scale * _through(ds.T, head_q, table.T)
            dv[b, :, hk] += _through(weights.T, head_dout, table.T)
    with np.errstate(all="ignore"):
        return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype)


def contaminated(dout, q, k, v, *, dlse=None, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """Where nan and inf of the inputs show in the gradients: (must, may) of dq, of dk and of dv, all of bool.

    What ``may`` leaves out must be finite, what ``must`` holds may not be. A row is touched if its own q, dout
    or dlse, or a key or value that it sees, is not finite. ``may`` is each touched row in dq, and each key that
    a touched row sees in dk and dv (for dv, dlse and the values touch nothing). Rows of lse -inf pass nothing.

    ``must`` counts only what no order of summation and no shortcut for weights of 0 can avoid: pairs with a
    weight above 2^-100. All of a row that has no softmax, or whose dout, dlse or values are not finite, in dq
    and in the dk of its keys; in dv the keys of the former, and the channels that are not finite in dout; and
    the channels that are not finite in a k or q with a finite weight (which takes a softcap), in dq and dk.
    """
    dout, q, k, v = (np.asarray(x).astype(np.float64) for x in (dout, q, k, v))
    options = _Options.of(q, k, causal, window, softmax_scale, softcap)
    bad_dout, bad_q, bad_k, bad_v = (~np.isfinite(x) for x in (dout, q, k, v))
    bad_dlse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), bool) if dlse is None else ~np.isfinite(dlse)
    (must_dq, may_dq), (must_dk, may_dk), (must_dv, may_dv) = masks = [
        (np.zeros(x.shape, bool), np.zeros(x.shape, bool)) for x in (q, k, v)]
    with np.errstate(all="ignore"):
        largest = options.scale * np.abs(q).max(initial=0) * np.abs(k).max(initial=0) * q.shape[3]
    if np.isfinite(largest) and not any(x.any() for x in (bad_dout, bad_v, bad_dlse)):
        return masks                        # all is finite, and so is every logit

    def pairwise(pairs, channels):
        """Which channels, rows x head_dim, have a partner in pairs."""
        return pairs.astype(np.float64) @ channels.astype(np.float64) > 0

    for b, h, hk in _heads(q, k):
        logits = options.logits(q[b, :, h], k[b, :, hk])
        weights, lse = _softmax(logits)
        pairs = options.table & (lse != -np.inf)[:, None]
        with np.errstate(invalid="ignore"):
            strong = pairs & np.where(np.isnan(weights), logits != -np.inf, weights > 2.0**-100)
        undefined = np.isnan(lse)[:, None]
        own = bad_q[b, :, h].any(axis=1, keepdims=True) | bad_dout[b, :, h].any(axis=1, keepdims=True)
        by_keys = undefined | own | pairwise(pairs, bad_k[b, :, hk].any(axis=1, keepdims=True))
        by_values = bad_dlse[b, h][:, None] | pairwise(pairs, bad_v[b, :, hk].any(axis=1, keepdims=True))
        touched = (by_keys | by_values) & pairs.any(axis=1, keepdims=True)
        may_dq[b, :, h] = touched
        may_dk[b, :, hk] |= (pairs & touched).any(axis=0)[:, None]
        may_dv[b, :, hk] |= (pairs & by_keys).any(axis=0)[:, None]

        lost = (undefined | bad_dout[b, :, h].any(axis=1, keepdims=True) | bad_dlse[b, h][:, None]
                | pairwise(strong, bad_v[b, :, hk].any(axis=1, keepdims=True)))
        must_dq[b, :, h] = (strong & lost).any(axis=1)[:, None] | pairwise(strong, bad_k[b, :, hk])
        must_dk[b, :, hk] |= (strong & lost).any(axis=0)[:, None] | pairwise(strong.T, bad_q[b, :, h])
        must_dv[b, :, hk] |= (strong & undefined).any(axis=0)[:, None] | pairwise(strong.T, bad_dout[b, :, h])
    return masks


@dataclass(frozen=True)
class GradientJudgement:
    """One gradient held against the truth and the unfused one; the fields are those of `Judgement`."""

    max_err: float
    rms_err: float
    ref_max_err: float
    ref_rms_err: float
    max_budget: float
    rms_budget: float
    scaled_err: float
    ref_scaled_err: float
    scaled_budget: float
    ok: bool
    why: str


@dataclass(frozen=True)
class BackwardJudgement:
    """The judgements of the three gradients; ``ok`` if all are, ``why`` names the gradients that are not."""

    dq: GradientJudgement
    dk: GradientJudgement
    dv: GradientJudgement

    @property
    def ok(self) -> bool:
        return self.dq.ok and self.dk.ok and self.dv.ok

    @property
    def why(self) -> str:
        judgements = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        return "; ".join(f"{name}: {judgement.why}" for name, judgement in judgements.items() if not judgement.ok)


def judge_backward(dq, dk, dv, dout, q, k, v, *, dlse=None, **options) -> BackwardJudgement:
    """Judge dq, dk and dv, of the shapes of q, k and v, as the gradients that `attention_backward` gives.

    Each must keep to the budget of `judge`, with `unfused_backward` for `unfused`. Elements that `contaminated`
    lets be nan or inf are not compared; the others must be finite (inf only where the truth is past the
    largest number of the dtype), and those that must not be finite are not. Rows that see nothing, and keys
    that nothing sees, have gradients of exactly 0.
    """
    truths, noises = _exact_backward(dout, q, k, v, dlse, **options)
    references = unfused_backward(dout, q, k, v, dlse=dlse, **options)
    masks = contaminated(dout, q, k, v, dlse=dlse, **options)
    return _judge_backward((dq, dk, dv), truths, noises, references, masks, str(q.dtype))


def _judge_backward(results, truths, noises, references, masks, dtype: str) -> BackwardJudgement:
    # The error of a row's lse is in all that the row gives to dv: as many are independent as q has rows.
    rows = math.prod(truths[0].shape[:-1])
    return BackwardJudgement(*(
        _judge_gradient(*each, dtype, rows) for each in zip(results, truths, noises, references, masks)))


def _judge_gradient(result, truth, noise, reference, masks, dtype: str, rows: int) -> GradientJudgement:
    faults = []
    must, may = masks
    compared = ~may & np.isfinite(truth)
    result = _of_shape("it", result, truth, faults)
    if result is not None:
        with np.errstate(invalid="ignore"):
            past = compared & (result == np.copysign(np.inf, truth)) & (np.abs(truth) + 4 * noise > _LARGEST[dtype])
        compared &= ~past
        for what, wrong in (("not finite", ~np.isfinite(result) & compared),
                            ("finite by mistake", np.isfinite(result) & must)):
            if wrong.any():
                place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
                faults.append(f"{what} in {int(wrong.sum())} places, first at {place}: {result[place]} "
                              f"for {truth[place]}")
    figures = _figures(result, truth, noise, reference, compared, faults, rows)
    return GradientJudgement(**figures, ok=not faults, why="; ".join(faults))


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, seqused_q=None, seqused_k=None, **options):
    """`attention` of each sequence of a packed batch.

    q is (total_q, heads_q, head_dim), k (total_k, heads_k, head_dim), v (total_k, heads_k, head_dim_v).
    Sequence n has the rows from cu_seqlens_q[n] to cu_seqlens_q[n + 1] of q and likewise of k and v, or the
    first seqused_q[n] and seqused_k[n] of them; the mask counts these lengths. Returns (out, lse) in float64:
    (total_q, heads_q, head_dim_v), 0 in rows of no sequence, and (heads_q, total_q), -inf there.
    """
    return _exact_varlen(q, k, v, _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), options)[:2]


def attention_varlen_backward(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, *, seqused_q=None, seqused_k=None,
                              dlse=None, **options):
    """`attention_backward` of each sequence of a packed batch, laid out as in `attention_varlen`.

    dlse is (heads_q, total_q) or None. Returns (dq, dk, dv) in float64, 0 in rows of no sequence.
    """
    gradients = [np.zeros(np.shape(x)) for x in (q, k, v)]
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        _scatter(gradients, rows, keys, attention_backward(
            dout[None, rows], q[None, rows], k[None, keys], v[None, keys], dlse=_dlse_of(dlse, rows), **options))
    return tuple(gradients)


def judge_varlen(out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, *, seqused_q=None, seqused_k=None,
                 **options) -> Judgement:
    """Judge ``out`` and ``lse`` (or None) as what `attention_varlen` gives, by the rules of `judge`.

    Rows of no sequence must be exactly 0, with an lse of -inf.
    """
    sequences = _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    reference = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    for rows, keys in sequences:
        reference[rows] = unfused(q[None, rows], k[None, keys], v[None, keys], **options)[0][0]
    return _judge(out, lse, *_exact_varlen(q, k, v, sequences, options), reference, q.dtype)


def judge_varlen_backward(dq, dk, dv, dout, q, k, v, cu_seqlens_q, cu_seqlens_k, *, seqused_q=None,
                          seqused_k=None, dlse=None, **options) -> BackwardJudgement:
    """Judge dq, dk and dv as what `attention_varlen_backward` gives, by the rules of `judge_backward`.

    Rows of no sequence must be exactly 0.
    """
    dtype = q.dtype
    truths, noises = ([np.zeros(x.shape) for x in (q, k, v)] for _ in range(2))
    references = [np.zeros(x.shape, dtype) for x in (q, k, v)]
    must, may = ([np.zeros(x.shape, bool) for x in (q, k, v)] for _ in range(2))
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        arrays = dout[None, rows], q[None, rows], k[None, keys], v[None, keys]
        of_row = _dlse_of(dlse, rows)
        truth, noise = _exact_backward(*arrays, of_row, **options)
        _scatter(truths, rows, keys, truth)
        _scatter(noises, rows, keys, noise)
        _scatter(references, rows, keys, unfused_backward(*arrays, dlse=of_row, **options))
        for which, masks in zip((must, may), zip(*contaminated(*arrays, dlse=of_row, **options))):
            _scatter(which, rows, keys, masks)
    return _judge_backward((dq, dk, dv), truths, noises, references, list(zip(must, may)), str(dtype))


def attention_with_kvcache(q, k_cache, v_cache, *, k=None, v=None, cache_seqlens=None, cache_batch_idx=None,
                           block_table=None, causal=True, **options):
    """`attention` of each request on its keys in a cache, and on the new ones of k and v behind them.

    q is (batch, seqlen_q, heads_q, head_dim). k_cache and v_cache are (cache_batch, max_seqlen, heads_k, dim),
    of which request b has number cache_batch_idx[b] (b by default); or, with block_table (batch, max_pages),
    (num_pages, page_size, heads_k, dim), and key j of request b is in page block_table[b, j // page_size] at
    j % page_size. cache_seqlens is how many keys are in the cache, for each request or for all (None: as many
    as fit). k and v (batch, seqlen_new, heads_k, dim) go behind them, as far as there is room.

    Returns (out, lse, k_cache, v_cache): out and lse as `attention` gives them, in float64, and copies of the
    caches as they are afterwards. Where two requests write to one place, the later one stays.
    """
    requests, k_cache, v_cache = _requests(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table)
    out, lse, _, _ = _exact_with_kvcache(q, v_cache.shape[3], requests, {"causal": causal, **options})
    return out, lse, k_cache, v_cache


def judge_with_kvcache(out, lse, q, k_cache, v_cache, **options) -> Judgement:
    """Judge ``out`` and ``lse`` (or None) as what `attention_with_kvcache` gives, by the rules of `judge`.

    The caches are those before the call. A request without keys must have exactly 0, with an lse of -inf.
    """
    return judge_of_kvcache(q, k_cache, v_cache, **options)(out, lse)


def judge_of_kvcache(q, k_cache, v_cache, *, k=None, v=None, cache_seqlens=None, cache_batch_idx=None,
                     block_table=None, causal=True, **options):
    """`judge_with_kvcache` as a function of (out, lse): for many results of one call the truth is computed once."""
    options = {"causal": causal, **options}
    requests, _, _ = _requests(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table)
    reference = np.zeros((*q.shape[:3], v_cache.shape[3]), q.dtype)
    for b, (keys, values) in enumerate(requests):
        reference[b] = unfused(q[b][None], keys[None], values[None], **options)[0][0]
    exact = _exact_with_kvcache(q, v_cache.shape[3], requests, options)
    return lambda out, lse: _judge(out, lse, *exact, reference, q.dtype)


def _requests(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table):
    """(keys and values of each request, one after the other in memory; k_cache and v_cache afterwards)."""
    batch, rows = q.shape[0], k_cache.shape[1]
    capacity = rows if block_table is None else rows * block_table.shape[1]

    def place(b, key):
        if block_table is not None:
            return int(block_table[b, key // rows]), key % rows
        return b if cache_batch_idx is None else int(cache_batch_idx[b]), key

    before, after, requests = (k_cache, v_cache), (k_cache.copy(), v_cache.copy()), []
    for b in range(batch):
        cached = capacity if cache_seqlens is None else int(np.broadcast_to(cache_seqlens, batch)[b])
        cached = min(max(cached, 0), capacity)
        appended = 0 if k is None else min(k.shape[1], capacity - cached)
        places = np.array([place(b, key) for key in range(cached)], int).reshape(cached, 2)
        requests.append([x[places[:, 0], places[:, 1]] for x in before])
        if k is None:
            continue
        for n in range(appended):
            for x, new in zip(after, (k, v)):
                x[place(b, cached + n)] = new[b, n]
        requests[b] = [np.concatenate([x, new[b, :appended]]) for x, new in zip(requests[b], (k, v))]
    return requests, *after


def _exact_with_kvcache(q, head_dim_v, requests, options):
    """What `_exact` gives, for each request; without noise where one has no keys."""
    out, noise = (np.zeros((*q.shape[:3], head_dim_v)) for _ in range(2))
    lse, spread = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf), np.zeros((q.shape[0], q.shape[2], q.shape[1]))
    for b, (keys, values) in enumerate(requests):
        if len(keys):
            results = _exact(q[b][None], keys[None], values[None], **options)
            out[b], lse[b], noise[b], spread[b] = (x[0] for x in results)
    return out, lse, noise, spread


def merge_attention(outs, lses):
    """(out, lse) in float64 of attention on all keys, from results on parts of them that share none.

    outs are (batch, seqlen, heads, head_dim_v), lses (batch, heads, seqlen) in natural logarithms. Parts whose
    lse is -inf saw nothing and have no influence, whatever their out holds; where all are, out is 0.
    """
    lses = np.stack([np.asarray(lse).astype(np.float64) for lse in lses])
    out = np.zeros(np.shape(outs[0]))
    weights, lse = _softmax(lses.reshape(len(lses), -1).T)
    for of_part, weight, each in zip(outs, weights.T, lses):
        weight = weight.reshape(each.shape).swapaxes(1, 2)[..., None]
        with np.errstate(all="ignore"):
            out += np.where(each.swapaxes(1, 2)[..., None] == -np.inf, 0, weight * np.asarray(of_part).astype(np.float64))
    return out, lse.reshape(lses.shape[1:])


def _sequences(cu_seqlens_q, cu_seqlens_k, seqused_q=None, seqused_k=None) -> list[tuple[slice, slice]]:
    """(rows of q, rows of k and v) of each sequence; a seqused past its slot ends with it."""
    def slots(cu_seqlens, seqused):
        for n, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:])):
            yield slice(int(start), int(stop if seqused is None else min(stop, start + seqused[n])))
    return list(zip(slots(cu_seqlens_q, seqused_q), slots(cu_seqlens_k, seqused_k)))


def _dlse_of(dlse, rows):
    return None if dlse is None else dlse[None, :, rows]


def _scatter(packed, rows, keys, values):
    """Put (dq, dk, dv), or what has their shapes, of one sequence in its place."""
    for array, place, value in zip(packed, (rows, keys, keys), values):
        array[place] = value[0]


def _exact_varlen(q, k, v, sequences, options):
    """What `_exact` gives, packed; without noise in rows of no sequence."""
    out, noise = (np.zeros((*q.shape[:2], v.shape[2])) for _ in range(2))
    lse, spread = np.full((q.shape[1], q.shape[0]), -np.inf), np.zeros((q.shape[1], q.shape[0]))
    for rows, keys in sequences:
        of_out, of_lse, of_noise, of_spread = _exact(q[None, rows], k[None, keys], v[None, keys], **options)
        out[rows], noise[rows], lse[:, rows], spread[:, rows] = of_out[0], of_noise[0], of_lse[0], of_spread[0]
    return out, lse, noise, spread


@dataclass(frozen=True)
class _Options:
    """The mask as a table, and scale and cap, in the dtype that the logits are computed in."""

    table: np.ndarray
    scale: float
    softcap: float

    @classmethod
    def of(cls, q, k, causal, window, softmax_scale, softcap):
        scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        return cls(visible(q.shape[1], k.shape[1], causal, window), float(scale), float(softcap))

    def cap(self, number):
        """The softcap as a number of that type: 1e300 is no cap, not inf * tanh(0)."""
        limits = np.finfo(number)
        return number(np.clip(self.softcap, float(limits.tiny), float(limits.max)))

    def logits(self, q, k):
        """(seqlen_q, seqlen_k) of one head's q (seqlen_q, head_dim) and k (seqlen_k, head_dim)."""
        number = q.dtype.type
        with np.errstate(all="ignore"):
            logits = (q @ k.T) * number(self.scale)
            if self.softcap:
                cap = self.cap(number)
                logits = cap * np.tanh(logits / cap)
        return np.where(self.table, logits, number(-np.inf))

    def slope(self, q, k):
        """The derivative of a logit by the same logit without softcap, as exact as its argument."""
        if not self.softcap:
            return np.ones(self.table.shape, q.dtype)
        number = q.dtype.type
        with np.errstate(all="ignore"):
            return np.cosh((q @ k.T) * number(self.scale) / self.cap(number)) ** -2


def _heads(q, k):
    group = q.shape[2] // max(1, k.shape[2])
    return [(b, h, h // group) for b in range(q.shape[0]) for h in range(q.shape[2])]


def _softmax(logits):
    """The softmax of each row and its lse, by the conventions for rows that have none."""
    weights, lse = np.zeros_like(logits), np.full(logits.shape[0], -np.inf)
    undefined = np.isnan(logits).any(axis=1) | (logits == np.inf).any(axis=1)
    weights[undefined], lse[undefined] = np.nan, np.nan
    rows = ~undefined & (logits > -np.inf).any(axis=1)
    if rows.any():
        weights[rows], lse[rows] = softmax(logits[rows], axis=1), logsumexp(logits[rows], axis=1)
    return weights, lse


def _weighted_values(weights, v, table):
    """weights @ v, where a value that is not finite reaches the rows that see it and no other.

    A row without weights (all 0: nothing to see) stays 0; one whose weights are nan becomes nan.
    """
    return _through(weights, v, table & (weights != 0).any(axis=1)[:, None])


def _through(pairs, x, table):
    """pairs @ x (pairs 0 outside of the table), where nan and inf in x go through pairs of the table only."""
    finite = np.isfinite(x)
    with np.errstate(all="ignore"):
        out = pairs @ np.where(finite, x, x.dtype.type(0))
        for n in np.flatnonzero(~finite.all(axis=1)):
            rows = table[:, n]
            out[rows] += pairs[rows, n, None] * np.where(finite[n], x.dtype.type(0), x[n])
    return out


def _exact(q, k, v, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """(out, lse) of `attention`, and the error that rounding alone may cause in the inputs' dtype:
    noise (batch, seqlen_q, heads_q, head_dim_v) in out and spread (batch, heads_q, seqlen_q) in a logit.

    Each weight may be rounded once, independently of the others, and so may the output: together about one
    unit roundoff of |out| + sqrt(sum of (weight * value)^2). In the accumulation dtype, a row's logits are
    off by |scale| |q| |k| roundoffs, and a sum over seqlen_k terms, in whatever order, by the square root
    of their number, either times the row's largest sum of weight * |value|. For 16 bits the first part
    rules, and it shrinks with the output, as it must: at seqlen 2048 outputs are near 1/50 of the values,
    and a floor tied to the values would let an output of zeros pass.
    """
    name = str(q.dtype)
    accumulation = ROUNDOFF["float64" if name == "float64" else "float32"]
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    options = _Options.of(q, k, causal, window, softmax_scale, softcap)
    out, noise = (np.empty((*q.shape[:3], v.shape[3])) for _ in range(2))
    lse, spread = (np.empty((q.shape[0], q.shape[2], q.shape[1])) for _ in range(2))
    for b, h, hk in _heads(q, k):
        head_q, head_k, head_v = q[b, :, h], k[b, :, hk], v[b, :, hk]
        weights, lse[b, h] = _softmax(options.logits(head_q, head_k))
        out[b, :, h] = _weighted_values(weights, head_v, options.table)

        longest_k = np.where(options.table, _norms(head_k), 0).max(axis=1, initial=0.0)
        spread[b, h] = accumulation * abs(options.scale) * _norms(head_q) * longest_k
        magnitudes = np.where(np.isfinite(head_v), np.abs(head_v), 0)
        rounded = np.abs(out[b, :, h]) + np.sqrt(weights**2 @ magnitudes**2)
        accumulated = (spread[b, h] + accumulation * k.shape[1]**0.5) * (weights @ magnitudes).max(axis=1)
        noise[b, :, h] = ROUNDOFF[name] * rounded + accumulated[:, None] + _SMALLEST[name]
    return out, lse, noise, spread


def _exact_backward(dout, q, k, v, dlse=None, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """(dq, dk, dv) of `attention_backward`, and the error that rounding alone may cause in each element.

    As in `_exact`, all independent roundings are summed as squares: each weight in dv, each ds in dq and dk is
    rounded once to the inputs' dtype, and the gradient itself. So are the weights in out, and out, before
    sum(dout * out), an error that a whole row shares. In the accumulation dtype, a weight is off by the
    roundoff of its logit and of lse, here and in out, dP and sum(dout * out) by one of |dout| |v| and |dout|
    |out|, the slope of a softcap by one of 1, and a sum of n terms by sqrt(n) of the sum of their magnitudes.
    An element that no pair takes part in has none. In float64 the truth errs as much as the result, together
    with the unfused one, which then measures nothing: four times the noise.
    """
    name = str(q.dtype)
    unit, accumulation = ROUNDOFF[name], ROUNDOFF["float64" if name == "float64" else "float32"]
    tiny, flushed = _UNDERFLOW[name], _UNDERFLOW["float64" if name == "float64" else "float32"]
    dout, q, k, v = (np.asarray(x).astype(np.float64) for x in (dout, q, k, v))
    options = _Options.of(q, k, causal, window, softmax_scale, softcap)
    dlse = np.zeros((q.shape[0], q.shape[2], q.shape[1])) if dlse is None else np.asarray(dlse, np.float64)
    dq, dk, dv = gradients = tuple(np.zeros(x.shape) for x in (q, k, v))
    squares, sums = (tuple(np.zeros(x.shape) for x in (q, k, v)) for _ in range(2))
    any_pair = tuple(np.zeros((*x.shape[:3], 1), bool) for x in (q, k, v))
    terms = q.shape[1] * max(1, q.shape[2] // max(1, k.shape[2]))      # of a sum in dk and dv

    for b, h, hk in _heads(q, k):
        head_q, head_k, head_v, head_dout = q[b, :, h], k[b, :, hk], v[b, :, hk], dout[b, :, h]
        weights, lse = _softmax(options.logits(head_q, head_k))
        pairs = options.table & (lse != -np.inf)[:, None]
        weights, slope = np.where(pairs, weights, 0), options.slope(head_q, head_k)
        with np.errstate(all="ignore"):
            dp = head_dout @ head_v.T
            delta = np.where(pairs, weights * dp, 0).sum(axis=1)
            change = dp - delta[:, None] + dlse[b, h][:, None]
            ds = np.where(pairs, weights * change * slope, 0)
            dq[b, :, h] = options.scale * _through(ds, head_k, pairs)
            dk[b, :, hk] += options.scale * _through(ds.T, head_q, pairs.T)
            dv[b, :, hk] += _through(weights.T, head_dout, pairs.T)

        # From here on without what is not finite: it counts in no element that is compared.
        weights, slope, change, ds = (np.where(pairs, _magnitudes(x), 0) for x in (weights, slope, change, ds))
        size_q, size_k, size_v, size_dout = map(_magnitudes, (head_q, head_k, head_v, head_dout))
        longest_k = np.where(pairs, _norms(size_k), 0).max(axis=1, initial=0.0)
        logit = accumulation * abs(options.scale) * _norms(size_q) * longest_k
        weight = (logit + accumulation * (4 + _magnitudes(lse)))[:, None]        # relative
        out = np.where(pairs, weights, 0) @ np.where(np.isfinite(head_v), head_v, 0)
        rounded_out = unit * np.hypot(np.linalg.norm(size_dout * out, axis=1),
                                      np.linalg.norm(weights * _magnitudes(dp), axis=1))[:, None]
        products = _norms(size_dout)[:, None] * (_norms(size_v) + _norms(out)[:, None])
        products += _magnitudes(dlse[b, h])[:, None]
        in_out = weight * (weights * change).sum(axis=1, keepdims=True)
        in_ds = weights * slope * (weight * change + in_out + accumulation * products)
        if options.softcap:
            in_ds += weights * change * (4 * accumulation + slope * 2 * logit[:, None] / options.cap(np.float64))
        ds_rounded = np.where(pairs, unit * ds + tiny + flushed * change, 0)
        weight_rounded = np.where(pairs, unit * weights + tiny, 0)
        signed_k = np.where(np.isfinite(head_k), head_k, 0)

        squares[0][b, :, h] = ds_rounded**2 @ size_k**2
        sums[0][b, :, h] = ((in_ds + accumulation * len(head_k)**0.5 * ds) @ size_k
                            + rounded_out * np.abs((weights * slope) @ signed_k))
        squares[1][b, :, hk] += (ds_rounded**2 + (weights * slope * rounded_out)**2).T @ size_q**2
        sums[1][b, :, hk] += (in_ds + accumulation * terms**0.5 * ds).T @ size_q
        squares[2][b, :, hk] += (weight_rounded**2).T @ size_dout**2
        sums[2][b, :, hk] += (weights * (weight + accumulation * terms**0.5)).T @ size_dout
        any_pair[0][b, :, h] = pairs.any(axis=1)[:, None]
        any_pair[1][b, :, hk] |= pairs.any(axis=0)[:, None]
    any_pair[2][...] = any_pair[1]

    scales, factor = (abs(options.scale), abs(options.scale), 1.0), 4 if name == "float64" else 1
    return gradients, tuple(
        np.where(some, factor * (scale * (np.sqrt(square) + total) + unit * _magnitudes(gradient) + tiny), 0)
        for gradient, square, total, some, scale in zip(gradients, squares, sums, any_pair, scales))


def _magnitudes(x):
    """|x|, and 0 where it is not finite, or so large that its square is not."""
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(x) & (np.abs(x) < 1e150), np.abs(x), 0)


def _norms(rows):
    """Euclidean norm of each row, 0 where it is not finite: such a row makes no finite logit."""
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(rows, axis=1)
    return np.where(np.isfinite(norms), norms, 0)


def _errors(result, truth, noise, finite) -> tuple[float, float, float]:
    """Largest, RMS and scaled error over the elements where the truth is finite."""
    with np.errstate(all="ignore"):
        error = np.abs(result - truth)[finite]
        scaled = np.where(error == 0, 0, error / noise[finite])        # noise 0: nothing but the truth will do
    return float(error.max(initial=0.0)), _rms(error), float(scaled.max(initial=0.0))


def _rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def _misplaced(name, result, truth) -> list[str]:
    """One line for each of nan, inf and -inf that does not stand exactly where the truth has it."""
    faults = []
    for value, is_value in (("nan", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = is_value(result) != is_value(truth)
        if wrong.any():
            place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            faults.append(f"{name} has {value} wrong in {int(wrong.sum())} places, first at {place}: "
                          f"{result[place]} for {truth[place]}")
    return faults
