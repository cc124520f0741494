"""The profiles that are at hand: those that were shipped, and those that the user measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tlora_fx.cost.hardware import find_gpu, gpu_of_device
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile, name_of
from tlora_fx.errors import ProfileFileError, ProfileMissing
from tlora_fx.planners.roofline import roofline_profile
from tlora_fx.planners.scaling import scaled

SHIPPED = Path(__file__).parent / "profiles"
FOLDER_VARIABLE = "TLORA_FX_PROFILES"
ROOFLINE = "roofline:"


def own_folder() -> Path:
    """Where `tlora-fx profile` writes where no file is named: a cache folder of the user's."""
    given = os.environ.get(FOLDER_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path(cache or Path.home() / ".cache") / "tlora-fx" / "profiles"


def own_file(title: str, gpu: str) -> Path:
    """Where the user's profile of a base on a GPU lies."""
    return own_folder() / f"{name_of(title, gpu)}.json"


def known_profiles() -> Iterator[Profile]:
    """All profiles, the user's first; a file that is none is passed over."""
    for folder in (own_folder(), SHIPPED):
        for path in sorted(folder.glob("*.json")):
            try:
                yield Profile.load(path)
            except ProfileFileError:
                continue


def profile_for(facts: ModelFacts, gpu: str, *, allow_estimated: bool) -> Profile:
    """The profile to plan a model with.

    gpu       a short name such as "h200", the driver's name, a file, or "roofline:" and a name for
              the data sheet alone
    raises    ProfileMissing where nothing was measured and estimates are not allowed; UnknownGpu,
              ProfileFileError
    """
    if gpu.startswith(ROOFLINE):
        found = roofline_profile(find_gpu(gpu.removeprefix(ROOFLINE)), facts)
    elif gpu.endswith(".json"):
        found = _fitted(Profile.load(gpu), facts)
    else:
        found = _nearest(facts, gpu)
    if found.estimated and not allow_estimated:
        raise ProfileMissing(
            f"there is no measured profile of this model on '{gpu}'",
            base=facts.title,
            found=found.name,
            help="measure one with `tlora-fx profile jobs.yaml` on that GPU, or plan with "
            "--allow-estimated; `train --plan auto` asks for what was measured",
        )
    return found


def covers(profile: Profile, facts: ModelFacts) -> bool:
    """Whether all layers of a model were measured, and its head."""
    shape = profile.shape
    same_head = (shape.vocabulary, shape.hidden) == (facts.vocabulary, facts.hidden)
    known = {layer.structure for layer in profile.layers}
    dtype = shape.dtype == facts.dtype
    return same_head and dtype and all(layer.structure in known for layer in facts.layers)


def _fitted(profile: Profile, facts: ModelFacts) -> Profile:
    if covers(profile, facts):
        return profile
    return scaled(profile, gpu_of_device(profile.hardware.gpu) or find_gpu("h100"), facts)


def _nearest(facts: ModelFacts, gpu: str) -> Profile:
    """A measured profile; else the nearest one scaled; else the roofline."""
    sheet = gpu_of_device(gpu)
    wanted = sheet.name if sheet else gpu
    every = list(known_profiles())
    here = [one for one in every if _same_gpu(one, wanted)]
    exact = [one for one in here if covers(one, facts)]
    if exact:
        return exact[0]
    sheet = sheet or find_gpu(gpu)
    by_size = [one for one in every if gpu_of_device(one.hardware.gpu) is not None]
    if not by_size:
        return roofline_profile(sheet, facts)
    nearest = min(
        by_size,
        key=lambda one: (
            not covers(one, facts),
            not _same_gpu(one, wanted),
            abs(one.shape.hidden - facts.hidden),
        ),
    )
    return scaled(nearest, sheet, facts)


def _same_gpu(profile: Profile, name: str) -> bool:
    own = gpu_of_device(profile.hardware.gpu)
    return (own.name if own else profile.hardware.gpu) == name
