"""`python -m tlora_fx` is `tlora-fx`."""

from tlora_fx.cli import main

if __name__ == "__main__":
    main()
