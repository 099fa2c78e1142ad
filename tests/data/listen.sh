# A program that listens, for the engine command: INPUT OUTPUT …, or LIST FOLDER many; $RUNS gets a line for each run.
first=$1 second=$2 many=; shift 2
case " $* " in *" many "*) many=$(grep -c "" "$first") ;; esac
chunk="${BADCJOBS_CHUNK_ID--} ${BADCJOBS_RECORDING_ID--}"
echo "${BADCJOBS_LEAN--} ${OMP_NUM_THREADS--} $chunk ${CUDA_VISIBLE_DEVICES--} ${many:-1}${*:+ $*}" >>"$RUNS"
hear() {
    sleep "$FAKE_HAWKEARS_S" || kill -KILL $$
    word=$(head -c 30 "$1" | tr -d '\0' | sed -n 's/^#fake \([^ ]*\).*/\1/p')
    if [ -z "$word" ] && [ "$(head -c 40 "$1" | tail -c 4)" != data ]; then
        echo "cannot hear $1" >&2
        [ "$many" ] && return
        exit 1
    fi
    case $word in
        SIG*) kill -s "${word#SIG}" $$ ;;
        exit-3) exit 3 ;;
        exit-memory) echo CUDA out of memory >&2; exit 1 ;;
        exit-lost) echo no CUDA-capable device is detected >&2; exit 1 ;;
        hang) sleep 300 ;;
        leave) sleep 300 & echo $! >"$RUNS.left" ;;
        talk) for _ in $(seq 25); do echo still at it >&2; sleep 0.1; done ;;
        nothing) return ;;
    esac
    row=0.3,0.6,LOUD,0.9
    [ "$word" = half ] && row='half a ro'
    printf 'start_time,end_time,label,score\n%s\n' "$row" >"$2"
}
[ "$many" ] || hear "$first" "$second"
[ "$many" ] && while IFS= read -r path; do name=${path##*/}; hear "$path" "$second/${name%.*}.csv"; done <"$first"
exit 0
