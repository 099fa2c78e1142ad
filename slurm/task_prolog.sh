#!/bin/bash
#
# Slurm runs this as the user, just before each task of each job (TaskProlog=, or srun --task-prolog=).
#
# It writes down what the task was given, and tells a badcjobs that may run in it where: badcjobs adds the name of its
# task database, and task_epilog.sh writes the end beside that. Other programs notice nothing. It never fails a job:
# whatever is missing, it is silent and exits with 0.

# EDIT: the shared folder that jobcomp.sh writes to (see README.md); leave it empty without jobcomp.sh.
SPOOL=

text() { # a value as JSON; only letters that never need quoting, and an empty one is nobody's knowledge
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

    # Node-local and private. Nobody else can put a folder of this name in our place and still own it.
    local folder=/tmp/badcjobs-slurm-$(id -u)
    mkdir -m 700 "$folder"
    [[ -d $folder && ! -L $folder && -O $folder ]] || return

    local notes=$folder/$SLURM_JOB_ID.$STEP.$PROCID.r$RESTART.$NODE
    allocation >"$notes" || return
    echo "export BADCJOBS_SLURM_NOTES=$notes" >&3 # Slurm obeys what a task prolog prints
    [[ -n $SPOOL && -d $SPOOL/wanted ]] && echo "export BADCJOBS_SLURM_SPOOL=$SPOOL" >&3
}

main 3>&1 >/dev/null 2>&1
exit 0
