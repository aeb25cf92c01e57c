"""Every kernel with a few options each, on arrays that end where their memory ends: for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Exits with 1 if a result is wrong. `--only simt` runs one tier, `--part backward` (forward, varlen, decode) one part. The tier
sm90 runs on no other GPU than its own.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import click  # noqa: E402
import numpy as np  # noqa: E402
from support import (  # noqa: E402
    DTYPES,
    TAKES,
    Lengths,
    decoding,
    dlse_of,
    dout_of,
    inputs,
    judge_of,
    normal,
    packed_inputs,
)

import cuflash  # noqa: E402
from cuflash import config, launch, oracle  # noqa: E402

SMALL = dict(batch=1, seqlen_q=70, seqlen_k=130, heads_q=2, heads_k=1)
NARROW = dict(batch=1, seqlen_q=17, seqlen_k=33, heads_q=2, heads_k=2)
HEADS = dict(heads_q=2, heads_k=1)
ODD_HEAD_DIMS = dict(head_dim=33, head_dim_v=20)


class Run(NamedTuple):
    sizes: dict
    options: dict
    offset: int = 0  # bytes that all arrays are moved by
    not_finite: bool = False  # whether V holds such values
    lengths: Lengths | None = None
    wrong: bool = False  # lengths that lie: the result means nothing
    deterministic: bool = False


FORWARD = {
    "plain": Run(SMALL, {}),
    "causal": Run(SMALL, dict(causal=True)),
    "window, softcap": Run(SMALL, dict(window=(20, 9), softcap=2.0)),
    "not finite under a mask": Run(SMALL, dict(window=(20, 9)), not_finite=True),
    "scale below 0, odd head dims": Run(
        NARROW | ODD_HEAD_DIMS, dict(softmax_scale=-0.1, causal=True)
    ),
    "misaligned": Run(NARROW | dict(head_dim=64), dict(causal=True), offset=4),
    "wide": Run(NARROW | dict(head_dim=256, head_dim_v=192), dict(causal=True)),
    "several warps to a row": Run(SMALL | dict(head_dim=128, seqlen_k=300), dict(causal=True)),
    "no keys": Run(NARROW | dict(seqlen_k=0), {}),
}
# More tiles than multiprocessors: fwd_sm90's blocks take one after the other.
FORWARD_SM90 = FORWARD | {
    "many tiles": Run(dict(batch=8, seqlen_q=300, seqlen_k=300, heads_q=16, heads_k=2), dict(causal=True)),
    "many tiles, no mask": Run(dict(batch=8, seqlen_q=300, seqlen_k=300, heads_q=16, heads_k=2), {}),
    "tiles that see nothing": Run(SMALL | dict(seqlen_q=500, seqlen_k=100), dict(window=(20, 9))),
}
BACKWARD = {
    "plain": Run(SMALL, {}),
    "causal": Run(SMALL, dict(causal=True)),
    "causal, deterministic": Run(SMALL | dict(seqlen_q=150), dict(causal=True), deterministic=True),
    "rows that see nothing": Run(SMALL | dict(seqlen_q=150, seqlen_k=40), dict(causal=True)),
    "window, softcap": Run(SMALL, dict(window=(20, 9), softcap=2.0)),
    "not finite under a mask": Run(SMALL, dict(window=(20, 9)), not_finite=True),
    "scale below 0, odd head dims": Run(
        NARROW | ODD_HEAD_DIMS, dict(softmax_scale=-0.1, causal=True)
    ),
    "misaligned": Run(NARROW | dict(head_dim=64), dict(causal=True), offset=4),
    "wide": Run(NARROW | dict(head_dim=256, head_dim_v=192), dict(causal=True)),
    "head_dim 128": Run(SMALL | dict(head_dim=128), dict(causal=True)),
    "no keys": Run(NARROW | dict(seqlen_k=0), {}),
    "no queries": Run(NARROW | dict(seqlen_q=0), {}),
}
PACKED = Lengths((0, 70, 1, 0, 33), (3, 65, 40, 0, 33), spare_q=5, spare_k=9)
VARLEN = {
    "causal": Run(HEADS, dict(causal=True), lengths=PACKED),
    "deterministic": Run(HEADS, dict(causal=True), lengths=PACKED, deterministic=True),
    "plain": Run(HEADS, {}, lengths=PACKED),
    "used rows, int64": Run(
        HEADS,
        dict(window=(20, 9)),
        lengths=Lengths((70, 40), (130, 20), (65, 0), (129, 20), dtype="int64"),
    ),
    "many sequences": Run(HEADS, dict(causal=True), lengths=Lengths((1,) * 1100)),
    "no tokens": Run(HEADS, {}, lengths=Lengths((0, 0))),
    "lengths that lie": Run(HEADS, dict(causal=True), lengths=PACKED, wrong=True),
    "wide": Run(HEADS | dict(head_dim=256), dict(causal=True), lengths=Lengths((17, 3), (33, 2))),
}


class Decode(NamedTuple):
    lengths: tuple[int, ...]  # in the cache
    sizes: dict
    options: dict
    offset: int = 0
    wrong: bool = False  # lengths and pages that lie
    masked: int = 0  # keys of the first request that no query sees, and that are NaN


LATENT = dict(heads_q=16, heads_k=1, head_dim=576, head_dim_v=512, values_are_keys=True)
DECODE = {
    "causal": Decode((130, 0, 65), dict(seqlen_q=3), {}),
    "not finite under a mask": Decode((130, 20), dict(seqlen_q=3), dict(window=(40, 0)), masked=87),
    "one split": Decode((130, 0, 65), {}, dict(num_splits=1)),
    "7 splits": Decode((300, 0, 65), {}, dict(num_splits=7)),
    "pages": Decode((130, 0, 65), dict(page_size=16), {}),
    "appended": Decode((130, 0, 65), dict(seqlen_q=3, new=3), {}),
    "appended across pages": Decode((15, 0, 65), dict(seqlen_q=3, new=3, page_size=16), {}),
    "no room for all": Decode((60, 0, 64), dict(seqlen_q=5, new=5, capacity=64), {}),
    "other rows": Decode((130, 0, 65), dict(by_index=True, length_dtype="int64"), {}),
    "many requests": Decode(tuple(n % 23 for n in range(400)), dict(heads_q=8), {}),
    "many rows": Decode((130, 20), dict(seqlen_q=30, heads_q=8), {}),
    "softcap": Decode((130, 20), {}, dict(softcap=2.0)),
    "lengths and pages that lie": Decode((60, 0, 64), dict(seqlen_q=3, new=3, page_size=16, capacity=80), {}, wrong=True),
    "odd head dims": Decode((130, 20), ODD_HEAD_DIMS, {}),
    "misaligned": Decode((130, 20), dict(new=2), {}, offset=4),
    "wide": Decode((130, 20), dict(head_dim=256, head_dim_v=192), {}),
    "latent": Decode((130, 20), LATENT | dict(page_size=64, new=2, seqlen_q=2), {}),
}
PARTS = {"forward": FORWARD, "backward": BACKWARD, "varlen": VARLEN, "decode": DECODE}
# All of them for one dtype of a kernel, since each is compiled; these for the others.
EVERY_DTYPE = ("causal", "not finite under a mask")
THOROUGH = {"simt": "float32", "sm80": "bfloat16", "sm90": "bfloat16"}


def runs_of(tier: str, part: str) -> dict[str, Run | Decode]:
    if tier != "sm90":
        runs = PARTS[part]
        return runs if tier == "simt" else {name: run for name, run in runs.items() if name != "latent"}
    if launch.device_of(0).compute_capability != (9, 0):
        return {}
    if part == "decode":  # latent attention, or many rows
        latent = {
            name: run._replace(sizes=run.sizes | LATENT)
            for name, run in DECODE.items()
            if run.offset == 0 and name not in ("odd head dims", "wide", "many requests")
        }
        many = {
            f"{name}, 80 heads": run._replace(sizes=run.sizes | dict(heads_q=80))
            for name, run in DECODE.items()
            if run.offset == 0 and name not in ("odd head dims", "latent")
        }
        return latent | many
    # TMA reads no array that begins between two multiples of 16 bytes, or has such rows.
    rows = {name: -(-size // 8) * 8 for name, size in ODD_HEAD_DIMS.items()}
    runs = FORWARD_SM90 if part == "forward" else PARTS[part]
    return {
        name: run._replace(sizes=run.sizes | rows if ODD_HEAD_DIMS.items() <= run.sizes.items() else run.sizes)
        for name, run in runs.items()
        if run.offset % 16 == 0 and (part == "forward" or run.sizes.get("head_dim", 64) <= 128)
    }


def exact(values, offset=0):
    """A contiguous array on the GPU whose last byte is the last one of its allocation."""
    import cupy

    values = np.ascontiguousarray(values)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(values.nbytes + offset), 0)
    if values.nbytes:
        (memory + offset).copy_from_host(values.ctypes.data, values.nbytes)
    return cupy.ndarray(values.shape, values.dtype, memptr=memory + offset)


def faults_of(run: Run, dtype: str, with_backward: bool) -> str:
    """What is wrong with a forward, and with the backward after it; "" if nothing is."""
    lengths = run.lengths
    q, k, v = inputs(dtype, **run.sizes) if lengths is None else packed_inputs(dtype, lengths, **run.sizes)
    if run.not_finite:
        v[0, 40, 0, 3], v[0, 100, 0, 60] = np.nan, np.inf
    ends, used = ((), {}) if lengths is None else lengths.arrays()
    if run.wrong:
        ends = tuple(np.array(x[::-1] * 3 - 7, x.dtype) for x in ends)
    on_gpu = [exact(x, run.offset) for x in (q, k, v)]
    lengths_on_gpu = [exact(x) for x in ends]
    named = {name: exact(x) for name, x in used.items()}
    out = exact(np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), run.offset)
    forward = cuflash.attention if lengths is None else cuflash.attention_varlen
    _, lse = forward(*on_gpu, *lengths_on_gpu, out=out, return_lse=True, **named, **run.options)
    judged = [] if run.wrong else [
        (oracle.judge if lengths is None else oracle.judge_varlen)(
            out.get(), lse.get(), q, k, v, *ends, **used, **run.options
        )
    ]
    if with_backward:
        dout, dlse = dout_of(q, v), dlse_of(q)
        results = [exact(np.zeros_like(x), run.offset) for x in (q, k, v)]
        backward = cuflash.attention_backward if lengths is None else cuflash.attention_varlen_backward
        backward(
            exact(dout, run.offset),
            *on_gpu,
            out,
            lse,
            *lengths_on_gpu,
            dlse=exact(dlse),
            deterministic=run.deterministic,
            **dict(zip(("dq", "dk", "dv"), results, strict=True)),
            **named,
            **run.options,
        )
        gradients = [x.get() for x in results]
        judge = oracle.judge_backward if lengths is None else oracle.judge_varlen_backward
        if not run.wrong:
            judged.append(judge(*gradients, dout, q, k, v, *ends, dlse=dlse, **used, **run.options))
    return "; ".join(judgement.why for judgement in judged if not judgement.ok)


def faults_of_decode(run: Decode, dtype: str) -> str:
    """What is wrong with a decoding, its caches afterwards, and two of its results joined."""
    call = decoding(dtype, run.lengths, **run.sizes)
    call.k_cache[0, : run.masked] = call.v_cache[0, : run.masked] = np.nan
    if run.wrong:
        lengths = np.array([2**31 - 1, -5, 64], np.int32)
        call = dataclasses.replace(call, cache_seqlens=lengths, block_table=call.block_table * 3 - 7)
    given = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, **call.named()}
    views = {"v_cache": "k_cache", "v": "k"} if call.values_are_keys else {}
    integers = ("cache_seqlens", "cache_batch_idx", "block_table")
    on_gpu = {
        name: exact(x, 0 if name in integers else run.offset) for name, x in given.items() if name not in views
    }
    on_gpu |= {name: on_gpu[of][..., : given[name].shape[3]] for name, of in views.items() if of in on_gpu}
    out = exact(np.zeros((*call.q.shape[:3], call.v_cache.shape[3]), call.q.dtype), run.offset)
    _, lse = cuflash.attention_with_kvcache(**on_gpu, out=out, return_lse=True, **run.options)
    parts = [out, exact(normal(out.shape, dtype, 1), run.offset)], [lse, exact(lse.get() - 1)]
    cuflash.merge_attention(*parts)
    if run.wrong:
        return ""
    judgement = judge_of(call, **{name: x for name, x in run.options.items() if name != "num_splits"})(
        out.get(), lse.get()
    )
    faults = [] if judgement.ok else [judgement.why]
    for name, expected in zip(("k_cache", "v_cache"), call.after(), strict=True):
        if on_gpu[name].get().tobytes() != np.ascontiguousarray(expected).tobytes():
            faults.append(f"{name} afterwards")
    return "; ".join(faults)


@click.command()
@click.option("--only", "tiers", multiple=True, default=list(THOROUGH), type=click.Choice(list(THOROUGH)))
@click.option("--part", "parts", multiple=True, default=list(PARTS), type=click.Choice(list(PARTS)))
def main(tiers, parts):
    import cupy

    cupy.cuda.set_allocator(None)  # no pool: each result, and scratch, is an allocation of its own size
    wrong = count = 0
    for tier in tiers:
        for part in parts:
            for dtype in TAKES[tier]:
                for name, run in runs_of(tier, part).items():
                    if run.offset % DTYPES[dtype].itemsize:
                        continue
                    if dtype != THOROUGH[tier] and name not in EVERY_DTYPE:
                        continue
                    with config.force_tier(tier):
                        decode = isinstance(run, Decode)
                        faults = faults_of_decode(run, dtype) if decode else faults_of(run, dtype, part != "forward")
                    count += 1
                    if faults:
                        wrong += 1
                        print(f"{tier} {dtype} {part}, {name}: {faults}")
    cupy.cuda.Device().synchronize()
    print(f"{count} runs, {wrong} wrong")
    sys.exit(1 if wrong or not count else 0)


if __name__ == "__main__":
    main()
