"""The driver, kernels and the public GEMM operations. Imports nothing."""
