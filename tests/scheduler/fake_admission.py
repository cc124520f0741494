"""An admission that compiles nothing and takes no time to import: what a job needs is made up."""

from __future__ import annotations

from tlora_fx.cost.load import Demand
from tlora_fx.scheduler.local import admission_worker
from tlora_fx.scheduler.local.admission_worker import PreparedJob
from tlora_fx.scheduler.state import JobRequest


class Prepared:
    """Requests of jobs that nobody has to compile."""

    def learn(self, job, base, shape):
        pass

    def restored(self, job):
        pass

    def request(self, job, now):
        return request(job, now)


def main(path):
    """What an admission process of these runs does."""
    here = Prepared()
    admission_worker.serve(path, lambda *job: PreparedJob(here.request(*job), None), here.restored)


def request(job, now):
    tokens = 400.0 + 40 * len(job.name)
    demand = Demand(
        1, 2, tokens, tokens * 200, tokens, 7, 1e5, tokens * 8e4, tokens * 3e5, 448, 1e7
    )
    steps, slowdown = job.max_steps or 10, job.schedule.max_slowdown
    return JobRequest(job.name, "base", demand, 1, steps, submitted=now, max_slowdown=slowdown)
