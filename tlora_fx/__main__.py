"""`tlora-fx`, and `python -m tlora_fx`."""

from tlora_fx.host.early_end import end_on_sigterm


def main() -> None:
    """Run the command line, which takes a moment to import."""
    end_on_sigterm()
    from tlora_fx.cli import main as run

    run()


if __name__ == "__main__":
    main()
