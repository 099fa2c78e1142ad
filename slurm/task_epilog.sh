#!/bin/bash
#
# Slurm runs this as the user after each task of each job, however the task ended (TaskEpilog=, or
# srun --task-epilog=). If badcjobs ran in the task, it writes OUT/tasks/<name>.slurm.json beside the task database: the
# resources of the task, and when it ended. `badcjobs merge` reads it. Needs task_prolog.sh.
#
# It never fails a job: it prints nothing and always exits with 0.
#
# epilog.d/50-badcjobs.sh calls it too, as the same user:  task_epilog.sh --left JOB NODE EXIT_CODE

write_record() { # notes file, name of the writer, exit code in the format of Slurm (7:0), or nothing
    local allocation database record code=null
    [[ -z ${3:-} ]] || code="\"$3\""
    {
        read -r allocation || return
        while read -r database; do
            [[ $allocation == *'}' && $database == /*/tasks/*.sqlite ]] || continue
            record=${database%.sqlite}.slurm.json
            printf '%s, "ended_at_s": %s, "exit_code": %s, "written_by": "%s"}\n' \
                "${allocation%'}'}" "$(date +%s)" "$code" "$2" >"$record.$$" &&
                mv -f "$record.$$" "$record"
            rm -f "$record.$$"
        done
    } <"$1"
    rm -f "$1"
}

main() {
    umask 022 # the same permissions as task databases
    local folder=/tmp/badcjobs-slurm-$(id -u) job=${SLURM_JOB_ID:-} notes
    [[ -d $folder && ! -L $folder && -O $folder ]] || return
    if [[ ${1:-} == --left ]]; then
        [[ $2 =~ ^[0-9]+$ && $3 != */* && ${4:-} =~ ^([0-9]+:[0-9]+)?$ ]] || return
        for notes in "$folder/$2".*."$3"; do
            [[ -f $notes && ! -L $notes ]] && write_record "$notes" epilog "${4:-}"
        done
    else
        local task=${SLURM_STEP_ID:-batch}.${SLURM_PROCID:-0}.r${SLURM_RESTART_COUNT:-0}
        notes=$folder/$job.$task.${SLURMD_NODENAME:-$HOSTNAME}
        [[ -f $notes && ! -L $notes ]] && write_record "$notes" task_epilog
    fi
}

main "$@" >/dev/null 2>&1
exit 0
