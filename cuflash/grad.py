"""attention_backward, attention_varlen_backward, attention_vjp: the gradients, from what a forward returned."""

from __future__ import annotations

from . import arrays, cpu, problem
from .attention import LENGTHS, OF_PACKED, OPTIONS, Operation, attention, perform
from .launch import Prepared


def attention_backward(dout, q, k, v, out, lse, *, causal=False, window=None, softmax_scale=None, softcap=0.0, dlse=None,
                       deterministic=False, dq=None, dk=None, dv=None):
    """The gradients of `attention` with respect to q, k and v, without ever storing the score matrix.

    FlashAttention (Dao et al. 2022, Algorithm 4; Dao 2023, Algorithm 2): the scores are computed again, tile by tile, from q, k
    and lse.

    Args:
        dout: gradient with respect to out, (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q. Any strides with a last one
            of 1; one that is expanded along its last axis, as the gradient of a sum is, is copied first.
        q, k, v: as in `attention`; 3-D ones, and then all of dout, out, dq, dk and dv, are a batch of one.
        out, lse: what `attention` returned for them, with ``return_lse=True`` and the same options. lse is contiguous.
        causal, window, softmax_scale, softcap: as in `attention`.
        dlse: gradient with respect to lse, in its shape and dtype and contiguous; zeros by default.
        deterministic: sum dq in a fixed order. It takes longer.
        dq, dk, dv: arrays to write the gradients into, each or none: of the shapes of q, k and v, their dtype, framework and
            device, last stride 1, sharing no memory with the inputs or each other. Not for JAX.

    Returns:
        (dq, dk, dv), of the shapes of q, k and v and in their dtype. dk and dv are summed over the query heads that read a key
        head. What is masked has no influence and gets none: a query that sees no key and a key that no query sees have gradient
        0, whatever they hold.

    With ``deterministic=True`` the same inputs give the same bits of dq, dk and dv in every run on one kind of GPU. By default dk
    and dv do, and dq is summed in whatever order tiles finish: its last bits may differ from run to run. On the CPU, and of head
    dims above 128 on Hopper's own kernels, all are the same.

    On a GPU the work is queued on the framework's current stream as in `attention`: nothing waits, and a CUDA graph can capture
    it once one such call has been made. Sums are float32 (float64 for float64).

    Memory: dq, dk, dv, and scratch of ``batch * heads_q * (padded_seqlen_q * padded_head_dim + seqlen_q * 2) * 4`` bytes (8 for
    float64) in which dq and two numbers of each row are kept, padded_seqlen_q being seqlen_q in whole groups of 16 and
    padded_head_dim head_dim in whole groups of 32, or at most of 64 above 128 and where shared memory is short (on Hopper the
    wider of head_dim and head_dim_v, up to 128, padded to 64, 96 or 128, and 4 bytes more; above 128 there 0, and 8 bytes more);
    with ``deterministic`` also, where padded_head_dim is not 0, ``4 * batch * heads_q * seqlen_q / tile`` bytes, tile being 32 to
    128 rows. On the CPU tiles of a fixed size, and the gradients of one head in the type of the sums.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, says what came and what is allowed.
        NotImplementedError: the tier forced by CUFLASH_TIER lacks a feature, or a torch tensor requires a gradient.
        RuntimeError: as `attention`.
    """
    options = causal, window, softmax_scale, softcap, deterministic
    return perform(_BACKWARD, (q, k, v, out, lse, _unexpanded(dout, out), dlse, dq, dk, dv), options)


def attention_vjp(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0, deterministic=False,
                  return_lse=False):
    """`attention`, and the function that takes gradients back through it.

    Args:
        q, k, v, causal, window, softmax_scale, softcap, return_lse: as in `attention`.
        deterministic: as in `attention_backward`.

    Returns:
        (out, pullback), with ``return_lse`` (out, lse, pullback). ``pullback(dout, dlse=None)`` returns (dq, dk, dv), any number
        of times; dlse is the gradient with respect to lse. It holds q, k, v, out and lse, which must not be changed.

    Raises:
        What `attention` raises; the pullback what `attention_backward` raises.
    """
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    problem.check_flag("deterministic", deterministic)
    out, lse = attention(q, k, v, return_lse=True, **options)

    def pullback(dout, dlse=None):
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options)

    return (out, lse, pullback) if return_lse else (out, pullback)


def attention_varlen_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None,
                              seqused_q=None, seqused_k=None, causal=False, window=None, softmax_scale=None, softcap=0.0,
                              dlse=None, deterministic=False, dq=None, dk=None, dv=None, validate=False):
    """The gradients of `attention_varlen` with respect to q, k and v.

    Args:
        dout: gradient with respect to out, (total_q, heads_q, head_dim_v); as in `attention_backward`.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, causal, window, softmax_scale,
            softcap, validate: as in `attention_varlen`.
        out, lse: what `attention_varlen` returned for them, with ``return_lse=True`` and the same options.
        dlse, deterministic, dq, dk, dv: as in `attention_backward`.

    Returns:
        (dq, dk, dv), of the shapes of q, k and v and in their dtype. Rows that take no part, covered by no sequence or beyond
        what is used of one, have gradient 0, and what dout and dlse hold there has no influence.

    What `deterministic` and the default promise is said in `attention_backward`, what is validated and how lengths are read in
    `attention_varlen`.

    Memory: that of `attention_backward` with total_q for ``batch * seqlen_q`` and ``total_q + 16 * (num_sequences + 1)`` for what
    is padded of it, and the list of tiles of `attention_varlen`, here of keys; with ``deterministic``
    ``4 * heads_q * (total_q / tile + num_sequences)`` bytes.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `attention_backward`.
    """
    problem.check_hint("max_seqlen_q", max_seqlen_q)
    problem.check_hint("max_seqlen_k", max_seqlen_k)
    options = causal, window, softmax_scale, softcap, deterministic
    return perform(_VARLEN_BACKWARD, (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _unexpanded(dout, out),
                                      dlse, dq, dk, dv), options, validate)


def _unexpanded(dout, out):
    """dout, or a copy where its last axis is expanded. What is not of out's kind and shape is left to the check to refuse."""
    if type(dout) is not type(out) or dout.shape != out.shape:
        return dout
    door = arrays.door_of(dout, "dout")
    if isinstance(door, arrays.TorchDoor) and not door.is_strided(dout):
        return dout
    return door.unexpanded(dout)


def _run(door, call: Prepared, given, pointers, number):
    gradients = tuple([make() if x is None else x for x, make in zip(given[-3:], call.makers)])
    if call.launch is not None:
        stream = door.stream(call.device_id)
        scratch, held = door.scratch(call.scratch_bytes, given[0], stream)
        offsets = call.scratch_offsets
        tiles, rows, dq_sum, turns = (scratch + offsets[name] if name in offsets else 0
                                      for name in ("tiles", "rows", "dq_sum", "turns"))
        lengths = pointers[5:-5] or (0,) * len(LENGTHS)
        call.launch(stream, *pointers[:5], *lengths, tiles, *pointers[-5:-3], *map(door.ptr, gradients), rows, dq_sum, turns)
    return gradients


_WRITTEN = ("dq", "dk", "dv")
_OPTIONS = (*OPTIONS, "deterministic")
_BACKWARD = Operation(
    "attention_backward", ("q", "k", "v", "out", "lse", "dout", "dlse", *_WRITTEN), _OPTIONS, ("dlse", *_WRITTEN), _WRITTEN,
    problem.check_attention_backward, _run,
    lambda stated, x: cpu.backward(stated, *(x[name] for name in ("dout", "q", "k", "v", "out", "lse", "dlse", *_WRITTEN))))
_VARLEN_BACKWARD = Operation(
    "attention_varlen_backward", ("q", "k", "v", "out", "lse", *LENGTHS, "dout", "dlse", *_WRITTEN), _OPTIONS,
    ("seqused_q", "seqused_k", "dlse", *_WRITTEN), _WRITTEN, problem.check_attention_varlen_backward, _run,
    lambda stated, x: cpu.backward_varlen(
        stated, *(x[name] for name in ("dout", "q", "k", "v", "out", "lse", *LENGTHS, "dlse", *_WRITTEN))),
    **OF_PACKED)
