"""Functions that several generated kernels share, one a file, in plain Triton.

`codegen/pieces/<name>.py` holds one `@triton.jit` function `<name>`, which reads no globals: what
it is specialised on are its `tl.constexpr` arguments. The generator copies its text into each
module that uses it, with the pieces that it calls; a piece imports those from their own modules.
Nothing here is imported by tlora-fx itself.
"""
