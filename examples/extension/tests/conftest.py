"""The fixture `golden`, and jobs on a small base."""

import pytest

from tlora_fx.testing import small_base, small_job

pytest_plugins = ["tlora_fx.testing.plugin"]


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Two jobs whose scales differ: 4.0 and 1.0."""
    base = small_base(tmp_path_factory.mktemp("base"))
    return [
        small_job("scaled", base, r=2, lora_alpha=8),
        small_job("plain", base, r=4, lora_alpha=4),
    ]
