"""Milliseconds of one step of each pair of a group and a layout, term by term.

The terms are those of tlora_fx/cost/step_time.py, summed over layers before and not after they are
asked for: all are straight in the sums that a `Demand` holds, but for the curves of a row's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlora_fx.cost.demand import Array
from tlora_fx.cost.layouts import Layouts
from tlora_fx.scheduler.estimator_fit import UNFUSED_MS, BaseFit
from tlora_fx.scheduler.estimator_rows import Groups, Pairs, Places

#: All-reduces of a layer in one direction under tensor parallelism.
TALKS = 2
#: As tlora_fx/cost/step_time.py has them.
GATHER_HOST_MS, HOST_BOUND_TOKENS = 0.95, 512
#: As `BaseFit` names curves and slopes of layers.
DIRECTIONS = ("forward", "backward")
Terms = dict[str, Array]


@dataclass(frozen=True, slots=True)
class StepClock:
    """Tells times of pairs.

    fused          adapters run in shared kernels; otherwise one after the other
    nano_batches   numbers of them to choose from, where tp talks
    """

    fit: BaseFit
    layouts: Layouts
    fused: bool = True
    nano_batches: Sequence[int] = (1,)

    def terms(self, groups: Groups, pairs: Pairs) -> Terms:
        """Milliseconds of a step by name [m]; they add up, an overlap being negative."""
        fit, rows, share = self.fit, pairs.rows, pairs.share
        base = rows * (self._curve("forward", pairs) + self._curve("backward", pairs))
        attention, adapters = self._beside(groups, pairs)
        targets = groups.column("targets")[pairs.group] * share
        talk, loss_talk = self._talk(pairs, targets)
        found = fit.loss.find(targets / rows)
        loss = rows * (self._loss("forward", pairs, found) + self._loss("backward", pairs, found))
        terms = {
            "host": fit.host.at(0, fit.host.find(groups.column("tokens")))[pairs.group],
            "base": base,
            "attention": attention,
            "adapters": adapters,
            "launching": self._launching(groups, pairs),
            "root": rows * self._curve("root", pairs),
            "loss": loss / self.layouts.tp[pairs.layout] + loss_talk,
            "tensor-parallel": talk,
        }
        if max(self.nano_batches) > 1:
            terms["overlap"] = self._overlap(groups, pairs)
        self._staged(pairs, terms)
        return terms | self._end(groups, pairs)

    def gathers(self, groups: Groups, pairs: Pairs) -> Array:
        """What a sharded base adds [m]: waiting for weights, unpacking them, slower compute.

        source   tlora_fx/cost/step_time.py, `_gathered_ms`, with layers that are all alike
        """
        whole = pairs.rows * self._row(groups, pairs)
        tables = len(self.fit.tp)
        # Weights are copied from neighbours in a node, and no graph holds a collective's gathers.
        near = self.layouts.near[pairs.layout, pairs.reach]
        pairs = replace(pairs, size=np.where(near, pairs.size, pairs.launched(tables).size))
        fit, facts, rows = self.fit, self.fit.facts, pairs.rows
        layers, slower = len(facts.layers), fit.profile.slowdown - 1
        tp = self.layouts.tp[pairs.layout]
        start, per_byte = pairs.links(self.layouts.gather)
        weights = sum(one.weight_bytes for one in facts.layers) / layers / tp
        sizes = (np.full_like(tp, facts.root_bytes), weights, facts.head_bytes / tp)
        root, layer, head = (np.where(size > 0, start + per_byte * size, 0.0) for size in sizes)
        unpack_root, unpack, unpack_head = (size * self.layouts.copy_per_byte for size in sizes)
        targets = groups.column("targets")[pairs.group] * pairs.share
        found, talk = fit.loss.find(targets / rows), self._talk(pairs, targets)
        loss_there = self._loss("forward", pairs, found) / tp
        loss_back = self._loss("backward", pairs, found) / tp + talk[1] / rows
        ends = self._curve("root", pairs)
        there, back = (one / layers for one in self._directions(groups, pairs, talk[0]))

        def beside(compute: Array, copied: Array, following: Array) -> Array:
            busy = compute + copied + slower * np.minimum(compute, following)
            return np.asarray(np.maximum(busy, following))

        forward = root + beside(ends, unpack_root, layer) + beside(there, unpack, head)
        forward += (layers - 1) * beside(there, unpack, layer) + loss_there + unpack_head
        backward = head + beside(loss_back, unpack_head, layer) + back + unpack
        backward += (layers - 1) * beside(back, unpack, layer)
        host = self._host(groups, pairs.launched(tables))
        graphs = pairs.size < tables
        forward = np.where(graphs, forward, np.maximum(forward, host[0] + GATHER_HOST_MS * layers))
        backward = np.where(
            graphs, backward, np.maximum(backward, host[1] + GATHER_HOST_MS * layers)
        )
        return np.asarray(rows * (forward + backward) - whole)

    def _row(self, groups: Groups, pairs: Pairs) -> Array:
        """What `terms` has for one row of a base that is not sharded."""
        tp, targets = self.layouts.tp[pairs.layout], groups.column("targets")[pairs.group]
        targets = targets * pairs.share
        found, talk = self.fit.loss.find(targets / pairs.rows), self._talk(pairs, targets)
        loss = self._loss("forward", pairs, found) + self._loss("backward", pairs, found)
        there, back = self._directions(groups, pairs, talk[0])
        row = self._curve("root", pairs) + there + back + loss / tp + talk[1] / pairs.rows
        return np.asarray(row)

    def _host(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array]:
        """What the host takes to launch all layers of a row: their time on a small one."""
        count = np.maximum(1.0, pairs.tokens // HOST_BOUND_TOKENS)
        found = self.fit.row.find(pairs.tokens / count)
        both = []
        floors = zip(DIRECTIONS, self._slopes(), self._floors(groups, pairs), strict=True)
        for name, slopes, floor in floors:
            each, work = self._adapted(groups, slopes)
            part = pairs.share * pairs.table(work) / (pairs.rows * count)
            curve = self.fit.row.at(self.fit.curve(name) + pairs.size, found)
            both.append(np.maximum(curve + pairs.table(each) + part, floor))
        return both[0], both[1]

    def _loss(self, name: str, pairs: Pairs, found: tuple[Places, Array]) -> Array:
        return self.fit.loss.at(self.fit.loss_curve(name, pairs.size), found)

    def _curve(self, name: str, pairs: Pairs) -> Array:
        return self.fit.row.at(self.fit.curve(name) + pairs.size, pairs.found)

    def _beside(self, groups: Groups, pairs: Pairs) -> tuple[Array, Array]:
        """Attention, and adapters, of the busiest replica in both directions."""
        fit = self.fit
        slopes = fit.forward + fit.backward
        attention = groups.squares * slopes[:, 0]
        if self.fused:
            work = groups.work(slopes) - attention
            each = groups.each_row(slopes, fit.sites)
        else:
            work = np.zeros_like(attention)
            each = groups.adapters * (UNFUSED_MS * len(fit.facts.layers)) + 0 * slopes[:, 0]
        adapters = pairs.rows * pairs.table(each) + pairs.share * pairs.table(work)
        return pairs.share * pairs.table(attention), adapters

    def _talk(self, pairs: Pairs, targets: Array) -> tuple[Array, Array]:
        """All-reduces of hidden states in layers, and of the gradient of the head's input."""
        facts = self.fit.facts
        start, per_byte = pairs.links(self.layouts.talk)
        per_token = per_byte * (facts.hidden * facts.itemsize)
        mine = pairs.tokens * pairs.rows
        each = 2 * TALKS * len(facts.layers)
        return each * (start * pairs.rows + per_token * mine), (
            start * pairs.rows + per_token * targets
        )

    def _staged(self, pairs: Pairs, terms: Terms) -> None:
        """Share out compute over stages; what they wait for each other is a term."""
        pp = self.layouts.pp[pairs.layout]
        if (pp == 1).all():
            return
        work = sum((terms[name] for name in terms if name != "host"), np.zeros_like(pp))
        for name in terms.keys() - {"host"}:
            terms[name] = terms[name] / pp
        facts = self.fit.facts
        start, per_byte = pairs.links(self.layouts.send)
        sent = start + per_byte * pairs.tokens * (facts.hidden * facts.itemsize)
        terms["bubble"] = (pp - 1) / pairs.rows * work / pp + 2 * (pp - 1) * sent

    def _end(self, groups: Groups, pairs: Pairs) -> Terms:
        """Sums of gradients, and optimizers, of the part that a process trains."""
        facts, pp = self.fit.facts, self.layouts.pp[pairs.layout]
        part = trained_part(self.layouts.tp[pairs.layout]) / pp
        numbers = groups.column("parameters")[pairs.group] * part
        start, per_byte = pairs.links(self.layouts.reduce)
        job, tensor, number = self.fit.optimizer
        steps = groups.column("jobs") * job
        return {
            "reduce": np.where(numbers > 0, start, 0.0) + per_byte * numbers * facts.trained_bytes,
            "optimizer": steps[pairs.group]
            + tensor * groups.column("tensors")[pairs.group] / pp
            + number * numbers,
        }

    def _directions(self, groups: Groups, pairs: Pairs, talk: Array) -> tuple[Array, Array]:
        """Milliseconds of all layers on one row, forward and backward, talk included."""
        talk = talk / 2 / pairs.rows
        each = zip(self._computed(groups, pairs), self._floors(groups, pairs), strict=True)
        there, back = (np.maximum(device, host) + talk for device, host in each)
        return there, back

    def _launching(self, groups: Groups, pairs: Pairs) -> Array:
        """What a round's layers wait for the host, which launches them."""
        if (pairs.size < len(self.fit.tp)).all():
            return np.zeros_like(pairs.tokens)
        each = zip(self._computed(groups, pairs), self._floors(groups, pairs), strict=True)
        waits = sum(np.maximum(host - device, 0.0) for device, host in each)
        return np.asarray(pairs.rows * waits)

    def _computed(self, groups: Groups, pairs: Pairs) -> list[Array]:
        """The device's milliseconds of all layers on one row, forward and backward."""
        return [
            self._curve(name, pairs) + self._part(groups, pairs, slopes) / pairs.rows
            for name, slopes in zip(DIRECTIONS, self._slopes(), strict=True)
        ]

    def _floors(self, groups: Groups, pairs: Pairs) -> list[Array]:
        """The host's; nothing where rows run as CUDA graphs."""
        both = []
        for host in (self.fit.forward_host, self.fit.backward_host):
            each, _ = self._adapted(groups, host[:, 1:])
            both.append(pairs.table(host[:, 0] + each))
        return both

    def _slopes(self) -> tuple[Array, Array]:
        return self.fit.forward, self.fit.backward

    def _part(self, groups: Groups, pairs: Pairs, slopes: Array) -> Array:
        """One direction of what `_beside` says: a round's milliseconds, rows' own included."""
        each, work = self._adapted(groups, slopes)
        return pairs.rows * pairs.table(each) + pairs.share * pairs.table(work)

    def _adapted(self, groups: Groups, slopes: Array) -> tuple[Array, Array]:
        """[n, tp] of each row however long it is, and of a round's tokens; one direction."""
        if self.fused:
            return groups.each_row(slopes, self.fit.sites), groups.work(slopes)
        unfused = UNFUSED_MS / 2 * len(self.fit.facts.layers)
        return groups.adapters * unfused + 0 * slopes[:, 0], groups.squares * slopes[:, 0]

    def _overlap(self, groups: Groups, pairs: Pairs) -> Array:
        """What the best number of nano-batches takes less than one, never positive.

        source   field notes on nano-batching: T = max(C, M) + min(C, M) / N, where C is N rows of
                 an N-th of the tokens, so that what a row costs at least is paid N times; nothing
                 of it is a CUDA graph
        """
        late = pairs.launched(len(self.fit.tp))
        both = zip(self._computed(groups, pairs), self._floors(groups, pairs), strict=True)
        wholes = [np.maximum(device, host) for device, host in both]
        floors = self._floors(groups, late)
        start, per_byte = pairs.links(self.layouts.talk)
        facts, best = self.fit.facts, np.zeros_like(pairs.tokens)
        layers = TALKS * len(facts.layers)
        bytes_ = pairs.tokens * (facts.hidden * facts.itemsize)
        for count in self.nano_batches:
            saved = np.zeros_like(best)
            found = self.fit.row.find(pairs.tokens / count)
            talk = layers * (count * start + per_byte * bytes_)
            once = layers * (start + per_byte * bytes_)
            for place, name in enumerate(DIRECTIONS):
                slopes, whole = self._slopes()[place], wholes[place]
                each = late.table(self._adapted(groups, slopes)[0])
                cut = count * self.fit.row.at(self.fit.curve(name) + late.size, found)
                cut += self._part(groups, late, slopes) / late.rows + (count - 1) * each
                cut = np.maximum(cut, count * floors[place])
                overlapped = np.maximum(cut, talk) + np.minimum(cut, talk) / count
                saved += overlapped - (whole + once) if count > 1 else 0.0
            best = np.minimum(best, np.where(start > 0, saved, 0.0))
        return np.asarray(best * pairs.rows)


def trained_part(tp: Array) -> Array:
    """Of an adapter's halves the one that tp cuts is a part, the other one whole."""
    return np.where(tp > 1, 0.5 + 0.5 / tp, 1.0)
