"""Fair shares: whose pieces run in the next cycle, by deficit round robin over tokens.

source   Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin
"""

from __future__ import annotations

from collections.abc import Mapping


class FairShares:
    """Shares the tokens of each cycle equally among the models that wait.

    A model that had less than its share comes first, one that had more comes last. Nobody owes
    anything once a cycle had room for all: what was free then was taken from nobody.

    budget   tokens of a cycle; a piece that is larger runs alone
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._deficits: dict[str, float] = {}

    def choose(self, costs: Mapping[str, int]) -> list[str]:
        """Models whose pieces run now: as many as fit the budget, and one at least.

        costs   by model, tokens of its next piece; who waits longest comes first
        """
        share = self.budget / max(1, len(costs))
        for name in [*self._deficits.keys() - costs.keys()]:
            # Who is away keeps its debts and earns, but saves nothing.
            self._deficits[name] = min(self._deficits[name] + share, 0.0)
        for name, cost in costs.items():
            earned = self._deficits.get(name, 0.0) + share
            self._deficits[name] = min(earned, max(share, cost))
        chosen: list[str] = []
        left = self.budget
        for name in sorted(costs, key=lambda name: -self._deficits[name]):
            if not chosen or costs[name] <= left:
                chosen.append(name)
                left -= costs[name]
                self._deficits[name] -= costs[name]
        if len(chosen) == len(costs):
            self._deficits.clear()
        return chosen
