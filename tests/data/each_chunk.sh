# Behaves in another way for each chunk; one leaves a daemon behind, one uses a pool.
header=start_time,end_time,label,score
case $BADCJOBS_CHUNK_ID in
c000) printf "$header\n0.5,1.25,AMRO,0.9\n" > "$2" ;;
c001) echo $header > "$2" ;;
c002) exit 0 ;;
c003) printf "$header\n0.5,soon,AMRO,0.9\n" > "$2" ;;
c004) printf 'start,end\n' > "$2" ;;
c005) echo 'no such model' >&2; exit 3 ;;
c006) kill -9 $$ ;;
c007) printf 'recording,name,start_time,end_time,score\nx,BCCH,0,3,0.75\n' > "$2" ;;
c008) echo $header > "$2"; exit 1 ;;
c009) printf '\377\376' > "$2" ;;
c010) mkdir "$2" ;;
c011) [ -e tried ] || { touch tried; exit 1; }; echo $header > "$2" ;;
c012) $PYTHON pool.py && echo $header > "$2" ;;
c013) setsid sh -c 'touch up; exec sleep 300' &
      while [ ! -e up ]; do sleep 0.01; done; echo $header > "$2" ;;
*) printf '\033[2J' >&2; exit 4 ;;
esac
