"""Every kernel with a few options each, on arrays that end where their memory ends: for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Exits with 1 if a result is wrong. `--only simt` runs one tier.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
from support import DTYPES, TAKES, backend_named, inputs  # noqa: E402

import cuflash  # noqa: E402
from cuflash import config, oracle  # noqa: E402

SMALL = dict(batch=1, seqlen_q=70, seqlen_k=130, heads_q=2, heads_k=1)
NARROW = dict(batch=1, seqlen_q=17, seqlen_k=33, heads_q=2, heads_k=2)

# (sizes, options, bytes that q, k, v and out are moved by, whether V holds what is not finite)
RUNS = {
    "plain": (SMALL, {}, 0, False),
    "causal": (SMALL, dict(causal=True), 0, False),
    "window, softcap": (SMALL, dict(window=(20, 9), softcap=2.0), 0, False),
    "not finite under a mask": (SMALL, dict(window=(20, 9)), 0, True),
    "scale below 0, odd head dims": (
        NARROW | dict(head_dim=33, head_dim_v=20),
        dict(softmax_scale=-0.1, causal=True),
        0,
        False,
    ),
    "misaligned": (NARROW | dict(head_dim=64), dict(causal=True), 4, False),
    "wide": (NARROW | dict(head_dim=256, head_dim_v=192), dict(causal=True), 0, False),
    "several warps to a row": (SMALL | dict(head_dim=128, seqlen_k=300), dict(causal=True), 0, False),
    "no keys": (NARROW | dict(seqlen_k=0), {}, 0, False),
}
# All of them for one dtype of a kernel, since each is compiled; these for the others.
EVERY_DTYPE = ("causal", "not finite under a mask")
THOROUGH = {"simt": "float32", "sm80": "bfloat16"}


def exact(cupy, values, offset):
    """A contiguous array whose last byte is the last one of its allocation."""
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(values.nbytes + offset), 0)
    if values.nbytes:
        (memory + offset).copy_from_host(values.ctypes.data, values.nbytes)
    return cupy.ndarray(values.shape, values.dtype, memptr=memory + offset)


def main() -> int:
    import cupy

    cupy.cuda.set_allocator(None)  # no pool: each result is an allocation of its own size
    tiers = [sys.argv[2]] if sys.argv[1:2] == ["--only"] else ["simt", "sm80"]
    wrong = count = 0
    for tier in tiers:
        backend = backend_named(tier)
        for dtype in TAKES[tier]:
            for name, (sizes, options, offset, poisoned) in RUNS.items():
                if offset % DTYPES[dtype].itemsize or dtype != THOROUGH[tier] and name not in EVERY_DTYPE:
                    continue
                q, k, v = inputs(dtype, **sizes)
                if poisoned:
                    v[0, 40, 0, 3], v[0, 100, 0, 60] = np.nan, np.inf
                out = exact(cupy, np.zeros((*q.shape[:3], v.shape[3]), q.dtype), offset)
                arrays = [exact(cupy, np.ascontiguousarray(x), offset) for x in (q, k, v)]
                with config.force_tier(tier):
                    _, lse = cuflash.attention(*arrays, out=out, return_lse=True, **options)
                judgement = oracle.judge(backend.download(out), backend.download(lse), q, k, v, **options)
                count += 1
                if not judgement.ok:
                    wrong += 1
                    print(f"{tier} {dtype} {name}: {judgement.why}")
    cupy.cuda.Device().synchronize()
    print(f"{count} runs, {wrong} wrong")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
