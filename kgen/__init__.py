"""kgen: tuned, verified FP8 GEMM kernels for NVIDIA Hopper. Imports nothing."""

__version__ = "0.1.0"
