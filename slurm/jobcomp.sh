#!/bin/bash
#
# slurmctld runs this as SlurmUser for every job that ends or is requeued (JobCompType=jobcomp/script,
# JobCompLoc=/path/to/jobcomp.sh). For jobs in which badcjobs has asked for it, it notes the state that Slurm gave:
# TIMEOUT, NODE_FAIL, PREEMPTED, CANCELLED, …: one line per end in SPOOL/ends/<job>.jsonl. `badcjobs merge` reads it.
#
# It writes nowhere but to SPOOL/ends, which belongs to SlurmUser; of what users leave in SPOOL/wanted it looks at
# names and owners only. It always exits with 0.

# EDIT: the shared folder that task_prolog.sh names as well (see README.md).
SPOOL=

text() { # a value as JSON; only letters that never need quoting, and an empty one is nobody's knowledge
    local clean=${1//[^[:alnum:] _.,:;=@+\/()\[\]-]/}
    if [[ -n $clean ]]; then printf '"%s"' "$clean"; else printf null; fi
}

main() {
    umask 022
    local job=${ARRAYJOBID:-0} index=$ARRAYTASKID wanted
    [[ $job != 0 ]] || job=$JOBID index=null # no array: Slurm says 0, and a number that no index can have
    [[ $job =~ ^[0-9]+$ && $index =~ ^([0-9]+|null)$ && $START =~ ^[0-9]+$ && $END =~ ^[0-9]+$ ]] || return
    wanted=$SPOOL/wanted/$job
    [[ -f $wanted && ! -L $wanted && $(stat -c %U "$wanted") == "$USERNAME" ]] || return
    local state=$JOBSTATE
    [[ $state != PENDING ]] || state=REQUEUED # it waits again: by hand, or by a rule of the site
    {
        printf '{"job_id": "%s", "array_index": %s, "state": %s, ' "$job" "$index" "$(text "$state")"
        printf '"exit_code": %s, "nodes": %s, ' "$(text "$EXITCODE")" "$(text "$NODES")"
        printf '"start_s": %s, "end_s": %s, "written_by": "jobcomp"}\n' "$START" "$END"
    } >>"$SPOOL/ends/$job.jsonl"
}

main </dev/null >/dev/null 2>&1
exit 0
