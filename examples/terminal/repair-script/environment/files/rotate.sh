#!/bin/bash
folder=$1
keep=$2
cd $folder
for log in $(ls *.log); do
    for i in $(seq 1 $keep); do
        if [ -f $log.$i ]; then
            mv $log.$i $log.$((i + 1))
        fi
    done
    mv $log $log.1
    touch $log
done
