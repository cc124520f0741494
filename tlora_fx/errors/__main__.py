"""`python -m tlora_fx.errors` prints docs/errors.md."""

from tlora_fx.error_page import page

if __name__ == "__main__":
    print(page(), end="")
