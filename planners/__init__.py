"""The planners: one target a file, each says where the parts of a Shared Super-Model run."""

if __name__ != "tlora_fx.planners":
    raise ImportError(
        f"this package is imported as 'tlora_fx.planners', not as {__name__!r}; "
        "install the project (make venv) or take its folder planners/ off sys.path",
        name=__name__,
    )
