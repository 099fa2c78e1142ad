#!/bin/sh
# Writes what BirdNET-Analyzer 2 writes for one audio file: a folder, its names, its tables, and a list of its settings.
# A file with "quiet" in its name has no detections, one with "bad" cannot be read, one with "other" has another header.
audio=$1
shift
while [ $# -gt 0 ]; do
    case $1 in
    -o | --output) out=$2 ;;
    --rtype) type=$2 ;;
    esac
    shift 2
done
name=$(basename "${audio%.*}")
head='Start (s),End (s),Scientific name,Common name,Confidence,File\n'
row="0.0,3.0,Bonasa umbellus,Ruffed Grouse,0.8141,$audio\n"
file=results.csv
case $type in
table)
    file=selection.table.txt
    head='Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq (Hz)\tHigh Freq (Hz)\tCommon Name\tSpecies Code\tConfidence\tBegin Path\tFile Offset (s)\n'
    row="1\tSpectrogram 1\t1\t0.0\t3.0\t0\t15000\tRuffed Grouse\trufgro\t0.8141\t$audio\t0.0\n"
    ;;
audacity)
    file=results.txt head='' row='0.0\t3.0\tBonasa umbellus, Ruffed Grouse\t0.8141\n'
    ;;
kaleidoscope)
    file=results.kaleidoscope.csv
    head='INDIR,FOLDER,IN FILE,OFFSET,DURATION,scientific_name,common_name,confidence,lat,lon,week,overlap,sensitivity\n'
    row="/data,july,$name.wav,0.0,3.0,Bonasa umbellus,Ruffed Grouse,0.8141,-1.0000,-1.0000,-1,0,1.0\n"
    ;;
esac
case $name in
*quiet*)
    row=''
    [ "$type" = table ] && row="1\tSpectrogram 1\t1\t0\t3\t0\t15000\tnocall\tnocall\t1.0\t$audio\t0\n"
    ;;
*other*) head='when,what\n' row='' ;;
esac
mkdir -p "$out"
case $name in
*bad*) echo "Error: Cannot analyze audio file $audio." ;;
*) printf "$head$row" > "$out/$name.BirdNET.$file" ;;
esac
printf 'Segment length,Sample rate\n3.0,48000\n' > "$out/BirdNET_analysis_params.csv"
