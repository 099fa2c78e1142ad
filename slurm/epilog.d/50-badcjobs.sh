#!/bin/bash
#
# Slurm runs this as root on each node after a job (Epilog=/etc/slurm/epilog.d/*). It writes the records that
# task_epilog.sh could not write because Slurm's step daemon died or the node was lost for some time. Optional.
#
# Nothing is read or written as root: it switches to the user of the job first, without supplementary groups and
# without a way to regain privileges. It takes at most ten seconds and always exits with 0: a failing Epilog drains the
# node.

# EDIT: the folder of task_epilog.sh.
HOOKS=/usr/local/lib/badcjobs/slurm

main() {
    [[ ${SLURM_JOB_UID:-} =~ ^[0-9]+$ && ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || return
    local gid=${SLURM_JOB_GID:-} become=()
    [[ $gid =~ ^[0-9]+$ ]] || gid=$(id -g "$SLURM_JOB_UID") || return
    [[ -d /tmp/badcjobs-slurm-$SLURM_JOB_UID && -r $HOOKS/task_epilog.sh ]] || return
    if [[ $(id -u) == 0 ]]; then
        become=(setpriv --reuid="$SLURM_JOB_UID" --regid="$gid" --clear-groups --no-new-privs --)
    elif [[ $(id -u) != "$SLURM_JOB_UID" ]]; then
        return # a Slurm that does not run as root cannot switch users
    fi
    cd / && timeout -k 1 10 "${become[@]}" /bin/bash "$HOOKS/task_epilog.sh" \
        --left "$SLURM_JOB_ID" "${SLURMD_NODENAME:-$HOSTNAME}" "${SLURM_JOB_EXIT_CODE2:-}"
}

main </dev/null >/dev/null 2>&1
exit 0
