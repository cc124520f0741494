"""Jobs as their users write them: what a job says, job files, adapter folders."""
