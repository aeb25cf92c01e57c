"""The judge: attention in float64, straightforward, O(seqlen_q * seqlen_k), independent of every other path.

``attention`` is the truth, ``unfused`` is what plain attention in the inputs' own dtype makes of it, and
``judge`` holds a result against both: its error may be at most twice that of ``unfused``, plus a floor.

The conventions are those of the library, written down a second time on purpose:

* Key j is visible to query i iff it is inside the window around j = i + seqlen_k - seqlen_q; ``visible`` is
  that table. Masked keys and values have no influence, whatever they hold.
* A logit is ``softmax_scale * q.k``, then ``softcap * tanh(logit / softcap)``, then masked.
* A row that sees no key, or whose visible logits are all -inf, has out 0 and lse -inf. A row that sees a
  logit of nan or +inf has out and lse nan. A visible value of nan or inf reaches just the rows that see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp, softmax

# Unit roundoff: the largest relative error of one rounding to nearest.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
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
    finite = np.isfinite(truth)
    faults = []

    result, reference = np.asarray(out), reference.astype(np.float64)
    max_err = rms_err = scaled_err = np.inf
    if result.shape != truth.shape:
        faults.append(f"out has shape {result.shape}, not {truth.shape}")
    else:
        result = result.astype(np.float64)
        faults += _misplaced("out", result, truth)
        max_err, rms_err, scaled_err = _errors(result, truth, noise, finite)
    known = finite & np.isfinite(reference)     # where float32 logits overflow, only the floor is left
    ref_max_err, ref_rms_err, ref_scaled_err = _errors(reference, truth, noise, known)

    floors = noise[finite]
    # An RMS of few elements is as lucky as a maximum.
    rms_floor = min(MAX_FLOOR, RMS_FLOOR + 2 / max(1, floors.size)**0.5)
    max_budget = 2 * ref_max_err + MAX_FLOOR * float(floors.max(initial=0.0))
    rms_budget = 2 * ref_rms_err + rms_floor * _rms(floors)
    scaled_budget = 2 * ref_scaled_err + MAX_FLOOR
    for name, error, budget in (("max error", max_err, max_budget), ("RMS error", rms_err, rms_budget),
                                ("error over rounding noise", scaled_err, scaled_budget)):
        if not error <= budget:
            faults.append(f"{name} {error:.3g} is over {budget:.3g}")

    lse_err, lse_budget = 0.0, 1e-13 if q.dtype == np.float64 else 1e-5
    if lse is not None:
        if np.shape(lse) != true_lse.shape:
            lse_err = np.inf
            faults.append(f"lse has shape {np.shape(lse)}, not {true_lse.shape}")
        else:
            lse = np.asarray(lse).astype(np.float64)
            faults += _misplaced("lse", lse, true_lse)
            known = np.isfinite(true_lse)
            # Logits that cancel (|q| |k| far above their product) have an error that no lse can be free of.
            unit = 1 + np.abs(true_lse[known]) + 4 * spread[known] / lse_budget
            lse_err = float((np.abs(lse[known] - true_lse[known]) / unit).max(initial=0.0))
            if not lse_err <= lse_budget:
                faults.append(f"lse error {lse_err:.3g} is over {lse_budget:.3g}")
    return Judgement(max_err, rms_err, ref_max_err, ref_rms_err, max_budget, rms_budget,
                     scaled_err, ref_scaled_err, scaled_budget,
                     lse_err, lse_budget, not faults, "; ".join(faults))


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

    def logits(self, q, k):
        """(seqlen_q, seqlen_k) of one head's q (seqlen_q, head_dim) and k (seqlen_k, head_dim)."""
        number, limits = q.dtype.type, np.finfo(q.dtype)
        with np.errstate(all="ignore"):
            logits = (q @ k.T) * number(self.scale)
            if self.softcap:
                cap = number(np.clip(self.softcap, float(limits.tiny), float(limits.max)))   # 1e300: no cap
                logits = cap * np.tanh(logits / cap)
        return np.where(self.table, logits, number(-np.inf))


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
    finite = np.isfinite(v)
    with np.errstate(all="ignore"):
        out = weights @ np.where(finite, v, v.dtype.type(0))
        live = (weights != 0).any(axis=1)
        for key in np.flatnonzero(~finite.all(axis=1)):
            rows = live & table[:, key]
            out[rows] += weights[rows, key, None] * np.where(finite[key], v.dtype.type(0), v[key])
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


def _norms(rows):
    """Euclidean norm of each row, 0 where it is not finite: such a row makes no finite logit."""
    with np.errstate(all="ignore"):
        norms = np.linalg.norm(rows, axis=1)
    return np.where(np.isfinite(norms), norms, 0)


def _errors(result, truth, noise, finite) -> tuple[float, float, float]:
    """Largest, RMS and scaled error over the elements where the truth is finite."""
    with np.errstate(all="ignore"):
        error = np.abs(result - truth)
        return (float(error[finite].max(initial=0.0)), _rms(error[finite]),
                float((error / noise)[finite].max(initial=0.0)))


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
