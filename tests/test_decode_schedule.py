"""Which block of a decoding kernel computes what, and which parts are joined behind it: kernels/attn/decode.cuh on the host.

Compiled by g++ with 32 coroutines for the lanes of a warp; of lengths, heads, rows, masks and splits at random:
every key tile that rows see is computed once, no two parts write to one slot, and all that must be joined is, in order.
"""

import ctypes
import itertools

import numpy as np
import pytest
from emulation import library, needs_compiler

from cuflash import launch

BLOCK_M, BLOCK_N = 8, 16
CASES = 40

pytestmark = needs_compiler


def compiled(left, right, fixed, appends, cost, sharing):
    """``sharing``: as many blocks find the same parts."""
    constants = dict(VARLEN=0, PAGED=0, V_IS_K=0, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, MASK_LEFT=left, MASK_RIGHT=right)
    constants |= dict(FIXED_SPLITS=fixed, APPENDS=appends, ITEM_COST=cost, SHARING=sharing)
    return library("schedule.cpp", tuple(sorted((constants | {"ASYNCHRONOUS": 1}).items())))


def noted(function, record, blocks, columns):
    """The rows that a function of the library notes."""
    params = ctypes.create_string_buffer(record.tobytes(), record.nbytes)
    found = np.zeros(1 << 20, np.int32)
    size = function(params, blocks, found.ctypes.data_as(ctypes.c_void_p), found.size)
    assert size <= found.size
    return [tuple(row) for row in found[:size].reshape(-1, columns).tolist()]


def draw(rng, left, right, fixed, appends):
    """(record, lengths of the requests before and after appending, arrays to keep alive)"""
    batch = int(rng.choice([1, 2, 5] if fixed else [1, 2, 5, 33, 70]))
    capacity = int(rng.choice([1, 15, 16, 17, 100, 700 if batch < 10 else 40]))
    cached = rng.integers(0, capacity + 1, batch).astype(np.int32)
    cached[rng.random(batch) < 0.3] = rng.choice([0, 1, capacity, capacity + 9, -5])
    record = np.zeros((), launch.DECODE_PARAMS)
    heads_k, group, seqlen_q = int(rng.choice([1, 2, 3])), int(rng.choice([1, 3, 4, 8])), int(rng.choice([1, 1, 2, 5, 16]))
    sizes = dict(batch=batch, seqlen_q=seqlen_q, seqlen_k=capacity, heads_q=heads_k * group, heads_k=heads_k)
    sizes |= dict(window_left=int(rng.choice([0, 3, 40])), window_right=int(rng.choice([0, 2])), num_slots=batch)
    sizes |= dict(seqlen_new=int(rng.choice([1, 4, 30])), num_splits=int(rng.choice([1, 2, 3, 8, 40])))
    sizes |= dict(num_row_tiles=-(-seqlen_q * group // BLOCK_M), num_blocks=int(rng.choice([1, 2, 7, 13, 64])))
    if fixed:
        parts = batch * sizes["num_row_tiles"] * heads_k * sizes["num_splits"]
        sizes["num_blocks"] = min(sizes["num_blocks"], parts)
    for name, value in sizes.items():
        record[name] = value
    record["cache_seqlens"] = cached.ctypes.data
    lengths = np.clip(cached, 0, capacity)
    if appends:
        lengths = np.minimum(lengths + sizes["seqlen_new"], capacity)
    return record, lengths.tolist(), cached


def tiles_seen(record, left, right, length, row_tile):
    """(first, end) of the key tiles that rows of an item see; one if they see none."""
    group = int(record["heads_q"]) // int(record["heads_k"])
    rows = range(row_tile * BLOCK_M, min((row_tile + 1) * BLOCK_M, int(record["seqlen_q"]) * group))
    seen = []
    for query in sorted({row // group for row in rows}):
        at = query + length - int(record["seqlen_q"])
        first = max(at - int(record["window_left"]), 0) if left else 0
        end = min(at + int(record["window_right"]) + 1, length) if right else length
        seen.append((first, end))
    first = min(first for first, _ in seen) // BLOCK_N
    return first, max(-(-max(end for _, end in seen) // BLOCK_N), first + 1)


# Lengths and masks do not depend on each other: one mask is enough where keys are appended.
OPTIONS = [(*masks, 0, 0) for masks in itertools.product([0, 1], [0, 1], [0, 1])] + [(1, 1, 0, 1, 0), (1, 1, 1, 1, 0)]
OPTIONS += [(0, 0, 0, 0, 1), (1, 1, 0, 0, 1), (0, 1, 0, 1, 2), (0, 1, 0, 0, 4), (0, 1, 1, 0, 1)]
BEHIND = [(*options, 1) for options in OPTIONS]
# As decode_combine_wide, behind a kernel whose items count for nothing.
BEHIND += [(0, 0, 0, 0, 0, 2), (1, 1, 0, 1, 0, 2), (0, 0, 1, 0, 0, 2), (1, 1, 1, 1, 0, 3)]


@pytest.mark.parametrize("left, right, fixed, appends, cost, sharing", BEHIND)
def test_every_tile_once(left, right, fixed, appends, cost, sharing):
    functions = compiled(left, right, fixed, appends, cost, sharing)
    rng = np.random.default_rng(16 * cost + 8 * left + 4 * right + 2 * fixed + appends)
    for _ in range(CASES):
        record, lengths, _held = draw(rng, left, right, fixed, appends)
        blocks, splits, heads_k = (int(record[name]) for name in ("num_blocks", "num_splits", "heads_k"))
        items = list(itertools.product(range(len(lengths)), range(int(record["num_row_tiles"])), range(heads_k)))
        expected = {item: tiles_seen(record, left, right, lengths[item[0]], item[1]) for item in items}
        done, work = {item: [] for item in items}, [0] * blocks
        # An item counts for so many tiles more where shares are large.
        counted = cost if sum(end - first for first, end in expected.values()) >= 16 * blocks else 0
        for block, *item, item_begin, item_end, begin, end, slot in noted(functions.items, record, blocks, 9):
            assert expected[tuple(item)] == (item_begin, item_end) and begin < end
            done[tuple(item)].append((begin, end, slot))
            work[block] += end - begin + (counted if begin == item_begin else 0)

        slots = set()
        for item, (first, end) in expected.items():
            parts = sorted(done[item])
            assert [begin for begin, _, _ in parts] == [first, *(part_end for _, part_end, _ in parts[:-1])]
            assert parts[-1][1] == end, "the parts follow each other"
            if len(parts) == 1:
                assert parts[0][2] == -1, "who has all of an item writes the outputs"
                continue
            of_item = {slot for _, _, slot in parts}
            assert len(of_item) == len(parts) and not of_item & slots
            assert all(slot in range(len(items) * splits if fixed else 2 * blocks) for slot in of_item)
            slots |= of_item
        if not fixed:
            # A border may lie in what an item costs, which is counted here where its first tile is.
            assert max(work) - min(work) <= 1 + 2 * counted, "equal shares"

        found = {}
        num_blocks = len(items) if fixed else blocks - 1
        for *item, share, shares, part, slot in noted(functions.parts, record, num_blocks * sharing, 7):
            found.setdefault(tuple(item), {}).setdefault((share, shares), []).append((part, slot))
        assert set(found) == {item for item in items if len(done[item]) > 1}
        for item, by_share in found.items():
            slots_in_order = [slot for _, _, slot in sorted(done[item])]
            assert all(parts == list(enumerate(slots_in_order)) for parts in by_share.values())
            shares = 1 if fixed else len(slots_in_order) - 1
            assert sorted(by_share) == [(share, shares) for share in range(shares)], "all tasks are somebody's, once"


@pytest.mark.parametrize("cost", [0, 4])
@pytest.mark.parametrize("row_tiles", [1, 3])
def test_as_much_work_as_the_host_lets_through(cost, row_tiles):
    """Steps of all items up to just below 2**31, which is what they are counted in."""
    functions = compiled(0, 0, 0, 0, cost, 1)
    blocks, batch, length = 13, 5, 2**28
    record = np.zeros((), launch.DECODE_PARAMS)
    tiles = -(-length // BLOCK_N)
    heads_k = (launch.MAX_GRID - blocks) // (batch * row_tiles * (tiles + 1 + cost))
    sizes = dict(batch=batch, seqlen_q=row_tiles * BLOCK_M, seqlen_k=length, heads_q=heads_k, heads_k=heads_k, num_slots=batch)
    for name, value in (sizes | dict(fixed_seqlen=length, num_row_tiles=row_tiles, num_blocks=blocks)).items():
        record[name] = value
    assert batch * row_tiles * heads_k * (tiles + cost) > 0.9 * 2**31
    done = {}
    for _, *item, item_begin, item_end, begin, end, slot in noted(functions.items, record, blocks, 9):
        assert (item_begin, item_end) == (0, tiles)
        done.setdefault(tuple(item), []).append((begin, end, slot))
    assert len(done) == batch * row_tiles * heads_k
    for parts in done.values():
        parts.sort()
        assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])] and parts[-1][1] == tiles
    found = {}
    for *item, share, shares, part, slot in noted(functions.parts, record, blocks - 1, 7):
        found.setdefault(tuple(item), {}).setdefault((share, shares), []).append((part, slot))
    split = {item: [slot for _, _, slot in parts] for item, parts in done.items() if len(parts) > 1}
    assert len(split) >= 2 and set(found) == set(split)
    for item, slots in split.items():
        assert found[item] == {(share, len(slots) - 1): list(enumerate(slots)) for share in range(len(slots) - 1)}
