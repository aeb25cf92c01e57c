"""Calls with CuPy arrays from the public function to what is launched, with a driver that is made up: no GPU.

The arrays are CuPy's own over addresses that are never touched. What a call allocates, what it passes to the kernels and
what it keeps for the next call is all that is looked at.
"""

import contextlib
import ctypes
import functools
import importlib
import types

import numpy as np
import pytest
from test_tma import MadeUpDriver, layout_of, pointers_of

import cuflash
from cuflash import arrays, config, jit, launch, tma
from cuflash import driver as driver_functions

cupy = pytest.importorskip("cupy", reason="no CuPy")

SHAPES = {
    "q": (2, 100, 4, 64),
    "k": (2, 120, 2, 64),
    "v": (2, 120, 2, 32),
    "out": (2, 100, 4, 32),
    "lse": (2, 4, 100),
}
MANY = {name: (99, *shape[1:]) for name, shape in SHAPES.items()}  # more query tiles than multiprocessors
PACKED = {"q": (100, 4, 64), "k": (120, 2, 64), "v": (120, 2, 32), "out": (100, 4, 32), "lse": (4, 100)}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class Gpu:
    """The made-up one: arrays, and what was launched, allocated and set to 0 (pointer, bytes)."""

    def __init__(self, arch: str):
        tier = arch.replace("_", "")
        self.arch, self.forward, self.backward = arch, f"fwd_{tier}", f"bwd_{tier}"
        self.launches, self.kernels, self.allocated, self.freed, self.cleared = [], [], [], [], []
        self.maps, self.launched_maps = MadeUpDriver(), []
        self.capturing, self.next, self.early = False, 1 << 32, []

    def array(self, shape, dtype="float16", device=0, offset=0):
        self.next += 1 << 28
        memory = cupy.cuda.UnownedMemory(self.next, 1 << 28, None, device_id=device)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, offset))

    def arrays(self, *names, shapes=SHAPES, dtype="float16"):
        return [self.array(shapes[name], "float32" if name == "lse" else dtype) for name in names]

    def launch_kernel(self, function, grid, _y, _z, threads, _ty, _tz, smem, stream, argv, _extra):
        kernel = self.kernels[function]
        layout = layout_of(kernel)
        address = ctypes.cast(argv, ctypes.POINTER(ctypes.c_uint64))[0]
        data = (ctypes.c_char * layout.itemsize).from_address(address)
        self.launches.append((kernel, np.frombuffer(bytes(data), layout)[0]))
        if kernel.endswith("sm90"):
            size = len(launch._TENSOR_MAPS) * tma.MAP_BYTES
            first = launch.BWD_TENSOR_MAPS_OFFSET if kernel.startswith("bwd") else launch.TENSOR_MAPS_OFFSET
            self.launched_maps = pointers_of(ctypes.string_at(address + first, size))

    def cuLaunchKernelEx(self, config, function, argv, extra):
        config = driver_functions._LaunchConfig.from_address(config)
        attribute = config.attributes[0]
        assert (config.num_attributes, attribute.id, attribute.value) == (1, 6, 1) and extra is None
        self.early.append(self.kernels[function])
        self.launch_kernel(function, *config.grid, *config.block, config.smem_bytes, config.stream, argv, extra)
        return 0

    def memset(self, pointer, value, num_bytes, stream):
        assert (value, stream) == (0, 7)
        self.cleared.append((pointer, num_bytes))

    def load(self, kernel, constants, arch, device_id, smem_bytes, *, stream):
        assert arch == self.arch + "a" * kernel.endswith("sm90")
        self.kernels.append(kernel)
        return types.SimpleNamespace(function=len(self.kernels) - 1, registers=64)

    def taken(self):
        """What was launched since the last time, by name."""
        launches, self.launches = dict(self.launches), []
        return launches

    def scratch(self):
        """(address, bytes) of the one scratch array since the last time."""
        (found,) = self.allocated
        self.allocated.clear()
        return found


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request, monkeypatch):
    """Where calls run on sm80, and where on sm90."""
    from cupy_backends.cuda.api import driver, runtime

    made = Gpu(request.param)
    attention = importlib.import_module("cuflash.attention")

    class Device(contextlib.nullcontext):
        def __init__(self, device_id=0):
            super().__init__()
            self.id = device_id

    def alloc(size):
        made.next += 1 << 28
        made.allocated.append((made.next, size))
        return types.SimpleNamespace(ptr=made.next)

    def malloc_async(size, stream):
        assert made.capturing and stream == 7
        return alloc(size).ptr

    monkeypatch.setattr(driver, "launchKernel", made.launch_kernel)
    monkeypatch.setattr(jit, "load", made.load)
    monkeypatch.setattr(runtime, "memsetAsync", made.memset)
    monkeypatch.setattr(tma, "_driver", lambda: made.maps)
    monkeypatch.setattr(driver_functions, "library", lambda: made)
    monkeypatch.setattr(jit, "arch_for", lambda capability: made.arch)
    monkeypatch.setattr(launch, "device_of", lambda device_id: config.DEVICES[made.arch])
    monkeypatch.setattr(attention, "_prepared", attention._Prepared())
    monkeypatch.setattr(attention, "_current_device", lambda: 0)
    monkeypatch.setattr(attention, "check_driver", lambda: None)
    monkeypatch.setattr(arrays.CupyDoor, "stream", lambda self, device_id: 7)
    monkeypatch.setattr(arrays, "_doors", {})  # a door takes CuPy's functions when it is made
    monkeypatch.setattr(arrays.CupyDoor, "maker", lambda self, *what: functools.partial(made.array, *what[:2]))
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    monkeypatch.setattr(cupy.cuda, "alloc", alloc)
    for name, function in (
        ("setDevice", lambda device_id: None),
        ("streamIsCapturing", lambda stream: made.capturing),
        ("mallocAsync", malloc_async),
        ("freeAsync", lambda pointer, stream: made.freed.append(pointer)),
    ):
        monkeypatch.setattr(cupy.cuda.runtime, name, function)
    return made


def pointers(record, *names):
    return [int(record[name]) for name in names]


def addresses(*given):
    return [x.data.ptr for x in given]


def test_a_dense_forward(gpu):
    q, k, v = gpu.arrays("q", "k", "v")
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    ((kernel, record),) = gpu.taken().items()
    assert kernel == gpu.forward
    assert pointers(record, "q", "k", "v", "out", "lse") == addresses(q, k, v, out, lse)
    assert pointers(record, *LENGTHS, "tiles") == [0] * 5 and gpu.allocated == gpu.cleared == []
    assert (out.shape, lse.shape, lse.dtype) == (SHAPES["out"], SHAPES["lse"], "float32")


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_masked_forward(gpu, return_lse):
    """On sm90 blocks count the tiles they take: in scratch of this call, which holds anything before. Not if each has one."""
    for shapes, is_counted in ((MANY, gpu.arch == "sm_90"),) * 2 + ((SHAPES, False),) * 2:  # prepared by the first
        gpu.allocated.clear()
        q, k, v = gpu.arrays("q", "k", "v", shapes=shapes)
        result = cuflash.attention(q, k, v, causal=True, return_lse=return_lse)
        out, lse = result if return_lse else (result, None)
        ((kernel, record),) = gpu.taken().items()
        assert kernel == gpu.forward and pointers(record, "q", "k", "v", "out") == addresses(q, k, v, out)
        assert pointers(record, "lse", *LENGTHS) == [lse.data.ptr if return_lse else 0, 0, 0, 0, 0]
        if is_counted:
            scratch, size = gpu.scratch()
            assert pointers(record, "tiles") == [scratch] and gpu.cleared == [(scratch, 16)] and size >= 16
            gpu.cleared.clear()
        else:
            assert pointers(record, "tiles") == [0] and gpu.allocated == gpu.cleared == []
    assert len(gpu.kernels) == 2, "each prepared once"


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
def test_tensor_maps_follow_the_arrays_of_each_call(gpu, is_packed, options):
    shapes = PACKED if is_packed else SHAPES
    rest = packed(gpu)[0] if is_packed else []
    function = cuflash.attention_varlen if is_packed else cuflash.attention
    q, k, v = gpu.arrays("q", "k", "v", shapes=shapes)
    function(q, k, v, *rest, **options)
    gpu.taken()
    if gpu.arch == "sm_80":
        assert gpu.maps.encoded == []
        return
    assert len(gpu.maps.encoded) == 3
    for name in "qkv":
        if name == "k":
            (k,) = gpu.arrays("k", shapes=shapes)
        out = function(q, k, v, *rest, **options)
        (record,) = (record for kernel, record in gpu.taken().items() if kernel == "fwd_sm90")
        expected = addresses(q, k, v, out)
        assert pointers(record, "q", "k", "v", "out") == expected
        assert gpu.launched_maps[:3] == expected[:3]
    assert len(gpu.maps.encoded) == 3, "a map of arrays that only lie elsewhere is not made again"
    assert [pointer for _, pointer in gpu.maps.replaced].count(k.data.ptr) == 1


@pytest.mark.parametrize("backwards", [False, True])
def test_arrays_that_tma_cannot_address(gpu, backwards):
    """Rows that run backwards, and rows of 8-byte alignment."""
    q, k, v = gpu.arrays("q", "k", "v")
    if backwards:
        k = k[:, ::-1]
    else:
        k = gpu.array((2, 120, 2, 68))[..., :64]
    out = cuflash.attention(q, k, v, causal=True)
    ((kernel, record),) = gpu.taken().items()
    assert kernel == "fwd_sm80" and pointers(record, "q", "k", "v", "out") == addresses(q, k, v, out)
    assert gpu.maps.encoded == gpu.allocated == gpu.cleared == []
    with config.force_tier("sm90"), pytest.raises(NotImplementedError, match="tier sm90: "):
        cuflash.attention(q, k, v, causal=True)


def test_tensor_maps_follow_the_arrays_of_each_backward(gpu):
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse")
    for _ in range(2):
        (dout,) = gpu.arrays("out")
        cuflash.attention_backward(dout, q, k, v, out, lse)
        assert list(gpu.taken()) == ["bwd_delta", gpu.backward, "bwd_cast"]
        if gpu.arch == "sm_90":
            assert gpu.launched_maps == addresses(q, k, v, dout)
    assert len(gpu.maps.encoded) == 4 * (gpu.arch == "sm_90")
    assert [pointer for _, pointer in gpu.maps.replaced] == [dout.data.ptr] * (gpu.arch == "sm_90")


def test_gradients_of_arrays_that_tma_cannot_address(gpu):
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse")
    dout = gpu.array((2, 100, 4, 36))[..., :32]
    cuflash.attention_backward(dout, q, k, v, out, lse)
    assert list(gpu.taken()) == ["bwd_delta", "bwd_sm80", "bwd_cast"] and gpu.maps.encoded == []
    with config.force_tier("sm90"), pytest.raises(NotImplementedError, match="tier sm90: "):
        cuflash.attention_backward(dout, q, k, v, out, lse)


def packed(gpu, dtype="int32", used=False):
    lengths = [gpu.array((4,), dtype), gpu.array((4,), dtype)]
    return lengths, {
        "seqused_q": gpu.array((3,), "int64"),
        "seqused_k": gpu.array((3,), "int32"),
    } if used else {}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("used", [False, True])
def test_a_packed_forward(gpu, dtype, used):
    q, k, v = gpu.arrays("q", "k", "v", shapes=PACKED)
    lengths, rest = packed(gpu, dtype, used)
    out, lse = cuflash.attention_varlen(q, k, v, *lengths, **rest, causal=True, return_lse=True)
    launches = gpu.taken()
    assert list(launches) == ["varlen_tiles", gpu.forward] and gpu.cleared == []
    scratch, size = gpu.scratch()
    for record in launches.values():
        assert pointers(record, "q", "k", "v", "out", "lse") == addresses(q, k, v, out, lse)
        assert pointers(record, *LENGTHS[:2]) == addresses(*lengths)
        assert pointers(record, *LENGTHS[2:]) == (addresses(*rest.values()) if used else [0, 0])
        assert pointers(record, "tiles") == [scratch] and size >= 8 * record["num_tiles"]
        assert record["int64_lengths"] == (3 if dtype == "int64" else 0) + 4 * used and record["batch"] == 3
    assert (out.shape, lse.shape) == (PACKED["out"], PACKED["lse"])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_backward(gpu, is_packed, deterministic):
    shapes = PACKED if is_packed else SHAPES
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse", shapes=shapes)
    dout, dlse = gpu.arrays("out", "lse", shapes=shapes)
    lengths, _ = packed(gpu)
    function = cuflash.attention_varlen_backward if is_packed else cuflash.attention_backward
    for _ in range(2):  # prepared by the first
        gradients = function(
            dout, q, k, v, out, lse, *(lengths if is_packed else ()), dlse=dlse, deterministic=deterministic
        )
        launches = gpu.taken()
        assert list(launches) == ["varlen_tiles"] * is_packed + ["bwd_delta", gpu.backward, "bwd_cast"]
        (scratch, size) = gpu.allocated[-1]
        for kernel, record in launches.items():
            assert pointers(record, "q", "k", "v", "out", "lse") == addresses(q, k, v, out, lse)
            assert pointers(record, *LENGTHS) == (addresses(*lengths) if is_packed else [0, 0]) + [0, 0]
            if kernel != "varlen_tiles":
                assert pointers(record, "dout", "dlse", "dq", "dk", "dv") == addresses(dout, dlse, *gradients)
                counts = deterministic or gpu.backward == "bwd_sm90"
                scratch_arrays = {"tiles": is_packed, "rows": True, "dq_sum": True, "turns": counts}
                places = [record[name] for name, is_there in scratch_arrays.items() if is_there]
                assert places == sorted(set(places)) and places[0] == scratch and places[-1] < scratch + size
                assert all(record[name] == 0 for name, is_there in scratch_arrays.items() if not is_there)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        assert {x.dtype.name for x in gradients} == {"float16"}
    assert len(gpu.kernels) == 3 + is_packed and len(gpu.allocated) == 2


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_wide_backward(gpu, is_packed):
    """On Hopper dq has a kernel of its own, and both start early."""
    shapes = {name: (*shape[:-1], 256) for name, shape in (PACKED if is_packed else SHAPES).items() if name != "lse"}
    q, k, v, out, dout = gpu.arrays("q", "k", "v", "out", "out", shapes=shapes)
    (lse,) = gpu.arrays("lse", shapes=PACKED if is_packed else SHAPES)
    lengths, _ = packed(gpu)
    if is_packed:
        cuflash.attention_varlen_backward(dout, q, k, v, out, lse, *lengths)
    else:
        cuflash.attention_backward(dout, q, k, v, out, lse)
    launched = [kernel for kernel, _ in gpu.launches]
    own = ["bwd_dkv_sm90", *["varlen_tiles"] * is_packed, "bwd_dq_sm90"] if gpu.arch == "sm_90" else ["bwd_sm80", "bwd_cast"]
    assert launched == ["varlen_tiles"] * is_packed + ["bwd_delta", *own]
    assert gpu.early == [kernel for kernel in own if kernel.startswith("bwd_d")]


def test_a_batch_of_one_without_its_axis(gpu):
    shapes = {name: shape[1:] for name, shape in SHAPES.items()}
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse", shapes=shapes)
    (dout,) = gpu.arrays("out", shapes=shapes)
    gradients = cuflash.attention_backward(dout, q, k, v, out, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert gpu.taken()[gpu.backward]["dq_strides"].tolist() == [100 * 4 * 64, 4 * 64, 64]


def test_the_pullback_of_a_forward(gpu):
    q, k, v = gpu.arrays("q", "k", "v")
    out, lse, pullback = cuflash.attention_vjp(
        q, k, v, window=(9, 0), softcap=2.0, deterministic=True, return_lse=True
    )
    forward = gpu.taken()[gpu.forward]
    dout, dlse = gpu.arrays("out", "lse")
    for gradient in (None, dlse):
        pullback(dout, gradient)
        launches = gpu.taken()
        record = launches[gpu.backward]
        assert pointers(record, "out", "lse", "dout") == addresses(out, lse, dout)
        assert pointers(record, "dlse") == [0 if gradient is None else dlse.data.ptr]
        for name in ("scale_log2", "tanh_scale", "cap_log2", "window_left", "window_right"):
            assert record[name] == forward[name]
        assert record["softmax_scale"] == 64**-0.5 and record["turns"] > 0
    out, pullback = cuflash.attention_vjp(q, k, v)
    assert out.shape == SHAPES["out"] and len(pullback(dout)) == 3


def test_gradients_into_given_arrays(gpu):
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse")
    dout, dk = gpu.arrays("out", "k")
    for _ in range(2):
        dq, given, dv = cuflash.attention_backward(dout, q, k, v, out, lse, dk=dk)
        assert given is dk and pointers(gpu.taken()["bwd_cast"], "dq", "dk", "dv") == addresses(dq, dk, dv)
    prepared = len(gpu.kernels)
    for bad in (k, gpu.array(SHAPES["k"], offset=2)):
        if bad is not k:
            bad = cupy.ndarray(SHAPES["k"], "float16", memptr=dout.data + 512)  # inside dout
        with pytest.raises(ValueError, match="dk must not overlap (k|dout): they share memory"):
            cuflash.attention_backward(dout, q, k, v, out, lse, dk=bad)
    with pytest.raises(ValueError, match="dv must not overlap dk"):
        cuflash.attention_backward(
            dout, q, k, v, out, lse, dk=dk, dv=cupy.ndarray(SHAPES["v"], "float16", memptr=dk.data)
        )
    assert len(gpu.kernels) == prepared and gpu.taken() == {}


def test_scratch_of_a_captured_call_belongs_to_the_graph(gpu):
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse")
    (dout,) = gpu.arrays("out")
    cuflash.attention_backward(dout, q, k, v, out, lse)
    assert gpu.freed == []
    gpu.capturing = True
    cuflash.attention_backward(dout, q, k, v, out, lse)
    assert gpu.freed == [gpu.allocated[-1][0]], "freed behind the launches"


def test_the_counter_of_a_captured_forward_belongs_to_the_graph(gpu):
    q, k, v = gpu.arrays("q", "k", "v", shapes=MANY)
    cuflash.attention(q, k, v, causal=True)
    assert gpu.freed == []
    gpu.capturing = True
    cuflash.attention(q, k, v, causal=True)
    assert gpu.freed == ([gpu.allocated[-1][0]] if gpu.arch == "sm_90" else [])
    assert gpu.cleared == [(scratch, 16) for scratch, _ in gpu.allocated], "each replay counts from 0"


def test_lengths_are_read_only_if_asked_to(gpu, monkeypatch):
    q, k, v = gpu.arrays("q", "k", "v", shapes=PACKED)
    lengths, _ = packed(gpu)
    values = {lengths[0].data.ptr: [0, 50, 40, 100], lengths[1].data.ptr: [0, 1, 2, 120]}
    monkeypatch.setattr(arrays.CupyDoor, "to_host", lambda self, x: np.array(values[x.data.ptr]))
    cuflash.attention_varlen(q, k, v, *lengths)
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease; got 50 and then 40 at index 2"):
        cuflash.attention_varlen(q, k, v, *lengths, validate=True)
    values[lengths[0].data.ptr] = [0, 50, 50, 100]
    cuflash.attention_varlen(q, k, v, *lengths, validate=True)
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="validate=True copies the lengths to the host"):
        cuflash.attention_varlen(q, k, v, *lengths, validate=True)


def test_lengths_elsewhere(gpu):
    q, k, v = gpu.arrays("q", "k", "v", shapes=PACKED)
    lengths, _ = packed(gpu)
    on_host = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q must be on the device of q, cuda:0; got cpu"):
        cuflash.attention_varlen(q, k, v, on_host, lengths[1])
    with pytest.raises(ValueError, match="cu_seqlens_k must be on the device of q, cuda:0; got cuda:1"):
        cuflash.attention_varlen(q, k, v, lengths[0], gpu.array((4,), "int32", device=1))
    with pytest.raises(ValueError, match="seqused_k must be on the device of q, cuda:0; got cpu"):
        cuflash.attention_varlen(q, k, v, *lengths, seqused_k=on_host[1:])
    assert gpu.taken() == {}


def test_calls_that_differ_are_prepared_apart(gpu):
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse")
    (dout,) = gpu.arrays("out")
    backward = cuflash.attention_backward
    calls = [
        lambda: cuflash.attention(q, k, v),
        lambda: cuflash.attention(q, k, v, return_lse=True),
        lambda: backward(dout, q, k, v, out, lse),
        lambda: backward(dout, q, k, v, out, lse, dlse=lse),
        lambda: backward(dout, q, k, v, out, lse, deterministic=True),
        lambda: backward(dout, q, k, v, out, lse, causal=True),
        lambda: backward(dout, q, k, v, out, lse, window=(4, 0)),
        lambda: backward(dout, q, k, v, out, lse, dq=out_of(q)),
        lambda: backward(dout, q, k, v, out, lse, softmax_scale=0.5),
    ]

    def out_of(x):
        return gpu.array(x.shape)

    kept = importlib.import_module("cuflash.attention")._prepared.calls
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            call()
            assert len(kept) == number
    for wrong in (dict(causal=1), dict(deterministic=1), dict(window=(4.0, 0)), dict(softmax_scale=True)):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            backward(
                dout, q, k, v, out, lse, **{"softmax_scale": 1, "window": (4, 0), "causal": True} | wrong
            )
    assert backward(dout, q, k, v, out, lse, window=[4, 0])[0].shape == q.shape and len(kept) == len(calls)


@pytest.mark.parametrize(
    "shapes",
    [
        {**SHAPES, "k": (2, 0, 2, 64), "v": (2, 0, 2, 32)},
        {**SHAPES, "q": (2, 0, 4, 64), "out": (2, 0, 4, 32), "lse": (2, 4, 0)},
        {name: (0, *shape[1:]) for name, shape in SHAPES.items()},
    ],
)
def test_empty_sides(gpu, shapes):
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse", shapes=shapes)
    (dout,) = gpu.arrays("out", shapes=shapes)
    gradients = cuflash.attention_backward(dout, q, k, v, out, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    counts = ["bwd_delta"] * (gpu.backward == "bwd_sm90")  # it sets the counter of tiles to 0
    expected = [] if q.shape[0] == 0 else ["bwd_delta", "bwd_cast"] if k.shape[1] == 0 else [*counts, gpu.backward]
    assert list(gpu.taken()) == expected


class Shared:
    """An array of another framework on a GPU, which gives CuPy its memory."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        raise AssertionError("cupy.from_dlpack is made up here")


def test_other_arrays_go_through_cupy(gpu, monkeypatch):
    monkeypatch.setattr(cupy, "from_dlpack", lambda shared: shared.x)
    monkeypatch.setattr(arrays.DlpackDoor, "keep_until_done", lambda self, *given: None)
    q, k, v, out, lse = gpu.arrays("q", "k", "v", "out", "lse")
    (dout,) = gpu.arrays("out")
    given = [Shared(x) for x in (dout, q, k, v, out, lse)]
    gradients = cuflash.attention_backward(*given)
    assert pointers(gpu.taken()["bwd_delta"], "q", "k", "v", "out", "lse", "dout") == addresses(
        q, k, v, out, lse, dout
    )
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    with pytest.raises(ValueError, match="lse must be on the device of q, cuda:0; got cpu"):
        cuflash.attention_backward(*given[:5], np.zeros(SHAPES["lse"], "float32"))
    with pytest.raises(TypeError, match="dv is not supported for dlpack arrays; got Shared"):
        cuflash.attention_backward(*given, dv=Shared(v))
    out, lse = cuflash.attention(*given[1:4], return_lse=True)
    assert list(gpu.taken()) == [gpu.forward] and lse.shape == SHAPES["lse"]


def test_a_device_that_is_not_current(gpu, monkeypatch):
    """Made current for the call, if CUDA or the framework has another one for current."""
    attention, entered = importlib.import_module("cuflash.attention"), []
    q, k, v = gpu.arrays("q", "k", "v")
    calls = {
        "attention": lambda: cuflash.attention(q, k, v),
        "attention_with_kvcache": lambda: cuflash.attention_with_kvcache(q, k, v),
    }
    for call in calls.values():
        call()
    gpu.taken()

    @contextlib.contextmanager
    def on_device(self, device_id):
        entered.append(device_id)
        yield
        assert gpu.launches and gpu.taken()

    monkeypatch.setattr(arrays.CupyDoor, "on_device", on_device)
    for current, of_framework in ((1, None), (0, lambda: 1), (1, lambda: 0), (0, lambda: 0)):
        monkeypatch.setattr(attention, "_current_device", lambda current=current: current)
        monkeypatch.setattr(arrays.CupyDoor, "current_device", of_framework and staticmethod(of_framework))
        for call in calls.values():
            call()
    assert entered == [0] * 6 and len(gpu.taken()) == 3


# ------------------------------------------------------------------------------------------------------------
# Decoding

CACHES = {
    "q": (3, 2, 4, 64),
    "k_cache": (3, 40, 2, 64),
    "v_cache": (3, 40, 2, 32),
    "k": (3, 2, 2, 64),
    "v": (3, 2, 2, 32),
    "out": (3, 2, 4, 32),
}
PAGES = CACHES | {"k_cache": (10, 16, 2, 64), "v_cache": (10, 16, 2, 32)}
DECODE_POINTERS = ("k_new", "v_new", "cache_seqlens", "cache_batch_idx", "block_table")


def decoding(gpu, *names, shapes=CACHES):
    return gpu.arrays("q", "k_cache", "v_cache", *names, shapes=shapes)


def test_decoding(gpu):
    q, k_cache, v_cache = decoding(gpu)
    out, lse = cuflash.attention_with_kvcache(q, k_cache, v_cache, return_lse=True)
    launches = gpu.taken()
    assert list(launches) == ["decode_sm80", "decode_combine"] and gpu.cleared == []
    assert gpu.early == ["decode_combine"] * (gpu.arch == "sm_90"), "older GPUs start none early"
    scratch, size = gpu.scratch()
    for record in launches.values():
        assert pointers(record, "q", "k", "v", "out", "lse") == addresses(q, k_cache, v_cache, out, lse)
        assert pointers(record, *DECODE_POINTERS) == [0] * 5
        assert pointers(record, "partial_out") == [scratch] and scratch < record["partial_lse"] < scratch + size
        assert (record["fixed_seqlen"], record["seqlen_new"], record["num_slots"]) == (40, 0, 3)
    assert (out.shape, lse.shape, lse.dtype) == (CACHES["out"], (3, 4, 2), "float32")


def test_the_pointers_of_decoding_with_everything(gpu):
    lengths, table = gpu.array((3,), "int64"), gpu.array((3, 7), "int32")[:, :5]
    for _ in range(2):
        q, k_cache, v_cache, k, v, out = decoding(gpu, "k", "v", "out", shapes=PAGES)
        given = cuflash.attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, block_table=table, out=out
        )
        assert given is out
        for record in gpu.taken().values():
            assert pointers(record, "q", "k", "v", "out", "lse") == [*addresses(q, k_cache, v_cache, out), 0]
            assert pointers(record, *DECODE_POINTERS) == [*addresses(k, v, lengths), 0, *addresses(table)]
            assert (record["seqlen_new"], record["page_size"], record["seqlen_k"]) == (2, 16, 80)
            assert (record["block_table_stride"], record["decode_int64_lengths"]) == (7, 1)
    assert len(gpu.kernels) == 2
    q, k_cache, v_cache = decoding(gpu)
    index = gpu.array((3,), "int64")
    cuflash.attention_with_kvcache(q, k_cache, v_cache, cache_batch_idx=index)
    record = gpu.taken()["decode_sm80"]
    assert pointers(record, *DECODE_POINTERS) == [0, 0, 0, index.data.ptr, 0] and record["decode_int64_lengths"] == 2


def test_a_length_that_changes_prepares_nothing(gpu):
    q, k_cache, v_cache, k, v = decoding(gpu, "k", "v")
    for length in (0, 1, np.int64(38), 17):
        cuflash.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=length)
        assert [record["fixed_seqlen"] for record in gpu.taken().values()] == [length, length]
    for wrong, message in ((39, "must leave room"), (-1, "must be 0 to 40"), (None, "must be given"), (41, "must be 0 to 40")):
        with pytest.raises(ValueError, match=f"cache_seqlens {message}"):
            cuflash.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=wrong)
    with pytest.raises(TypeError, match="cache_seqlens must be an integer, an array or None; got True"):
        cuflash.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=True)
    assert len(gpu.kernels) == 2 and gpu.taken() == {}
    lengths = gpu.array((3,), "int32")
    cuflash.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)
    assert pointers(gpu.taken()["decode_sm80"], "cache_seqlens") == [lengths.data.ptr]


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_with_out_and_a_workspace_nothing_is_allocated(gpu, monkeypatch, num_splits):
    q, k_cache, v_cache, out = decoding(gpu, "out")
    options = {"num_splits": num_splits, "out": out}
    needed = cuflash.kvcache_workspace_bytes(q, k_cache, v_cache, **options)
    assert gpu.kernels == gpu.allocated == [] and (needed > 0) == (num_splits != 1)
    workspace = gpu.array((needed + 1000,), "uint8")[1000 - 1000 % 16 :] if needed else gpu.array((0,), "uint8")
    monkeypatch.setattr(arrays.CupyDoor, "maker", lambda self, *what: None)
    for _ in range(2):
        cuflash.attention_with_kvcache(q, k_cache, v_cache, workspace=workspace, **options)
        for record in gpu.taken().values():
            places = pointers(record, "partial_out", "partial_lse")
            assert (places[0] == workspace.data.ptr < places[1] < workspace.data.ptr + needed) if needed else places == [0, 0]
    assert gpu.allocated == []
    if needed:
        for small in (workspace[: needed - 16], workspace[:0]):
            with pytest.raises(ValueError, match=f"workspace must have {needed} bytes or more .*; got {len(small)}"):
                cuflash.attention_with_kvcache(q, k_cache, v_cache, workspace=small, **options)
        with pytest.raises(ValueError, match="workspace must be aligned to 16 bytes"):
            cuflash.attention_with_kvcache(q, k_cache, v_cache, workspace=workspace[8:], **options)


def test_values_that_begin_where_keys_do_are_another_call(gpu):
    """Shapes and strides of the two are those of keys and values that lie apart."""
    q, k_cache, other = (gpu.array(shape) for shape in ((3, 1, 4, 576), (3, 40, 1, 576), (3, 40, 1, 576)))
    expected = "decode_sm90" if gpu.arch == "sm_90" else "decode_simt"
    for _ in range(2):
        for values, kernel in ((other, "decode_simt"), (k_cache, expected)):
            cuflash.attention_with_kvcache(q, k_cache, values[..., :512])
            ((kernel_launched, record), _) = gpu.taken().items()
            assert kernel_launched == kernel
            assert pointers(record, "k", "v") == addresses(k_cache, values)
    assert len(gpu.kernels) == 4
    k, lengths = gpu.array((3, 1, 1, 576)), gpu.array((3,), "int32")
    cuflash.attention_with_kvcache(q, k_cache, k_cache[..., :512], k=k, v=k[..., :512], cache_seqlens=lengths)
    gpu.taken()
    with pytest.raises(ValueError, match=r"v must be k\[..., :head_dim_v\]"):
        away = gpu.array((3, 1, 1, 576))[..., :512]
        cuflash.attention_with_kvcache(q, k_cache, k_cache[..., :512], k=k, v=away, cache_seqlens=lengths)
    with pytest.raises(ValueError, match="v_cache must not overlap k_cache"):
        cuflash.attention_with_kvcache(q, k_cache, k_cache[..., 64:], k=k, v=k[..., :512], cache_seqlens=lengths)
    assert gpu.taken() == {}


def test_caches_in_one_buffer_are_looked_at_once(gpu, monkeypatch):
    """Keys and values side by side in each page span the same addresses, and share none."""
    attention = importlib.import_module("cuflash.attention")
    looked, check = [], attention._check_overlaps
    monkeypatch.setattr(attention, "_check_overlaps", lambda *given: looked.append(check(*given)))
    table, lengths = gpu.array((3, 5), "int32"), gpu.array((3,), "int32")
    options = {"block_table": table, "cache_seqlens": lengths}
    for _ in range(4):
        pages, q, k = gpu.array((10, 2, 16, 2, 64)), gpu.array((3, 1, 4, 64)), gpu.array((3, 1, 2, 64))
        v = gpu.array((3, 1, 2, 64))
        cuflash.attention_with_kvcache(q, pages[:, 0], pages[:, 1], k=k, v=v, **options)
    assert len(looked) == 1 and len(gpu.kernels) == 2
    with pytest.raises(ValueError, match="k_cache must not overlap k: they share memory"):
        cuflash.attention_with_kvcache(q, pages[:, 0], pages[:, 1], k=pages[:3, 0, :1], v=v, **options)


def test_a_given_out_in_a_cache(gpu):
    q, k_cache, v_cache, out = decoding(gpu, "out")
    cuflash.attention_with_kvcache(q, k_cache, v_cache, out=out)
    inside = cupy.ndarray(CACHES["out"], "float16", memptr=v_cache.data + 512)
    for _ in range(2):
        with pytest.raises(ValueError, match="out must not overlap v_cache: they share memory"):
            cuflash.attention_with_kvcache(q, k_cache, v_cache, out=inside)
    with pytest.raises(ValueError, match="workspace must not overlap q: they share memory"):
        inside = cupy.ndarray((1 << 22,), "uint8", memptr=q.data)
        cuflash.attention_with_kvcache(q, k_cache, v_cache, workspace=inside)


def test_contents_are_read_only_if_asked_to(gpu, monkeypatch):
    q, k_cache, v_cache = decoding(gpu, shapes=PAGES)
    lengths, table = gpu.array((3,), "int32"), gpu.array((3, 5), "int32")
    values = {lengths.data.ptr: [0, 17, 80], table.data.ptr: [[0, 9, 10, 1, 2]] * 3}
    monkeypatch.setattr(arrays.CupyDoor, "to_host", lambda self, x: np.array(values[x.data.ptr]))
    given = {"cache_seqlens": lengths, "block_table": table}
    cuflash.attention_with_kvcache(q, k_cache, v_cache, **given)
    with pytest.raises(ValueError, match="got 10 for page 2 of request 2"):
        cuflash.attention_with_kvcache(q, k_cache, v_cache, **given, validate=True)
    with pytest.raises(ValueError, match="got 10 for page 2 of request 0"):
        cuflash.attention_with_kvcache(q, k_cache, v_cache, block_table=table, cache_seqlens=33, validate=True)
    values[lengths.data.ptr] = [0, 17, 32]
    cuflash.attention_with_kvcache(q, k_cache, v_cache, **given, validate=True)


def test_new_keys_without_queries(gpu):
    q, k_cache, v_cache, k, v = decoding(gpu, "k", "v", shapes=CACHES | {"q": (3, 0, 4, 64)})
    out = cuflash.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=3)
    assert list(gpu.taken()) == ["decode_sm80"] and out.shape == (3, 0, 4, 32)
    assert cuflash.attention_with_kvcache(q, k_cache, v_cache).shape == (3, 0, 4, 32) and gpu.taken() == {}


def test_caches_of_other_frameworks(gpu, monkeypatch):
    monkeypatch.setattr(cupy, "from_dlpack", lambda shared: shared.x)
    monkeypatch.setattr(arrays.DlpackDoor, "keep_until_done", lambda self, *given: None)
    given = decoding(gpu)
    lengths, k, v = gpu.array((3,), "int32"), gpu.array(CACHES["k"]), gpu.array(CACHES["v"])
    shared = [Shared(x) for x in given]
    out = cuflash.attention_with_kvcache(*shared, cache_seqlens=Shared(lengths))
    assert pointers(gpu.taken()["decode_sm80"], "q", "k", "v", "cache_seqlens") == addresses(*given, lengths)
    assert out.shape == CACHES["out"]
    assert cuflash.kvcache_workspace_bytes(*shared) == cuflash.kvcache_workspace_bytes(*given) > 0
    for name, rest in (("k", {"k": Shared(k), "v": Shared(v)}), ("workspace", {"workspace": Shared(lengths)})):
        with pytest.raises(TypeError, match=f"{name} is not supported for dlpack arrays; got Shared"):
            cuflash.attention_with_kvcache(*shared, cache_seqlens=3, **rest)
    assert gpu.taken() == {}
