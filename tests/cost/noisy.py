"""A module that logs while it is imported, as libraries do that look for others."""

import logging

logging.getLogger("noisy").warning("I miss a part")
logging.getLogger("noisy").error("I am broken")
