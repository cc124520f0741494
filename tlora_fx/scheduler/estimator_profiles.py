"""The profiles that an estimator may be made of: of the cluster's own GPUs, and measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tlora_fx.cost.hardware import gpu_of_device
from tlora_fx.cost.model_facts import ModelFacts
from tlora_fx.cost.profile import Profile
from tlora_fx.cost.profile_sources import profile_for
from tlora_fx.errors import ProfileMismatch
from tlora_fx.scheduler.bases import find_base


def profiles_for(
    bases: Iterable[str],
    gpu: str,
    *,
    allow_estimated: bool = False,
    shapes: Mapping[str, ModelFacts] | None = None,
    given: Mapping[str, Profile] | None = None,
) -> dict[str, Profile]:
    """A profile of each base on one kind of GPU.

    gpu              a short name such as "h200", or the driver's
    allow_estimated  where nothing was measured take the nearest profile, scaled, or a roofline
    shapes           facts of bases that are not known by name
    given            profiles that a user names; they are not scaled
    raises           ProfileMismatch, BaseUnknown, UnknownGpu
    """
    known, own = shapes or {}, given or {}
    found = {}
    for base in bases:
        facts = known[base] if base in known else find_base(base).facts()
        profile = own.get(base) or profile_for(facts, gpu, allow_estimated=True)
        demand_profile(base, profile, gpu, allow_estimated=allow_estimated)
        found[base] = profile
    return found


def demand_profile(base: str, profile: Profile, gpu: str, *, allow_estimated: bool) -> None:
    """Refuse a profile of other hardware, and one that was not measured.

    raises    ProfileMismatch
    """
    if not same_gpu(profile.hardware.gpu, gpu):
        raise ProfileMismatch(
            f"the profile of base '{base}' is of another GPU",
            profile=profile.name,
            expected=gpu,
            found=profile.hardware.gpu,
            help="measure the base there with `tlora-fx profile`, or name the right profile",
        )
    if profile.estimated and not allow_estimated:
        raise ProfileMismatch(
            f"base '{base}' was not measured on '{gpu}'",
            profile=profile.name,
            found=f"{profile.source}, from {profile.origin}",
            help="measure it with `tlora-fx profile`, or allow estimated profiles",
        )


def same_gpu(one: str, other: str) -> bool:
    """Whether two names mean one kind of GPU."""
    known = [gpu_of_device(name) for name in (one, other)]
    if None in known:
        return one.lower() == other.lower()
    return known[0] is known[1]
