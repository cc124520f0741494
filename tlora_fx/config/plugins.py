"""Plug-ins of other packages: classes that their entry points name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from tlora_fx.errors import PluginBroken


@dataclass(frozen=True, slots=True)
class Plugin:
    """Class that another package offers under a name.

    package    the distribution and its version, "" where it is not known
    found      the class, None where it is broken
    broken     why it cannot be used, "" for none
    """

    name: str
    package: str
    target: str
    found: type | None
    broken: str = ""

    def error(self, what: str) -> PluginBroken:
        """Error which says that the plug-in `what`, such as "pass 'name'", is broken and why."""
        return PluginBroken(
            f"{what} is broken",
            package=self.package or None,
            entry=self.target,
            found=self.broken,
            help="mend or uninstall that package",
        )


def load_plugin(entry: EntryPoint) -> Plugin:
    """Import what any entry point names; never raises."""
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever a stranger's module raises)
        return Plugin(entry.name, package, entry.value, None, f"{type(error).__name__}: {error}")
    if not isinstance(loaded, type):
        return Plugin(entry.name, package, entry.value, None, f"{entry.value} is no class")
    return Plugin(entry.name, package, entry.value, loaded)


def plugins_of(group: str, load: Callable[[EntryPoint], Plugin] = load_plugin) -> list[Plugin]:
    """Plug-ins of a group of entry points by name, broken ones too."""
    return [load(entry) for entry in sorted(entry_points(group=group), key=lambda each: each.name)]


def plugin_names(group: str, own: Iterable[str] = ()) -> list[str]:
    """Names in a group of entry points, and our own, without importing anything."""
    return sorted({*own, *(entry.name for entry in entry_points(group=group))})
