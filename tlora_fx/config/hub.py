"""Whether the hub is reached: asked once a process, in place of each library's own retries.

Where it is not, the libraries are told to take what they have cached, or to say at once that they
have nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import urllib.error
import urllib.request
from functools import cache
from pathlib import Path

from tlora_fx.config.base_spec import is_written_as_path
from tlora_fx.config.paths import is_there, with_home

ENDPOINT = "HF_ENDPOINT"
OFFLINE = "HF_HUB_OFFLINE"
WAIT_SECONDS = 3.0
#: Modules that read once whether they are offline, and their names of it.
_READ_ONCE = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}


def is_hub_id(source: object) -> bool:
    """Whether a base or tokenizer is named as one of the hub, and is nothing on this machine."""
    return isinstance(source, str) and not is_written_as_path(source) and not is_there(source)


def hub_cache() -> Path:
    """Folder where the hub's libraries keep what they have downloaded."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return with_home(os.environ.get("HF_HUB_CACHE", f"{home}/hub"))


def is_set_offline() -> bool:
    """Whether the environment says that the hub is not to be reached."""
    return os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def why_offline() -> str:
    """Reason why nothing comes from the hub, in a few words; empty where it is reached."""
    if is_set_offline():
        return _trouble() if _asked else f"{OFFLINE} is set"
    return _trouble()


_asked: list[str] = []


@cache
def _trouble() -> str:
    address = os.environ.get(ENDPOINT, "https://huggingface.co")
    said = [f"{address}: no answer within {WAIT_SECONDS:.0f} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(address, method="HEAD")  # noqa: S310  (the user's)
            urllib.request.urlopen(request, timeout=WAIT_SECONDS).close()  # noqa: S310
        except urllib.error.HTTPError:
            said[0] = ""  # an answer is an answer
        except (OSError, ValueError) as error:
            said[0] = f"{address}: {getattr(error, 'reason', error)}"
        else:
            said[0] = ""

    # Looking up a name waits as long as it likes, whatever the timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(WAIT_SECONDS)
    trouble = said[0]
    _asked.append(trouble)
    if trouble:
        os.environ[OFFLINE] = "1"
        for name, constants in _READ_ONCE.items():
            for constant in constants:
                if name in sys.modules:
                    setattr(sys.modules[name], constant, True)
    return trouble
