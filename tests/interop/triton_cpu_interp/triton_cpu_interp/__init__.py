"""A Triton backend in name only: under TRITON_INTERPRET=1 kernels run as Python, and nothing asks it to compile."""
