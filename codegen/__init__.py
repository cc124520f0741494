"""Kernel code generation: from a kernel's specialisation to readable Triton source."""

if __name__ != "tlora_fx.codegen":
    raise ImportError(
        f"this package is imported as 'tlora_fx.codegen', not as {__name__!r}; "
        "install the project (make venv) or take its folder codegen/ off sys.path",
        name=__name__,
    )
