"""Whether the Triton kernels are right on a device, one file for each group of them."""
