"""Suggests a policy that would be much faster for a simulated batch."""

from __future__ import annotations

from moesched.analysis.helps import Help
from moesched.jobs.job import Job
from moesched.jobs.report import JobReport
from moesched.planner.rivals import faster_policy
from moesched.requests.batch import Batch


def another_policy(report: JobReport, job: Job, batch: Batch) -> list[Help]:
    """Find a policy that would be much faster for a simulated batch; empty if there is none.

    There is none for beam search or several nodes, which the planner's quick search does not cover.
    """
    if job.beams > 1 or job.nodes > 1:
        return []
    rate = report.throughput_tokens_per_second
    rival = faster_policy(job.setting(batch.prompts, batch.new_tokens), report.policy, rate)
    if rival is None:
        return []
    sizes = f"--batch-size {rival.schedule.batch_size} --micro-batch-size {rival.schedule.micro_batch_size}"
    return [
        Help(
            change=f"The policy {rival.policy} instead of {report.policy}",
            command=f"simulate ... --policy {rival.policy} {sizes}",
            saved=1 - rate / rival.schedule.throughput,
        )
    ]
