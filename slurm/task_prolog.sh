#!/bin/bash
#
# Slurm runs this as the user before each task of each job (TaskProlog=, or srun --task-prolog=).
#
# It writes the resources of the task to a notes file, and passes the path of that file to the task. If badcjobs runs in
# the task, it adds the path of its task database, and task_epilog.sh writes a record beside that database. Other
# programs are not affected. It never fails a job: it prints no messages and always exits with 0.

# EDIT: the shared folder that jobcomp.sh writes to (see README.md); empty without jobcomp.sh.
SPOOL=

text() { # print a value as JSON, without characters that need quoting; empty: null
    local clean=${1//[^[:alnum:] _.,:;=@+\/()\[\]-]/}
    if [[ -n $clean ]]; then printf '"%s"' "$clean"; else printf null; fi
}

allocation() {
    local index=${SLURM_ARRAY_TASK_ID:-null} # a number, or null
    printf '{"job_id": %s, "array_index": %s, "restart": %s, ' "$(text "$JOB")" "$index" "$RESTART"
    printf '"step": %s, "procid": %s, "node": %s, ' "$(text "$STEP")" "$PROCID" "$(text "$NODE")"
    printf '"gpus": %s, "job_gpus": %s, ' "$(text "${CUDA_VISIBLE_DEVICES:-}")" "$(text "${SLURM_JOB_GPUS:-}")"
    printf '"cpus_on_node": %s, ' "$(text "${SLURM_CPUS_ON_NODE:-}")"
    printf '"nodes": %s, "partition": %s, ' "$(text "${SLURM_JOB_NODELIST:-}")" "$(text "${SLURM_JOB_PARTITION:-}")"
    printf '"started_at_s": %s}\n' "$(date +%s)"
}

main() {
    umask 077
    JOB=${SLURM_ARRAY_JOB_ID:-${SLURM_JOB_ID:-}} STEP=${SLURM_STEP_ID:-batch}
    PROCID=${SLURM_PROCID:-0} RESTART=${SLURM_RESTART_COUNT:-0} NODE=${SLURMD_NODENAME:-$HOSTNAME}
    [[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ && $STEP$PROCID$RESTART$NODE != */* ]] || return

    # Node-local and private. A folder of this name that another user has created is not used.
    local folder=/tmp/badcjobs-slurm-$(id -u)
    mkdir -m 700 "$folder"
    [[ -d $folder && ! -L $folder && -O $folder ]] || return

    local notes=$folder/$SLURM_JOB_ID.$STEP.$PROCID.r$RESTART.$NODE
    allocation >"$notes" || return
    echo "export BADCJOBS_SLURM_NOTES=$notes" >&3 # Slurm applies the export lines that a task prolog prints
    [[ -n $SPOOL && -d $SPOOL/wanted ]] && echo "export BADCJOBS_SLURM_SPOOL=$SPOOL" >&3
}

main 3>&1 >/dev/null 2>&1
exit 0
