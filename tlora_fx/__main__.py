"""`python -m tlora_fx` is `tlora-fx`."""

from tlora_fx.cli import main

main()
