#!/bin/bash
#
# slurmctld runs this as SlurmUser for every job that ends or is requeued (JobCompType=jobcomp/script,
# JobCompLoc=/path/to/jobcomp.sh). For jobs in which badcjobs has requested it, it records the state from Slurm
# (TIMEOUT, NODE_FAIL, PREEMPTED, CANCELLED, …): one line per end in SPOOL/ends/<job>.jsonl. `badcjobs merge` reads it.
#
# It writes only to SPOOL/ends, which belongs to SlurmUser. It checks only the names and owners of the files that users
# create in SPOOL/wanted. It always exits with 0.

# EDIT: the shared folder, the same as in task_prolog.sh (see README.md).
SPOOL=

text() { # print a value as JSON, without characters that need quoting; empty: null
    local clean=${1//[^[:alnum:] _.,:;=@+\/()\[\]-]/}
    if [[ -n $clean ]]; then printf '"%s"' "$clean"; else printf null; fi
}

main() {
    umask 022
    local job=${ARRAYJOBID:-0} index=$ARRAYTASKID wanted
    [[ $job != 0 ]] || job=$JOBID index=null # no array: Slurm passes 0, and an index that is not valid
    [[ $job =~ ^[0-9]+$ && $index =~ ^([0-9]+|null)$ && $START =~ ^[0-9]+$ && $END =~ ^[0-9]+$ ]] || return
    wanted=$SPOOL/wanted/$job
    [[ -f $wanted && ! -L $wanted && $(stat -c %U "$wanted") == "$USERNAME" ]] || return
    local state=$JOBSTATE
    [[ $state != PENDING ]] || state=REQUEUED # requeued by a user or by a rule of the site
    {
        printf '{"job_id": "%s", "array_index": %s, "state": %s, ' "$job" "$index" "$(text "$state")"
        printf '"exit_code": %s, "nodes": %s, ' "$(text "$EXITCODE")" "$(text "$NODES")"
        printf '"start_s": %s, "end_s": %s, "written_by": "jobcomp"}\n' "$START" "$END"
    } >>"$SPOOL/ends/$job.jsonl"
}

main </dev/null >/dev/null 2>&1
exit 0
