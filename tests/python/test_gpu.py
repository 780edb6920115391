"""wavekv.gpu where there is no GPU: what it refuses, and how it says so. tests/client/gpu has the rest."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import wavekv
from wavekv import ModelShape, PlannedSegment

gpu = pytest.importorskip(
    "wavekv.gpu", reason="wavekv was built without the CUDA Toolkit", exc_type=ImportError
)
from wavekv import _gpu  # noqa: E402

CPU, CUDA, CUDA_HOST = 1, 2, 3
FLOAT, BFLOAT, INT = 2, 4, 0
SHAPE = ModelShape(layers=2, query_heads=8, kv_heads=2, key_dim=64)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class FakeCudaTensor:
    """Says that it lies on a GPU. Nobody may look at its data."""

    def __init__(self, shape, code=BFLOAT, bits=16, strides=None, device=(CUDA, 0), said=None):
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        pointer = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)) if strides else None
        self._managed = _DLManagedTensor(
            _DLTensor(0x1000, *device, len(shape), code, bits, 1, self._shape, pointer, 0)
        )
        self._said = said or device
        self.asked_stream = None

    def __dlpack_device__(self):
        return self._said

    def __dlpack__(self, *, stream=None):
        self.asked_stream = stream
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), b"dltensor", None)


def test_import_of_wavekv_does_not_load_it():
    code = "import sys, wavekv; assert 'wavekv._gpu' not in sys.modules; assert wavekv.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_module_the_import_says_what_to_do():
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'wavekv._gpu':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "import wavekv\n"
        "try:\n"
        "    import wavekv.gpu\n"
        "except ImportError as error:\n"
        "    assert 'built without CUDA' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('the import went through')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "array, error, says",
    [
        # What has no business here.
        (np.zeros((2, 3), np.float32), ValueError, "host memory (DLPack device type 1)"),
        ([1.0, 2.0], TypeError, "is a list, expected an object with __dlpack__"),
        (FakeCudaTensor((2, 3), device=(CUDA_HOST, 0)), ValueError, "host memory (DLPack device type 3)"),
        (FakeCudaTensor((2, 3), device=(7, 0)), ValueError, "lies elsewhere (DLPack device type 7)"),
        # Says one thing and hands out another.
        (FakeCudaTensor((2, 3), device=(CPU, 0), said=(CUDA, 0)), ValueError, "host memory"),
        (FakeCudaTensor((2, 3), INT, 32), TypeError, "DLPack type code 0 with 32 bits"),
        (FakeCudaTensor((2, 3), FLOAT, 64), TypeError, "with 64 bits"),
        (FakeCudaTensor((2, 3), strides=(1, 2)), ValueError, "[2, 3] is not dense and row-major"),
        (FakeCudaTensor((1, 1, 1, 1, 1)), ValueError, "rank 5"),
    ],
)
def test_tensors_that_are_none_are_refused_by_name(array, error, says):
    with pytest.raises(error) as raised:
        _gpu.CudaTensor(array, "queries", 7)
    assert str(raised.value).startswith("queries: ")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "code, bits, name", [(BFLOAT, 16, "bf16"), (FLOAT, 16, "f16"), (FLOAT, 32, "f32")]
)
def test_tensors_on_a_gpu_are_taken_as_they_are(code, bits, name):
    # An axis of one token may have any stride.
    tensor = _gpu.CudaTensor(
        FakeCudaTensor((4, 1, 8), code, bits, strides=(8, 5, 1), device=(CUDA, 3)), "keys", 7
    )
    assert (tensor.dtype, tensor.shape, tensor.device) == (name, (4, 1, 8), 3)


def test_streams_are_handles_or_carry_one():
    class Stream:
        cuda_stream = 41

    # DLPack has a number of its own for the default stream, whose handle is 0.
    for stream, asked in [(41, 41), (Stream(), 41), (0, 1)]:
        array = FakeCudaTensor((2, 3))
        _gpu.CudaTensor(array, "queries", stream)
        assert array.asked_stream == asked
    with pytest.raises(TypeError, match="stream: is a NoneType, expected an integer handle"):
        _gpu.CudaTensor(FakeCudaTensor((2, 3)), "queries", None)


def test_insert_refuses_host_arrays_before_it_touches_anything():
    rows = np.zeros((2, 5, 2, 64), np.float32)
    with pytest.raises(ValueError, match="keys: lies in host memory"):
        gpu.insert(None, 0, rows, rows, 0)  # The sequence is not looked at.


def test_a_batch_needs_a_model_that_a_step_can_do():
    with pytest.raises(ValueError, match="value_dim is 32, expected key_dim, 64"):
        gpu.ResidentBatch(ModelShape(2, 8, 2, 64, value_dim=32), 1000)
    with pytest.raises(ValueError, match="query_heads is 7, expected a multiple of kv_heads, 2"):
        gpu.ResidentBatch(ModelShape(2, 7, 2, 64), 1000)
    with pytest.raises(wavekv.InvalidArgumentError, match="dtype is f32; allowed: bf16, f16"):
        gpu.ResidentBatch(ModelShape(2, 8, 2, 64, dtype="f32"), 1000)


def _has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(_has_driver(), reason="this machine has a driver")
def test_a_batch_without_a_driver_says_what_is_missing():
    with pytest.raises(wavekv.FailedPreconditionError, match="no CUDA driver"):
        gpu.ResidentBatch(SHAPE, 1000)


def test_a_labeller_takes_keys_as_engines_have_them():
    labeller = gpu.KeyLabeller(SHAPE)
    plan = [PlannedSegment(0, 2048, 128)]
    # Of too few tokens for the segment: nothing is left to do, and no GPU is asked for.
    for strides in (None, (64, 128, 1), (64 * 100, 64, 1)):
        keys = FakeCudaTensor((2, 100, 64), strides=strides)
        labels = labeller.launch(keys, plan, 7)
        assert (len(labels), labels.ready, labels.wait()) == (0, True, [])
        assert keys.asked_stream == 7
    # torch says 1 where an axis has one entry.
    one_head = gpu.KeyLabeller(ModelShape(layers=2, query_heads=8, kv_heads=1, key_dim=64))
    assert len(one_head.launch(FakeCudaTensor((1, 100, 64), strides=(1, 64, 1)), plan, 7)) == 0


@pytest.mark.parametrize(
    ("tensor", "error", "text"),
    [
        (FakeCudaTensor((100, 2, 64)), ValueError, "tokens, 64"),
        (FakeCudaTensor((2, 100, 128)), ValueError, "tokens, 64"),
        (FakeCudaTensor((2, 100)), ValueError, "tokens, 64"),
        (FakeCudaTensor((2, 100, 64), FLOAT, 16), TypeError, "f16, expected bf16"),
        (FakeCudaTensor((2, 100, 64), strides=(6400, 1, 100)), ValueError, "in a row"),
        (FakeCudaTensor((2, 100, 64), strides=(-6400, 64, 1)), ValueError, "in a row"),
        (FakeCudaTensor((2, 100, 64), strides=(6500, 65, 1)), wavekv.InvalidArgumentError, "strides"),
        (np.zeros((2, 100, 64), np.float32), ValueError, "host memory"),
    ],
)  # fmt: skip
def test_a_labeller_refuses_other_keys(tensor, error, text):
    with pytest.raises(error, match=text):
        gpu.KeyLabeller(SHAPE).launch(tensor, [PlannedSegment(0, 1024, 64)], 0)


def test_a_labeller_refuses_shapes_that_no_kernel_does():
    for changed in ({"key_dim": 80}, {"dtype": "f32"}):
        with pytest.raises(wavekv.InvalidArgumentError):
            gpu.KeyLabeller(ModelShape(**{"layers": 2, "query_heads": 8, "kv_heads": 2, "key_dim": 64} | changed))
