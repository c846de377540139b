"""A loaded kernel: `Kernel.load` takes a cubin, `prepare` tensors, `Launch.run` a stream.

Takes cubin bytes, its configuration and torch tensors that the kernel can read as they are; gives
launches. Packs GemmArgs, the kernel's one argument; kgen/templates/gemm.cu.j2 declares the same
640 bytes. Must not import cache, build or search.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import torch

from kgen.config import GemmConfig, Resources, grid_size, resources_of
from kgen.errors import DriverError, LaunchError, UnsupportedInput
from kgen.problem import (
    BY_K_RECIPES,
    D_DTYPE_BYTES,
    GemmProblem,
    ceil_div,
    round_up,
    scale_shapes,
)
from kgen.reference import TORCH_D_DTYPES, TORCH_OPERAND_DTYPES
from kgen.runtime import driver
from kgen.runtime.driver import AlignedBuffer, LaunchConfig
from kgen.runtime.tma import TensorMap

ARGS_BYTES: Final = 640
MAP_A, MAP_B, MAP_D, MAP_SFA, TAIL = 0, 128, 256, 384, 512
#: sfa, sfb, sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k, m, n, k, sfa_direct, d,
#: d_stride_m, a, b, a_stride_m, b_stride_n, bias
_TAIL: Final = struct.Struct("<2Q4q4IQq2Q2qQ")
#: Streams a launch remembers; programs use a few, and a forgotten one is only made again.
_MAX_STREAMS: Final = 64
#: Of cuLaunchKernelEx: configuration, function, parameter pointers, no extras.
_Arguments = tuple[int, int, int, None]


@dataclass(frozen=True)
class Matrix:
    """A matrix in device memory: address, extents, strides in elements."""

    address: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Matrix:
        """The matrix behind a tensor [rows, cols]; raises UnsupportedInput for another rank."""
        if tensor.dim() != 2:
            raise UnsupportedInput(
                f"a tensor of shape {list(tensor.shape)}: expected two dimensions"
            )
        return cls(tensor.data_ptr(), *tensor.shape, *tensor.stride())

    def in_bytes(self, size: int) -> Matrix:
        """The same with columns and strides in bytes, for elements of `size` bytes."""
        strides = self.row_stride * size, self.col_stride * size
        return Matrix(self.address, self.rows, self.cols * size, *strides)

    def pitch_bytes(self, size: int) -> int:
        """Bytes from row to row; of a single row, whose stride torch leaves open, its length."""
        return (self.row_stride if self.rows > 1 else self.cols) * size


@dataclass(frozen=True)
class Operands:
    """The five matrices of one GEMM, of agreeing extents: a, sfa, b, sfb, d; the bias's address.

    Columns of a and b count bytes: so do kernels, to which a K block is 128 bytes of a row.
    `scales_by_k`: scales go with blocks of K columns, as those of recipe "block" do.
    """

    a: Matrix
    sfa: Matrix
    b: Matrix
    sfb: Matrix
    d: Matrix
    bias: int = 0
    scales_by_k: bool = True

    @property
    def sfa_direct(self) -> bool:
        """Whether the kernel reads A's scales itself, because TMA can not take their layout."""
        return not self.scales_by_k or not is_for_tma(self.sfa)

    def maps(self, r: Resources, d_dtype: str) -> dict[int, TensorMap]:
        """Byte offset in GemmArgs to the tensor map that goes there."""
        a, b, d = self.a, self.b, self.d
        k = a.cols
        d_pitch = d.pitch_bytes(D_DTYPE_BYTES[d_dtype])
        maps = {
            MAP_A: TensorMap("uint8", a.address, (k, a.rows), a.pitch_bytes(1), r.a_box, 128),
            MAP_B: TensorMap("uint8", b.address, (k, b.rows), b.pitch_bytes(1), r.b_box, 128),
            MAP_D: TensorMap(
                d_dtype, d.address, (d.cols, d.rows), d_pitch, r.d_box, r.d_swizzle_bytes
            ),
        }
        if not self.sfa_direct:
            maps[MAP_SFA] = map_of_scales(self.sfa, r.sfa_box)
        return maps

    def pack_into(self, buffer: AlignedBuffer, r: Resources, d_dtype: str) -> None:
        """Write GemmArgs for these matrices and a kernel with these resources."""
        for offset, tensor_map in self.maps(r, d_dtype).items():
            tensor_map.encode_into(buffer.address + offset)
        buffer.write(TAIL, self.tail())

    def tail(self) -> bytes:
        """What of GemmArgs follows the tensor maps."""
        s, t = self.sfa, self.sfb
        strides = (s.row_stride, s.col_stride, t.row_stride, t.col_stride)
        sizes = (self.a.rows, self.d.cols, self.a.cols)
        d = (self.d.address, self.d.row_stride)
        a, b = self.a, self.b
        rest = (a.address, b.address, a.row_stride, b.row_stride, self.bias)
        direct = int(self.sfa_direct)
        return _TAIL.pack(s.address, t.address, *strides, *sizes, direct, *d, *rest)


def is_for_tma(scales: Matrix) -> bool:
    """Whether TMA can take the layout of scales that go with K: rows side by side, on 16 bytes."""
    contiguous = scales.row_stride == 1 or scales.rows == 1
    return contiguous and scales.address % 16 == 0 and _column_pitch(scales) % 16 == 0


def map_of_scales(scales: Matrix, box: tuple[int, int]) -> TensorMap:
    """The tensor map of scales that TMA can take."""
    dims, pitch = (scales.rows, scales.cols), _column_pitch(scales)
    return TensorMap("fp32", scales.address, dims, pitch, box)


def _column_pitch(scales: Matrix) -> int:
    # Of a single column, whose stride torch leaves open, what TMA would like best.
    return (scales.col_stride if scales.cols > 1 else ceil_div(scales.rows, 4) * 4) * 4


def operands(
    tensors: tuple[torch.Tensor, ...], problem: GemmProblem, bias: torch.Tensor | None = None
) -> Operands:
    """The matrices behind (a, sfa, b, sfb, d); raises UnsupportedInput naming what does not fit.

    a [M, K], b [N, K] and d [M, N8], N8 being N rounded up to a multiple of 8: rows of B that are
    not there read as zero. sfa and sfb FP32 as `scale_shapes` says, for N8 under recipe "row";
    bias [N8], contiguous, of d's type. All types, and whether there is a bias, as in `problem`,
    of which nothing else is used.
    """
    a, sfa, b, sfb, d = tensors
    recipe = problem.recipe
    bias_at = bias.data_ptr() if bias is not None else 0
    of_five = (Matrix.of(a), Matrix.of(sfa), Matrix.of(b), Matrix.of(sfb), Matrix.of(d))
    o = Operands(*of_five, bias_at, recipe in BY_K_RECIPES)
    n8, d_torch = round_up(o.b.rows, 8), TORCH_D_DTYPES[problem.d_dtype]
    of_a, of_b = scale_shapes(recipe, o.a.rows, n8 if recipe == "row" else o.b.rows, o.a.cols)
    expected: list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]] = [
        ("a", a, TORCH_OPERAND_DTYPES[problem.a_dtype], (o.a.rows, o.a.cols)),
        ("sfa", sfa, torch.float32, of_a),
        ("b", b, TORCH_OPERAND_DTYPES[problem.b_dtype], (o.b.rows, o.a.cols)),
        ("sfb", sfb, torch.float32, of_b),
        ("d", d, d_torch, (o.a.rows, n8)),
    ]
    if (bias is not None) != problem.bias:
        given = "none" if bias is None else f"{bias.dtype}{list(bias.shape)}"
        raise UnsupportedInput(f"bias is {given}: the kernel is for bias={problem.bias}")
    if bias is not None:
        expected.append(("bias", bias, d_torch, (n8,)))
        if bias.stride(0) != 1 or bias.data_ptr() % 4:
            raise UnsupportedInput("bias is strided or not on 4 bytes: expected it contiguous")
    for name, tensor, dtype, shape in expected:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            given = f"{tensor.dtype}{list(tensor.shape)}"
            raise UnsupportedInput(f"{name} is {given}: expected {dtype}{list(shape)}")
    for name, matrix in (("a", o.a), ("b", o.b), ("d", o.d)):
        if matrix.col_stride != 1 and matrix.cols > 1:
            raise UnsupportedInput(f"{name} has column stride {matrix.col_stride}: expected 1")
    size = problem.operand_bytes
    return o if size == 1 else replace(o, a=o.a.in_bytes(size), b=o.b.in_bytes(size))


class Launch:
    """One kernel with its arguments packed: `run(stream)` starts it. May be run from any thread.

    Holds addresses, not tensors: it stays right as long as the same memory holds the operands.
    """

    __slots__ = (
        "_args",
        "_calls",
        "_cluster",
        "_grid",
        "_kept",
        "_kernel",
        "_params",
        "_params_at",
    )

    def __init__(
        self, kernel: Kernel, args: AlignedBuffer, grid: int, kept: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """`kept`: memory of the launch's own that its arguments point to."""
        self._kernel, self._args, self._grid, self._kept = kernel, args, grid, kept
        self._params = (ctypes.c_void_p * 1)(args.address)
        self._params_at = ctypes.addressof(self._params)
        self._cluster = driver.cluster_attribute(kernel.config.cluster_size)
        #: By stream: the arguments of the driver's call, and what must live as long as them.
        self._calls: dict[int, tuple[_Arguments, LaunchConfig]] = {}

    @property
    def grid(self) -> int:
        """CTAs that a run starts; 0 for a problem with no rows."""
        return self._grid

    @property
    def args(self) -> bytes:
        """The packed GemmArgs."""
        return bytes(self._args)

    def run(self, stream: int) -> None:
        """Start the kernel on a stream (raw handle) of the kernel's device. Does not wait.

        The device must be current. Raises DriverError, `fatal` when the context is lost.
        """
        if not self._grid:
            return
        call = self._calls.get(stream) or self._configure(stream)
        code = driver.launch()(*call[0])
        if code:
            self._retry(code, call[0])

    def _configure(self, stream: int) -> tuple[_Arguments, LaunchConfig]:
        # One for each stream, never changed afterwards: two threads may launch at once.
        kernel = self._kernel
        config = LaunchConfig()
        config.grid[:] = (self._grid, 1, 1)
        config.block[:] = (kernel.resources.threads, 1, 1)
        config.smem_bytes = kernel.resources.smem_bytes
        config.stream = stream
        if kernel.config.cluster_size > 1:
            config.attributes, config.num_attributes = ctypes.addressof(self._cluster), 1
        if len(self._calls) >= _MAX_STREAMS:
            self._calls.clear()
        arguments = (ctypes.addressof(config), kernel.function, self._params_at, None)
        entry = self._calls[stream] = (arguments, config)
        return entry

    def _retry(self, code: int, arguments: _Arguments) -> None:
        # A thread that never touched CUDA has no current context; torch sets it lazily.
        kernel = self._kernel
        if code in (driver.INVALID_CONTEXT, driver.INVALID_HANDLE):
            with driver.current_device(kernel.ordinal):
                code = driver.launch()(*arguments)
        if code:
            shape = f"grid {self._grid}, {kernel.resources.threads} threads"
            driver.raise_for(code, f"launch of {kernel.entry} [{kernel.config}], {shape}")


class Kernel:
    """A cubin loaded on one device, for every M of its problem class."""

    #: The kind of problem; kernels of grouped kinds are made in `kgen.runtime.grouped_kernel`.
    kind: ClassVar[str] = "dense"
    #: Bytes of the kernel's one argument.
    args_bytes: ClassVar[int] = ARGS_BYTES

    def __init__(
        self,
        handles: tuple[int, int],
        entry: str,
        config: GemmConfig,
        *,
        problem: GemmProblem,
        ordinal: int,
    ) -> None:
        """Wraps the (module, function) handles that `driver.load_function` gave; see `load`."""
        self._module, self.function = handles
        self.entry = entry
        self.config = config
        self.problem = problem
        self.ordinal = ordinal
        self.resources = resources_of(config, problem)
        self.device = driver.device_facts(ordinal)
        size = config.cluster_size
        if size > 1:
            r = self.resources
            count = driver.max_active_clusters(
                self.function, size, r.threads, r.smem_bytes, ordinal
            )
            self.device = replace(self.device, clusters_by_size=((size, count),))

    @classmethod
    def load(  # noqa: PLR0917, what a cubin comes with, in that order
        cls,
        cubin: bytes,
        entry: str,
        config: GemmConfig,
        problem: GemmProblem,
        ordinal: int,
        made_by: str = "",
    ) -> Self:
        """Load a cubin on `cuda:ordinal`. `made_by` names the compiler in messages.

        `problem` is one that the cubin serves; its sizes and SM budget are not used.

        Raises LaunchError when the driver refuses the image or its resources, DriverError with
        `fatal` when the context is lost.
        """
        smem_bytes = resources_of(config, problem).smem_bytes
        try:
            handles = driver.load_function(cubin, entry, smem_bytes, ordinal)
            return cls(handles, entry, config, problem=problem, ordinal=ordinal)
        except DriverError as error:
            if error.fatal or error.code == 0:
                raise
            raise LaunchError(_load_message(error, made_by, ordinal)) from error

    def prepare(  # noqa: PLR0917, five tensors in the kernel's order
        self,
        a: torch.Tensor,
        sfa: torch.Tensor,
        b: torch.Tensor,
        sfb: torch.Tensor,
        d: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        num_sms: int = 0,
    ) -> Launch:
        """Pack the arguments for these tensors, on at most `num_sms` SMs (0: all).

        Shapes and dtypes as in `operands`; a, b and d with 16-byte aligned addresses and pitches.
        Raises UnsupportedInput for tensors the kernel can not take as they are.
        """
        args = AlignedBuffer(self.args_bytes)
        o = self._operands((a, sfa, b, sfb, d), bias)
        if o.a.rows == 0:
            return self._launch(args, 0)
        problem = replace(self.problem, m=o.a.rows, n=o.d.cols, k=a.shape[1], num_sms=num_sms)
        o.pack_into(args, self.resources, self.problem.d_dtype)
        return self._launch(args, grid_size(problem, self.config, self.device))

    def _launch(
        self, args: AlignedBuffer, grid: int, kept: tuple[torch.Tensor, ...] = ()
    ) -> Launch:
        """What every way to prepare ends with."""
        return Launch(self, args, grid, kept)

    def _operands(self, tensors: tuple[torch.Tensor, ...], bias: torch.Tensor | None) -> Operands:
        return operands(tensors, self.problem, bias)

    def __call__(  # noqa: PLR0917, five tensors in the kernel's order
        self,
        a: torch.Tensor,
        sfa: torch.Tensor,
        b: torch.Tensor,
        sfb: torch.Tensor,
        d: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        num_sms: int = 0,
    ) -> None:
        """Prepare and run on the current stream of the kernel's device."""
        launch = self.prepare(a, sfa, b, sfb, d, bias, num_sms=num_sms)
        with torch.cuda.device(self.ordinal):
            launch.run(current_stream(self.ordinal))

    def unload(self) -> None:
        """Free the module; no launch of it, pending or captured in a graph, may remain."""
        driver.unload(self._module, self.ordinal)


def _no_stream(ordinal: int) -> int:
    raise DriverError(f"cuda:{ordinal} has no streams in a torch built without CUDA")


#: current_device(): the ordinal that torch launches on. 0.1 us.
current_device: Final[Callable[[], int]] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
#: current_stream(ordinal): the raw handle of torch's current stream on a device. 0.1 us;
#: torch.cuda.current_stream() makes a Stream object and takes 4.4.
current_stream: Final[Callable[[int], int]] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _no_stream
)


def _load_message(error: DriverError, made_by: str, ordinal: int) -> str:
    message = f"the kernel can not be loaded on cuda:{ordinal}: {error}"
    if error.code in driver.REFUSED_IMAGE_RESULTS:
        version = "{}.{}".format(*driver.driver_version())
        device = driver.device_facts(ordinal)
        message += (
            f"; the cubin is for sm_90a, made by {made_by or 'an unnamed compiler'}, the device is "
            f"{device.name} ({device.arch}) with a driver for CUDA {version}: update the driver, "
            "or choose an older compiler with KGEN_COMPILER"
        )
    return message
