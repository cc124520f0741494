"""Jobs join and leave a Shared Super-Model: rows of banks, columns of tables, and names.

An open model was compiled for J slots of one structure, a branch at every open site. A job that
comes takes a vacant slot; what it needs of each bank are rows. Nothing is traced or compiled, and
rows are captured again only where it adapts a site that nobody did. Where all slots or rows are
taken, banks become larger ones, once, and whoever compiled or captured the old ones does so again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tlora_fx.config.job import Job
from tlora_fx.errors import JobsDiffer, NotAdmitted
from tlora_fx.ir.graph import AdapterSite, GroupGraph, rename_job, vacant
from tlora_fx.model.adapter_bank import AdapterBank, refresh_tables
from tlora_fx.model.slots import RowTable

#: Finds the adapters of a job on the model's base, by module path.
Resolve = Callable[[Job], Mapping[str, AdapterSite]]
NOTED_BY = "elastic"
GROWN = (
    "banks have doubled, to {} slots and {} rows: what reads them is compiled and captured again"
)
ALONE = "train it in a group of its own: tlora-fx train JOBS.yaml -o OUTPUT"


@dataclass(frozen=True, slots=True)
class Admission:
    """Result of a job's admission.

    slot    its index in every table
    moved   names of jobs whose rows are elsewhere now
    grown   whether banks became larger
    """

    slot: int
    moved: tuple[str, ...] = ()
    grown: bool = False


class Membership:
    """Jobs in the slots of an open model.

    group     its graphs, whose jobs are renamed
    jobs      a job a slot; a vacant slot's stands for nobody
    banks     by the site's path
    resolve   finds a job's adapters
    """

    def __init__(
        self,
        group: GroupGraph,
        jobs: list[Job],
        banks: Mapping[str, AdapterBank],
        net: nn.Module,
        resolve: Resolve,
    ) -> None:
        assert group.open is not None
        self.group, self.jobs, self.banks, self.net = group, jobs, banks, net
        self.slots, self.resolve = group.open, resolve
        self.grown = False
        self._resolved: tuple[Job, Mapping[str, AdapterSite]] | None = None
        for slot, graph in enumerate(group.jobs):
            for path, site in graph.sites.items():
                self._lay(path, banks[path].table.with_job(slot, site.rank), slot, site)  # type: ignore[union-attr]
        refresh_tables(banks.values())

    @property
    def members(self) -> dict[str, int]:
        """The slots that are taken, by job."""
        return {job.name: slot for slot, job in enumerate(self.jobs) if job.name != vacant(slot)}

    def admit(self, job: Job, *, may_grow: bool) -> Admission:
        """Give a job a slot and, at each of its sites, rows of zeros.

        may_grow  where all is taken, banks double, if they never have
        raises    NotAdmitted, JobsDiffer, TloraError of its targets; nothing is changed then
        """
        sites = self.fitting(job)
        found = self._free_slots(sites)
        grown = found is None and may_grow and not self.grown
        if grown:
            self._grow()
            found = self._free_slots(sites)
        if found is None:
            raise self._full(job, sites)
        slot, tables = found
        moved = {
            self.jobs[other].name
            for path, table in tables.items()
            for other, rank in enumerate(table.ranks)
            if other != slot and rank and self._table(path).offsets[other] != table.offsets[other]
        }
        for path, table in tables.items():
            self._lay(path, table, slot, sites[path])
        refresh_tables(self.banks[path] for path in tables)
        self.jobs[slot] = job
        rename_job(self.group, slot, job.name, dict(sites))
        return Admission(slot, tuple(sorted(moved)), grown)

    def release(self, name: str) -> int:
        """Take a job's rows and slot back; returns the slot.

        raises    NotAdmitted where no such job is in the model
        """
        slot = self.members.get(name)
        if slot is None:
            raise NotAdmitted(
                "no such job is in the model", job=name, expected=", ".join(self.members) or "none"
            )
        rows: list[Tensor] = []
        for path in self.group.jobs[slot].sites:
            rows += self._lay(path, self._table(path).without(slot), slot, None)
        refresh_tables(self.banks[path] for path in self.group.jobs[slot].sites)
        if rows:
            torch._foreach_zero_(rows)
        empty = vacant(slot)
        self.jobs[slot] = self.jobs[slot].model_copy(update={"name": empty})
        rename_job(self.group, slot, empty, {})
        return slot

    def fitting(self, job: Job) -> Mapping[str, AdapterSite]:
        """A job's adapters, where the model's structure has a place for each.

        raises    NotAdmitted, JobsDiffer, TloraError of its targets
        """
        like = self.jobs[0]
        if job.name in self.members:
            raise JobsDiffer("two jobs have one name", found=job.name, help="rename one")
        compared = [
            (field, getattr(like, field), getattr(job, field))
            for field in ("base", "adapter_dtype", "adapter_compute")
        ]
        if noise := job.neftune_noise_alpha:
            compared.append(("neftune_noise_alpha", "no noise on embeddings", noise))
        for field, expected, found in compared:
            if expected != found:
                raise NotAdmitted(
                    f"job '{job.name}' does not fit the running model",
                    field=field, expected=expected, found=found, help=ALONE,
                )  # fmt: skip
        if self._resolved is None or self._resolved[0] is not job:
            self._resolved = job, self.resolve(job)
        sites = self._resolved[1]
        for path, site in sites.items():
            wrong = self._why_not(path, site)
            if wrong:
                expected, found = wrong
                raise NotAdmitted(
                    f"job '{job.name}' needs another structure than the running model's",
                    site=path, expected=expected, found=found, help=ALONE,
                )  # fmt: skip
        return sites

    def bytes_needed(self, job: Job, *, may_grow: bool, crowded: bool = False) -> int:
        """Bytes of a job's optimizer state, at two numbers a parameter, and of larger banks.

        may_grow  banks double where nothing else fits
        crowded   the slot and rows that are free may be another's
        """
        sites = self.fitting(job)
        rows = {path: self._row_bytes(path) for path in self.banks}
        state = sum(2 * site.rank * rows[path] for path, site in sites.items())
        if not may_grow or self.grown or not (crowded or self._free_slots(sites) is None):
            return state
        # Parameters and gradients; the old ones are let go of bank by bank.
        return state + sum(2 * len(self.banks[path].a) * size for path, size in rows.items())

    def _row_bytes(self, path: str) -> int:
        bank = self.banks[path]
        return bank.a.element_size() * (bank.a.shape[1] + bank.b.shape[1])

    def _why_not(self, path: str, site: AdapterSite) -> tuple[str, str] | None:
        """What a site should be and is, where it has no place in the model."""
        if site.kind != "lora":
            return "plain LoRA", site.kind
        if path not in self.banks:
            return f"sites among {self.slots.sites}", path
        if site.rank > self.slots.rank:
            return f"a rank of {self.slots.rank} at most", str(site.rank)
        if site.dropout and not self.slots.dropout:
            return "no dropout", str(site.dropout)
        return None

    def _free_slots(
        self, sites: Mapping[str, AdapterSite]
    ) -> tuple[int, dict[str, RowTable]] | None:
        """A slot and the tables with the job in it: as few others move as possible."""
        free = [slot for slot, job in enumerate(self.jobs) if job.name == vacant(slot)]
        for moves in range(len(self.jobs)):
            for slot in free:
                tables: dict[str, RowTable] = {}
                for path, site in sites.items():
                    table = self._table(path).with_job(slot, site.rank, moves)
                    if table is None:
                        break
                    tables[path] = table
                else:
                    return slot, tables
        return None

    def _full(self, job: Job, sites: Mapping[str, AdapterSite]) -> NotAdmitted:
        need = max(site.rank for site in sites.values())
        least = min(table.total - table.used for table in map(self._table, sites))
        return NotAdmitted(
            f"the running model has no free slot or rows for job '{job.name}'",
            expected=f"a vacant slot of {len(self.jobs)}, and {need} rows",
            found=f"{len(self.jobs) - len(self.members)} vacant slots, {least} rows",
            help=f"wait until a job has ended, or {ALONE}",
        )

    def _grow(self) -> None:
        """Twice the slots and rows."""
        old, self.grown = len(self.jobs), True
        self.slots = replace(self.slots, jobs=2 * old, rows=2 * self.slots.rows)
        self.group.open = self.slots
        for slot in range(old, 2 * old):
            self.jobs.append(self.jobs[0].model_copy(update={"name": vacant(slot)}))
            self.group.jobs.append(self.group.jobs[0].for_job(vacant(slot), {}))
        for bank in self.banks.values():
            bank.grow(self.slots.jobs, self.slots.rows)
        # The base's own dropouts have a rate for each job, all equal to the base's.
        for name, table in list(self.net.named_buffers()):
            path, _, what = name.rpartition(".")
            if what == "rates" and "keyed" in path.split(".") and len(table) == old:
                self.net.get_submodule(path)._buffers[what] = torch.cat([table, table])
        self.group.notes.append((NOTED_BY, GROWN.format(self.slots.jobs, self.slots.rows)))

    def _table(self, path: str) -> RowTable:
        table = self.banks[path].table
        assert table is not None
        return table

    def _lay(
        self, path: str, table: RowTable | None, slot: int, site: AdapterSite | None
    ) -> list[Tensor]:
        assert table is not None
        return self.banks[path].lay(table, slot, site)
